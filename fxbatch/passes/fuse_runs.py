"""Runs of calls that were learned, found in a program and put together in one walk of its columns.

In: the columns of a program whose calls stand instance after instance, and the runs as tables. Out: for each call its
place in an occurrence of a run, and which outputs are read from outside; then the columns with the run's pieces in
place of each occurrence. `fuse.py` says what a run is.

    find_runs(sig, instance, inputs, ..., head, place, outside)      # FOUND, OUT_OF_ORDER, or a slot
    calls, entries = put_runs(sig, instance, inputs, ..., new_sig, new_instance, new_inputs, new_outputs)

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from fxbatch.ir import NOT_THERE

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

# What `find_runs` gives besides slots.
FOUND, OUT_OF_ORDER = -1, -2


class RunTables:
    """Runs as columns: which signatures in order, what each of their inputs reads, which inputs are the same."""

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        wired: Sequence[Sequence[int]],
        alias: Sequence[Mapping[int, int]],
        widths: Sequence[int],
        signatures: int,
    ) -> None:
        """members: signature numbers of each run; wired: of each flat input slot the flat output slot of the same run
        that it reads, or -1; alias: slots that read what another slot reads; widths: flat outputs of each run."""
        self.member = np.array([s for run in members for s in run], dtype=np.int64)
        self.first_member = np.array([0, *accumulate(map(len, members))], dtype=np.int64)
        self.wired = np.array([w for run in wired for w in run], dtype=np.int64)
        self.first_slot = np.array([0, *accumulate(map(len, wired))], dtype=np.int64)
        self.alias = np.full(len(self.wired), -1, dtype=np.int64)
        for run, pairs in enumerate(alias):
            for slot, other in pairs.items():
                self.alias[self.first_slot[run] + slot] = other
        self.first_output = np.array([0, *accumulate(widths)], dtype=np.int64)
        self.begins = np.full(signatures, -1, dtype=np.int64)  # of each signature the run that begins with it
        for run, calls in enumerate(members):
            self.begins[calls[0]] = run


def find_runs(
    sig: Shorts,
    instance: Shorts,
    inputs: Ints,
    outputs: Ints,
    width: Ints,
    arity: Ints,
    constant: Flags,
    earlier: Int,
    begins: Ints,
    member: Ints,
    first_member: Ints,
    wired: Ints,
    first_slot: Ints,
    alias: Ints,
    first_output: Ints,
    head: Written,
    place: Written,
    outside: Marks,
) -> int:
    """Fill, for each call, `head` (the first call of its occurrence, -1: in none) and `place` (which member it is), and
    for each flat output of each run whether something outside reads it: FOUND. OUT_OF_ORDER where the calls don't stand
    instance after instance, and a slot that does not read what its alias reads, counted over all runs: then nothing is
    to be used."""
    calls: Int = sig.shape[0]
    scratch: Written = np.empty(3 * calls + 2, dtype=np.int64)
    value: Written = scratch[: calls + 1]  # of each call its first value
    begin: Written = scratch[calls + 1 : 2 * calls + 2]  # and its first input
    order: Written = scratch[2 * calls + 2 :]  # the calls that are no constants
    n: Int = 0
    value[0] = earlier
    begin[0] = 0
    for c in range(calls):
        if not 0 <= sig[c] < width.shape[0] or (c and instance[c] < instance[c - 1]):
            return OUT_OF_ORDER
        value[c + 1] = value[c] + width[sig[c]]
        begin[c + 1] = begin[c] + arity[sig[c]]
        head[c] = -1
        if not constant[sig[c]]:
            order[n] = c
            n += 1
    if begin[calls] > inputs.shape[0]:
        raise IndexError(NOT_THERE)
    maker: Written = np.full(value[calls], -1, dtype=np.int64)
    for c in range(calls):
        for v in range(value[c], value[c + 1]):
            maker[v] = c
    p: Int = 0
    while p < n:
        run: Int = begins[sig[order[p]]]
        length: Int = 0 if run < 0 else first_member[run + 1] - first_member[run]
        good: Int = length > 0 and p + length <= n
        if good and instance[order[p]] != instance[order[p + length - 1]]:
            good = 0
        k: Int = 0
        slot: Int = first_slot[run] if run >= 0 else 0
        first_value: Int = 0  # flat outputs of the members before
        while good and k < length:
            c = order[p + k]
            good = sig[c] == member[first_member[run] + k]
            i: Int = begin[c]
            while good and i < begin[c + 1]:
                v = inputs[i]
                if not 0 <= v < value[calls]:
                    raise IndexError(NOT_THERE)
                source: Int = maker[v]
                inner: Int = source >= 0 and head[source] == order[p]
                reads: Int = -1
                if inner:
                    reads = place[source] + v - value[source]
                good = reads == wired[slot]
                i += 1
                slot += 1
            if good:
                head[c] = order[p]
                place[c] = first_value  # its first flat output, until the run is done
                first_value += width[sig[c]]
                k += 1
        if not good:
            for j in range(k):
                head[order[p + j]] = -1
            p += 1
            continue
        slot = first_slot[run]
        for j in range(length):
            c = order[p + j]
            for i in range(begin[c], begin[c + 1]):
                other: Int = alias[slot]
                if other >= 0 and inputs[i] != _read_by(other, p, order, begin, inputs):
                    return slot
                slot += 1
        p += length
    for c in range(calls):
        for i in range(begin[c], begin[c + 1]):
            v = inputs[i]
            source = maker[v]
            if source >= 0 and head[source] >= 0 and head[source] != head[c]:
                outside[first_output[begins[sig[head[source]]]] + place[source] + v - value[source]] = 1
    for i in range(outputs.shape[0]):
        v = outputs[i]
        if not 0 <= v < value[calls]:
            raise IndexError(NOT_THERE)
        source = maker[v]
        if source >= 0 and head[source] >= 0:
            outside[first_output[begins[sig[head[source]]]] + place[source] + v - value[source]] = 1
    return FOUND


@cython.cfunc
def _read_by(slot: Int, p: Int, order: Written, begin: Written, inputs: Ints) -> Int:
    """The value that a flat input slot of the run that begins at `p` reads."""
    c: Int = order[p]
    while slot >= begin[c + 1] - begin[c]:
        slot -= begin[c + 1] - begin[c]
        p += 1
        c = order[p]
    return inputs[begin[c] + slot]


def put_runs(
    sig: Shorts,
    instance: Shorts,
    inputs: Ints,
    outputs: Ints,
    width: Ints,
    arity: Ints,
    earlier: Int,
    begins: Ints,
    first_member: Ints,
    first_piece: Ints,
    head: Ints,
    place: Ints,
    fused: Ints,
    read: Ints,
    first_read: Ints,
    gives: Ints,
    first_given: Ints,
    new_sig: WrittenShorts,
    new_instance: WrittenShorts,
    new_inputs: Written,
    new_outputs: Written,
) -> tuple[int, int]:
    """The columns with the pieces of each run at the place of its last call; how many calls and inputs there are then.
    fused: the signature of each piece; read, gives: which flat slots its inputs and outputs are."""
    calls: Int = sig.shape[0]
    values: Int = earlier
    for c in range(calls):
        values += width[sig[c]]
    scratch: Written = np.empty(values + 2 * calls, dtype=np.int64)
    number: Written = scratch[:values]  # of each value its new number
    members: Written = scratch[values : values + calls]  # of the occurrence that is gone through
    begin: Written = scratch[values + calls :]
    first: Written = np.empty(calls, dtype=np.int64)
    for v in range(earlier):
        number[v] = v
    n: Int = 0
    entries: Int = 0
    at: Int = 0
    v = earlier
    new: Int = earlier
    count: Int = 0
    for c in range(calls):
        s = sig[c]
        begin[c] = at
        first[c] = v
        if head[c] < 0:
            for i in range(at, at + arity[s]):
                new_inputs[entries] = number[inputs[i]]
                entries += 1
            for i in range(width[s]):
                number[v + i] = new
                new += 1
            new_sig[n], new_instance[n] = s, instance[c]
            n += 1
        else:
            if head[c] == c:
                count = 0
            members[count] = c
            count += 1
            run: Int = begins[sig[head[c]]]
            if count == first_member[run + 1] - first_member[run]:
                for piece in range(first_piece[run], first_piece[run + 1]):
                    slot: Int = 0
                    k: Int = 0
                    for r in range(first_read[piece], first_read[piece + 1]):
                        if read[r] < slot:
                            slot = k = 0
                        while read[r] >= slot + arity[sig[members[k]]]:
                            slot += arity[sig[members[k]]]
                            k += 1
                        new_inputs[entries] = number[inputs[begin[members[k]] + read[r] - slot]]
                        entries += 1
                    for g in range(first_given[piece], first_given[piece + 1]):
                        k = 0
                        while gives[g] >= place[members[k]] + width[sig[members[k]]]:
                            k += 1
                        number[first[members[k]] + gives[g] - place[members[k]]] = new
                        new += 1
                    new_sig[n], new_instance[n] = fused[piece], instance[c]
                    n += 1
        at += arity[s]
        v += width[s]
    for i in range(outputs.shape[0]):
        new_outputs[i] = number[outputs[i]]
    return n, entries
