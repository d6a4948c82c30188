"""Program -> Survey: what every policy and pass asks first, answered in one pass over the calls; and which
inputs of which signatures need gradients.

Comes in: a Program. Goes out: how often each signature is called, chains of calls of one signature, and the
SignatureGraph: which output feeds which slot. A model has few signature graphs, so what follows from one (its
strongly connected components, who may run before whom, the Needs of gradients) is worked out once.

    found = survey(program)
    found.counts                 # int64 [signatures]
    found.graph.parts            # [[0], [2, 5], [3]]: components as they feed each other, constants first
    needs = find_needs(program, shared_needs, constant_needs)
    needs.inputs[3]              # (True, True, False)

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxbatch.ir import NOT_THERE, Program, SignatureColumns, offsets
from fxbatch.passes.components import components

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


_DENSE_LIMIT = 1 << 22


class SignatureGraph:
    """Distinct pairs (slot, output), both flat over signatures, such that some call reads such an output there."""

    def __init__(self, columns: SignatureColumns, pairs: np.ndarray) -> None:
        """pairs: slot * outputs + output, ascending."""
        outs = max(int(columns.width.sum()), 1)
        self.columns = columns
        self.slots, self.outs = pairs // outs, pairs % outs
        self.key = self.slots.tobytes(), self.outs.tobytes()

    @functools.cached_property
    def parts(self) -> list[list[int]]:
        """The strongly connected components, each sorted: constants, then as they feed. Constants feed nobody here."""
        c = self.columns
        numbers = np.arange(len(c.arity))
        reader, source = numbers.repeat(c.arity)[self.slots], numbers.repeat(c.width)[self.outs]
        edges = ~c.constant[source]
        parts = components(len(numbers), zip(source[edges].tolist(), reader[edges].tolist(), strict=True))
        return sorted(parts, key=lambda part: not c.constant[part[0]])

    @functools.cached_property
    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """The parts as columns: members of part p are `members[first[p] : first[p + 1]]` -> (members, first)."""
        sizes = np.array([len(part) for part in self.parts], dtype=np.int64)
        return np.array([s for part in self.parts for s in part], dtype=np.int64), offsets(sizes)

    @functools.cached_property
    def several(self) -> list[list[int]]:
        """The parts of several signatures, which wait for each other in turn."""
        return [part for part in self.parts if len(part) > 1]


class Survey(NamedTuple):
    """Facts about a program as arrays, which are not to be written to."""

    counts: np.ndarray  # int64 [signatures]: calls of each
    before: np.ndarray  # int32 [calls]: calls of its signature before it on a path of such calls alone
    longest: np.ndarray  # int64 [signatures]: calls on the longest such path
    graph: SignatureGraph
    present: bytes  # a byte per signature: whether it is called


def survey(program: Program) -> Survey:
    """The survey of a program, made once."""
    facts: Survey | None = program.notes.get("survey")
    if facts is None:
        facts = program.notes["survey"] = _survey(program)
    return facts


def _survey(program: Program) -> Survey:
    c = program.columns
    before = np.empty(len(program.sig), dtype=np.int32)
    counts, longest, present, pairs = _walk(
        program.sig, program.inputs, c.first_slot, c.first_output, program.known, before
    )
    graph = c.fact(_graph, (_find_pairs(program) if pairs is None else pairs).tobytes())
    return Survey(counts, before, longest, graph, present)


def _walk(
    sig: Shorts, inputs: Ints, slot: Ints, out: Ints, earlier: Int, before: WrittenShorts
) -> tuple[np.ndarray, np.ndarray, bytes, np.ndarray | None]:
    """Calls of each signature, the longest chains of them, whether there are any, and the pairs slot * outputs + output
    that occur, ascending; None where a table of all that may would be too large, or takes longer than a search."""
    at = 0
    values = 0
    signatures = slot.shape[0] - 1
    outs = out[signatures]
    places = slot[signatures] * outs
    dense = places <= _DENSE_LIMIT and places <= 256 * (256 + inputs.shape[0])
    columns = np.zeros(2 * signatures, dtype=np.int64)
    marks = np.zeros(signatures + (places if dense else 0), dtype=np.uint8)
    counts: Written = columns
    longest: Written = counts[signatures:]
    present: Marks = marks
    seen: Marks = present[signatures:]
    for c in range(sig.shape[0]):
        s = sig[c]
        if s < 0 or s >= signatures:
            raise IndexError(NOT_THERE)
        counts[s] += 1
    for s in range(signatures):
        present[s] = counts[s] > 0
        values += counts[s] * (out[s + 1] - out[s])
    scratch: WrittenShorts = np.empty(2 * values, dtype=np.int32)
    maker: WrittenShorts = scratch[:values]  # of each value the call that makes it ...
    flat: WrittenShorts = scratch[values:]  # ... and its number among all outputs
    values = 0
    for c in range(sig.shape[0]):
        s, depth = sig[c], 0
        if at + slot[s + 1] - slot[s] > inputs.shape[0]:
            raise IndexError(NOT_THERE)
        for i in range(slot[s], slot[s + 1]):
            v = inputs[at] - earlier
            at += 1
            if v < -earlier or v >= values:
                raise IndexError(NOT_THERE)
            if v >= 0:
                if dense:
                    seen[i * outs + flat[v]] = 1
                if sig[maker[v]] == s and before[maker[v]] >= depth:
                    depth = before[maker[v]] + 1
        before[c] = depth
        if depth >= longest[s]:
            longest[s] = depth + 1
        for i in range(out[s], out[s + 1]):
            maker[values], flat[values] = c, i
            values += 1
    pairs = marks[signatures:].nonzero()[0] if dense else None
    return columns[:signatures], columns[signatures:], marks[:signatures].tobytes(), pairs


def _graph(columns: SignatureColumns, pairs: bytes) -> SignatureGraph:
    return SignatureGraph(columns, np.frombuffer(pairs, dtype=np.int64))


def _find_pairs(program: Program) -> np.ndarray:
    """The pairs of a program, by sorting those of its calls."""
    computed = program.inputs >= program.known
    output = program.output_of_value[program.inputs[computed] - program.known]
    arity = program.arity[program.sig]
    within = np.arange(len(program.inputs)) - np.repeat(program.input_offsets[: len(program)], arity)
    slots = np.repeat(program.columns.first_slot[program.sig], arity) + within
    return np.unique(slots[computed] * int(program.width.sum()) + output)


# -- gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Needs:
    """Per signature: gradients needed for each input, and whether its outputs carry gradients."""

    inputs: tuple[tuple[bool, ...], ...]
    outputs: np.ndarray  # bool [signatures' outputs, flat]
    feeds: tuple[np.ndarray, np.ndarray]  # pairs (flat slot, flat output): which output feeds which slot


def find_needs(
    program: Program,
    shared_needs: Sequence[bool],
    constant_needs: Mapping[int, bool],
    *,
    known_needs: np.ndarray | None = None,
) -> Needs:
    """shared_needs: a signature, whether any shared operand of it requires a gradient; constant_needs: a
    constant signature, whether any of its tensors does; known_needs: bool [program.known]."""
    facts = survey(program)
    early = early_needs(program, known_needs) or bytes(int(program.arity.sum()))
    present = facts.counts.nonzero()[0].tolist()
    begin = tuple(s for s in present if shared_needs[s] or constant_needs.get(s))
    return program.columns.fact(_spread_needs, *facts.graph.key, tuple(present), begin, early)


def early_needs(program: Program, known_needs: np.ndarray | None) -> bytes:
    """A byte an input slot of the signatures: whether it reads an early value with a gradient; b"" where none does."""
    if known_needs is None or not program.known:
        return b""
    first_slot = program.columns.first_slot
    slots = np.zeros(first_slot[len(first_slot) - 1], dtype=np.uint8)
    any_early = _mark_early(program.sig, first_slot, program.inputs, known_needs, program.known, slots)
    return slots.tobytes() if any_early else b""


def _mark_early(sig: Shorts, first: Ints, inputs: Ints, needs: Flags, earlier: Int, slots: Marks) -> bool:
    at = 0
    any_early = False
    if needs.shape[0] < earlier:
        raise IndexError(NOT_THERE)
    for c in range(sig.shape[0]):
        s = sig[c]
        if s < 0 or s >= first.shape[0] - 1 or at + first[s + 1] - first[s] > inputs.shape[0]:
            raise IndexError(NOT_THERE)
        for i in range(first[s], first[s + 1]):
            v = inputs[at]
            at += 1
            if v < 0:
                raise IndexError(NOT_THERE)
            if v < earlier and needs[v]:
                slots[i] = 1
                any_early = True
    return any_early


def _spread_needs(
    columns: SignatureColumns,
    slots_bytes: bytes,
    outs_bytes: bytes,
    present: tuple[int, ...],
    begin: tuple[int, ...],
    needs_bytes: bytes,
) -> Needs:
    """The needs of a signature graph, of which a model has few; `begin` are signatures with gradients of their
    own, `present` all that are called."""
    slots, outs = np.frombuffer(slots_bytes, dtype=np.int64), np.frombuffer(outs_bytes, dtype=np.int64)
    slot_needs = np.frombuffer(needs_bytes, dtype=bool).copy()
    signatures = columns.signatures
    first_slot, first_out = columns.first_slot, columns.first_output
    out_needs = np.zeros(int(columns.width.sum()), dtype=bool)
    owner = np.repeat(np.arange(len(signatures)), columns.arity)
    readers: dict[int, list[int]] = {}
    for slot, out in zip(slots.tolist(), outs.tolist(), strict=True):
        readers.setdefault(out, []).append(slot)
    beginning = set(begin)
    waiting = [s for s in present if s in beginning or slot_needs[first_slot[s] : first_slot[s + 1]].any()]
    done = set()
    while waiting:
        s = waiting.pop()
        signature = signatures[s]
        if s in done or not signature.modes.grad:
            continue
        done.add(s)
        for j, kind in enumerate(signature.outputs):
            if kind.differentiable:
                out = int(first_out[s]) + j
                out_needs[out] = True
                for slot in readers.get(out, ()):
                    slot_needs[slot] = True
                    waiting.append(int(owner[slot]))
    flags = slot_needs.tolist()
    inputs = tuple(
        tuple(
            flags[first_slot[s] + i] and signature.modes.grad and t.differentiable
            for i, t in enumerate(signature.inputs)
        )
        for s, signature in enumerate(signatures)
    )
    out_needs.setflags(write=False)
    return Needs(inputs, out_needs, (slots, outs))


def _wanted(columns: SignatureColumns, needs: Needs, reached_bytes: bytes) -> tuple[np.ndarray, np.ndarray]:
    """bool [signatures]: whose outputs reach one of these outputs (a byte each) by differentiable inputs; uint8
    [their inputs]: these inputs."""
    reached = np.frombuffer(reached_bytes, dtype=bool)
    slots, outs = needs.feeds
    owner_of_out = np.repeat(np.arange(len(columns.width)), columns.width).tolist()
    feeders: dict[int, list[int]] = {}
    for slot, out in zip(slots.tolist(), outs.tolist(), strict=True):
        feeders.setdefault(slot, []).append(out)
    wanted = np.zeros(len(columns.width), dtype=bool)
    waiting = [owner_of_out[o] for o in np.flatnonzero(reached & needs.outputs).tolist()]
    while waiting:
        s = waiting.pop()
        if wanted[s]:
            continue
        wanted[s] = True
        for i, need in enumerate(needs.inputs[s]):
            if need:
                feeding = feeders.get(int(columns.first_slot[s]) + i, ())
                waiting.extend(owner_of_out[o] for o in feeding if needs.outputs[o])
    wanted.setflags(write=False)
    through = np.array([need for of_inputs in needs.inputs for need in of_inputs], dtype=np.uint8)
    through *= np.repeat(wanted, columns.arity)
    return wanted, through


def find_wanted(
    phases: Sequence[tuple[Program, Needs]], results: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """uint8 [signatures] a phase: whose outputs reach, by differentiable inputs, one of the values `results`; uint8
    [values]: which values do. What was computed to be asked for alone reaches none."""
    last = phases[len(phases) - 1][0]
    marked = np.zeros(last.known + int(survey(last).counts @ last.width), dtype=np.uint8)
    if (results < 0).any():
        raise IndexError(NOT_THERE)
    marked[results.astype(np.int64, copy=False)] = 1
    wanted_of_phases = []
    for program, needs in reversed(phases):
        c = program.columns
        hit = np.zeros(len(c.output_types), dtype=np.uint8)
        _reach(program.sig, c.first_output, program.known, marked, hit)
        wanted, through = c.fact(_wanted, needs, hit.tobytes())
        leads = np.zeros(len(c.width), dtype=np.uint8)
        _mark_read(
            program.sig, c.first_output, c.first_slot, program.inputs, program.known, through, wanted, marked, leads,
        )  # fmt: skip
        wanted_of_phases.append(leads)
    wanted_of_phases.reverse()
    return wanted_of_phases, marked


def _reach(sig: Shorts, first: Ints, earlier: Int, marked: Marks, hit: Marks) -> None:
    """Mark the outputs whose values are marked."""
    v = earlier
    for c in range(sig.shape[0]):
        s = sig[c]
        if s < 0 or s >= first.shape[0] - 1 or v + first[s + 1] - first[s] > marked.shape[0]:
            raise IndexError(NOT_THERE)
        for i in range(first[s], first[s + 1]):
            hit[i] |= marked[v]
            v += 1


def _mark_read(
    sig: Shorts,
    first: Ints,
    slot: Ints,
    inputs: Ints,
    earlier: Int,
    through: Flags,
    wanted: Flags,
    marked: Marks,
    leads: Marks,
) -> None:
    """Mark the signatures of calls that lead to marked values, of those that are wanted, and what these calls read
    where gradients go through."""
    v, e, calls = earlier, inputs.shape[0], sig.shape[0]
    for c in range(calls):
        v += first[sig[c] + 1] - first[sig[c]]
    for c in range(calls):
        s = sig[calls - 1 - c]
        v -= first[s + 1] - first[s]
        e -= slot[s + 1] - slot[s]
        if e < 0:
            raise IndexError(NOT_THERE)
        count = 0
        for i in range(first[s + 1] - first[s]):
            count |= marked[v + i]
        if count:
            leads[s] = wanted[s]
            for i in range(e, e + slot[s + 1] - slot[s]):
                if not 0 <= inputs[i] < marked.shape[0]:
                    raise IndexError(NOT_THERE)
                if through[slot[s] + i - e]:
                    marked[inputs[i]] = 1
