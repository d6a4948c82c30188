"""Program -> Program in which equal pure calls on equal inputs are one call, within and across instances.

    v0 = s0 constant() = 17 @0                v0 = s0 constant() = 17 @0
    v1 = s1 embed(v0) @0                      v1 = s1 embed(v0) @0
    v2 = s0 constant() = 17 @1        ==>     return v1, v1
    v3 = s1 embed(v2) @1
    return v1, v3

    rewrite = Deduplicator()             # where it pays: what `deduplicate="auto"` runs
    rewrite(program) is program          # few calls, few equal ones, or a structure that is planned once for all

Equal are calls of one signature on the same values; numbers of equal bits; constants that are one tensor,
or small tensors of equal bits that need no gradient. Random calls are never equal to any other.
Candidates are found by hash and confirmed by comparison.

What it costs is the pass, reads by index where rows stood in order, and a plan a minibatch: which calls are equal
is a matter of the data, so that two minibatches of one structure no longer have one plan.

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.ir import Program
from fxbatch.passes.select import checksum, kept_payloads
from fxbatch.torch_private import inside_functorch
from fxbatch.trace.integers import PLAIN_TENSORS, IntegerColumn, read_payload

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Shorts = cython.typedef(cython.const[cython.int][::1])
Flags = cython.typedef(cython.const[cython.uchar][::1])
Written = cython.typedef(cython.longlong[::1])
WrittenShorts = cython.typedef(cython.int[::1])
Marks = cython.typedef(cython.uchar[::1])
Hash = cython.typedef(cython.ulonglong)

NOT_THERE = "a column names a call or a value that is not there"

# Constants of up to this many elements are compared by value.
SMALL_CONSTANT = 16

# Below this many calls the steps' own cost dominates, and fewer rows don't change that (benchmarks/rewrite_gains.py).
FEWEST_CALLS = 1000
# The share of the calls that must go: with 7 % (EWT) nothing was won, with 22 % (SST) 6 % of the step.
LEAST_SHARE = 0.125
REMEMBERED = 256

StructureKey = tuple[int, int]
_NOT_MET: StructureKey = (-1, 0)


def deduplicate(program: Program, *, least: float = 0.0) -> Program:
    """The program with each computation once; the same object when no two calls are equal, or when not more
    than the share `least` of its calls would go.

    About 0.05 us a call, constants included. Output i of the result stands for output i of the program: two
    may be one value.
    """
    if not len(program):
        return program
    payloads = {s: _read(program, s, payload) for s, payload in program.constants.items()}
    contents = {s: _contents(program, s, payload) for s, payload in payloads.items()}
    begin = np.full(len(program.signatures), -1, dtype=np.int64)
    at = 0
    for s, content in contents.items():
        begin[s] = at
        at += len(content)
    sig, inputs, instance, outputs = map(
        np.empty_like, (program.sig, program.inputs, program.instance, program.outputs)
    )
    keep = np.empty(len(program), dtype=bool)
    merger = _EqualCalls(program, begin, np.concatenate([np.empty(0, dtype=np.int64), *contents.values()]))
    kept = merger.run(sig, inputs, instance, outputs, keep)
    if kept >= len(program) * (1 - least):
        return program
    sig = sig[:kept].copy()
    return dataclasses.replace(
        program,
        sig=sig,
        inputs=inputs[: int(program.arity[sig].sum())].copy(),
        instance=instance[:kept].copy(),
        outputs=outputs,
        constants=kept_payloads(program, payloads, keep),
    )


@cython.cclass
class _EqualCalls:
    """One pass over the calls in recorded order: what a call reads is numbered anew before it is looked up, so that
    what was merged earlier is equal here."""

    sig: Shorts
    instance: Shorts
    inputs: Ints
    outputs: Ints
    arity: Ints
    width: Ints
    random: Flags
    begin: Ints  # of each signature of constants where its contents begin, -1 for others
    content: Ints
    known: Int
    calls: Int
    mask: Int
    new_sig: WrittenShorts
    new_inputs: Written
    value: Written  # of each value the one that stands for it
    first_input: Written  # of each kept call, as the next two
    first_value: Written
    held: Written  # what a constant holds
    next: Written  # of each signature its next content
    table: Written  # open addressing: one more than a kept call's number, 0 is free

    def __init__(self, program: Program, begin: np.ndarray, content: np.ndarray) -> None:
        columns = program.columns
        self.sig, self.instance = program.sig, program.instance
        self.inputs, self.outputs = program.inputs, program.outputs
        self.arity, self.width, self.random = columns.arity, columns.width, columns.random
        self.begin, self.content, self.known, self.calls = begin, content, program.known, len(program)
        places = 64
        while places < 2 * self.calls:
            places *= 2
        self.mask = places - 1
        self.table = np.zeros(places, dtype=np.int64)
        n = self.calls
        scratch: Written = np.empty(3 * n + program.values, dtype=np.int64)
        self.first_input, self.first_value, self.held = (
            scratch[:n],
            scratch[n : 2 * n],
            scratch[2 * n : 3 * n],
        )
        self.value = scratch[3 * n :]
        self.next = begin.copy()

    @cython.ccall
    def run(
        self, sig: WrittenShorts, inputs: Written, instance: WrittenShorts, outputs: Written, keep: Marks
    ) -> Int:
        """Write the columns of the smaller program, and which calls stay; how many those are."""
        kept = 0
        entry = 0
        at = 0
        values = self.known
        number = self.known
        self.new_sig, self.new_inputs = sig, inputs
        for i in range(self.known):
            self.value[i] = i
        for c in range(self.calls):
            s = self.sig[c]
            if s < 0 or s >= self.arity.shape[0] or at + self.arity[s] > self.inputs.shape[0]:
                raise IndexError(NOT_THERE)
            for i in range(self.arity[s]):
                v = self.inputs[at + i]
                if v < 0 or v >= values:
                    raise IndexError(NOT_THERE)
                inputs[entry + i] = self.value[v]
            at += self.arity[s]
            self.held[kept] = 0
            if self.begin[s] >= 0:
                if self.next[s] >= self.content.shape[0]:
                    raise IndexError(NOT_THERE)
                self.held[kept] = self.content[self.next[s]]
                self.next[s] += 1
            sig[kept], self.first_input[kept] = s, entry
            found = -1 if self.random[s] else self.look_up(kept)
            keep[c] = found < 0
            if found < 0:
                found = kept
                instance[kept], self.first_value[kept] = self.instance[c], number
                number += self.width[s]
                entry += self.arity[s]
                kept += 1
            for i in range(self.width[s]):
                self.value[values] = self.first_value[found] + i
                values += 1
        for i in range(self.outputs.shape[0]):
            if not 0 <= self.outputs[i] < values:
                raise IndexError(NOT_THERE)
            outputs[i] = self.value[self.outputs[i]]
        return kept

    @cython.cfunc
    @cython.exceptval(check=False)
    def look_up(self, k: Int) -> Int:
        """The kept call that call k is equal to, or -1: then it is entered."""
        s = self.new_sig[k]
        count = self.arity[s]
        at = self.first_input[k]
        mixed: Hash = _mix(_mix(0x243F6A88, s), self.held[k])
        for i in range(count):
            mixed = _mix(mixed, self.new_inputs[at + i])
        place = (mixed >> 32) & self.mask
        while self.table[place]:
            other = self.table[place] - 1
            if self.new_sig[other] == s and self.held[other] == self.held[k]:
                for i in range(count):
                    if self.new_inputs[self.first_input[other] + i] != self.new_inputs[at + i]:
                        break
                else:
                    return other
            place = (place + 1) & self.mask
        self.table[place] = k + 1
        return -1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _mix(chain: Hash, item: Hash) -> Hash:
    if not cython.compiled:
        return hash((chain, item))
    factor: Hash = 0x4F1BBCDC  # larger literals are Python numbers
    chain = (chain ^ item) * ((factor << 32) | 0x3FA53E0B)
    return chain ^ (chain >> 29)


def _read(program: Program, s: int, payload: Sequence[Any]) -> Sequence[Any]:
    """The payload of a signature, integers as a column: what runs later need not read them again."""
    signature = program.signatures[s]
    column = read_payload(signature.outputs[0], signature.operation.kind, payload, watched=False)
    return payload if column is None else column


def _contents(program: Program, s: int, payload: Sequence[Any]) -> np.ndarray:
    """int64 [payload]: equal for equal constants of a signature, and for no others."""
    if program.signatures[s].operation.kind == "number":
        return _equal_numbers(payload)
    if isinstance(payload, IntegerColumn):
        return payload.numbers
    return _equal_tensors(payload)


def _equal_numbers(payload: Sequence[Any]) -> np.ndarray:
    """The position of the first number of the same type and bits (0.0 is not -0.0)."""
    seen: dict[Any, int] = {}
    out = np.empty(len(payload), dtype=np.int64)
    for i, number in enumerate(payload):
        key = (type(number), number) if type(number) in (int, bool) else (type(number), _bits(number))
        out[i] = seen.setdefault(key, i)
    return out


def _bits(number: float | complex) -> bytes:
    return struct.pack("<dd", number.real, number.imag)


def _equal_tensors(payload: Sequence[torch.Tensor]) -> np.ndarray:
    """Equal for what is the same object, or small and of the same bits."""
    if len(payload) < 2 or not _comparable(payload):
        return np.array(list(map(id, payload)), dtype=np.int64)
    if any(t.requires_grad for t in payload):
        return _equal_free_tensors(payload)
    bits = _bits_of(payload)
    if bits.shape[1] == 8:
        return bits.view(np.int64).reshape(-1)
    if bits.shape[1] < 8:
        padded = np.zeros((len(payload), 8), dtype=np.uint8)
        padded[:, : bits.shape[1]] = bits
        return padded.view(np.int64).reshape(-1)
    whole, size = bits.tobytes(), bits.shape[1]
    seen: dict[bytes, int] = {}
    rows = (whole[at : at + size] for at in range(0, len(whole), size))
    return np.array([seen.setdefault(row, i) for i, row in enumerate(rows)], dtype=np.int64)


def _equal_free_tensors(payload: Sequence[torch.Tensor]) -> np.ndarray:
    """Positions of the first equal one: those that require a gradient are equal to themselves alone."""
    first: dict[Any, int] = {}
    free = [i for i, t in enumerate(payload) if not t.requires_grad]
    rows = iter(_bits_of([payload[i] for i in free])) if free else iter(())
    keys: list[Any] = [id(t) if t.requires_grad else next(rows).tobytes() for t in payload]
    return np.array([first.setdefault(key, i) for i, key in enumerate(keys)], dtype=np.int64)


def _bits_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """uint8 [tensors, bytes]"""
    rows = torch.stack(list(tensors)).reshape(len(tensors), -1).resolve_conj().resolve_neg()
    return rows.contiguous().view(torch.uint8).numpy().reshape(len(tensors), -1)


def _comparable(payload: Sequence[torch.Tensor]) -> bool:
    """Whether the numbers of these tensors can be read, and are so few that reading them pays."""
    sample = payload[0]
    return (
        0 < sample.numel() <= SMALL_CONSTANT
        and sample.device.type == "cpu"
        and all(type(t) in PLAIN_TENSORS and t.layout is torch.strided for t in payload)
        and not inside_functorch()
    )


def deduplicate_large(program: Program) -> Program:
    """The program with each computation once where it has many calls and enough of them are equal."""
    return program if len(program) < FEWEST_CALLS else deduplicate(program, least=LEAST_SHARE)


class Deduplicator:
    """`deduplicate_large`, but a structure that comes with other data is left as it is from then on.

    Its plan is then made once, not once a minibatch. A minibatch that comes again, an epoch later, is no
    other data. Bounded; a structure is known by checksums: at worst one is left alone that could have shrunk.
    """

    def __init__(self) -> None:
        # The structure of the result; None where it came with other data.
        self._result: OrderedDict[StructureKey, StructureKey | None] = OrderedDict()

    def __call__(self, program: Program) -> Program:
        """The program itself, or a smaller one with its results."""
        if len(program) < FEWEST_CALLS:
            return program
        structure = _structure(program)
        before = self._result.pop(structure, _NOT_MET)
        smaller = program if before is None else deduplicate_large(program)
        after = structure if smaller is program else _structure(smaller)
        changed = before != _NOT_MET and before != after
        self._result[structure] = None if changed else after
        if len(self._result) > REMEMBERED:
            self._result.popitem(last=False)
        return program if changed else smaller


def _structure(program: Program) -> StructureKey:
    return program.known, checksum(program.sig, program.inputs, program.outputs)
