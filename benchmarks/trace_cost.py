"""Microseconds a call for recording a Tree-LSTM with three operations a node, on one core.

python -m benchmarks.trace_cost --leaves 64 --trees 64
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from torch import nn

from fxbatch.trace.minibatch import record_minibatch
from fxbatch.trace.table import SignatureTable


class Node:
    """A binary tree; leaves carry their word's number as a tensor."""

    __slots__ = ("left", "right", "word")

    def __init__(self, left: Any = None, right: Any = None, word: torch.Tensor | None = None) -> None:
        self.left, self.right, self.word = left, right, word


def random_tree(leaves: int, generator: random.Random) -> Node:
    """A tree of random shape."""
    if leaves == 1:
        return Node(word=torch.tensor(generator.randrange(1000)))
    k = generator.randrange(1, leaves)
    return Node(random_tree(k, generator), random_tree(leaves - k, generator))


class Leaf(nn.Module):
    """State of a leaf from its embedding."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, 2 * d)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = self.linear(x).chunk(2, -1)
        return h.tanh(), c


class Cell(nn.Module):
    """State of an inner node from its children's."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * d, 5 * d)

    def forward(
        self, h1: torch.Tensor, c1: torch.Tensor, h2: torch.Tensor, c2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, f1, f2, o, g = self.gates(torch.cat([h1, h2], -1)).chunk(5, -1)
        c = i.sigmoid() * g.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """The forward for one tree."""

    def __init__(self, d: int = 150) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, d)
        self.leaf, self.cell = Leaf(d), Cell(d)

    def forward(self, tree: Node) -> Any:
        if tree.word is not None:
            return self.leaf(self.embed(tree.word))
        return self.cell(*self.forward(tree.left), *self.forward(tree.right))


class _NoExecution:
    """Recording alone: nothing is run."""

    def run(self, program: Any) -> None:
        raise AssertionError("nothing asks for values")

    read = materialise = run


def measure(leaves: int, trees: int, repeats: int) -> dict[str, float]:
    """Best of `repeats`: microseconds a call for recording and for making the program."""
    model = TreeLSTM()
    generator = random.Random(0)
    instances = [((random_tree(leaves, generator),), {}) for _ in range(trees)]
    table = SignatureTable()
    best = {"record": float("inf"), "program": float("inf"), "calls": 0.0}
    for _ in range(repeats + 1):
        start = time.process_time()
        recording = record_minibatch(model.forward, instances, table, _NoExecution())
        middle = time.process_time()
        program = recording.pending_program(recording.output_ids())
        end = time.process_time()
        calls = len(program)
        best["record"] = min(best["record"], (middle - start) / calls * 1e6)
        best["program"] = min(best["program"], (end - middle) / calls * 1e6)
        best["calls"] = float(calls)
    return best


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--trees", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    found = measure(options.leaves, options.trees, options.repeats)
    print(
        f"{found['calls']:.0f} calls: recording {found['record']:.2f} µs a call, "
        f"program {found['program']:.2f} µs a call"
    )


if __name__ == "__main__":
    main()
