"""Program -> Program in which equal pure calls on equal inputs are one call, within and across instances.

    v0 = s0 constant() = 17 @0                v0 = s0 constant() = 17 @0
    v1 = s1 embed(v0) @0                      v1 = s1 embed(v0) @0
    v2 = s0 constant() = 17 @1        ==>     return v1, v1
    v3 = s1 embed(v2) @1
    return v1, v3

Equal are calls of one signature on the same values; numbers of equal bits; constants that are one tensor,
or small tensors of equal bits that need no gradient. Random calls are never equal to any other.
Candidates are found by hash and confirmed by comparison.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.ir import Program
from fxbatch.passes.frontier import Frontier, stable_argsort
from fxbatch.passes.native import Native
from fxbatch.passes.select_calls import kept_payloads, select_calls
from fxbatch.torch_private import inside_functorch
from fxbatch.trace.integers import PLAIN_TENSORS, IntegerColumn, read_payload

# Constants of up to this many elements are compared by value.
SMALL_CONSTANT = 16

_MIX = np.uint64(0x9E3779B97F4A7C15)


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
    if Native.loops is not None:
        return _merge_natively(program, payloads, contents, least)
    same = np.arange(len(program))  # the first call equal to each call
    for s, content in contents.items():
        mine = np.flatnonzero(program.sig == s)
        _, begin, inverse = np.unique(content, return_index=True, return_inverse=True)
        same[mine] = mine[begin[inverse]]
    frontier = Frontier(program)
    merge = _merge_by_call if frontier.narrow else _merge_by_depth
    same = merge(program, frontier, same)
    keep = same == np.arange(len(program))
    if int(keep.sum()) >= len(program) * (1 - least):
        return program
    return select_calls(dataclasses.replace(program, constants=payloads), keep, _value_of(program, same))


def _read(program: Program, s: int, payload: Sequence[Any]) -> Sequence[Any]:
    """The payload of a signature, integers as a column: what runs later need not read them again."""
    signature = program.signatures[s]
    column = read_payload(signature.outputs[0], signature.operation.kind, payload, watched=False)
    return payload if column is None else column


def _merge_natively(
    program: Program, payloads: dict[int, Sequence[Any]], contents: dict[int, np.ndarray], least: float
) -> Program:
    """One pass in C: the columns of the result are the beginnings of arrays as long as those of the program."""
    begin = np.full(len(program.signatures), -1, dtype=np.int64)
    at = 0
    for s, content in contents.items():
        begin[s] = at
        at += len(content)
    content = np.concatenate([np.empty(0, dtype=np.int64), *contents.values()])
    merges = np.array([not s.operation.random for s in program.signatures], dtype=bool)
    columns = (program.sig, program.width, program.arity, program.inputs, program.instance, program.outputs)
    sig, inputs, instance, outputs = map(
        np.empty_like, (program.sig, program.inputs, program.instance, program.outputs)
    )
    keep = np.empty(len(program), dtype=bool)
    kept = Native.loops.merge_equal(
        *columns, merges, begin, content, sig, inputs, instance, outputs, keep, program.values, program.known
    )
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


def _value_of(program: Program, same: np.ndarray) -> np.ndarray:
    """Each value's equal among the values of the calls that stay."""
    if not len(program.call_of_value):
        return np.arange(program.values)
    call = program.call_of_value
    moved = program.first_value[same[call]] - program.first_value[call]
    value_of = np.arange(program.values)
    value_of[program.known :] += moved
    return value_of


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


def _pure(program: Program) -> np.ndarray:
    """bool [calls]: whether a call may be merged: not random, and no constant (those are done)."""
    kinds = [
        not s.operation.random and s.operation.kind not in ("constant", "number") for s in program.signatures
    ]
    return np.array(kinds, dtype=bool)[program.sig]


def _merge_by_call(program: Program, frontier: Frontier, same: np.ndarray) -> np.ndarray:
    """One pass over the calls in recorded order, keyed by signature and inputs."""
    value_of = _value_of(program, same).tolist()
    inputs, offsets = program.inputs.tolist(), program.input_offsets.tolist()
    first, sig = program.first_value.tolist(), program.sig.tolist()
    merged = same.tolist()
    seen: dict[tuple[int, ...], int] = {}
    for call in np.flatnonzero(_pure(program)).tolist():
        read = [value_of[v] for v in inputs[offsets[call] : offsets[call + 1]]]
        found = seen.setdefault((sig[call], *read), call)
        if found != call:
            merged[call] = found
            value_of[first[call] : first[call + 1]] = range(first[found], first[found + 1])
    return np.array(merged, dtype=np.int64)


def _merge_by_depth(program: Program, frontier: Frontier, same: np.ndarray) -> np.ndarray:
    """Depth by depth: what a depth reads is canonical when its turn comes."""
    value_of = _value_of(program, same)
    same = same.copy()
    pure = np.flatnonzero(_pure(program))
    order = pure[stable_argsort(frontier.depth[pure], int(frontier.depth.max(initial=0)) + 1)]
    cuts = np.flatnonzero(np.diff(frontier.depth[order])) + 1
    with np.errstate(over="ignore"):
        for calls in np.split(order, cuts):
            _merge_level(program, calls, same, value_of)
    return same


def _merge_level(program: Program, calls: np.ndarray, same: np.ndarray, value_of: np.ndarray) -> None:
    count = program.arity[program.sig[calls]]
    start = program.input_offsets[calls]
    end = np.cumsum(count)
    slot = np.arange(int(end[-1]) if len(end) else 0) - np.repeat(end - count, count)
    read = value_of[program.inputs[np.repeat(start, count) + slot]]
    mixed = (read.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    mixed *= (slot.astype(np.uint64) * np.uint64(2) + np.uint64(3)) * _MIX
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    key = (
        total[end] - total[end - count] + program.sig[calls].astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    )
    _, begin, inverse = np.unique(key, return_index=True, return_inverse=True)
    if len(begin) == len(calls):
        return
    leader = begin[inverse]  # position in `calls`; np.unique gives the first
    again = np.flatnonzero(leader != np.arange(len(calls)))
    other = leader[again]
    equal = program.sig[calls[again]] == program.sig[calls[other]]
    again, other = again[equal], other[equal]
    count = count[again]
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    left = read[np.repeat(end[again] - count, count) + within]
    right = read[np.repeat((end - program.arity[program.sig[calls]])[other], count) + within]
    differing = np.bincount(np.repeat(np.arange(len(again)), count)[left != right], minlength=len(again)) > 0
    again, other = calls[again[~differing]], calls[other[~differing]]
    same[again] = other
    width = program.width[program.sig[again]]
    within = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    value_of[np.repeat(program.first_value[again], width) + within] = (
        np.repeat(program.first_value[other], width) + within
    )
