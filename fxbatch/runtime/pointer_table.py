"""Pointers that `_native.c` reads besides arenas: one template per set of operations, filled in once per run.

In: the operations of a program and their arrays. Out: rows of (pointer, bytes, flag) for a run.

    table = PointerTable.of(arrays, backward=False)
    filled = table.fill(memory.columns(arrays)[1], memory.shared, {})      # filled.programs, filled.rows

A signature's rows: how many kept and saved arrays there are, those arrays, shared operands, and rows for the gradients
of parameters. A signature has no program where C can't read an operand as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fxbatch.codegen.native_programs import NativeStep
from fxbatch.ir import Signature
from fxbatch.runtime.memory import Arrays, GradientRows
from fxbatch.runtime.operands import Asked, put_steps
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.trace.constants import PLAIN_TENSORS

Programs = tuple[Any, ...]  # a signature; None where Python runs it


class Filled(NamedTuple):
    """The programs that can run, None for others, and int64 [rows, 3] as memory is."""

    programs: Programs
    rows: np.ndarray
    places: np.ndarray  # where its arrays are
    shared: list[int]  # and shared operands, where that was asked for


@dataclass(frozen=True)
class _Part:
    """The rows of one signature that has a program."""

    s: int
    operation: CompiledOperation
    step: NativeStep
    shared: int  # its first row of shared operands
    extra: int  # of the gradients of parameters


@dataclass(frozen=True, eq=False)
class PointerTable:
    """Rows whose pointers are still to come, and where each comes from."""

    programs: Programs
    first: np.ndarray
    rows: np.ndarray  # int64 [rows, 3]
    at: np.ndarray  # rows of arrays
    arrays: np.ndarray  # which
    parts: tuple[_Part, ...]

    @staticmethod
    def of(arrays: Arrays, *, backward: bool) -> PointerTable | None:
        """The template; None where nothing runs in C."""
        rows, first = array("q"), [0]
        programs: list[object] = []
        at: list[int] = []
        read: list[int] = []
        parts: list[_Part] = []
        for s, operation in enumerate(arrays.compiled):
            step = None if operation is None else _step_of(operation, arrays, s, backward=backward)
            programs.append(None if step is None else step.program)
            if operation is not None and step is not None:
                groups, saved = len(operation.kept_groups), len(operation.saved_types)
                first_array = len(rows) // 3 + 1
                shared = first_array + groups + saved
                rows.extend((groups, saved, 0))
                rows.extend((0, 0, 0) * (groups + saved))
                for size in step.shared_bytes:
                    rows.extend((0, size, 0))
                rows.extend((0, 0, 0) * len(operation.extra_types))
                at += range(first_array, shared)
                read += range(arrays.first[s], arrays.first[s] + groups + saved)
                parts.append(_Part(s, operation, step, shared, shared + len(step.shared_bytes)))
            first.append(len(rows) // 3)
        if not parts:
            return None
        column = lambda x: np.array(x, dtype=np.int64)  # noqa: E731
        return PointerTable(
            tuple(programs), column(first), column(rows).reshape(-1, 3), column(at), column(read),
            tuple(parts),
        )  # fmt: skip

    def fill_again(
        self, before: Filled | None, places: np.ndarray, operands: Mapping[Signature, Sequence[torch.Tensor]]
    ) -> Filled:
        """`fill` in a run of several phases: what was filled before where all is where it was. `places` is the very
        array as long as nothing has moved."""
        tensors = [t for part in self.parts for t in operands.get(part.operation.signature, ())]
        if not all(type(t) in PLAIN_TENSORS for t in tensors):
            return self.fill(places, operands, {})
        shared = [t.data_ptr() for t in tensors]
        if before is not None and places is before.places and shared == before.shared:
            return before
        return self.fill(places, operands, {})._replace(shared=shared)

    def fill(
        self,
        places: np.ndarray,
        operands: Mapping[Signature, Sequence[torch.Tensor]],
        asked: Asked,
        written: GradientRows | None = None,
    ) -> Filled:
        """The pointers as memory is now. places: where the arrays lie; written: the rows for the gradients of
        parameters."""
        rows, programs = self.rows.copy(), self.programs
        refused = put_steps(rows, self, places, operands, asked, written)
        if refused:
            programs = tuple(None if s in refused else x for s, x in enumerate(programs))
        return Filled(programs, rows, places, [])


def _step_of(operation: CompiledOperation, arrays: Arrays, s: int, *, backward: bool) -> NativeStep | None:
    """The native program of an operation whose arrays C can read."""
    step = operation.native_backward if backward else operation.native_forward
    stop = arrays.first[s] + len(operation.kept_groups) + len(operation.saved_types)
    kinds = arrays.kinds.types[arrays.first[s] : stop]
    return step if all(k.nbytes and k.device.type == "cpu" for k in kinds) else None
