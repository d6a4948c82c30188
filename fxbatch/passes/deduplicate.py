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

from typing import Any

import numpy as np
import torch

from fxbatch.ir import Program
from fxbatch.passes.frontier import Frontier, stable_argsort
from fxbatch.passes.select_calls import select_calls

# Constants of up to this many elements are compared by value.
SMALL_CONSTANT = 16

_MIX = np.uint64(0x9E3779B97F4A7C15)


def deduplicate(program: Program) -> Program:
    """The program with each computation once; the same object when no two calls are equal.

    About 0.3 us a call. Output i of the result stands for output i of the program: two may be one value.
    """
    if not len(program):
        return program
    same = np.arange(len(program))  # the first call equal to each call
    for s, payload in program.constants.items():
        mine = np.flatnonzero(program.sig == s)
        first = _equal_numbers(payload) if program.signatures[s].operation.kind == "number" else None
        first = _equal_tensors(payload) if first is None else first
        same[mine] = mine[first]
    frontier = Frontier(program)
    if frontier.narrow:
        same = _merge_by_call(program, frontier, same)
    else:
        same = _merge_by_depth(program, frontier, same)
    keep = same == np.arange(len(program))
    if keep.all():
        return program
    return select_calls(program, keep, _value_of(program, same))


def _value_of(program: Program, same: np.ndarray) -> np.ndarray:
    """Each value's equal among the values of the calls that stay."""
    if not len(program.call_of_value):
        return np.arange(program.values)
    call = program.call_of_value
    moved = program.first_value[same[call]] - program.first_value[call]
    value_of = np.arange(program.values)
    value_of[program.known :] += moved
    return value_of


def _equal_numbers(payload: list[Any]) -> np.ndarray:
    """The position of the first number of the same type and bits (0.0 is not -0.0)."""
    seen: dict[Any, int] = {}
    out = np.empty(len(payload), dtype=np.int64)
    for i, number in enumerate(payload):
        key = (type(number), number) if type(number) in (int, bool) else (type(number), _bits(number))
        out[i] = seen.setdefault(key, i)
    return out


def _bits(number: float | complex) -> str:
    if isinstance(number, complex):
        return f"{number.real.hex()} {number.imag.hex()}"
    return float(number).hex() if number == number else "nan"


def _equal_tensors(payload: list[torch.Tensor]) -> np.ndarray:
    """The position of the first tensor that is the same object, or small and of the same bits."""
    first: dict[int, int] = {}
    out = np.array([first.setdefault(id(t), i) for i, t in enumerate(payload)], dtype=np.int64)
    sample = payload[0] if payload else None
    if (
        sample is None
        or sample.numel() > SMALL_CONSTANT
        or sample.numel() == 0
        or sample.device.type != "cpu"
    ):
        return out
    free = [i for i in first.values() if not payload[i].requires_grad]
    if len(free) < 2 or sample.layout != torch.strided:
        return out
    rows = torch.stack([payload[i] for i in free]).reshape(len(free), -1).resolve_conj().resolve_neg()
    bits = rows.contiguous().view(torch.uint8).numpy().reshape(len(free), -1)
    if bits.shape[1] == 8:
        key: np.ndarray = bits.view(np.int64).reshape(-1)
    else:
        key = np.ascontiguousarray(bits).view(np.dtype((np.void, bits.shape[1]))).reshape(-1)
    _, begin, inverse = np.unique(key, return_index=True, return_inverse=True)
    equal = np.arange(len(payload))
    positions = np.array(free)
    equal[positions] = positions[begin[inverse]]
    return equal[out]


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
