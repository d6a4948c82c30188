"""Run tasks: check that the competitors agree, time them in turn, count, and put the results together.

result = run_tasks(TASKS, Settings(quick=True), command="python -m benchmarks --quick")
write_report(result, Path("bench-results"))
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.correctness import CorrectnessError, check_outcome
from benchmarks.machine import describe_machine
from benchmarks.measure import Clock, measure
from benchmarks.results import CaseResult, RunResult, TaskResult
from benchmarks.task import Case, Incomplete, Settings, Skip, Task


class Watcher(Protocol):
    """Who is told how far a run is: a progress bar, or nobody."""

    def task(self, name: str, title: str) -> None: ...
    def case(self, name: str) -> None: ...
    def run(self, contender: str) -> None: ...
    def finished(self, case: CaseResult) -> None: ...
    def skipped(self, what: str, reason: str) -> None: ...
    def failed(self, what: str, reason: str) -> None: ...


class Nobody:
    """A Watcher that does nothing."""

    def task(self, name: str, title: str) -> None: ...
    def case(self, name: str) -> None: ...
    def run(self, contender: str) -> None: ...
    def finished(self, case: CaseResult) -> None: ...
    def skipped(self, what: str, reason: str) -> None: ...
    def failed(self, what: str, reason: str) -> None: ...


@contextlib.contextmanager
def pinned(settings: Settings) -> Iterator[None]:
    """The thread count and the seed of a run, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_tasks(
    tasks: Sequence[Task],
    settings: Settings,
    *,
    command: str,
    watcher: Watcher | None = None,
    keep: Callable[[RunResult], None] = lambda run: None,
    before: RunResult | None = None,
) -> RunResult:
    """Run the tasks one after the other. `keep` is given what there is after each, so that nothing is lost.

    before: an earlier run that ended half way; its tasks that went through are taken over and not run again.
    ValueError where it was measured with other settings or another machine. Ctrl-C: KeyboardInterrupt.
    """
    watcher = watcher or Nobody()
    begin = time.perf_counter()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    shown = {
        "quick": settings.quick, "repeats": settings.repeats, "warmup": settings.warmup,
        "budget": settings.budget, "seed": settings.seed, "tasks": [task.name for task in tasks],
    }  # fmt: skip
    with pinned(settings):
        machine = describe_machine(settings.device, threads=torch.get_num_threads())
        done = taken_over(before, shown, machine)
        earlier = 0.0 if before is None else before.seconds
        run = RunResult(date, command, shown, machine, list(done.values()), earlier)
        for task in tasks:
            if task.name not in done:
                done[task.name] = run_task(task, settings, watcher)
            found = [done[t.name] for t in tasks if t.name in done]
            seconds = earlier + time.perf_counter() - begin
            run = replace(run, tasks=found, seconds=seconds)
            keep(run)
    return run


# What must be the same for the tasks of two runs to stand in one report.
SAME_SETTINGS = ("quick", "repeats", "warmup", "budget", "seed")
SAME_MACHINE = ("processor", "cores", "threads", "device", "python", "packages", "commit")


def taken_over(
    before: RunResult | None, settings: dict[str, Any], machine: dict[str, Any]
) -> dict[str, TaskResult]:
    """The tasks of an earlier run that went through, by name; ValueError where it can't be gone on with."""
    if before is None:
        return {}
    for what, names, old, new in (
        ("settings", SAME_SETTINGS, before.settings, settings),
        ("machine", SAME_MACHINE, before.machine, machine),
    ):
        for name in names:
            if old.get(name) != new.get(name):
                raise ValueError(f"its {what} differ: {name} was {old.get(name)!r}, is {new.get(name)!r}")
    return {t.name: t for t in before.tasks if not any(case.failed for case in t.cases)}


def run_task(task: Task, settings: Settings, watcher: Watcher) -> TaskResult:
    """All cases of one task. A Skip is its result; an error outside competitors is a failed case of its own."""
    watcher.task(task.name, task.title)
    begin = time.perf_counter()
    cases: list[CaseResult] = []
    reason = ""
    errors: dict[str, str] = {}
    try:
        for case in task.cases(settings):
            cases.append(run_case(case, settings, watcher))
            del case
            gc.collect()
    except Skip as skip:
        reason = str(skip)
        watcher.skipped(task.name, reason)
    except Exception as error:  # noqa: BLE001 - one task's error must not end the others' run
        errors["cases"] = describe(error)
    tables, plots = [], []
    try:
        tables = task.tables(cases, settings) if cases else []
        plots = task.plots(cases, settings) if cases else []
    except Exception as error:  # noqa: BLE001 - what was measured must not be lost
        errors["tables and plots"] = describe(error)
    for what, text in errors.items():
        watcher.failed(f"{task.name}: {what}", text)
    if errors:
        cases.append(CaseResult(OUTSIDE, {}, "run", 0, {}, {}, [], {}, {}, errors))
    seconds = time.perf_counter() - begin
    return TaskResult(task.name, task.title, task.explanation, cases, tables, plots, reason, seconds)


OUTSIDE = "outside its cases"  # the case that stands for what failed in a task, but in none of its cases


def run_case(case: Case, settings: Settings, watcher: Watcher) -> CaseResult:
    """Check, time and count one case. Who raises or differs is named in `failed`, and not timed."""
    watcher.case(case.name)
    begin = time.perf_counter()
    for name, reason in case.skipped.items():
        watcher.skipped(f"{case.name}: {name}", reason)
    checked, failed = check_case(case, settings, watcher)

    def lost(name: str, error: Exception) -> None:
        failed[name] = describe(error)
        watcher.failed(f"{case.name}: {name}", failed[name])

    entries, ratios = measure(
        [c for c in case.contenders if c.name not in failed],
        repeats=settings.repeats,
        warmup=settings.warmup,
        device=settings.device,
        slow=case.slow,
        budget=settings.budget,
        spent=time.perf_counter() - begin,
        on_run=watcher.run,
        on_error=lost,
    )
    numbers: dict[str, float] = {}
    if case.numbers is not None:
        watcher.run("counting")
        try:
            numbers = case.numbers()
        except Incomplete as error:
            numbers = error.numbers
            failed |= error.failures
            watcher.failed(case.name, str(error))
        except Exception as error:  # noqa: BLE001 - the times that were taken must not be lost
            failed["counting"] = describe(error)
            watcher.failed(f"{case.name}: counting", failed["counting"])
    result = CaseResult(
        case.name, case.parameters, case.unit, case.count, entries, dict(case.skipped), ratios, checked,
        numbers, failed,
    )  # fmt: skip
    watcher.finished(result)
    return result


def check_case(case: Case, settings: Settings, watcher: Watcher) -> tuple[dict[str, float], dict[str, str]]:
    """Run every contender once; (shares of the tolerance used up, errors), each by competitor."""
    outcomes: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    failed: dict[str, str] = {}
    for contender in case.contenders:
        watcher.run(f"{contender.name}, checking")
        try:
            if contender.prepare is not None:
                contender.prepare(0)
            if contender.outcome is None:
                contender.run(Clock(settings.device))
                continue
            outcomes.setdefault(contender.group, {})[contender.name] = contender.outcome()
        except Exception as error:  # noqa: BLE001 - one competitor's error must not end the others' run
            failed[contender.name] = describe(error)
            watcher.failed(f"{case.name}: {contender.name}", failed[contender.name])
    checked: dict[str, float] = {}
    for group in outcomes.values():
        reference = case.reference if case.reference in group else next(iter(group))
        for name, outcome in group.items():
            if name == reference:
                continue
            try:
                checked[name] = check_outcome(name, outcome, group[reference], tolerance=case.tolerance)
            except CorrectnessError as error:
                failed[name] = str(error)
                watcher.failed(f"{case.name}: {name}", str(error))
    return checked, failed


def describe(error: Exception) -> str:
    """The kind of an error, its first line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}{where}"
