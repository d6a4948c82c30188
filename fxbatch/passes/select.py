"""Program -> Program with fewer calls: what a rewrite keeps, renumbered; without the calls that no result needs.

    v1 = s1 f(v0)                     v1 = s1 f(v0)
    v2 = s2 g(v0)          ==>        return v1              # eliminate_dead
    return v1

    keep = np.array([True, True, False])
    select_calls(program, keep)

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fxbatch.ir import NOT_THERE, Program
from fxbatch.trace.constants import taken

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

MANY = 64  # signatures, from which on a phase is planned for those alone that it calls


def eliminate_dead(program: Program) -> Program:
    """The program without dead calls; the same object when there are none.

    Random calls stay even when nobody reads them, and so does what they read: without them, later calls would
    draw other numbers from the same seed.
    """
    live, dead = _live_calls(program, program.outputs, program.columns.random)
    return select_calls(program, live) if dead else program


def calls_behind(program: Program, values: np.ndarray) -> np.ndarray:
    """bool [calls]: what has to run for these values."""
    return _live_calls(program, values, np.zeros(len(program.signatures), dtype=bool))[0]


def _live_calls(program: Program, values: np.ndarray, stays: np.ndarray) -> tuple[np.ndarray, int]:
    """bool [calls]: those of signatures that stay, and what has to run for these values; how many others there are."""
    live, p = np.zeros(len(program), dtype=bool), program
    dead = _mark_live(p.sig, p.arity, p.call_of_value, p.inputs, values, stays, live, p.known)
    return live, dead


def _mark_live(
    sig: Shorts, arity: Ints, maker: Ints, inputs: Ints, outputs: Ints, stays: Flags, live: Marks, early: Int
) -> Int:
    """Live are calls of signatures that stay, calls that make outputs, and what a live call reads; -> dead calls."""
    values = maker.shape[0]
    dead = 0
    at = inputs.shape[0]
    for i in range(outputs.shape[0]):
        v = outputs[i] - early
        if v < -early or v >= values:
            raise IndexError(NOT_THERE)
        if v >= 0:
            live[maker[v]] = 1
    for c in range(sig.shape[0] - 1, -1, -1):
        s = sig[c]
        at -= arity[s]
        if at < 0:
            raise IndexError(NOT_THERE)
        live[c] |= stays[s]
        if not live[c]:
            dead += 1
            continue
        for i in range(at, at + arity[s]):
            v = inputs[i] - early
            if v < -early or v >= values:
                raise IndexError(NOT_THERE)
            if v >= 0:
                live[maker[v]] = 1
    return dead


def select_calls(program: Program, keep: np.ndarray) -> Program:
    """The calls where `keep` (bool [calls]) holds.

    `program.outputs` keep their places: output i of the result stands for output i of the program. The signatures
    stay as they are, also those without calls. What is read or needed but not kept is value -1.
    """
    constants = {}
    for s, payload in program.constants.items():
        mine = keep[program.sig == s].nonzero()[0]
        constants[s] = payload if len(mine) == len(payload) else taken(payload, mine)
    return _in_order(program, keep.nonzero()[0], constants)


def number_segments(
    sig: Shorts, width: Ints, arity: Ints, inputs: Ints, ends: Flags, segment: Written, earlier: Int
) -> None:
    """After how many segments each call can run (written to `segment`), where calls that `ends` marks run at the end of
    one: those that read them too, all others in the next."""
    values = earlier
    for c in range(sig.shape[0]):
        if not 0 <= sig[c] < width.shape[0]:
            raise IndexError(NOT_THERE)
        values += width[sig[c]]
    # Of each value twice the segment; one more where a marked call makes it.
    segment_of: Written = np.zeros(values, dtype=np.int64)
    at = 0
    value = earlier
    for c in range(sig.shape[0]):
        s = sig[c]
        if at + arity[s] > inputs.shape[0]:
            raise IndexError(NOT_THERE)
        latest: Int = 0
        when: Int = 0
        for i in range(at, at + arity[s]):
            if not 0 <= inputs[i] < value:
                raise IndexError(NOT_THERE)
            when = segment_of[inputs[i]]
            latest = max(latest, when if ends[c] else when + when % 2)
        segment[c] = latest // 2
        for i in range(value, value + width[s]):
            segment_of[i] = 2 * (latest // 2) + ends[c]
        at += arity[s]
        value += width[s]


def checksum(sig: np.ndarray, inputs: np.ndarray, outputs: np.ndarray) -> int:
    """A number that tells columns of programs apart; another one where this file is not compiled."""
    if not cython.compiled:
        return hash((sig.tobytes(), inputs.tobytes(), outputs.tobytes()))
    return _checksum(sig, inputs, outputs)


def _checksum(sig: Shorts, inputs: Ints, outputs: Ints) -> int:
    """Four chains at once, for one waits for its multiplications."""
    a: Hash = sig.shape[0]
    b: Hash = inputs.shape[0]
    c: Hash = outputs.shape[0]
    d: Hash = 4
    for i in range(inputs.shape[0] // 2):
        a, b = _mix(a, inputs[2 * i]), _mix(b, inputs[2 * i + 1])
    if inputs.shape[0] % 2:
        a = _mix(a, inputs[inputs.shape[0] - 1])
    for i in range(sig.shape[0] // 2):
        c, d = _mix(c, sig[2 * i]), _mix(d, sig[2 * i + 1])
    if sig.shape[0] % 2:
        d = _mix(d, sig[sig.shape[0] - 1])
    for i in range(outputs.shape[0]):
        c = _mix(c, outputs[i])
    return _mix(_mix(a, b), _mix(c, d)) >> 1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _mix(chain: Hash, item: Hash) -> Hash:
    factor: Hash = 0x4F1BBCDC  # larger literals are Python numbers
    chain = (chain ^ item) * ((factor << 32) | 0x3FA53E0B)
    return chain ^ (chain >> 32)


def met_alone(program: Program) -> Program:
    """The program with those signatures alone that its calls have, and one of each type that they read of earlier
    phases: the table has one for each size that was met. The same object where most are met, or there are few."""
    if len(program.signatures) < MANY:
        return program
    c = program.columns
    met = np.bincount(program.sig, minlength=len(program.signatures)).nonzero()[0]
    if 4 * len(met) > len(program.signatures):
        return program
    there = {t for s in met.tolist() for t in program.signatures[s].outputs}
    read = {t for s in met.tolist() for t in program.signatures[s].inputs}
    places = [int(np.argmax(c.output_types == c.type_ids[t])) for t in read - there]
    makers = np.searchsorted(c.first_output, np.array(places, dtype=np.int64), side="right") - 1
    chosen = np.unique(np.concatenate([met, makers]))
    new = Program(
        signatures=tuple([program.signatures[s] for s in chosen.tolist()]),
        sig=np.searchsorted(chosen, program.sig).astype(np.int32),
        inputs=program.inputs, instance=program.instance, outputs=program.outputs, known=program.known,
        early_types=lambda: early_types(), instances=program.instances,
        constants={k: program.constants[s] for k, s in enumerate(chosen.tolist()) if s in program.constants},
    )  # fmt: skip

    def early_types() -> np.ndarray | None:
        """Of those that the program has: -1 for others, which it does not read."""
        types = np.array([new.type_ids.get(t, -1) for t in program.types], dtype=np.int32)
        return None if program.known_types is None else types[program.known_types]

    return new


def reorder(program: Program, order: np.ndarray) -> Program:
    """A program with the calls in another order (int64 [calls]: which call comes first, second, ...), renumbered.

    Constants of one signature must keep their order among themselves.
    """
    if len(order) != len(program):
        raise IndexError(NOT_THERE)
    return _in_order(program, order, program.constants)


def _in_order(program: Program, order: np.ndarray, constants: Mapping[int, Sequence[Any]]) -> Program:
    """These calls of a program, in this order, with these constants."""
    sig, instance = np.empty(len(order), dtype=np.int32), np.empty(len(order), dtype=np.int32)
    inputs, outputs = np.empty_like(program.inputs), np.empty_like(program.outputs)
    entries = _take_in_order(
        program.sig, program.instance, program.inputs, program.outputs, program.width, program.arity, order,
        sig, instance, inputs, outputs, program.known,
    )  # fmt: skip
    return dataclasses.replace(
        program, sig=sig, inputs=inputs[:entries], instance=instance, outputs=outputs, constants=constants
    )


def _take_in_order(
    sig: Shorts,
    instance: Shorts,
    inputs: Ints,
    outputs: Ints,
    width: Ints,
    arity: Ints,
    order: Ints,
    new_sig: WrittenShorts,
    new_instance: WrittenShorts,
    new_inputs: Written,
    new_outputs: Written,
    early: Int,
) -> Int:
    """Write the columns of calls in this order, each once and after those that it reads, their values numbered anew: -1
    for those of other calls. How many inputs they have."""
    first: Written = np.empty(2 * sig.shape[0], dtype=np.int64)  # of each call's values, of its inputs
    values = early
    at = 0
    for c in range(sig.shape[0]):
        if not 0 <= sig[c] < width.shape[0]:
            raise IndexError(NOT_THERE)
        first[2 * c], first[2 * c + 1] = values, at
        values += width[sig[c]]
        at += arity[sig[c]]
    if at > inputs.shape[0]:
        raise IndexError(NOT_THERE)
    number: Written = np.full(values, -1, dtype=np.int64)
    for i in range(early):
        number[i] = i
    value = early
    at = 0
    for k in range(order.shape[0]):
        c = order[k]
        if not 0 <= c < sig.shape[0]:
            raise IndexError(NOT_THERE)
        s = sig[c]
        new_sig[k], new_instance[k] = s, instance[c]
        for i in range(first[2 * c + 1], first[2 * c + 1] + arity[s]):
            if not 0 <= inputs[i] < values or at >= new_inputs.shape[0]:
                raise IndexError(NOT_THERE)
            new_inputs[at] = number[inputs[i]]
            at += 1
        for i in range(first[2 * c], first[2 * c] + width[s]):
            number[i] = value
            value += 1
    for i in range(outputs.shape[0]):
        if not 0 <= outputs[i] < values:
            raise IndexError(NOT_THERE)
        new_outputs[i] = number[outputs[i]]
    return at
