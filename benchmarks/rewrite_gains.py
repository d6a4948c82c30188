"""The gains of rewrites, kept memory and row order: calls, step time and bytes, one option changed at a time.

    python -m benchmarks.rewrite_gains                     # SST, EWT, expression trees: two minutes or so
    python -m benchmarks.rewrite_gains --rounds 15

Training steps in CPU time of one thread, all variants in turn on the same minibatch, another one each round; a
ratio is the median over rounds of the variant's time over that of the defaults. Bytes are those of all arenas and
kept rows of a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxbatch
from benchmarks.contenders import undecorated
from benchmarks.task import Settings
from benchmarks.workloads import ewt_tagger, sst_trees

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("defaults", {}),
    ("without deduplicate", {"deduplicate": False}),
    ("deduplicate=True", {"deduplicate": True}),
    ("without fuse", {"fuse": False}),
)


class Calculator(nn.Module):
    """Vectors of arithmetic expressions: nested triples of an operator and two expressions, digits at the leaves."""

    def __init__(self, hidden: int = 150) -> None:
        super().__init__()
        self.digit = nn.Embedding(10, hidden)
        self.operators = nn.ModuleDict({name: nn.Linear(2 * hidden, hidden) for name in ("plus", "times")})
        self.out = nn.Linear(hidden, 1)

    def encode(self, expression: Any) -> Tensor:
        if isinstance(expression, Tensor):
            found: Tensor = self.digit(expression)
            return found
        name, left, right = expression
        return torch.tanh(self.operators[name](torch.cat([self.encode(left), self.encode(right)])))

    @fxbatch.autobatch
    def loss(self, expression: Any) -> Tensor:
        """The square of the expression's score: no dimensions."""
        return self.out(self.encode(expression)).square().sum()


DIGITS = tuple(torch.arange(10).unbind())


def draw_expression(chance: random.Random, leaves: int) -> Any:
    """An expression with so many digits."""
    if leaves == 1:
        return chance.choice(DIGITS)
    left = chance.randrange(1, leaves)
    name = chance.choice(("plus", "times"))
    return (name, draw_expression(chance, left), draw_expression(chance, leaves - left))


def workloads(data: Path | None, batch: int) -> dict[str, tuple[nn.Module, Callable[[int], Sequence[Any]]]]:
    """A model with a decorated `loss`, and its minibatches by number."""
    settings = Settings(data=data)
    trees, batches, source = sst_trees(settings, hidden=150, batch=batch)
    bare, _, _ = sst_trees(settings, hidden=150, batch=batch, bare=True)
    tagger, sentences = ewt_tagger(settings, hidden=128, embedding=100, batch=batch)

    def expressions(number: int) -> Sequence[Any]:
        chance = random.Random(number)
        return [draw_expression(chance, chance.randrange(4, 24)) for _ in range(batch)]

    return {
        f"Tree-LSTM on {source}": (trees, lambda number: batches[number]),
        f"Tree-LSTM on {source}, bare functions": (bare, lambda number: batches[number]),
        "BiLSTM tagger on EWT": (tagger, lambda number: sentences[number]),
        "expression trees": (Calculator(), expressions),
    }


def step_seconds(loss: Callable[[Any], Tensor], model: nn.Module, batch: Any) -> float:
    """CPU seconds of this thread for a training step without an optimizer."""
    for parameter in model.parameters():
        parameter.grad = None
    start = time.thread_time()
    loss(batch).sum().backward()
    return time.thread_time() - start


def measure(model: nn.Module, batch_of: Callable[[int], Any], rounds: int) -> list[dict[str, Any]]:
    """A row a variant."""
    fn = undecorated(model, "loss")
    made: dict[str, Any] = {name: fxbatch.autobatch(**options)(fn) for name, options in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 2):
        batch = batch_of(number)
        for name, batched in list(made.items())[:: 1 if number % 2 else -1]:
            taken = step_seconds(lambda x, batched=batched: batched(model, x), model, batch)  # type: ignore[misc]  # bound now
            if number > 1:
                seconds[name].append(taken)
    rows = []
    for name, batched in made.items():
        engine = batched.__fxbatch__.engine(model)
        ratios = [a / b for a, b in zip(seconds[name], seconds["defaults"], strict=True)]
        records = engine.rewrites.records
        rows.append({
            "variant": name, "calls": records[0].before, "after": records[-1].after,
            "ms": 1e3 * statistics.median(seconds[name]), "ratio": statistics.median(ratios),
            "MB": engine.pool.bytes / 1e6,
        })  # fmt: skip
    return rows


def after_the_trace(module: nn.Module, bare: nn.Module, batch_of: Callable[[int], Any], rounds: int) -> str:
    """The bare model's speed over the module's, traces made before, and what the traces cost."""
    seconds: dict[str, list[float]] = {name: [] for name in ("module", "bare", "module trace", "bare trace")}
    for number in range(rounds + 2):
        for name, model in (("module", module), ("bare", bare)):
            start = time.thread_time()
            traces = [fxbatch.trace(model.loss, x) for x in batch_of(number)]
            traced = time.thread_time() - start
            taken = step_seconds(model.loss, model, traces)  # type: ignore[arg-type]  # a bound method
            if number > 1:
                seconds[name].append(taken)
                seconds[f"{name} trace"].append(traced)
    ratio = statistics.median(a / b for a, b in zip(seconds["module"], seconds["bare"], strict=True))
    ms = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
    return (
        f"bare functions at {ratio:.2f} of the module's speed after the trace ({ms['bare']:.1f} and "
        f"{ms['module']:.1f} ms a step); traces, one by one: {ms['bare trace']:.1f} and {ms['module trace']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--only", default="", help="workloads with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=130)
    made = workloads(options.data, options.batch)
    for name, (model, batch_of) in made.items():
        if options.only not in name:
            continue
        table = Table(title=f"{name}, training, batch {options.batch}")
        for column in ("variant", "calls", "calls after", "ms", "time / defaults", "MB kept"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for row in measure(model, batch_of, options.rounds):
            table.add_row(
                row["variant"], str(row["calls"]), str(row["after"]), f"{row['ms']:.1f}",
                f"{row['ratio']:.2f}", f"{row['MB']:.1f}",
            )  # fmt: skip
        console.print(table)
    (module, batch_of), (bare, _) = list(made.values())[:2]
    if options.only in "after the trace":
        console.print(after_the_trace(module, bare, batch_of, options.rounds))


if __name__ == "__main__":
    main()
