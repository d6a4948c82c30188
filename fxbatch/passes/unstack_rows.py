"""Program -> Program in which a row of a stack is what was stacked.

    v4 = s1 stack(v1, v2, v3)
    v6 = s2 getitem(v4, v5)      # v5 = 0          ==>     what reads v6 reads v1
    v7 = s3 tanh(v6)                                       v7 = s3 tanh(v1)

Children whose states are put together are often taken apart again, one by one (`h = torch.stack(states); h[0]`).
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

from fxbatch.ir import Program, Signature, SignatureColumns
from fxbatch.passes.select import eliminate_dead
from fxbatch.passes.unstack_sums import is_stack
from fxbatch.trace.operations import take_row
from fxbatch.trace.values import GETITEM

_NO_ROW, _LIFTED = -(2**62), -(2**62) + 1


def _kinds(columns: SignatureColumns) -> np.ndarray:
    """int64 [3, signatures]: whether each stacks along the first dimension; which row each takes of its first input
    (_LIFTED: its second says, _NO_ROW: none); the number of its modes. Empty where nothing takes a row of a stack."""
    signatures = columns.signatures
    modes = list(dict.fromkeys(s.modes for s in signatures))
    rows = [(is_stack(s), _row(s), modes.index(s.modes)) for s in signatures]
    kinds = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return kinds if kinds[0].any() and (kinds[1] != _NO_ROW).any() else kinds[:0]


def _row(signature: Signature) -> int:
    if signature.shared or signature.arguments is None:
        return _NO_ROW
    if signature.operation.target is take_row:
        return _LIFTED
    leaves = signature.arguments.leaves
    if signature.operation.target is GETITEM and len(leaves) == 2 and type(leaves[1]) is int:
        return leaves[1]
    return _NO_ROW


def unstack_rows(program: Program) -> Program:
    """The program without rows that are taken of stacks; the same object where there are none."""
    kinds = program.columns.fact(_kinds)
    if not len(kinds):
        return program
    stacks, rows, modes = kinds[:, program.sig]
    calls = np.flatnonzero(rows != _NO_ROW)
    first = program.input_offsets[calls]
    computed = program.inputs[first] >= program.known
    calls, first = calls[computed], first[computed]
    stack = program.call_of_value[program.inputs[first] - program.known]
    good = (stacks[stack] > 0) & (modes[stack] == modes[calls])
    calls, first, stack = calls[good], first[good], stack[good]
    row = rows[calls]
    lifted = row == _LIFTED
    row[lifted] = _numbers(program, program.inputs[first[lifted] + 1])
    width = np.diff(program.input_offsets)[stack]
    row = np.where(row < 0, row + width, row)
    there = (row >= 0) & (row < width)
    calls, row, stack = calls[there], row[there], stack[there]
    shown = program.inputs[program.input_offsets[stack] + row]
    # Without gradients a row is no part of the graph, and what it shows may be.
    grad = np.array([s.modes.grad for s in program.signatures])
    maker = program.call_of_value[np.maximum(shown - program.known, 0)]
    same = grad[program.sig[calls]] | ((shown >= program.known) & ~grad[program.sig[maker]])
    calls, shown = calls[same], shown[same]
    if not len(calls):
        return program
    stands_for = np.arange(program.values)
    stands_for[program.first_value[calls]] = shown
    while ((further := stands_for[stands_for]) != stands_for).any():  # a stack of rows of stacks
        stands_for = further
    inputs, outputs = stands_for[program.inputs], stands_for[program.outputs]
    if len(np.unique(outputs)) < len(outputs):  # results are each of their own
        return program
    return eliminate_dead(dataclasses.replace(program, inputs=inputs, outputs=outputs))


def _numbers(program: Program, values: np.ndarray) -> np.ndarray:
    """int64: the numbers that these values are, _NO_ROW for those of which that is not known."""
    numbers = np.full(len(values), _NO_ROW, dtype=np.int64)
    call = program.call_of_value[np.maximum(values - program.known, 0)]
    kinds = np.where(values >= program.known, program.sig[call], -1)
    for s in np.unique(kinds).tolist():
        if s < 0 or program.signatures[s].operation.kind != "number":
            continue
        mine = np.flatnonzero(kinds == s)
        place = np.searchsorted(np.flatnonzero(program.sig == s), call[mine])
        numbers[mine] = np.array(program.constants[s])[place]
    return numbers


class RowUnstacker:
    """`unstack_rows` as a pass that says which programs it leaves as they are."""

    def __call__(self, program: Program) -> Program:
        """The program without rows that are taken of stacks."""
        return unstack_rows(program)

    def idle_below(self, program: Program) -> int:
        """Programs of these signatures with fewer calls are left as they are."""
        return 0 if len(program.columns.fact(_kinds)) else sys.maxsize
