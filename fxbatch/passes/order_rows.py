"""Schedule -> Schedule: the calls of each step in the order in which their readers want them.

From the last step to the first, calls are ordered by where their first reader (in the nearest later step)
reads them, so that the reader finds consecutive rows and needs no index. Calls that nobody reads keep their
order behind the others. Which calls a step has does not change.

    before: step 3 = leaf(1) leaf(2) leaf(0); step 4 reads 0, 1, 2     through an index
    after:  step 3 = leaf(0) leaf(1) leaf(2); step 4 reads 0, 1, 2     as a view
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from fxbatch.ir import INDEX, Program, Schedule, Signature
from fxbatch.passes.plan import SlotTable, plan_arenas

# Rows a step that must be saved: copying one costs some 0.05 us, so one instance's few rows are never worth it.
FEWEST_ROWS = 16


class RowOrderer:
    """Orders rows for the families of programs (sets of signatures) where it saves copies.

    Decided at the first program of a family and again every `again` programs, by counting the rows that must be
    gathered through an index: ordering must save a third of them, and `fewest` a step. Programs that read fewer
    than that can't win and aren't tried.
    """

    def __init__(self, *, capacity: int = 256, again: int = 100, fewest: int = FEWEST_ROWS) -> None:
        self.capacity = capacity
        self.again = again
        self.fewest = fewest
        self._wins: OrderedDict[tuple[Signature, ...], tuple[bool, int]] = OrderedDict()

    def __call__(self, program: Program, schedule: Schedule, slots: SlotTable) -> Schedule:
        """The schedule with rows in order, or as it is."""
        least = self.fewest * len(schedule)
        if len(program.inputs) < least:
            return schedule
        wins, uses = self._wins.get(program.signatures, (True, 0))
        ordered = order_rows(program, schedule, slots) if wins or not uses else schedule
        if not uses:
            before, after = (indexed_rows(program, x, slots) for x in (schedule, ordered))
            wins = 3 * after <= 2 * before and before - after >= least
        self._wins[program.signatures] = (wins, (uses + 1) % self.again)
        if len(self._wins) > self.capacity:
            self._wins.popitem(last=False)
        return ordered if wins else schedule


def indexed_rows(program: Program, schedule: Schedule, slots: SlotTable) -> int:
    """Rows that the plan of this schedule gathers through an index."""
    plan = plan_arenas(program, schedule, [None] * len(program.signatures), slots=slots)
    return int(plan.gather_rows[plan.gather_kind == INDEX].sum())


def order_rows(program: Program, schedule: Schedule, slots: SlotTable) -> Schedule:
    """The schedule with rows reordered; the same object when nothing moves."""
    if not len(program.inputs):
        return schedule  # nothing is read
    first = schedule.offsets.tolist()
    steps = len(first) - 1
    order = schedule.order.copy()
    rows = np.diff(schedule.offsets)
    step_of_call = np.empty(len(order), dtype=np.int64)
    step_of_call[order] = np.repeat(np.arange(steps), rows)
    made = program.inputs >= program.known
    source = program.call_of_value[program.inputs[made] - program.known]
    reader = program.reader[made]
    # Of the entries that read a call, the one in the nearest step counts; it gives the key.
    by_source = np.lexsort((step_of_call[reader], source))
    sorted_source = source[by_source]
    lead = np.flatnonzero(np.diff(sorted_source, prepend=-1) != 0) if len(by_source) else by_source
    best = np.flatnonzero(made)[by_source[lead]]
    has_reader = np.full(len(order), -1, dtype=np.int64)
    has_reader[sorted_source[lead]] = best

    slot = np.arange(len(program.inputs)) - program.input_offsets[program.reader]
    slot += slots.first_slot[program.sig[program.reader]]
    prior, size, member = slots.prior[slot], slots.size[slot], slots.member[slot]
    position = np.empty(len(order), dtype=np.int64)
    last = np.iinfo(np.int64).max
    for k in range(steps - 1, -1, -1):
        a, b = first[k], first[k + 1]
        calls = order[a:b]
        if b - a > 1:
            entry = has_reader[calls]
            readers = program.reader[entry]
            step = step_of_call[readers]
            where = prior[entry] * rows[step] + position[readers] * size[entry] + member[entry]
            key = np.where(entry < 0, last, step * (1 << 40) + where)
            calls = order[a:b] = calls[np.argsort(key, kind="stable")]
        position[calls] = np.arange(b - a)
    return (
        schedule
        if np.array_equal(order, schedule.order)
        else Schedule(order, schedule.offsets, schedule.policy)
    )
