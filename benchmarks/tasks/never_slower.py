"""Never slower than the loop: ordinary per-instance models, most of which gain nothing by batching, beside the loop.

In: Settings. Out: one row per model and mode: CPU time of the decorated call over that of the plain loop, minibatch by
minibatch on new data, from the first one of a fresh model on; what was built, and how many minibatches ran the loop.

    python -m benchmarks --task never-slower
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.ordinary_models import ROWS, Row
from benchmarks.results import CaseResult, Table
from benchmarks.task import Case, Settings, Task
from fxbatch import LoopWarning
from fxbatch.runtime.strategy import AdaptiveSwitch

FIRST = 10  # minibatches after which a row must not be slower
MOST_AFTER, MOST_IN_ALL = 1.1, 2.0
COLUMNS = {
    "loop, ms": "loop",
    "first / loop": "first",
    "median / loop": "median",
    "after ten / loop": "after",
    "in all / loop": "all",
    "built": "built",
    "by the loop": "loops",
}


def cases(settings: Settings) -> Iterator[Case]:
    for row in ROWS.values():
        for grad in (True, False):
            name = f"{row.name}, {'training' if grad else 'inference'}"
            yield Case(
                name, {"grad": grad}, "instance", row.instances, [],
                numbers=lambda row=row, grad=grad: beside_the_loop(row, settings, grad=grad),  # type: ignore[misc]
            )  # fmt: skip


def beside_the_loop(row: Row, settings: Settings, *, grad: bool) -> dict[str, float]:
    """The row's figures over the first hundred minibatches; each is run by both, in turns."""
    rounds, instances = settings.size(100, 4), settings.size(row.instances, 4)
    model, other = row.model(), row.model()
    decorated, alone = row.decorate(model), row.alone(other)
    loop = lambda *columns: torch.stack([alone(*one) for one in zip(*columns, strict=True)])  # noqa: E731
    ours, theirs = [], []
    before, AdaptiveSwitch.on = AdaptiveSwitch.on, True
    try:
        for round in range(rounds):
            batch = row.batch(round, instances)
            for mine in (True, False) if round % 2 else (False, True):
                if mine:
                    ours.append(seconds(decorated, model, batch, grad=grad))
                else:
                    theirs.append(seconds(loop, other, batch, grad=grad))
        engine = decorated.__fxbatch__.engine(model)  # type: ignore[attr-defined]
        loops = engine.strategy.looped(grad=grad)
    finally:
        AdaptiveSwitch.on = before
    built = sum(x.graphs is not None for x in engine.operations._entries.values())
    late = min(FIRST, rounds // 2)
    usual = statistics.median(theirs)
    return {
        "loop": usual * 1e3,
        "first": ours[0] / usual,
        "median": statistics.median(a / b for a, b in zip(ours[late:], theirs[late:], strict=True)),
        "after": sum(ours[late:]) / sum(theirs[late:]),
        "all": sum(ours) / sum(theirs),
        "built": built,
        "loops": loops,
    }


def seconds(run: Callable[..., Any], model: torch.nn.Module, batch: Sequence[Any], *, grad: bool) -> float:
    """CPU time of one minibatch, its backward included."""
    model.zero_grad(set_to_none=True)
    collects = gc.isenabled()
    gc.disable()  # what a collection finds is of all that ran before
    try:
        started = time.process_time()
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore", LoopWarning)
            result = run(*batch)
            if grad:
                result.sum().backward()
        return time.process_time() - started
    finally:
        if collects:
            gc.enable()


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    for case in found:
        if case.numbers:
            rows.append([case.name, *[case.numbers[key] for key in COLUMNS.values()]])
    rounds = settings.size(100, 4)
    note = f"CPU time of the decorated call over the plain loop's, new data in each of {rounds} minibatches."
    if not settings.quick:  # few small minibatches, most of them counted, say nothing
        slower = [case.name for case in found if case.numbers and case.numbers["after"] > MOST_AFTER]
        longer = [case.name for case in found if case.numbers and case.numbers["all"] > MOST_IN_ALL]
        note += (
            f" After the first ten more than {MOST_AFTER} times the loop: {', '.join(slower) or 'none'}."
            f" In all more than {MOST_IN_ALL} times: {', '.join(longer) or 'none'}."
        )
    return [Table("Beside the plain loop", ["row", *COLUMNS], rows, note)]


TASK = Task(
    name="never-slower",
    title="Never slower than the plain loop",
    explanation=(
        "Ordinary per-instance models, most of them with tensors of sizes of their own or with waits for values. "
        "`adaptive=True`, the default: where batching is estimated to be slower, minibatches run the loop."
    ),
    cases=cases,
    tables=tables,
)
