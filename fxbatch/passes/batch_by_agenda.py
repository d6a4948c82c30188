"""Batching by agenda (Neubig, Goldberg & Dyer 2017, section 3.2).

Comes in: a Program. Goes out: a Schedule. Of the signatures with ready calls, the one whose remaining
calls have the lowest average depth goes first, with all of its ready calls; ties: cheap before heavy.

    schedule = batch_by_agenda(program)
    len(schedule)          # launches, one a constant signature included
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program, Schedule
from fxbatch.passes.frontier import Frontier, constant_steps, cost_of, schedule_from_steps
from fxbatch.passes.native import Native


def batch_by_agenda(program: Program) -> Schedule:
    """The agenda schedule; about 0.1 us a call, without the extension in C up to 0.6 us."""
    return agenda_schedule(Frontier(program))


def agenda_schedule(frontier: Frontier) -> Schedule:
    """The agenda schedule of a program whose frontier is known already."""
    if not frontier.calls:
        return Schedule(np.zeros(0, np.int64), np.zeros(1, np.int64), "agenda")
    if Native.loops is not None:
        run = _agenda_in_c
    else:
        run = _agenda_by_lists if frontier.narrow else _agenda_by_arrays
    step_of_call, steps = run(frontier)
    return schedule_from_steps(step_of_call, steps, "agenda")


def _remaining(frontier: Frontier) -> tuple[list[int], list[int]]:
    """A signature: the sum of the depths of its calls, and how many there are."""
    sig, signatures = frontier.program.sig, len(frontier.program.signatures)
    total = np.bincount(sig, weights=frontier.depth, minlength=signatures).astype(np.int64)
    return total.tolist(), np.bincount(sig, minlength=signatures).tolist()


def _agenda_in_c(frontier: Frontier) -> tuple[np.ndarray, int]:
    program = frontier.program
    total, count = (np.array(column, dtype=np.int64) for column in _remaining(frontier))
    cost = np.array([cost_of(s) for s in program.signatures], dtype=np.int64)
    step_of_call = np.zeros(frontier.calls, dtype=np.int64)
    steps = constant_steps(frontier, step_of_call)
    indegree = frontier.indegree.copy()
    indegree[frontier.constant] = -1  # they have their steps
    columns = (program.sig, frontier.depth, frontier.reader_offsets, frontier.readers, cost)
    return step_of_call, Native.loops.agenda(*columns, indegree, total, count, step_of_call, steps)


def _agenda_by_arrays(frontier: Frontier) -> tuple[np.ndarray, int]:
    sig, depth = frontier.program.sig, frontier.depth
    total, count = _remaining(frontier)
    cost = [cost_of(s) for s in frontier.program.signatures]
    step_of_call = np.zeros(frontier.calls, dtype=np.int64)
    steps = constant_steps(frontier, step_of_call)
    indegree = frontier.indegree.copy()
    mark = np.empty(frontier.calls, dtype=np.int64)
    ready: dict[int, list[np.ndarray]] = {}
    fresh = np.flatnonzero((indegree == 0) & ~frontier.constant)
    while True:
        add_by_signature(ready, fresh, sig)
        if not ready:
            return step_of_call, steps
        chosen = min(ready, key=lambda s: (total[s] / count[s], cost[s], s))
        chunks = ready.pop(chosen)
        calls = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        step_of_call[calls] = steps
        steps += 1
        count[chosen] -= len(calls)
        total[chosen] -= int(depth[calls].sum())
        fresh = frontier.advance(calls, indegree, mark)


def add_by_signature(ready: dict[int, list[np.ndarray]], calls: np.ndarray, sig: np.ndarray) -> None:
    """Put calls that have become ready into the agenda, by signature."""
    if not len(calls):
        return
    kinds = sig[calls]
    first = int(kinds[0])
    same = kinds == first
    while not same.all():
        ready.setdefault(first, []).append(calls[same])
        calls, kinds = calls[~same], kinds[~same]
        first = int(kinds[0])
        same = kinds == first
    ready.setdefault(first, []).append(calls)


def _agenda_by_lists(frontier: Frontier) -> tuple[np.ndarray, int]:
    sig, depth = frontier.program.sig.tolist(), frontier.depth.tolist()
    total, count = _remaining(frontier)
    cost: dict[int, int] = {}
    first_steps = np.zeros(frontier.calls, dtype=np.int64)
    steps = constant_steps(frontier, first_steps)
    step_of_call = first_steps.tolist()
    indegree = frontier.indegree.tolist()
    readers, offsets = frontier.readers.tolist(), frontier.reader_offsets.tolist()
    ready: dict[int, list[int]] = {}
    for call in np.flatnonzero((frontier.indegree == 0) & ~frontier.constant).tolist():
        ready.setdefault(sig[call], []).append(call)

    def priority(s: int) -> tuple[float, int, int]:
        if s not in cost:
            cost[s] = cost_of(frontier.program.signatures[s])
        return (total[s] / count[s], cost[s], s)

    while ready:
        chosen = next(iter(ready)) if len(ready) == 1 else min(ready, key=priority)
        calls = ready.pop(chosen)
        count[chosen] -= len(calls)
        for call in calls:
            step_of_call[call] = steps
            total[chosen] -= depth[call]
            for reader in readers[offsets[call] : offsets[call + 1]]:
                left = indegree[reader] - 1
                indegree[reader] = left
                if not left:
                    ready.setdefault(sig[reader], []).append(reader)
        steps += 1
    return np.array(step_of_call, dtype=np.int64), steps
