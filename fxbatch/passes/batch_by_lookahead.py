"""Batching by lookahead: component by component of the signature graph, each by a search.

Comes in: a Program. Goes out: a Schedule with at most as many steps as `batch_by_agenda` gives.

    schedule = batch_by_lookahead(program)
    len(schedule) <= len(batch_by_agenda(program))        # always

The signature graph says whose calls read whose. Its strongly connected components can run one after another,
and no schedule does better than the best of each: what a component needs of others has then been made, and nobody
waits for its calls meanwhile. A component of one signature runs in as many steps as its longest chain, which is
the lower bound. One of several signatures, which wait for each other in turn, is searched (`search_steps`): first
greedily, then, where that is above the lower bound, as widely as time allows. Where the whole is still above the
lower bound, the agenda is tried as well, and the better one taken.

The greedy step is that of ED-Batch in spirit (Chen et al. 2023, section 4: prefer signatures of which many of
those calls are ready that could be): it prefers a signature of which all calls that head the longest remaining
chain are ready, which shortens the lower bound of what remains by one. Nothing has to be trained.
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program, Schedule
from fxbatch.passes.batch_by_agenda import agenda_schedule
from fxbatch.passes.frontier import Frontier, schedule_from_steps
from fxbatch.passes.native import Native, empty_column
from fxbatch.passes.search_steps import affordable_width, cut_component, search_steps
from fxbatch.passes.survey import survey


def batch_by_lookahead(program: Program) -> Schedule:
    """The lookahead schedule; 0.02 us a call where no signatures wait for each other in turn, else up to 0.7."""
    if not len(program):
        return Schedule(np.zeros(0, np.int64), np.zeros(1, np.int64), "lookahead")
    found = survey(program)
    if not found.graph.several:
        return _in_turn(program, found.before, found.longest)
    before, length = found.before.copy(), found.longest.copy()
    bound = int(length.sum())
    for part in found.graph.several:
        component = cut_component(program, np.array(part))
        step, steps = search_steps(component, 1)
        width = affordable_width(component, len(program)) if steps > component.bound else 1
        if width > 1:
            wide, fewer = search_steps(component, width)
            step, steps = (wide, fewer) if fewer < steps else (step, steps)
        before[component.calls] = step
        bound += component.bound - int(length[part].sum())
        length[part] = 0
        length[part[0]] = steps
    if int(length.sum()) > bound:
        other = agenda_schedule(Frontier(program))
        if len(other) < int(length.sum()):
            return Schedule(other.order, other.offsets, "lookahead")
    return _in_turn(program, before, length)


def signature_components(program: Program) -> list[list[int]]:
    """The strongly connected components of the signature graph, each sorted: constants, then as they feed."""
    return survey(program).graph.parts


def _in_turn(program: Program, before: np.ndarray, length: np.ndarray) -> Schedule:
    """One component after another: `before` is a call's step in its own, `length` the steps, summed over its
    signatures."""
    graph = survey(program).graph
    if Native.loops is not None:
        offsets, order = Native.loops.in_turn(program.sig, before, length, *graph.turns, empty_column)
        return Schedule(order, offsets, "lookahead")
    first = np.zeros(len(program.signatures), dtype=np.int64)
    steps = 0
    for part in graph.parts:
        first[part] = steps
        steps += int(length[part].sum())
    return schedule_from_steps(first[program.sig] + before, steps, "lookahead")
