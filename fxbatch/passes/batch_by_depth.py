"""Batching by depth (Looks et al. 2017, section 2): all calls of one signature and depth are one step.

Comes in: a Program. Goes out: a Schedule, depths ascending, signatures in order inside a depth.

    schedule = batch_by_depth(program)
    depths(program)       # int32 [calls]: 0 for constants, else 1 + the deepest input
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program, Schedule
from fxbatch.passes.frontier import Frontier, stable_argsort


def depths(program: Program) -> np.ndarray:
    """int32 [calls]: the longest path from a constant to each call.

    Constants have depth 0; values of earlier phases count as constants; a call that reads only those,
    or nothing, has depth 1.
    """
    return Frontier(program).depth


def batch_by_depth(program: Program) -> Schedule:
    """One step a (depth, signature) pair that occurs, in that order."""
    return depth_schedule(program, depths(program), "depth")


def depth_schedule(program: Program, depth: np.ndarray, policy: str) -> Schedule:
    """The schedule of one step a (depth, signature) pair, for depths that are known already."""
    if not len(program):
        return Schedule(np.zeros(0, np.int64), np.zeros(1, np.int64), policy)
    key = depth.astype(np.int64) * len(program.signatures) + program.sig
    order = stable_argsort(key, int(key.max()) + 1)
    ordered = key[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    offsets = np.concatenate([[0], cuts, [len(order)]]).astype(np.int64)
    return Schedule(order, offsets, policy)
