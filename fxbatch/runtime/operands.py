"""Looked up anew in each call: the tensors that shared operands are, their types, and the pointers that C reads.

    tensors = resolve_all(operands)
    types_of(tensors)                    # all that operations depend on, but for what is in them and where they are
    by_signature(called, tensors)        # {signature: its tensors}
    put_steps(rows, table, memory, ...)  # pointers of what steps read and write, see pointer_table.py

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.codegen.native import address
from fxbatch.ir import SharedOperand, Signature
from fxbatch.trace.constants import PLAIN_TENSORS

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Flags = cython.typedef(cython.const[cython.uchar][::1])
Written = cython.typedef(cython.longlong[::1])

Asked = dict[int, int]  # where shared operands are, by their ids; -1: where C must not look
FROM_FORWARD, FROM_STEPS, OUTPUT = 0, 1, 2  # what a kernel of gradients of parameters reads: what left it

_STRIDED = torch.strided


def resolve_all(operands: Sequence[SharedOperand]) -> list[torch.Tensor]:
    """`resolve` of each."""
    tensors = []
    for operand in operands:
        owner = operand.owner
        t = None if owner is None else owner._parameters.get(operand.name)
        tensors.append(operand.resolve() if t is None else t)
    return tensors


def types_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """A type each, with everything that decides which code may read it."""
    return [
        (t.requires_grad, t.shape, t.stride(), t.dtype, t.device, is_plain(t))
        if t.layout is _STRIDED
        else (t.requires_grad, t.shape, t.layout, t.dtype, t.device)
        for t in tensors
    ]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's numbers in memory are what it is, so that C can read them."""
    return type(tensor) in PLAIN_TENSORS and not tensor.is_neg()


def by_signature(
    called: Sequence[tuple[Signature, Sequence[int]]], tensors: Sequence[torch.Tensor]
) -> dict[Signature, list[torch.Tensor]]:
    """The tensors of each signature that is called. called: with the places of its shared operands among them."""
    return {signature: [tensors[i] for i in places] for signature, places in called}


def requiring_grad(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those that require gradients, by id."""
    return {id(t): t for t in tensors if t.requires_grad}


def any_of(flags: Flags, places: Ints) -> bool:
    """Whether there is a flag at any of these places."""
    for i in range(places.shape[0]):
        if not 0 <= places[i] < flags.shape[0]:
            raise IndexError("a value that is not there")
        if flags[places[i]]:
            return True
    return False


# -- pointers ---------------------------------------------------------------------------------------


def moved(inside: np.ndarray, device: np.ndarray, begins: Sequence[int]) -> np.ndarray:
    """The places of arrays in memory, given those in pieces that begin here; 0 where C can't read their piece."""
    table = inside.copy()
    to: Written = table.reshape(-1)
    device_of: Ints = device
    for i in range(device_of.shape[0]):
        begin: Int = begins[device_of[i]]
        to[3 * i] = to[3 * i] + begin if begin else 0
    return table


def gradient_rows(capacity: np.ndarray, calls: Sequence[int], made_by: np.ndarray) -> np.ndarray:
    """int64: rows of the arrays of a backward pass. capacity: of each arena, where one with the zero row alone has no
    memory; made_by: of each other array, which of `calls` it has rows for."""
    most: Ints = capacity
    owner: Ints = made_by
    rows = np.empty(most.shape[0] + owner.shape[0], dtype=np.int64)
    to: Written = rows
    for i in range(most.shape[0]):
        to[i] = most[i] if most[i] > 1 else 0
    for i in range(owner.shape[0]):
        to[most.shape[0] + i] = calls[owner[i]]
    return rows


def arena_table(places: np.ndarray, width: np.ndarray, arenas: Int) -> np.ndarray:
    """int64 [arenas, 3]: pointer, bytes and bytes a row of each, zeros where C can't read it or nothing is there.
    places: of all arrays; width: bytes a row of each."""
    columns = np.zeros((arenas, 3), dtype=np.int64)
    table: Written = columns.reshape(-1)
    at: Ints = places.reshape(-1)
    wide: Ints = width
    for i in range(arenas):
        if at[3 * i] and at[3 * i + 1]:
            table[3 * i], table[3 * i + 1], table[3 * i + 2] = at[3 * i], at[3 * i + 1], wide[i]
    return columns


def clear_rows(table: np.ndarray) -> list[int]:
    """Zero the first row of each arena of a table; those that are not in it."""
    at: Ints = table.reshape(-1)
    left: list[int] = []
    for i in range(len(table)):
        pointer, size = at[3 * i], at[3 * i + 2]
        if not pointer:
            left.append(i)
        elif cython.compiled:
            row = cython.cast(cython.p_char, cython.cast(cython.size_t, pointer))
            for b in range(size):
                row[b] = 0
        else:
            ctypes.memset(int(pointer), 0, int(size))
    return left


def put_steps(
    rows: np.ndarray,
    table: Any,
    places: np.ndarray,
    operands: Mapping[Signature, Any],
    asked: Asked,
    written: Any,
) -> list[int]:
    """Write pointers into the rows of a PointerTable; the signatures whose operands C can't read. written: rows that
    steps make for the gradients of parameters (GradientRows), or None."""
    refused: list[int] = []
    to: Written = rows.reshape(-1)
    at: Ints = places.reshape(-1)
    row_of: Ints = table.at
    array: Ints = table.arrays
    for i in range(row_of.shape[0]):
        _copy(to, 3 * row_of[i], at, 3 * array[i], 3)
    for part in table.parts:
        operation = part.operation
        tensors = operands.get(operation.signature)
        if tensors is None:  # a signature without calls
            continue
        if not _put_operands(to, 3, part.shared, tensors, part.step.shared_bytes, asked):
            refused.append(part.s)
        elif written is not None and operation in written.first_of:
            at = written.places.reshape(-1)
            _copy(to, 3 * part.extra, at, 3 * written.first_of[operation], 3 * len(operation.extra_types))
    return refused


def put_kernels(
    rows: np.ndarray,
    kernels: Sequence[Any],
    memory: Any,
    written: Any,
    results: Sequence[torch.Tensor],
    asked: Asked,
) -> bool:
    """Write pointers and bytes into the rows [.., 2] of kernels that give gradients of parameters, but of outputs of
    steps; whether C can read all of it. memory: where forward left rows; written: where the steps of backward did."""
    to: Written = rows.reshape(-1)
    left: Ints = memory.places.reshape(-1)
    extra: Ints = written.places.reshape(-1)
    at: Int
    for kernel in kernels:
        operation, row = kernel.operation, kernel.row
        for kind, offset in kernel.inputs:
            if kind != OUTPUT:
                if kind == FROM_FORWARD:
                    at = 3 * (memory.first_of[operation] + offset)
                    _copy(to, 2 * row, left, at, 2)
                else:
                    at = 3 * (written.first_of[operation] + offset)
                    _copy(to, 2 * row, extra, at, 2)
                if not to[2 * row]:
                    return False
            row += 1
        outputs = [results[slot] for slot in kernel.slots]
        shared, sizes = memory.shared[operation.signature], kernel.step.shared_bytes
        if not (
            _put_operands(to, 2, row, shared, sizes, asked)
            and _put_operands(to, 2, row + len(shared), outputs, [t.nbytes for t in outputs], asked)
        ):
            return False
    return True


@cython.cfunc
def _copy(to: Written, at: Int, source: Ints, begin: Int, items: Int) -> cython.void:
    if begin < 0 or at < 0 or begin + items > source.shape[0] or at + items > to.shape[0]:
        raise IndexError("a table of pointers names an array that is not there")
    for i in range(items):
        to[at + i] = source[begin + i]


@cython.cfunc
def _put_operands(
    to: Written, width: Int, row: Int, tensors: Sequence[torch.Tensor], sizes: Sequence[int], asked: Asked
) -> cython.bint:
    """Where tensors are, and how many bytes they have, in rows from `row` on; whether C may look at all of them."""
    if (row + len(tensors)) * width > to.shape[0]:
        raise IndexError("a table of pointers has no rows for these operands")
    for tensor, size in zip(tensors, sizes, strict=True):
        key = id(tensor)
        place = asked.get(key)
        if place is None:
            place = address(tensor, size)
            asked[key] = place = -1 if place is None else place
        if place < 0:
            return False
        to[row * width], to[row * width + 1] = place, size
        row += 1
    return True


def add_gradients(
    kernels: Sequence[Any],
    operands: Mapping[Signature, Any],
    results: Sequence[torch.Tensor],
    gradients: dict[int, Any],
) -> None:
    """Note what kernels gave as the gradients of their operands: results of several, or of steps, are added."""
    for kernel in kernels:
        if kernel.adds:
            continue
        shared = operands[kernel.operation.signature]
        for position, slot in zip(kernel.operation.grad_shared, kernel.slots, strict=True):
            key, grad = id(shared[position]), results[slot]
            before = gradients.get(key)
            gradients[key] = grad if before is None else before + grad
