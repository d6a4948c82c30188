"""Microseconds a call of a Tree-LSTM for recording, merging and planning, on one core, in CPU time.

python -m benchmarks.trace_cost --leaves 19 --trees 64             # a minibatch like those of SST
python -m benchmarks.trace_cost --leaves 128 --trees 1024          # and as cached traces
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from torch import nn

from fxbatch.runtime.engine import Engine, ReadyMinibatch
from fxbatch.runtime.options import Options
from fxbatch.trace.minibatch import record_minibatch
from fxbatch.trace.traces import merge, trace_instance


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


class _Bare:
    """The user's own code alone: recursion and attribute look-ups as in the model, nothing called."""

    def __init__(self, model: TreeLSTM) -> None:
        self.model = model

    def forward(self, tree: Node) -> Any:
        model = self.model
        if tree.word is not None:
            return _leaf(model.leaf, model.embed, tree.word)
        return _cell(model.cell, *self.forward(tree.left), *self.forward(tree.right))


def _leaf(*_: Any) -> tuple[int, int]:
    return 0, 0


def _cell(*_: Any) -> tuple[int, int]:
    return 0, 0


def measure(leaves: int, trees: int, repeats: int) -> dict[str, float]:
    """Best of `repeats`, microseconds a call: the user's code, recording (with it), planning, both warm."""
    model = TreeLSTM()
    generator = random.Random(0)
    instances = [((random_tree(leaves, generator),), {}) for _ in range(trees)]
    engine = Engine(Options.of(), model)
    run = engine.execution()
    traces = [trace_instance(model.forward, *i, engine.table, run, model) for i in instances]
    best: dict[str, float] = {}
    bare = _Bare(model)

    def note(name: str, seconds: float, calls: int) -> None:
        best[name] = min(best.get(name, float("inf")), seconds / calls * 1e6)

    for _ in range(repeats + 1):
        times = [time.process_time()]
        for (tree,), _ in instances:
            bare.forward(tree)
        times.append(time.process_time())
        cold = record_minibatch(model.forward, instances, engine.table, run, roots=(model,))
        calls = cold.recorder.pending
        times.append(time.process_time())
        ReadyMinibatch.of(engine, [], cold)
        times.append(time.process_time())
        _forget(engine)
        warm = merge(traces, engine.table, model)
        times.append(time.process_time())
        ReadyMinibatch.of(engine, [], warm)
        times.append(time.process_time())
        _forget(engine)
        for name, begin, end in zip(NAMES, times, times[1:], strict=False):
            note(name, end - begin, calls)
    best["calls"] = float(calls)
    return best


NAMES = ("user", "record", "plan", "merge", "plan merged")


def _forget(engine: Engine) -> None:
    engine.structures.clear()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--trees", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    found = measure(options.leaves, options.trees, options.repeats)
    parts = ", ".join(f"{name} {found[name]:.2f}" for name in NAMES)
    cold, warm = found["record"] + found["plan"], found["merge"] + found["plan merged"]
    print(f"{found['calls']:.0f} calls, \u00b5s a call: {parts}; cold {cold:.2f}, warm {warm:.2f}")


if __name__ == "__main__":
    main()
