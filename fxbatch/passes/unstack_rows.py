"""Program -> Program in which a row of a stack is what was stacked, and rows are taken before calls that treat each row
by itself, not after them.

    v4 = s1 stack(v1, v2, v3)
    v6 = s2 getitem(v4, v5)      # v5 = 0          ==>     what reads v6 reads v1
    v7 = s3 tanh(v6)                                       v7 = s3 tanh(v1)

    v1 = s0 constant() = [17, 4, 9]                        v1 = s4 constant() = 9
    v2 = s1 embed(v1)                              ==>     v2 = s5 embed(v1)
    v4 = s2 getitem(v2, v3)      # v3 = 2                  what reads v4 reads v2

    unstack = RowUnstacker()          # one a decorated callable: it keeps the new Signatures
    program = unstack(program)

Children whose states are put together are often taken apart again, one by one (`h = torch.stack(states); h[0]`), and
words are looked up at once (`embed(sentence)[i]`). Where nothing but rows is read of `f(x)`, f is called with the rows:
then it batches, and equal ones run once, as where each word is looked up by itself.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fxbatch.caches import Cache
from fxbatch.ir import Program, Signature, SignatureColumns, Slot, TensorSpec, tensor_spec
from fxbatch.passes.select import eliminate_dead, reorder
from fxbatch.passes.unstack_sums import is_stack, number_of
from fxbatch.trace.constants import PLAIN_TENSORS, IntegerColumn, read_payload, taken
from fxbatch.trace.module_state import has_hooks
from fxbatch.trace.modules import runs_torchs_code_alone
from fxbatch.trace.operations import take_row
from fxbatch.trace.table import static_key
from fxbatch.trace.values import GETITEM

NO_ROW, LIFTED, ALL = -(2**62), -(2**62) + 1, -(2**62) + 2
# Pointwise: torch's own code in C, or functions of these names.
_POINTWISE_MODULES = frozenset({
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
})  # fmt: skip
_POINTWISE = frozenset({
    *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in
      ("abs", "exp", "log", "neg", "relu", "sigmoid", "sqrt", "square", "tanh")),
    F.dropout, F.elu, F.gelu, F.leaky_relu, F.relu, F.sigmoid, F.silu, F.softplus, F.tanh,
})  # fmt: skip


def row_read(signature: Signature) -> int:
    """Which row a call reads of its first input: a number of `x[3]`, ALL for `x.unbind(0)` (which `for row in x` is as
    well), LIFTED where the number is its second input, NO_ROW where it is another call."""
    target = signature.operation.target
    if signature.shared or signature.arguments is None:
        return NO_ROW
    if target is take_row:
        return LIFTED
    first, *rest = signature.arguments.leaves or (None,)
    if type(first) is not Slot:
        return NO_ROW
    if target is GETITEM:  # x[[3]] has the same leaves, and as many dimensions as x
        is_row = len(rest) == 1 and len(signature.outputs[0].shape) < len(signature.inputs[0].shape)
        return rest[0] if is_row and type(rest[0]) is int else NO_ROW
    whole = target in (torch.unbind, torch.Tensor.unbind) and rest in ([], [0])
    return ALL if whole else NO_ROW


class _Kinds(NamedTuple):
    """By signature, as the facts that the passes here ask for."""

    stack: np.ndarray  # bool: whether it stacks along the first dimension
    row: np.ndarray  # int64: which row it takes of its first input
    modes: np.ndarray  # int64: the number of its modes
    grad: np.ndarray  # bool: whether gradients go through it
    alike: np.ndarray  # bool: whether it treats each row of its only input by itself
    constant: np.ndarray  # bool: constants that have rows
    rows: np.ndarray  # int64 [types]: how many there are


def _kinds(columns: SignatureColumns) -> _Kinds | tuple[()]:
    """Empty where nothing takes a row of a stack, or of what treats rows by themselves."""
    kinds = _Kinds(
        np.array(columns.each(is_stack), dtype=bool),
        np.array(columns.each(row_read), dtype=np.int64),
        columns.modes,
        np.array(columns.each(_has_gradients), dtype=bool),
        np.array(columns.each(treats_rows_alike), dtype=bool),
        np.array(columns.each(_has_rows), dtype=bool),
        np.array([t.shape[0] if t.shape else 0 for t in columns.types], dtype=np.int64),
    )
    return kinds if (kinds.stack | kinds.alike).any() and (kinds.row != NO_ROW).any() else ()


def _has_gradients(signature: Signature) -> bool:
    return signature.modes.grad


def _has_rows(signature: Signature) -> bool:
    return signature.operation.kind == "constant" and signature.outputs[0].shape != ()


def treats_rows_alike(signature: Signature) -> bool:
    """Whether each row of the only output is that of the only input, as the same call with this row alone gives it."""
    s, target = signature, signature.operation.target
    if len(s.inputs) != 1 or len(s.outputs) != 1 or s.operation.random or s.reason or s.arguments is None:
        return False
    shape, of = s.inputs[0].shape, s.outputs[0].shape
    leaves = s.arguments.leaves
    if not shape or shape[:1] != of[:1] or leaves[0] != Slot("input", 0):
        return False
    if s.operation.kind == "module":
        plain = s.operation.method is None and s.frozen is not None and len(leaves) == 1
        return plain and s.frozen is not None and _rank_after(s.frozen.module, len(shape)) > 0
    if s.operation.kind != "function":
        return False
    if target is F.embedding:  # in a table that all share; what else is set is for its gradient or rows
        return len(s.shared) == 1 and leaves[1] == Slot("shared", 0) and all(
            x is None or x is False or (type(x) is float and n == 2) for n, x in enumerate(leaves[2:])
        )  # fmt: skip
    if target == F.linear:
        all_share = all(x is None or (type(x) is Slot and x.kind == "shared") for x in leaves[1:])
        return len(shape) > 1 and all_share
    return target in _POINTWISE and not s.shared and True not in leaves[1:]


def _rank_after(module: nn.Module | None, rank: int) -> int:
    """How many dimensions a module of torch's gives of this many, where it treats each row by itself; 0 where not."""
    if type(module) is nn.Sequential and not has_hooks(module) and "forward" not in vars(module):
        for part in module:
            rank = _rank_after(part, rank) if rank else 0
        return rank
    if module is None or not runs_torchs_code_alone(module):
        return 0
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return rank + 1 if plain else 0
    if type(module) is nn.Linear:
        return rank if rank > 1 else 0
    if type(module) is nn.LayerNorm:
        return rank if rank > len(module.normalized_shape) else 0
    return rank if type(module) in _POINTWISE_MODULES else 0


class _RowReads(NamedTuple):
    """Rows that are read one by one and whose numbers are known, int64 each."""

    call: np.ndarray
    value: np.ndarray  # what is read
    source: np.ndarray  # the value that it is a row of
    row: np.ndarray  # from 0 on


def _row_reads(program: Program, kinds: _Kinds) -> _RowReads:
    calls = np.flatnonzero((kinds.row != NO_ROW)[program.sig])
    calls = calls[program.makers(program.inputs[program.input_offsets[calls]]) >= 0]
    first = program.input_offsets[calls]
    row = kinds.row[program.sig[calls]]
    lifted = row == LIFTED
    row[lifted] = _numbers(program, program.inputs[first[lifted] + 1])
    width = program.width[program.sig[calls]]
    times = np.where(row == ALL, width, 1)
    within = np.arange(times.sum()) - (np.cumsum(times) - times).repeat(times)
    source, row = program.inputs[first].repeat(times), row.repeat(times)
    row = np.where(row == ALL, within, row)
    rows = kinds.rows[program.type_of_value[source]]
    row = np.where(row < 0, row + rows, row)
    calls = calls.repeat(times)
    there = (row >= 0) & (row < rows)
    return _RowReads(*(x[there] for x in (calls, program.first_value[calls] + within, source, row)))


def _numbers(program: Program, values: np.ndarray) -> np.ndarray:
    """int64: the numbers that these values are, NO_ROW for those of which that is not known."""
    numbers = np.full(len(values), NO_ROW, dtype=np.int64)
    call = program.makers(values)
    there = np.flatnonzero(call >= 0)
    for s, mine, place in _by_signature(program, call[there]):
        if program.signatures[s].operation.kind == "number":
            numbers[there[mine]] = np.array(program.constants[s])[place]
    return numbers


def _by_signature(program: Program, calls: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each signature of these calls, which of them are of it, and where these are among its calls."""
    sig = program.sig[calls]
    for s in np.unique(sig).tolist():
        mine = np.flatnonzero(sig == s)
        yield s, mine, np.searchsorted(np.flatnonzero(program.sig == s), calls[mine])


def unstack_rows(program: Program) -> Program:
    """The program without rows that are taken of stacks; the same object where there are none."""
    kinds = program.columns.fact(_kinds)
    if not kinds or not kinds.stack[program.sig].any():
        return program
    calls, value, source, row = _row_reads(program, kinds)
    stack = program.makers(source)
    sig, by = program.sig[stack], program.sig[calls]
    good = kinds.stack[sig] & (kinds.modes[sig] == kinds.modes[by])
    calls, value, stack, row = calls[good], value[good], stack[good], row[good]
    shown = program.inputs[program.input_offsets[stack] + row]
    # Without gradients a row is no part of the graph, and what it shows may be.
    maker = program.makers(shown)
    same = kinds.grad[program.sig[calls]] | ((maker >= 0) & ~kinds.grad[program.sig[maker]])
    if not same.any():
        return program
    stands_for = np.arange(program.values)
    stands_for[value[same]] = shown[same]
    while ((further := stands_for[stands_for]) != stands_for).any():  # a stack of rows of stacks
        stands_for = further
    inputs, outputs = stands_for[program.inputs], stands_for[program.outputs]
    if len(outputs) and np.bincount(outputs).max() > 1:  # results are each of their own
        return program
    return eliminate_dead(dataclasses.replace(program, inputs=inputs, outputs=outputs))


class _Rows(NamedTuple):
    """Calls for rows, in the order of (call, row), int64 each."""

    call: np.ndarray  # the one that they take the place of
    row: np.ndarray


class RowUnstacker:
    """Takes rows where they come from; the same Signatures for the same calls of one row."""

    def __init__(self) -> None:
        self.signatures: Cache[Hashable, Signature] = Cache("signatures of rewrites")

    def __call__(self, program: Program) -> Program:
        """The program without rows that are taken of stacks, or of what treats each row by itself."""
        return unstack_rows(self._take_rows_first(program))

    def idle_below(self, program: Program) -> int:
        """Programs of these signatures with fewer calls are left as they are."""
        return 0 if program.columns.fact(_kinds) else sys.maxsize

    def _take_rows_first(self, program: Program) -> Program:
        """The program in which calls that treat rows alike are calls of one row each, where nothing else is read."""
        kinds = program.columns.fact(_kinds)
        if not kinds or not kinds.alike[program.sig].any():
            return program
        reads = _row_reads(program, kinds)
        source = np.full(len(program), -1)  # of each such call, the call that gives its input
        alike = np.flatnonzero(kinds.alike[program.sig])
        source[alike] = program.makers(program.inputs[program.input_offsets[alike]])
        apart = _calls_apart(program, kinds, reads, source)
        of = program.makers(reads.source)
        mine = apart[of]
        if not mine.any():
            return program
        source[source >= 0] = np.where(kinds.stack[program.sig[source]], -2 - source, source)[source >= 0]
        rows = _rows_needed(of[mine], reads.row[mine], source)
        return self._with_rows(program, rows, source, kinds, reads.value[mine], (of[mine], reads.row[mine]))

    def _with_rows(
        self,
        program: Program,
        rows: _Rows,
        source: np.ndarray,
        kinds: _Kinds,
        values: np.ndarray,
        shown: tuple[np.ndarray, np.ndarray],
    ) -> Program:
        """The program with calls for these rows. values: those that are read, which are `shown` (call, row) then."""
        most = int(kinds.rows.max()) + 1
        keys = rows.call * most + rows.row
        numbers = program.values + np.arange(len(keys))  # of the values that they give
        before = source[rows.call]
        stack, among = before < -1, before >= 0
        read = np.zeros(len(keys), dtype=np.int64)
        read[stack] = program.inputs[program.input_offsets[-2 - before[stack]] + rows.row[stack]]
        read[among] = numbers[np.searchsorted(keys, before[among] * most + rows.row[among])]
        reads = stack | among  # others are constants
        sig, signatures = self._row_signatures(program, rows)
        stands_for = np.arange(program.values + len(keys))
        stands_for[values] = numbers[np.searchsorted(keys, shown[0] * most + shown[1])]
        outputs = stands_for[program.outputs]
        if len(outputs) and np.bincount(outputs).max() > 1:  # results are each of their own
            return program
        every = np.concatenate([program.sig, sig])
        # All rows stand where the whole stood: calls that follow one another are fused.
        order = np.argsort(np.concatenate([np.arange(len(program)), rows.call]), kind="stable")
        constants = dict(program.constants)
        for s in np.unique(sig[~reads]).tolist():
            mine = sig == s
            payload = _row_constants(
                program, rows.call[mine], rows.row[mine], constants.get(s, ()), signatures[s].outputs[0]
            )
            number = (np.cumsum(every == s) - 1)[order[every[order] == s]]
            constants[s] = taken(payload, number)
        wide = dataclasses.replace(
            program,
            signatures=signatures,
            sig=every.astype(np.int32),
            inputs=stands_for[np.concatenate([program.inputs, read[reads]])],
            instance=np.concatenate([program.instance, program.instance[rows.call]]),
            outputs=outputs,
            constants=constants,
        )
        return eliminate_dead(reorder(wide, order))

    def _row_signatures(self, program: Program, rows: _Rows) -> tuple[np.ndarray, tuple[Signature, ...]]:
        """The signature of each call for a row, as a number among all signatures."""
        signatures = list(program.signatures)
        number = np.full(len(signatures), -1)
        of = program.sig[rows.call]
        for s in np.unique(of).tolist():
            number[s] = number_of(signatures, self._row_signature(program, program.signatures[s]))
        return number[of], tuple(signatures)

    def _row_signature(self, program: Program, like: Signature) -> Signature:
        """The Signature of the same call with one row; the user's own, where there is one."""
        inputs, outputs = (
            tuple([tensor_spec(t.shape[1:], t.dtype, t.device) for t in types]) for types in (like.inputs, like.outputs)
        )  # fmt: skip
        key = outputs, _key(like, inputs)
        signature = self.signatures.get(key)
        if signature is None:
            of_operation = (s for s in program.signatures if s.operation is like.operation)
            users = (s for s in of_operation if s.outputs == outputs and _key(s, s.inputs) == key[1])
            new = dataclasses.replace(like, inputs=inputs, outputs=outputs, sizes=None)
            signature = next(users, new)
            self.signatures.put(key, signature)
        return signature


def _key(s: Signature, inputs: tuple[TensorSpec, ...]) -> Hashable:
    """Equal for calls that differ in the sizes of their inputs alone, which are `inputs` here."""
    reads = None if s.frozen is None else s.frozen.reads.key
    static = () if s.arguments is None else s.arguments.leaves
    leaves = tuple(x if type(x) is Slot else static_key(x) for x in static)
    return s.operation, inputs, tuple(x.key for x in s.shared), leaves, s.modes, s.shared_names, reads


def _calls_apart(program: Program, kinds: _Kinds, reads: _RowReads, source: np.ndarray) -> np.ndarray:
    """bool [calls]: those that can be calls of one row each, in the end of stacked values or of constants, since
    nothing but rows is read of them. source: the call that gives the input of each."""
    sig = program.sig
    apart = kinds.alike[sig] & (source >= 0)
    results = program.makers(program.outputs)
    apart[results[results >= 0]] = False
    by_rows = np.bincount(reads.call, minlength=len(program)) == program.width[sig]
    by_rows &= kinds.row[sig] != NO_ROW
    of = source[apart]
    begins = np.zeros(len(program), dtype=bool)
    constants = np.unique(of[kinds.constant[sig[of]]])
    begins[constants] = list(map(_is_plain, _payloads(program, constants)))
    begins[of[kinds.stack[sig[of]]]] = True
    # Without gradients a row is no part of the graph, nor is what reads a stack that was made so.
    through = kinds.grad[sig[source]] | ~kinds.grad[sig] | kinds.constant[sig[source]] | ~begins[source]
    apart &= through
    maker = program.makers(program.inputs)
    ours = (maker >= 0) & apart[maker]
    maker, reader = maker[ours], program.reader[ours]
    graded = by_rows[reader] & (kinds.grad[sig[reader]] | ~kinds.grad[sig[maker]])
    before = -1
    while before != (before := int(apart.sum())):
        apart[maker[~(graded | apart[reader])]] = False
        apart &= begins[source] | apart[source]
    return apart


def _rows_needed(call: np.ndarray, row: np.ndarray, source: np.ndarray) -> _Rows:
    """All calls for rows: of `call`, of which these rows are read, and of what they read in turn."""
    parts = []
    while len(call):
        parts.append((call, row))
        within = source[call] >= 0
        call, row = source[call][within], row[within]
    call, row = (np.concatenate(x) for x in zip(*parts, strict=True))
    most = int(row.max()) + 1
    keys = np.unique(call * most + row)
    return _Rows(keys // most, keys % most)


def _payloads(program: Program, calls: np.ndarray) -> list[torch.Tensor]:
    """The tensors that constants are."""
    tensors: list[torch.Tensor] = [*calls]
    for s, mine, place in _by_signature(program, calls):
        for i, k in zip(mine.tolist(), place.tolist(), strict=True):
            tensors[i] = program.constants[s][k]
    return tensors


def _is_plain(t: torch.Tensor) -> bool:
    return type(t) in PLAIN_TENSORS and t.layout is torch.strided


def _row_constants(
    program: Program, call: np.ndarray, row: np.ndarray, before: Sequence[torch.Tensor], t: TensorSpec
) -> Sequence[torch.Tensor]:
    """The payload of constants of type t: those before, and these rows of constants."""
    starts = np.flatnonzero(np.diff(call, prepend=-1))
    tensors = _payloads(program, call[starts])
    rows = np.split(row, starts[1:])
    column = read_payload(t, "constant", before, watched=False)
    if column is not None:
        return IntegerColumn.joined([column, IntegerColumn.of_rows(tensors, rows)])
    parts = []
    for tensor, numbers in zip(tensors, rows, strict=True):
        with torch.set_grad_enabled(tensor.requires_grad):
            every = tensor.unbind(0)
        parts += [every[i] for i in numbers.tolist()]
    return [*before, *parts]
