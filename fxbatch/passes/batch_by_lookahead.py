"""Batching by lookahead: a step that shortens what must follow goes first.

Comes in: a Program. Goes out: a Schedule with at most as many steps as `batch_by_agenda` gives.

    schedule = batch_by_lookahead(program)
    len(schedule) <= len(batch_by_agenda(program))        # always

The calls that head the longest remaining chain of their signature are its critical calls. A step whose
ready calls include ALL critical calls of its signature shortens that chain, and so the lower bound of
what remains, by one; a schedule of such steps alone is optimal. So signatures of which that is true go
first; among equals the one with the ready call that has the longest path before it, then the one with
most ready calls. The idea of a ratio of ready calls to those that could be is that of ED-Batch (Chen et
al. 2023, section 4); counting only the critical ones makes it exact in more cases and needs no training.
Where no two signatures wait for each other in turn, no search is needed: one signature after another,
each by its own chains, is optimal. Where the result is above the lower bound, the agenda is tried as well,
and the better one taken.
"""

from __future__ import annotations

import networkx as nx
import numpy as np

from fxbatch.ir import CONSTANT_KINDS, Program, Schedule
from fxbatch.passes.batch_by_agenda import add_by_signature, agenda_schedule
from fxbatch.passes.frontier import Frontier, constant_steps, peaks, schedule_from_steps
from fxbatch.passes.lower_bound import chain_below, height, own_chains, signature_graph
from fxbatch.passes.native import Native


def batch_by_lookahead(program: Program) -> Schedule:
    """The lookahead schedule; 0.3 us a call for wide programs, 1 us for narrow and small ones."""
    if not len(program):
        return Schedule(np.zeros(0, np.int64), np.zeros(1, np.int64), "lookahead")
    found = _signature_by_signature(program)
    if found is not None:
        return found
    frontier = Frontier(program)
    critical = _Critical(frontier)
    run = _lookahead_by_lists if frontier.narrow else _lookahead_by_arrays
    step_of_call, steps = run(frontier, critical)
    if steps > critical.bound:
        other = agenda_schedule(frontier)
        if len(other) < steps:
            return Schedule(other.order, other.offsets, "lookahead")
    return schedule_from_steps(step_of_call, steps, "lookahead")


def _signature_by_signature(program: Program) -> Schedule | None:
    """One signature after another, each in as many steps as its longest chain: the lower bound.

    Possible where no two signatures wait for each other in turn; None where they do.
    """
    graph = signature_graph(program)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    try:
        ranked = list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        return None
    before, length = own_chains(program)
    constants = [s.operation.kind in CONSTANT_KINDS for s in program.signatures]
    ranked = sorted(ranked, key=lambda s: not constants[s])  # constants first, else as ranked
    first = np.zeros(len(program.signatures), dtype=np.int64)
    first[ranked] = np.cumsum(length[ranked]) - length[ranked]
    steps = int(length.sum())
    if Native.loops is None:
        return schedule_from_steps(first[program.sig] + before, steps, "lookahead")
    offsets, order = np.empty(steps + 1, dtype=np.int64), np.empty(len(program), dtype=np.int64)
    Native.loops.arrange(program.sig, before, first, offsets, order)
    return Schedule(order, offsets, "lookahead")


class _Critical:
    """How many calls remain, and how many are ready, by (signature, length of the chain they head).

    All pairs share one list: those of signature s are the places `base[s] : base[s + 1]`, shortest chain
    first; `top[s]` is the place of the longest chain that remains.
    """

    def __init__(self, frontier: Frontier) -> None:
        sig, signatures = frontier.program.sig, len(frontier.program.signatures)
        chain = chain_below(frontier)
        longest = peaks(sig, chain, signatures)
        base = np.zeros(signatures + 1, dtype=np.int64)
        np.cumsum(longest, out=base[1:])
        self.bound = int(base[-1])
        self.place = base[sig] + (chain - 1)  # of each call
        self.height = height(frontier)  # of each call: calls on the longest path from it on
        self.remaining: list[int] = np.bincount(self.place, minlength=self.bound).tolist()
        self.ready = [0] * self.bound
        self.base: list[int] = base.tolist()
        self.top: list[int] = (base[1:] - 1).tolist()

    def waits(self, s: int) -> bool:
        """Whether some critical call of signature s is not ready yet."""
        top = self.top[s]
        return self.ready[top] != self.remaining[top]

    def lower(self, s: int) -> None:
        """Move the top of signature s below the places that have run."""
        top, base = self.top[s], self.base[s]
        while top >= base and not self.remaining[top]:
            top -= 1
        self.top[s] = top


def _lookahead_by_lists(frontier: Frontier, critical: _Critical) -> tuple[np.ndarray, int]:
    sig, place, high = frontier.program.sig.tolist(), critical.place.tolist(), critical.height.tolist()
    first_steps = np.zeros(frontier.calls, dtype=np.int64)
    steps = constant_steps(frontier, first_steps)
    step_of_call = first_steps.tolist()
    indegree = frontier.indegree.tolist()
    readers, offsets = frontier.readers.tolist(), frontier.reader_offsets.tolist()
    remaining, ready = critical.remaining, critical.ready
    agenda: dict[int, list[int]] = {}
    for call in np.flatnonzero((frontier.indegree == 0) & ~frontier.constant).tolist():
        agenda.setdefault(sig[call], []).append(call)
        ready[place[call]] += 1
    highest = {s: max(high[c] for c in calls) for s, calls in agenda.items()}

    def priority(s: int) -> tuple[bool, int, int, int]:
        return (critical.waits(s), -highest[s], -len(agenda[s]), s)

    while agenda:
        chosen = next(iter(agenda)) if len(agenda) == 1 else min(agenda, key=priority)
        calls = agenda.pop(chosen)
        highest[chosen] = 0
        for call in calls:
            step_of_call[call] = steps
            at = place[call]
            remaining[at] -= 1
            ready[at] -= 1
            for reader in readers[offsets[call] : offsets[call + 1]]:
                left = indegree[reader] - 1
                indegree[reader] = left
                if not left:
                    kind = sig[reader]
                    ready[place[reader]] += 1
                    if kind in agenda:
                        agenda[kind].append(reader)
                        highest[kind] = max(highest[kind], high[reader])
                    else:
                        agenda[kind] = [reader]
                        highest[kind] = high[reader]
        critical.lower(chosen)
        steps += 1
    return np.array(step_of_call, dtype=np.int64), steps


def _lookahead_by_arrays(frontier: Frontier, critical: _Critical) -> tuple[np.ndarray, int]:
    sig, place, high = frontier.program.sig, critical.place, critical.height
    step_of_call = np.zeros(frontier.calls, dtype=np.int64)
    steps = constant_steps(frontier, step_of_call)
    indegree = frontier.indegree.copy()
    mark = np.empty(frontier.calls, dtype=np.int64)
    agenda: dict[int, list[np.ndarray]] = {}
    fresh = np.flatnonzero((indegree == 0) & ~frontier.constant)

    def priority(s: int) -> tuple[bool, int, int, int]:
        chunks = agenda[s]
        highest = max(int(high[calls].max()) for calls in chunks)
        return (critical.waits(s), -highest, -sum(map(len, chunks)), s)

    while True:
        add_by_signature(agenda, fresh, sig)
        if not agenda:
            return step_of_call, steps
        _count(critical.ready, place[fresh], 1)
        chosen = next(iter(agenda)) if len(agenda) == 1 else min(agenda, key=priority)
        chunks = agenda.pop(chosen)
        calls = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        step_of_call[calls] = steps
        steps += 1
        _count(critical.ready, place[calls], -1)
        _count(critical.remaining, place[calls], -1)
        critical.lower(chosen)
        fresh = frontier.advance(calls, indegree, mark)


def _count(counts: list[int], places: np.ndarray, sign: int) -> None:
    """Add `sign` at each place; there are few places and many calls."""
    if not len(places):
        return
    low = int(places.min())
    for offset, n in enumerate(np.bincount(places - low).tolist()):
        if n:
            counts[low + offset] += sign * n
