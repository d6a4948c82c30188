"""Program -> Program in which equal pure calls on equal inputs are one call, within and across instances.

    v0 = s0 constant() = 17 @0                v0 = s0 constant() = 17 @0
    v1 = s1 embed(v0) @0                      v1 = s1 embed(v0) @0
    v2 = s0 constant() = 17 @1        ==>     return v1, v1
    v3 = s1 embed(v2) @1
    return v1, v3

    deduplicate_large(program) is program   # few calls, or few equal ones: what `deduplicate="auto"` runs

Equal are calls of one signature on the same values; numbers of equal bits; constants that are one tensor,
or small tensors of equal bits that need no gradient. Random calls are never equal to any other.
Candidates are found by hash and confirmed by comparison.

What it costs is the pass, reads by index where rows stood in order, and a plan per minibatch: which calls are equal
is a matter of the data, so that two minibatches of one structure no longer have one plan.

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.ir import NOT_THERE, Program
from fxbatch.passes.select import select_calls
from fxbatch.torch_private import inside_functorch
from fxbatch.trace.constants import PLAIN_TENSORS, IntegerColumn, RowColumn, read_payload

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


# Constants of up to this many elements are compared by value.
SMALL_CONSTANT = 16

# Below this many calls the steps' own cost dominates, and fewer rows don't change that (benchmarks/rewrite_gains.py).
FEWEST_CALLS = 1000
# The share of the calls that must go: with 7 % (EWT) nothing was won, with 22 % (SST) 6 % of the step.
LEAST_SHARE = 0.125


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
    held = np.concatenate([np.empty(0, dtype=np.int64), *contents.values()])
    inputs, outputs = np.empty_like(program.inputs), np.empty_like(program.outputs)
    keep, c = np.empty(len(program), dtype=bool), program.columns
    distinct = _find_equal(
        program.sig, c.width, c.arity, c.random, program.inputs, program.outputs, begin, held, inputs, outputs,
        keep, program.known,
    )  # fmt: skip
    if distinct >= len(program) * (1 - least):
        return program
    return select_calls(
        dataclasses.replace(program, inputs=inputs, outputs=outputs, constants=payloads), keep
    )


def _find_equal(
    sig: Shorts,
    width: Ints,
    arity: Ints,
    random: Flags,
    old_inputs: Ints,
    results: Ints,
    begin: Ints,
    contents: Ints,
    inputs: Written,
    outputs: Written,
    keep: Marks,
    earlier: Int,
) -> Int:
    """Mark the first call of equal ones, and write of what is read and of the results the values that stand for them;
    how many calls are marked. begin: where the contents of each signature of constants begin, -1 for others.

    One pass in recorded order: what a call reads is replaced before the call is looked up, so that what was found
    equal earlier is equal here.
    """
    mask: Int = 63
    while 3 * mask < 4 * sig.shape[0]:
        mask = 2 * mask + 1
    values: Int = earlier
    for c in range(sig.shape[0]):
        if sig[c] < 0 or sig[c] >= arity.shape[0]:
            raise IndexError(NOT_THERE)
        values += width[sig[c]]
    if max(values, old_inputs.shape[0]) > 0x7FFFFFFF:
        raise OverflowError("a program has at most 2,147,483,647 values")
    # Small, for it is read anywhere. Open addressing: one more than a call, 0 is free.
    table: WrittenShorts = np.zeros(mask + 1, dtype=np.int32)
    scratch: WrittenShorts = np.empty(2 * sig.shape[0], dtype=np.int32)
    first_input: WrittenShorts = scratch[: sig.shape[0]]  # of each call, as the next two
    first_value: WrittenShorts = scratch[sig.shape[0] :]
    held: Written = np.empty(sig.shape[0], dtype=np.int64)  # what a constant holds
    following: Written = np.array(begin)
    value: WrittenShorts = np.arange(values, dtype=np.int32)  # of each value the one that stands for it
    distinct = 0
    at = 0
    v = earlier
    for c in range(sig.shape[0]):
        s = sig[c]
        if at + arity[s] > old_inputs.shape[0]:
            raise IndexError(NOT_THERE)
        first_input[c], first_value[c], held[c] = at, v, 0
        if begin[s] >= 0:
            if following[s] >= contents.shape[0]:
                raise IndexError(NOT_THERE)
            held[c] = contents[following[s]]
            following[s] += 1
        mixed: Hash = _mix(_mix(0x243F6A88, s), held[c])
        for i in range(at, at + arity[s]):
            if old_inputs[i] < 0 or old_inputs[i] >= v:
                raise IndexError(NOT_THERE)
            inputs[i] = value[old_inputs[i]]
            mixed = _mix(mixed, inputs[i])
        match = c
        place = (mixed >> 32) & mask
        while table[place] and match == c and not random[s]:
            other = table[place] - 1
            if sig[other] == s and held[other] == held[c]:
                i = 0
                while i < arity[s] and inputs[first_input[other] + i] == inputs[at + i]:
                    i += 1
                if i == arity[s]:
                    match = other
            place = (place + 1) & mask
        keep[c] = match == c
        if match == c:
            distinct += 1
            if not random[s]:
                table[place] = c + 1
        for i in range(width[s]):
            value[v + i] = first_value[match] + i
        at += arity[s]
        v += width[s]
    for i in range(results.shape[0]):
        if results[i] < 0 or results[i] >= values:
            raise IndexError(NOT_THERE)
        outputs[i] = value[results[i]]
    return distinct


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
    if isinstance(payload, IntegerColumn):
        return payload.numbers
    if isinstance(payload, RowColumn):
        return payload.keys
    keys: list[Any]
    if program.signatures[s].operation.kind == "number":  # of the same type and bits: 0.0 is not -0.0
        keys = [
            (type(x), x if type(x) in (int, bool) else struct.pack("<dd", x.real, x.imag)) for x in payload
        ]
    elif len(payload) < 2 or not _comparable(payload):
        return np.array(list(map(id, payload)), dtype=np.int64)
    else:  # of the same bits; those that require a gradient are equal to themselves alone
        rows = torch.stack(list(payload)).detach().reshape(len(payload), -1).resolve_conj().resolve_neg()
        bits = rows.contiguous().view(torch.uint8).numpy()
        keys = (
            bits.view(f"S{bits.shape[1]}").reshape(-1).tolist()
        )  # without the last zeros, of one length each
        keys = [id(t) if t.requires_grad else key for t, key in zip(payload, keys, strict=True)]
    first: dict[Any, int] = {}
    return np.array([first.setdefault(key, i) for i, key in enumerate(keys)], dtype=np.int64)


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
