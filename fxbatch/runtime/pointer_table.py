"""What `_native.c` reads of an operation beside arenas: a template once a set of operations, filled in once a run.

In: the operations of a program and the arrays of a slab. Out: rows of (pointer, bytes, flag) for a run on such a slab.

    table = PointerTable.of(compiled, kinds, backward=False)
    columns = table.fill(run, slab, workspace)       # None where a shared operand can't be read as it is

A signature's rows: how many kept and saved arrays there are, those arrays, shared operands, what the kernel prepares
of them, and rows for the gradients of parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import address, place_of
from fxbatch.codegen.native_steps import NativeStep
from fxbatch.ir import Signature
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.slab import Slab, SlabKinds
from fxbatch.trace.integers import PLAIN_TENSORS

if TYPE_CHECKING:
    from fxbatch.runtime.gradient_rows import GradientRows
    from fxbatch.runtime.run import Run


@dataclass(frozen=True)
class Pointers:
    """The columns of one run, and what they point to that nobody else holds."""

    rows: Any  # int64 [rows, 3]
    first: Any  # int64 [signatures + 1]: where those of each begin
    held: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class PointerTable:
    """Rows whose pointers are still to come, and where each comes from."""

    programs: tuple[Any, ...]  # a signature; None where Python runs it
    first: np.ndarray
    rows: np.ndarray  # int64 [rows, 3]
    at: np.ndarray  # rows of arrays of the slab
    arrays: np.ndarray  # which
    shared_at: np.ndarray  # rows of shared operands, in the order of `native`
    native: tuple[tuple[Signature, tuple[int, ...]], ...]  # with the bytes of each shared operand
    fixed: tuple[tuple[int, Signature, NativeStep], ...]  # first row, and who prepares them
    extra: tuple[tuple[int, CompiledOperation], ...]  # first row

    @staticmethod
    def of(
        compiled: Sequence[CompiledOperation | None], kinds: SlabKinds, *, backward: bool
    ) -> PointerTable | None:
        """The template; None where nothing runs in C."""
        rows, first = array("q"), [0]
        programs: list[Any] = []
        at: list[int] = []
        arrays: list[int] = []
        shared_at: list[int] = []
        native: list[tuple[Signature, tuple[int, ...]]] = []
        fixed: list[tuple[int, Signature, NativeStep]] = []
        extra: list[tuple[int, CompiledOperation]] = []
        for s, operation in enumerate(compiled):
            step = None
            if operation is not None:
                step = operation.native_backward if backward else operation.native_forward
            if operation is None or step is None:
                programs.append(None)
                first.append(len(rows) // 3)
                continue
            kept, saved = len(operation.kept_groups), len(operation.saved_types)
            place = len(rows) // 3 + 1
            rows.extend((kept, saved, 0))
            at += range(place, place + kept + saved)
            arrays += range(kinds.first[s], kinds.first[s] + kept + saved)
            place += kept + saved
            rows.extend((0, 0, 0) * (kept + saved))
            shared_at += range(place, place + len(step.shared_bytes))
            for size in step.shared_bytes:
                rows.extend((0, size, 0))
            native.append((operation.signature, step.shared_bytes))
            place += len(step.shared_bytes)
            if step.fixed:
                fixed.append((place, operation.signature, step))
            rows.extend((0, 0, 0) * len(step.fixed))
            if backward and operation.extra_types:
                extra.append((place + len(step.fixed), operation))
            rows.extend((0, 0, 0) * len(operation.extra_types))
            programs.append(step.program)
            first.append(len(rows) // 3)
        if not native:
            return None
        as_array = lambda x: np.array(x, dtype=np.int64)  # noqa: E731
        return PointerTable(
            tuple(programs), as_array(first), as_array(rows).reshape(-1, 3), as_array(at), as_array(arrays),
            as_array(shared_at), tuple(native), tuple(fixed), tuple(extra),
        )  # fmt: skip

    def fill(
        self, run: Run, slab: Slab, workspace: Workspace, made: GradientRows | None = None
    ) -> Pointers | None:
        """The rows of one run as memory is now; None where C can't read a shared operand as it is. made: the rows for
        the gradients of parameters."""
        if slab.pointer is None:
            return None
        pointers = []
        for signature, sizes in self.native:
            for tensor, size in zip(run.shared[signature], sizes, strict=True):
                pointer = address(tensor, size)
                if pointer is None:
                    return None
                pointers.append(pointer)
        rows = self.rows.copy()
        if len(self.at):
            places = slab.plan.places[self.arrays]
            places[:, 0] += slab.pointer
            rows[self.at] = places
        rows[self.shared_at, 0] = pointers
        held = []
        for place, signature, step in self.fixed:
            fixed = step.prepared(run.shared[signature], workspace)
            if fixed is None:
                return None
            for k, tensor in enumerate(fixed):
                where = place_of(tensor)
                if where is None:
                    return None
                rows[place + k, :2] = where
            held += fixed
        if made is not None:
            for place, operation in self.extra:
                for k, found in enumerate(made.places(operation)):
                    rows[place + k, :2] = found
        return Pointers(rows, self.first, held)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's numbers in memory are what it is, so that C can read them."""
    return type(tensor) in PLAIN_TENSORS and not tensor.is_neg()


def arena_columns(slab: Slab) -> np.ndarray:
    """int64 [arenas, 3]: pointer, bytes, bytes a row."""
    n = slab.kinds.arenas
    columns = slab.plan.places[:n].copy()
    columns[:, 0] += slab.pointer or 0
    columns[:, 2] = slab.kinds.row_bytes[:n]
    return columns
