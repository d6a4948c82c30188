"""No batching: every call is its own step, in recorded order (for comparisons and ablations).

Comes in: a Program. Goes out: a Schedule of one call a step, constants first, one step a signature.

    schedule = steps_in_order(program)
    len(schedule)        # the number of launches that batching saves from
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program, Schedule
from fxbatch.passes.frontier import Frontier, constant_steps, schedule_from_steps


def steps_in_order(program: Program) -> Schedule:
    """One step a call; only constants, which are no launches of an operation, are put together."""
    frontier = Frontier(program)
    step_of_call = np.zeros(len(program), dtype=np.int64)
    first = constant_steps(frontier, step_of_call)
    rest = np.flatnonzero(~frontier.constant)
    step_of_call[rest] = first + np.arange(len(rest))
    return schedule_from_steps(step_of_call, first + len(rest), "none")
