"""Program -> Program in which sums and means over a stack of values are additions.

    v4 = s1 stack(v1, v2, v3)        v4 = s3 add(v1, v2)
    v5 = s2 sum(v4; 0)          ==>  v5 = s3 add(v4, v3)

    unstack = Unstacker()          # one a decorated callable: it keeps the new Signatures
    program = unstack(program)

A stack of k values, and what reads it, has a signature for each k: an atom of two neighbours and one of three
would not batch, and each k takes operations of its own, compiled when it is met first. Additions have one signature
for all of them. They are pairwise, so few wait for each other; the order of a sum over a dimension is PyTorch's
own choice. Additions that the user wrote are left as they are. A mean is divided by a number of each call.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from fxbatch.caches import Cache
from fxbatch.ir import (
    Operation,
    Program,
    Signature,
    SignatureColumns,
    Slot,
    Template,
    TensorSpec,
    tensor_spec,
)
from fxbatch.passes.select import eliminate_dead, reorder

_SUMS = (torch.sum, torch.Tensor.sum)
_MEANS = (torch.mean, torch.Tensor.mean)
_ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__)
_DTYPES = (torch.float32, torch.float64, torch.int64)  # narrower ones are summed in wider ones
_RULE = "a sum over a stack, as additions"
_PLACES = 64  # positions that what replaces one call may take: fewer rounds than an int64 has bits


def _kinds(columns: SignatureColumns) -> np.ndarray:
    """int64 [3, signatures]: whether each stacks along the first dimension, whether it reduces that (1: a sum, 2: a
    mean), the number of its modes; empty where nothing can reduce a stack."""
    kinds = np.array([columns.each(is_stack), columns.each(_reduction), columns.modes], dtype=np.int64)
    return kinds if len(kinds) and kinds[:2].any(axis=1).all() else kinds[:0]


def summed_stacks(program: Program) -> np.ndarray:
    """bool [calls]: stacks that nothing reads but sums and means which become additions, and these."""
    kinds = program.columns.fact(_kinds)
    if not len(kinds):
        return np.zeros(len(program), dtype=bool)
    stacks, sums, modes = kinds[:, program.sig]
    maker = program.makers(program.inputs)
    maker, reader = maker[maker >= 0], program.reader[maker >= 0]
    fits = (sums[reader] > 0) & (modes[reader] == modes[maker])
    otherwise = np.bincount(maker[~fits], minlength=len(program)) > 0
    results = program.makers(program.outputs)
    otherwise[results[results >= 0]] = True
    summed = (stacks > 0) & ~otherwise
    summed[reader[fits & summed[maker]]] = True
    return summed


class Unstacker:
    """Replaces reductions of stacks; the same Signatures for the same types and modes."""

    def __init__(self) -> None:
        self.signatures: Cache[Hashable, Signature] = Cache("signatures of rewrites")

    def __call__(self, program: Program) -> Program:
        """The program with additions; the same object where nothing reduces a stack."""
        kinds = program.columns.fact(_kinds)
        if not len(kinds):
            return program
        stacks, sums, modes = kinds[:, program.sig]  # of each call
        calls = np.flatnonzero(sums)
        stack = program.makers(program.inputs[program.input_offsets[calls]])
        calls, stack = calls[stack >= 0], stack[stack >= 0]
        fitting = (stacks[stack] > 0) & (modes[stack] == modes[calls])
        if not fitting.any():
            return program
        calls = calls[fitting]
        return _Unstacking(self, program, calls, stack[fitting], sums[calls] == 2).run()

    def idle_below(self, program: Program) -> int:
        """Programs of these signatures with fewer calls are left as they are."""
        return 0 if len(program.columns.fact(_kinds)) else sys.maxsize

    def signature(self, like: Signature, operation: str, inputs: tuple[TensorSpec, ...]) -> Signature:
        """The Signature of `operation` in the modes of `like`, which gives what it gives."""
        key = (operation, inputs, like.outputs, like.modes)
        signature = self.signatures.get(key)
        if signature is None:
            slots = tuple(Slot("input", i) for i in range(len(inputs)))
            target = torch.add if operation == "add" else torch.div
            signature = Signature(
                Operation(operation, "function", target, _RULE), inputs, like.outputs,
                arguments=Template.of((slots, {})), result=Template.of(Slot("output", 0)), modes=like.modes,
                location=like.location,
            )  # fmt: skip
            self.signatures.put(key, signature)
        return signature

    def number(self, kind: TensorSpec) -> Signature:
        """The Signature of numbers of a type."""
        number = self.signatures.get(kind)
        return number or self.signatures.put(kind, Signature(Operation("number", "number"), (), (kind,)))


class _Unstacking:
    """Puts additions in the place of some calls, each of which reduces the stack that another call makes."""

    def __init__(
        self, unstack: Unstacker, program: Program, calls: np.ndarray, stack: np.ndarray, mean: np.ndarray
    ) -> None:
        self.unstack, self.program, self.calls, self.stack, self.mean = unstack, program, calls, stack, mean
        self.signatures = list(program.signatures)
        self.constants = dict(program.constants)
        self.values = program.values
        self.sig: list[np.ndarray] = [program.sig]
        self.inputs: list[np.ndarray] = [program.inputs]
        self.instance: list[np.ndarray] = [program.instance]
        self.position: list[np.ndarray] = [np.arange(len(program)) * _PLACES + _PLACES - 1]

    def run(self) -> Program:
        program = self.program
        divided = self._divide(self._add())
        value_of = np.arange(self.values)
        value_of[program.first_value[self.calls]] = divided
        while ((further := value_of[value_of]) != value_of).any():  # a stack of one is what it stacks
            value_of = further
        wide = dataclasses.replace(
            program,
            signatures=tuple(self.signatures),
            sig=np.concatenate(self.sig).astype(np.int32),
            inputs=value_of[np.concatenate(self.inputs)],
            instance=np.concatenate(self.instance).astype(np.int32),
            outputs=value_of[program.outputs],
            constants=self.constants,
        )
        order = np.argsort(np.concatenate(self.position), kind="stable")
        return eliminate_dead(reorder(wide, order))

    def _add(self) -> np.ndarray:
        """Additions of neighbours, round after round; the value that is left of each stack."""
        program = self.program
        count = program.arity[program.sig[self.stack]]
        group = np.repeat(np.arange(len(count)), count)
        start = program.input_offsets[self.stack]
        values = program.inputs[np.repeat(start - (np.cumsum(count) - count), count) + np.arange(len(group))]
        kind = self._numbers(program.sig[self.calls], self._addition)
        for number in range(_PLACES - 3):
            if int(count.max()) == 1:
                break
            within = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
            first = within % 2 == 0
            paired = np.flatnonzero(first & (within + 1 < count[group]))
            pairs = np.stack([values[paired], values[paired + 1]], axis=1).reshape(-1)
            values[paired] = self._append(kind[group[paired]], pairs, group[paired], number)
            values, group, count = values[first], group[first], (count + 1) // 2
        return values

    def _divide(self, total: np.ndarray) -> np.ndarray:
        """Means are divided by how many values they are of."""
        program, mine = self.program, np.flatnonzero(self.mean)
        if not len(mine):
            return total
        counts = program.arity[program.sig[self.stack[mine]]]
        sig = program.sig[self.calls[mine]]
        kind = self._numbers(sig, lambda s: self.unstack.number(_scalar(s)))
        for s in np.unique(kind).tolist():
            self.constants[s] = [*self.constants.get(s, ()), *map(float, counts[kind == s].tolist())]
        numbers = self._append(kind, program.inputs[:0], mine, _PLACES - 3)
        kind = self._numbers(sig, lambda s: self.unstack.signature(s, "div", (s.outputs[0], _scalar(s))))
        pairs = np.stack([total[mine], numbers], axis=1).reshape(-1)
        total[mine] = self._append(kind, pairs, mine, _PLACES - 2)
        return total

    def _append(self, sig: np.ndarray, inputs: np.ndarray, group: np.ndarray, place: int) -> np.ndarray:
        """Calls of one output each, in the place of calls[group]; the values that they make."""
        calls = self.calls[group]
        self.sig.append(sig)
        self.inputs.append(inputs)
        self.instance.append(self.program.instance[calls])
        self.position.append(calls * _PLACES + place)
        self.values += len(calls)
        return np.arange(self.values - len(calls), self.values)

    def _numbers(self, sig: np.ndarray, signature: Any) -> np.ndarray:
        """For each signature number of a reduction, that of the signature which takes its place."""
        number = np.zeros(len(self.program.signatures), dtype=np.int64)
        # By what a reduction gives: the number of stacked values does not matter.
        numbers: dict[Hashable, int] = {}
        for s in np.unique(sig).tolist():
            like = self.program.signatures[s]
            key = like.outputs, like.modes
            if key not in numbers:
                numbers[key] = number_of(self.signatures, signature(like))
            number[s] = numbers[key]
        return number[sig]

    def _addition(self, like: Signature) -> Signature:
        """The user's own addition of such values, where there is one: they batch together."""
        kind = like.outputs[0]
        plain = Template.of(((Slot("input", 0), Slot("input", 1)), {}))
        for s in self.program.signatures:
            same = s.inputs == (kind, kind) and s.operation.target in _ADDITIONS and s.modes == like.modes
            if same and s.arguments == plain:
                return s
        return self.unstack.signature(like, "add", (kind, kind))


def number_of(signatures: list[Signature], signature: Signature) -> int:
    """The number of a signature among these; it is put there where it is not."""
    if signature not in signatures:
        signatures.append(signature)
    return signatures.index(signature)


def _scalar(signature: Signature) -> TensorSpec:
    kind = signature.outputs[0]
    return tensor_spec((), kind.dtype, kind.device)


def is_stack(signature: Signature) -> bool:
    """`torch.stack` of its inputs in order, along the first dimension."""
    if signature.operation.target != torch.stack or signature.shared or signature.arguments is None:
        return False
    args, kwargs = signature.arguments.fill(input=[Slot("input", i) for i in range(len(signature.inputs))])
    named = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    rank = len(signature.inputs[0].shape) + 1
    members = list(named.pop("tensors", ()))
    in_order = members == [Slot("input", i) for i in range(len(signature.inputs))]
    return in_order and int(named.pop("dim", 0)) % rank == 0 and not named


def _reduction(signature: Signature) -> int:
    """1 for a sum over the first dimension, 2 for a mean, 0 for anything else or of other types."""
    target = signature.operation.target
    kind = 1 if target in _SUMS else 2 if target in _MEANS else 0
    if not kind or signature.shared or len(signature.inputs) != 1 or signature.arguments is None:
        return 0
    source, reduced = signature.inputs[0], signature.outputs[0]
    same = reduced == dataclasses.replace(source, shape=source.shape[1:]) and reduced.dtype in _DTYPES
    if not source.shape or not same or signature.modes.autocast:
        return 0
    args, kwargs = signature.arguments.fill(input=[Slot("input", 0)])
    named = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    if len(args) > 2 or named.pop("input", None) != Slot("input", 0):
        return 0
    dim = named.pop("dim", None)
    over = [dim] if type(dim) is int else dim
    first = len(source.shape) == 1 if over is None else [d % len(source.shape) for d in over] == [0]
    return kind if first and not named else 0
