"""Where output blocks begin when rows are used again: for inference, which keeps nothing for backward.

A block is free again when the last reader of any of its values has run (results are never freed). Each block
takes the first free rows of its arena that are wide enough, so that peak memory follows the live values, not
all values: a chain of 1,000 steps needs two blocks.

    before: step 0 -> rows 0:4, step 1 -> rows 4:8, step 2 (reads step 1) -> rows 8:12
    after:  step 0 -> rows 0:4, step 1 -> rows 4:8, step 2 (reads step 1) -> rows 0:4
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program, Schedule, offsets


def last_readers(program: Program, schedule: Schedule) -> np.ndarray:
    """int64 [values - known]: the step that reads each value last; its own step without readers, and the
    number of steps for results."""
    steps = len(schedule)
    step_of_call = np.empty(len(program), dtype=np.int64)
    step_of_call[schedule.order] = np.arange(steps).repeat(schedule.offsets[1:] - schedule.offsets[:-1])
    last = np.empty(program.values, dtype=np.int64)
    last[: program.known] = steps
    last[program.known :] = step_of_call[program.call_of_value]
    np.maximum.at(last, program.inputs, step_of_call[program.reader])
    last[program.outputs] = steps
    return last[program.known :]


def reuse_rows(
    program: Program,
    schedule: Schedule,
    first_block: np.ndarray,
    arena: np.ndarray,
    size: np.ndarray,
    arenas: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(first row of each block, rows an arena needs). Blocks are in step order, `first_block[k]` the first of
    step k; `arena` and `size` (rows) are a block's."""
    last = last_readers(program, schedule)
    step_rows = schedule.offsets[1:] - schedule.offsets[:-1]
    width = first_block[1:] - first_block[:-1]
    made = program.width[program.sig[schedule.order]]
    within = np.arange(int(made.sum())) - np.repeat(offsets(made)[:-1], made)
    value = np.repeat(program.first_value[schedule.order] - program.known, made) + within
    block = np.repeat(np.repeat(first_block[:-1], step_rows), made) + within
    dies = np.zeros(len(arena), dtype=np.int64)
    np.maximum.at(dies, block, last[value])

    free: list[list[tuple[int, int]]] = [[] for _ in range(arenas)]  # (first row, end), in order
    end = [0] * arenas
    ending: list[list[int]] = [[] for _ in range(len(width) + 1)]
    start = [0] * len(arena)
    sizes, owners, deaths = size.tolist(), arena.tolist(), dies.tolist()
    bounds = first_block.tolist()
    for k in range(len(width)):
        for b in range(bounds[k], bounds[k + 1]):
            start[b], end[owners[b]] = _take(free[owners[b]], end[owners[b]], sizes[b])
            ending[deaths[b]].append(b)
        for b in ending[k]:
            _give(free[owners[b]], start[b], start[b] + sizes[b])
    return np.array(start, dtype=np.int64), np.array(end, dtype=np.int64)


def _take(free: list[tuple[int, int]], end: int, rows: int) -> tuple[int, int]:
    """The first free rows that are enough, else rows at the end: (first row, new end)."""
    for i, (a, b) in enumerate(free):
        if b - a >= rows:
            if b - a == rows:
                del free[i]
            else:
                free[i] = (a + rows, b)
            return a, end
    if free and free[-1][1] == end:
        a, _ = free.pop()
        return a, a + rows
    return end, end + rows


def _give(free: list[tuple[int, int]], a: int, b: int) -> None:
    """Put rows back, joined with free neighbours."""
    i = 0
    while i < len(free) and free[i][0] < a:
        i += 1
    if i < len(free) and free[i][0] == b:
        b = free.pop(i)[1]
    if i and free[i - 1][1] == a:
        a = free.pop(i - 1)[0]
        i -= 1
    free.insert(i, (a, b))
