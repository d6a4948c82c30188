"""Where a step's time goes before the first kernel: seconds of trace, merge, rewrite, schedule and plan.

In: runs of decorated callables. Out: seconds a stage, without the stages inside it; what `explain` counts.

    with stage_times() as seconds:
        model.loss(trees)
    seconds["trace"], seconds["plan"]
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import nn

import fxbatch
from benchmarks.contenders import Batches, Training, decorated
from benchmarks.measure import Clock, Contender
from fxbatch import decorator
from fxbatch.runtime.engine import Engine
from fxbatch.trace.record import Recorder

# Stage, class or module, function. A stage inside another counts for itself alone.
STAGES: tuple[tuple[str, Any, str], ...] = (
    ("trace", Engine, "record"),
    ("merge", decorator.Autobatched, "ready"),  # of traces: all that is done with them but what follows
    ("merge", Recorder, "pending_program"),
    ("rewrite", Engine, "rewrite"),
    ("schedule", Engine, "schedule"),
    ("plan", Engine, "plan"),
)
NAMES = tuple(dict.fromkeys(name for name, _, _ in STAGES))


@contextlib.contextmanager
def stage_times(
    stages: Sequence[tuple[str, Any, str]] = STAGES, now: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, float]]:
    """Seconds by stage of everything that runs within, in this thread; complete when it ends."""
    seconds = dict.fromkeys((name for name, _, _ in stages), 0.0)
    inner = [0.0]  # seconds of stages inside the one that runs

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = now()
            try:
                return method(*args, **kwargs)
            finally:
                took = now() - start
                seconds[name] += took - inner.pop()
                inner[-1] += took

        return run

    with contextlib.ExitStack() as stack:
        for name, owner, method in stages:
            stack.enter_context(mock.patch.object(owner, method, timed(name, getattr(owner, method))))
        yield seconds


def staged(contender: Contender) -> Contender:
    """The contender with its forward split into the stages and the rest, which keeps the name `forward`."""

    def run(clock: Clock) -> None:
        with stage_times() as seconds:
            contender.run(clock)
        before = sum(seconds.values())
        clock.phases["forward"] = clock.phases.get("forward", before) - before
        clock.phases = {**seconds, **clock.phases}

    return Contender(
        contender.name, run, contender.outcome, contender.prepare, contender.limit, contender.group
    )


def prepared(contender: Contender) -> Contender:
    """The contender with one phase `preparation`: all stages together."""
    inner = staged(contender)

    def run(clock: Clock) -> None:
        inner.run(clock)
        clock.phases["preparation"] = sum(clock.phases.pop(name) for name in NAMES)

    return Contender(contender.name, run, contender.outcome, contender.prepare)


def preparation_contenders(model: nn.Module, method: str, batches: Batches[Any]) -> list[Contender]:
    """Steps with new instances (`cold`), with traces made before (`warm`), with plans made before (`ready`).

    `ready` is what `fxbatch.prefetch` hands out: another thread merged and planned it.
    """
    bound = getattr(model, method)

    def traced(number: int) -> list[Any]:
        data = fxbatch.TracedDataset(bound, batches[number])
        return [data[i] for i in range(len(data))]

    def ready(number: int) -> Any:
        (minibatch,) = fxbatch.prefetch(bound, [traced(number)])
        return minibatch

    found = [prepared(Training(model, batches, method).batched("cold"))]
    for name, made in (("warm", traced), ("ready", ready)):
        work = Training(model, Batches(made), method)
        found.append(prepared(work.contender(name, lambda batch: bound(batch).sum())))
    return found


def counted(model: nn.Module, method: str, batch: list[Any], **options: Any) -> dict[str, float]:
    """Launches before and after, steps over their lower bound, gathers read in place: numbers of a case."""
    found = fxbatch.explain(getattr(model, method), batch, **options)
    gathers = found.gathers_elided + found.gathers_indexed
    return {
        "launches one by one": found.launches_before,
        "launches batched": found.launches_after,
        "steps": found.steps,
        "steps / lower bound": found.ratio,
        "gathers read in place": found.gathers_elided / gathers if gathers else 1.0,
        "unbatched calls": sum(row.calls for row in found.unbatched),
        "phases": found.phases,
    }


__all__ = ["NAMES", "counted", "decorated", "prepared", "preparation_contenders", "stage_times", "staged"]
