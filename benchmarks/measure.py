"""Interleaved timing: competitors take turns, A B C, C B A, B C A, so that a slow minute hits all alike.

In: contenders, each with a `run` that does the same work. Out: an Entry each, and ratios pair by pair.

    entries, ratios = measure(contenders, repeats=7, warmup=2, device=torch.device("cpu"), slow=("loop",))
    entries["fxbatch"].wall.median                                     # seconds
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.machine import resident_bytes
from benchmarks.results import Entry, Ratio, Spread


class Clock:
    """Gives a run's phases names: `with clock("forward"): ...`. Synchronises the device at each edge.

    `round` counts up from 0, which is the check before the timing; warm-up rounds are 1 and on, then the
    timed ones. All contenders get the same round's minibatch, and no round has that of an earlier one.
    """

    def __init__(self, device: torch.device, round: int = 0) -> None:
        self.device = device
        self.round = round
        self.phases: dict[str, float] = {}
        self.elsewhere: tuple[float, float] | None = None  # wall and CPU seconds of a run in another process

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        synchronize(self.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            synchronize(self.device)
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Contender:
    """Somebody who does the work of a case.

    run(clock): one minibatch, from the user's data to the result; a phase may be named with the clock.
    outcome(): the tensors that the work of round 0 gives, by name, for the comparison before the timing; None
    where they can't be compared (a limit that does less work).
    prepare(round): make that round's minibatch, outside the timing.
    limit: at most so many runs are timed and none to warm up, where one takes very long; the check ran it.
    With 0 it is checked alone.
    factor(round): what a run's seconds are times, for one that does a part of the work; its name says so.
    group: contenders of one group get the same minibatches, and their outcomes are compared.
    """

    name: str
    run: Callable[[Clock], Any]
    outcome: Callable[[], dict[str, torch.Tensor]] | None = None
    prepare: Callable[[int], None] | None = None
    limit: int | None = None
    group: str = ""
    factor: Callable[[int], float] | None = None


@dataclass
class _Samples:
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    resident: int = 0


# Warm-up ends, after one round, when it and the check before it have taken this share of a case's budget.
WARMUP_SHARE = 1 / 3
# So many rounds are timed whatever went before, where they take no longer than the budget: compiling for the check
# often takes most of it, and one round of a shared machine says little.
FEWEST_ROUNDS = 3


def measure(
    contenders: Sequence[Contender],
    *,
    repeats: int,
    warmup: int,
    device: torch.device,
    slow: Sequence[str] = (),
    budget: float = float("inf"),
    spent: float = 0.0,
    on_run: Callable[[str], None] = lambda name: None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> tuple[dict[str, Entry], list[Ratio]]:
    """Time the contenders in turn, `repeats` rounds after `warmup` untimed ones.

    slow: the contenders that the others' ratios are taken to. budget: seconds of the case, of which `spent`
    went before (a check that ran everybody once); a round that would not end within it is not begun, but
    FEWEST_ROUNDS are timed all the same unless they take longer than all of it, and one always is.
    on_error: told who raised what, who then takes no further part; None raises.
    The garbage collector is run before each run, and not during it. What was there before the first run it leaves
    alone: looking at all of that each time would push a contender's code and data out of the caches, as nothing does
    between the steps of a training.
    """
    gc.collect()
    gc.freeze()
    try:
        return _measure(contenders, repeats, warmup, device, slow, budget, spent, on_run, on_error)
    finally:
        gc.unfreeze()


def _measure(
    contenders: Sequence[Contender],
    repeats: int,
    warmup: int,
    device: torch.device,
    slow: Sequence[str],
    budget: float,
    spent: float,
    on_run: Callable[[str], None],
    on_error: Callable[[str, Exception], None] | None,
) -> tuple[dict[str, Entry], list[Ratio]]:
    begin = time.perf_counter() - spent
    samples = {c.name: _Samples() for c in contenders}
    raised: dict[str, None] = {}

    def turn(contender: Contender, number: int, *, timed: bool) -> None:
        if contender.name in raised:
            return
        on_run(contender.name)
        try:
            found = _run_once(contender, device, number)
        except Exception as error:
            if on_error is None:
                raise
            raised[contender.name] = None
            on_error(contender.name, error)
            return
        if timed:
            _add(samples[contender.name], *found)

    for number in range(warmup):
        if number and time.perf_counter() - begin > budget * WARMUP_SHARE:
            break
        for contender in contenders:
            if contender.limit is None:
                turn(contender, number + 1, timed=False)
    longest = 0.0
    for done in range(repeats):
        start = time.perf_counter()
        short = done < FEWEST_ROUNDS and longest * FEWEST_ROUNDS <= budget
        if done and not short and start - begin + longest > budget:
            break
        for contender in in_turn(contenders, done):
            if contender.limit is None or done < contender.limit:
                turn(contender, warmup + done + 1, timed=True)
        longest = max(longest, time.perf_counter() - start)
    entries = {name: _entry(s) for name, s in samples.items() if s.wall and name not in raised}
    return entries, pair_ratios(entries, slow)


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: A B C, C B A, B C A, A C B, ... Each is first and last as often as any other."""
    first = number // 2 % len(contenders) if contenders else 0
    order = [*contenders[first:], *contenders[:first]]
    return order if number % 2 == 0 else order[::-1]


def _run_once(
    contender: Contender, device: torch.device, number: int
) -> tuple[float, float, float | None, dict[str, float]]:
    """(wall seconds, CPU seconds, device seconds, phases) of one run."""
    if contender.prepare is not None:
        contender.prepare(number)
    clock = Clock(device, number)
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        events = _events(device)
        if events is not None:
            events[0].record()
        cpu, wall = time.process_time(), time.perf_counter()
        contender.run(clock)
        if events is not None:
            events[1].record()
        synchronize(device)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if clock.elsewhere is not None:
            wall, cpu = clock.elsewhere
    finally:
        if enabled:
            gc.enable()
    seconds = None if events is None else events[0].elapsed_time(events[1]) / 1000
    if contender.factor is None:
        return wall, cpu, seconds, clock.phases
    whole = contender.factor(number)
    phases = {name: whole * part for name, part in clock.phases.items()}
    return whole * wall, whole * cpu, None if seconds is None else whole * seconds, phases


def _events(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _add(samples: _Samples, wall: float, cpu: float, device: float | None, phases: dict[str, float]) -> None:
    samples.wall.append(wall)
    samples.cpu.append(cpu)
    if device is not None:
        samples.device.append(device)
    for name, seconds in phases.items():
        samples.phases.setdefault(name, []).append(seconds)
    samples.resident = resident_bytes()


def _entry(samples: _Samples) -> Entry:
    return Entry(
        wall=Spread.of(samples.wall),
        cpu=Spread.of(samples.cpu),
        device=Spread.of(samples.device) if samples.device else None,
        phases={name: Spread.of(seconds) for name, seconds in samples.phases.items()},
        resident_bytes=samples.resident,
    )


def pair_ratios(entries: dict[str, Entry], slow: Sequence[str]) -> list[Ratio]:
    """slow's time / the other's, round by round, for each of `slow` and each other contender."""
    ratios = []
    for base in slow:
        if base not in entries:
            continue
        for name, entry in entries.items():
            if name != base:
                pairs = zip(entries[base].wall.samples, entry.wall.samples, strict=False)
                ratios.append(Ratio(base, name, Spread.of([a / b for a, b in pairs])))
    return ratios


def seconds_of(work: Callable[[], Any], *, repeats: int, device: torch.device | None = None) -> Spread:
    """The seconds of a piece of work that has no competitor: one untimed run, then `repeats` timed ones."""
    where = device or torch.device("cpu")
    timed = Contender("work", lambda clock: work())
    samples = [_run_once(timed, where, number)[0] for number in range(repeats + 1)]
    return Spread.of(samples[1:])
