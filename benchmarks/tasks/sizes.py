"""Sizes of their own: per-instance models on sentences and graphs, beside the loop and beside the same work by hand.

In: Settings. Out: one row per model and mode: CPU time of the loop, of the decorated call and by hand, in turns on the
same minibatch, new data in each; values and gradients are compared first.

    python -m benchmarks --task sizes
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import fxbatch
from benchmarks.results import CaseResult, Table
from benchmarks.sized_models import ROWS, SizedRow
from benchmarks.task import Case, Settings, Task

BATCH = 64
COLUMNS = {
    "loop, ms": "loop",
    "fxbatch, ms": "ours",
    "by hand, ms": "hand",
    "over the loop": "over_loop",
    "over by hand": "over_hand",
    "first minibatch, ms": "first",
}


def cases(settings: Settings) -> Iterator[Case]:
    for row in ROWS:
        for grad in settings.size((True, False), (True,)):
            name = f"{row.name}, {'training' if grad else 'inference'}"
            yield Case(
                name, {"grad": grad, "by hand": row.how}, "instance", BATCH, [],
                numbers=lambda row=row, grad=grad: beside(row, settings, grad=grad),  # type: ignore[misc]
            )  # fmt: skip


def beside(row: SizedRow, settings: Settings, *, grad: bool) -> dict[str, float]:
    """The figures of a row."""
    torch.manual_seed(settings.seed)
    rounds, n = settings.size(24, 3), settings.size(BATCH, 8)
    model = row.model()
    decorated = fxbatch.autobatch(type(model).forward)
    runs = {
        "loop": lambda columns: torch.stack([model(*one) for one in zip(*columns, strict=True)]),
        "ours": lambda columns: decorated(model, *columns),
        "hand": lambda columns: row.by_hand(model, *columns),
    }
    batch = row.batch(n)
    with torch.set_grad_enabled(grad):
        first = _seconds(runs["ours"], model, batch, grad=grad)
    _compare(runs, model, batch)
    found: dict[str, list[float]] = {name: [] for name in runs}
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for round in range(rounds):
            batch = row.batch(n)
            order = list(runs)[round % 3 :] + list(runs)[: round % 3]
            for name in order:
                found[name].append(_seconds(runs[name], model, batch, grad=grad))
    usual = {name: statistics.median(times) * 1e3 for name, times in found.items()}
    ratio = lambda a: statistics.median(x / y for x, y in zip(found[a], found["ours"], strict=True))  # noqa: E731
    return {**usual, "over_loop": ratio("loop"), "over_hand": ratio("hand"), "first": first * 1e3}


def _seconds(run: Any, model: torch.nn.Module, batch: Any, *, grad: bool) -> float:
    model.zero_grad(set_to_none=True)
    started = time.process_time()
    result = run(batch)
    if grad:
        result.square().mean().backward()
    return time.process_time() - started


def _compare(runs: dict[str, Any], model: torch.nn.Module, batch: Any) -> None:
    """Values and gradients of all three, before any is timed."""
    seen = {}
    for name, run in runs.items():
        model.zero_grad(set_to_none=True)
        result = run(batch)
        result.square().mean().backward()
        seen[name] = [result.detach(), *[p.grad for p in model.parameters()]]
    for name in ("ours", "hand"):
        torch.testing.assert_close(seen[name], seen["loop"], rtol=1e-4, atol=1e-5)


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = [
        [case.name, *[case.numbers[key] for key in COLUMNS.values()]] for case in found if case.numbers
    ]
    note = (
        f"{BATCH} instances, sentences of 5 to 40 words or graphs of as many atoms, 64 features; medians of the CPU "
        "time of each minibatch and of its ratios; new data in each. By hand: packed rows, padded and masked, offsets, "
        "packed sequences."
    )
    return [Table("Tensors of their own sizes", ["model", *COLUMNS], rows, note)]


TASK = Task(
    name="sizes",
    title="Sizes of their own",
    explanation=(
        "Models on `[T, 64]` and `[2, E]`, written for one instance, beside the loop and beside the same work by hand."
    ),
    cases=cases,
    tables=tables,
)
