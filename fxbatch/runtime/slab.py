"""All memory of a run of one phase in one piece: arenas, and the rows that operations keep for backward.

In: the operations of a program, and a plan. Out: a SlabPlan, where each array begins; then a Slab, taken from the pool
in one piece, with tensors of it where Python asks for them.

    plan = plan_slab(kinds, plan)                  # offsets and sizes alone
    slab = Slab(pool, plan.lines)                  # [lines, 64] bytes
    slab.tensor(kind, offset, rows)                # a view [rows, *shape]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxbatch.codegen.native import address
from fxbatch.codegen.step_functions import group_type
from fxbatch.ir import VIEW, Plan, TensorType, tensor_type
from fxbatch.runtime.buffers import Buffer, BufferPool
from fxbatch.runtime.compiled import CompiledOperation

LINE = 64  # bytes: each array begins at a multiple of it
_LINES = tensor_type(
    (LINE // 4,), torch.float32, torch.device("cpu")
)  # of the usual type: no view of it is needed


@dataclass(frozen=True, eq=False)
class SlabKinds:
    """The arrays that a run of these operations needs: arenas by type, then what each operation keeps and saves."""

    kinds: tuple[TensorType, ...]
    arenas: int  # how many of them are arenas
    row_bytes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]  # of [rows, *shape]
    owners: tuple[
        tuple[int, int], ...
    ]  # of all others: the signature that keeps or saves it, and rows a call
    first: tuple[int, ...]  # of each signature: its first array
    kept: tuple[tuple[int, tuple[int, ...]], ...]  # signatures that keep input groups, and which

    @staticmethod
    def of(types: Sequence[TensorType], compiled: Sequence[CompiledOperation | None]) -> SlabKinds | None:
        """The arrays; None where they can't lie in one piece of this machine's memory."""
        kinds, owners, first = list(types), [], []
        for s, operation in enumerate(compiled):
            first.append(len(kinds))
            if operation is None:
                continue
            if operation.graphs is not None:
                kinds += [group_type(operation.graphs, g) for g in operation.kept_groups]
                owners += [(s, len(operation.layout.groups[g])) for g in operation.kept_groups]
            kinds += operation.saved_types
            owners += [(s, 1)] * len(operation.saved_types)
        row_bytes = tuple(kind.numel * kind.dtype.itemsize for kind in kinds)
        if not all(row_bytes) or any(kind.device.type != "cpu" for kind in kinds):
            return None
        kept = tuple((s, c.kept_groups) for s, c in enumerate(compiled) if c is not None and c.kept_groups)
        strides = tuple(torch.empty((2, *kind.shape), device="meta").stride() for kind in kinds)
        return SlabKinds(tuple(kinds), len(types), row_bytes, strides, tuple(owners), tuple(first), kept)


@dataclass(frozen=True, eq=False)
class SlabPlan:
    """Where the arrays of one plan lie."""

    lines: int
    places: np.ndarray  # int64 [kinds, 3]: offset, bytes, whether it lies in an arena
    rows: tuple[int, ...]  # of each array
    counts: tuple[int, ...]  # calls of each signature
    inside: frozenset[int]  # arrays that lie in an arena; only looked up


def plan_slab(kinds: SlabKinds, plan: Plan) -> SlabPlan:
    """Arenas as large as the plan has them, rows for all calls; what lies together in an arena is read there.

    Plain loops: there are a few dozen arrays, for which each array operation would cost as much as all of them.
    """
    counts, steps, last = [[0] * len(kinds.first) for _ in range(3)]
    for k, (s, n) in enumerate(zip(plan.step_signature.tolist(), plan.step_rows.tolist(), strict=True)):
        counts[s] += n
        steps[s] += 1
        last[s] = k
    once = {s: last[s] for s, _ in kinds.kept if steps[s] == 1}
    inside = _rows_in_place(kinds, plan, once) if once else {}
    rows = plan.capacity.tolist()
    rows += [counts[s] * members for s, members in kinds.owners]
    places: list[int] = []
    end = 0
    for array, (n, width) in enumerate(zip(rows, kinds.row_bytes, strict=True)):
        found = inside.get(array)
        if found is not None:
            places += (places[3 * found[0]] + found[1] * kinds.row_bytes[found[0]], n * width, 1)
            continue
        places += (end, n * width, 0)
        end += -(-n * width // LINE) * LINE
    columns = np.array(places, dtype=np.int64).reshape(-1, 3)
    return SlabPlan(end // LINE, columns, tuple(rows), tuple(counts), frozenset(inside))


def _rows_in_place(kinds: SlabKinds, plan: Plan, once: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Of operations with one step (`once`) whose kept groups are views: array -> (arena, first row), for no copy."""
    found = {}
    for s, groups in kinds.kept:
        first = int(plan.first_gather[once[s]]) if s in once else -1
        for position, group in enumerate(groups if s in once else ()):
            if plan.gather_kind[first + group] == VIEW:
                place = int(plan.gather_arena[first + group]), int(plan.gather_start[first + group])
                found[kinds.first[s] + position] = place
    return found


class Slab:
    """The memory of one run."""

    def __init__(self, pool: BufferPool, kinds: SlabKinds, plan: SlabPlan) -> None:
        self.kinds = kinds
        self.plan = plan
        self._memory = Buffer(pool, _LINES)
        memory = self._memory.reserve(plan.lines)
        self.pointer = address(memory, plan.lines * LINE)  # where it begins, None where C must not look
        self._typed = {torch.float32: memory}  # the same memory by type

    def tensor(self, array: int) -> torch.Tensor:
        """Array number `array` as [rows, *shape]."""
        kind, rows = self.kinds.kinds[array], self.plan.rows[array]
        typed = self._typed.get(kind.dtype)
        if typed is None:
            typed = self._typed[kind.dtype] = self._typed[torch.float32].view(kind.dtype)
        offset = int(self.plan.places[array, 0]) // kind.dtype.itemsize
        return typed.as_strided((rows, *kind.shape), self.kinds.strides[array], offset)

    def release(self) -> None:
        """Give the memory back."""
        self._typed.clear()
        self._memory.release()
