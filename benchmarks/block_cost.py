"""The cost of recording a minibatch of a block, against the same model under `@autobatch`; ways to reduce.

In: nothing. Out: a table: recording in microseconds a call and milliseconds a minibatch, whole training steps, and
sums over sequences of different length as a balanced tree, as wider trees, and as a stack a length.

    python -m benchmarks.block_cost
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxbatch
import fxbatch.blocks as fb
from examples.fold import tree_lstm
from fxbatch.data.sst import Tree, parse_tree
from fxbatch.decorator import find_autobatched

console = Console(highlight=False)


class Decorated(nn.Module):
    """The Tree-LSTM of examples/fold/tree_lstm.py as a user writes it, with that example's modules."""

    def __init__(self, layers: tree_lstm.Layers) -> None:
        super().__init__()
        self.layers = layers
        self.vectors, self.word, self.pair, self.logits = (
            layers.vectors,
            layers.word,
            layers.pair,
            layers.logits,
        )

    @fxbatch.autobatch
    def forward(self, tree: Tree[int, str]) -> Any:
        return tree_lstm.plain(self.layers, tree)


class Scale(nn.Module):
    """Times a vector: something to train, before the sum."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class StackedSum(nn.Module):
    """The sum of a sequence of scaled vectors as one stack: an operation for each length."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale = Scale(n)

    @fxbatch.autobatch
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.scale(x) for x in xs]).sum(0)


def random_tree(draw: random.Random, leaves: int) -> str:
    """A labelled binary tree in brackets."""
    label = draw.randrange(5)
    if leaves == 1:
        return f"({label} w{draw.randrange(50)})"
    left = draw.randrange(1, leaves)
    return f"({label} {random_tree(draw, left)} {random_tree(draw, leaves - left)})"


def best_of(work: Callable[[], Any], repeats: int) -> float:
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def recording_cost(model: nn.Module, data: Sequence[Any], repeats: int) -> tuple[float, int]:
    """Seconds to record a minibatch, and how many calls it has."""
    batched, _ = find_autobatched(model)
    engine = batched.engine(model)
    owner, instances = batched.split((model, data), {})
    del owner
    calls = 0

    def record() -> None:
        nonlocal calls
        recording = engine.record(batched.fn, instances, engine.execution())
        calls = len(recording.pending_program([]).sig)

    return best_of(record, repeats), calls


def step(model: nn.Module, data: Sequence[Any]) -> None:
    """Forward and backward of one minibatch."""
    result = model(data)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def compare_tree_lstm(trees: int, leaves: int, n: int, repeats: int) -> float:
    """Print both costs for the Tree-LSTM; the ratio of the recordings."""
    torch.manual_seed(0)
    draw = random.Random(0)
    data = [parse_tree(random_tree(draw, draw.randrange(leaves // 2, leaves * 3 // 2))) for _ in range(trees)]
    layers = tree_lstm.Layers([f"w{i}" for i in range(50)], n)
    models = {"block": fb.compile(tree_lstm.build(layers)), "@autobatch": Decorated(layers)}
    table = Table("Tree-LSTM", "record, ms", "calls", "us a call", "training step, ms")
    cost = {}
    for name, model in models.items():
        for _ in range(3):
            step(model, data)
        seconds, calls = recording_cost(model, data, repeats)
        cost[name] = seconds
        whole = best_of(lambda m=model: step(m, data), repeats)  # type: ignore[misc]  # bound now
        table.add_row(
            name, f"{seconds * 1e3:.2f}", str(calls), f"{seconds / calls * 1e6:.2f}", f"{whole * 1e3:.1f}"
        )
    console.print(table)
    ratio = cost["block"] / cost["@autobatch"]
    console.print(f"recording a block costs {ratio:.2f} of @autobatch (target: at most 0.5)")
    return ratio


def compare_sums(sequences: int, longest: int, n: int, repeats: int) -> None:
    """Print what sums over sequences of different length cost, forwards and backwards."""
    torch.manual_seed(0)
    draw = random.Random(0)
    data = [[torch.randn(n) for _ in range(draw.randrange(1, longest))] for _ in range(sequences)]
    scaled = fb.Map(fb.Vector(n) >> fb.Function(Scale(n)))
    ways: dict[str, nn.Module] = {"tree of pairs": fb.compile(scaled >> fb.Reduce(torch.add))}
    for width in (2, 4, 8, 16):
        ways[f"Sum, groups of {width}"] = fb.compile(scaled >> _Sum(width))
    ways["one stack for each length, @autobatch"] = StackedSum(n)
    table = Table(f"sum of 1 to {longest - 1} vectors of {n}", "training step, ms")
    for name, model in ways.items():
        for _ in range(2):
            step(model, data)
        table.add_row(name, f"{best_of(lambda m=model: step(m, data), repeats) * 1e3:.2f}")  # type: ignore[misc]
    console.print(table)


class _Sum(fb.Sum):
    """`Sum` with another width of its groups."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def main(argv: Sequence[str] | None = None) -> float:
    """Run both comparisons; the ratio of recording costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", type=int, default=64)
    parser.add_argument("--leaves", type=int, default=20)
    parser.add_argument("--size", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(argv)
    ratio = compare_tree_lstm(options.trees, options.leaves, options.size, options.repeats)
    compare_sums(options.trees, 2 * options.leaves, options.size, options.repeats)
    return ratio


if __name__ == "__main__":
    main()
