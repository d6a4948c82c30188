"""The arrays that a plan needs (see runtime/memory.py): how many rows each has, and where they lie.

    rows, inside, first, calls = rows_of_arrays(table, plan)
    places, ends = place_arrays(table.width, table.device, table.devices, rows, inside, first)

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxbatch.ir import Plan

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Written = cython.typedef(cython.longlong[::1])

LINE = 64  # bytes: each array begins at a multiple of it


@dataclass(frozen=True)
class ArrayTable:
    """The arrays of a run as columns: arenas, then what operations keep and save for their backward."""

    owner: np.ndarray  # int64 [arrays]: the signature that keeps or saves it, -1 for an arena
    members: np.ndarray  # int64 [arrays]: rows a call
    group: np.ndarray  # int64 [arrays]: the group whose rows an operation keeps, -1 for all others
    width: np.ndarray  # int64 [arrays]: bytes a row
    device: np.ndarray  # int64 [arrays]: the number of its device
    devices: int
    signatures: int


def rows_of_arrays(table: ArrayTable, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """int64 columns: how many rows each array has; the arena that has them where they are (of operations with one step
    whose kept group is a view), else -1, and its first row there; the calls of each signature."""
    arrays = len(table.owner)
    signatures: Int = table.signatures
    columns = np.zeros(3 * arrays + 3 * signatures, dtype=np.int64)
    found: Written = columns
    last: Written = columns[3 * arrays + signatures :]  # of each signature its last step; how many it has
    calls: Written = columns[3 * arrays :]
    owner: Ints = table.owner
    members: Ints = table.members
    group: Ints = table.group
    capacity: Ints = plan.capacity
    signature: Ints = plan.step_signature
    rows: Ints = plan.step_rows
    first_gather: Ints = plan.first_gather
    kind: Ints = plan.gather_kind
    arena: Ints = plan.gather_arena
    start: Ints = plan.gather_start
    for k in range(signature.shape[0]):
        s = signature[k]
        calls[s] += rows[k]
        last[s] = k
        last[signatures + s] += 1
    for i in range(owner.shape[0]):
        s = owner[i]
        found[i] = capacity[i] if s < 0 else calls[s] * members[i]
        found[arrays + i] = -1
        if s >= 0 and group[i] >= 0 and last[signatures + s] == 1:
            g = first_gather[last[s]] + group[i]
            if kind[g] == 0:  # VIEW
                found[arrays + i] = arena[g]
                found[2 * arrays + i] = start[g]
    return (
        columns[:arrays],
        columns[arrays : 2 * arrays],
        columns[2 * arrays : 3 * arrays],
        columns[3 * arrays : 3 * arrays + signatures],
    )


def place_arrays(
    width: np.ndarray,
    device: np.ndarray,
    devices: int,
    rows: np.ndarray,
    inside: np.ndarray | None = None,
    first: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [arrays, 3]: offset, a multiple of LINE, bytes, and whether an array is part of an arena;
    int64 [devices]: where they end. inside: the earlier array that has the rows, from `first` on, or -1."""
    arrays = len(width)
    places = np.zeros((arrays, 3), dtype=np.int64)
    ends = np.zeros(devices, dtype=np.int64)
    at: Written = places.reshape(-1)
    end: Written = ends
    wide: Ints = width
    where: Ints = device
    count: Ints = rows
    has: Ints = width if inside is None else inside
    begin: Ints = width if first is None else first
    parts: Int = inside is not None
    line: Int = LINE
    for i in range(arrays):
        size = count[i] * wide[i]
        at[3 * i + 1] = size
        if parts and has[i] >= 0:
            at[3 * i] = at[3 * has[i]] + begin[i] * wide[i]
            at[3 * i + 2] = 1
            continue
        at[3 * i] = end[where[i]]
        end[where[i]] += (size + line - 1) // line * line
    return places, ends
