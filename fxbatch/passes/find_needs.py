"""Program -> Needs: which inputs of which signatures need gradients.

Decided on the signature graph (who feeds whom), not call by call: an input slot needs a gradient when any
value that it reads may carry one.

    >>> needs = find_needs(program, shared_needs, constant_needs)     # doctest: +SKIP
    >>> needs.inputs[3]                                                # doctest: +SKIP
    (True, True, False)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fxbatch.ir import Program, Signature, SignatureColumns, signature_columns
from fxbatch.passes.native import Native
from fxbatch.passes.survey import count_values, flat_slots, survey

_KEPT = 256  # sets of outputs that are reached


@dataclass(frozen=True)
class Needs:
    """Per signature: gradients needed for each input, and whether its outputs carry gradients."""

    inputs: tuple[tuple[bool, ...], ...]
    outputs: np.ndarray  # bool [signatures' outputs, flat]
    feeds: tuple[np.ndarray, np.ndarray]  # pairs (flat slot, flat output): which output feeds which slot
    _wanted: dict[bytes, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def wanted(self, columns: SignatureColumns, reached: bytes) -> np.ndarray:
        """bool [signatures]: whose outputs reach one of these outputs (a byte each) by differentiable inputs."""
        found = self._wanted.get(reached)
        if found is None:
            if len(self._wanted) >= _KEPT:
                self._wanted.clear()
            found = self._wanted[reached] = self._find_wanted(columns, np.frombuffer(reached, dtype=bool))
        return found

    def _find_wanted(self, columns: SignatureColumns, reached: np.ndarray) -> np.ndarray:
        slots, outs = self.feeds
        owner_of_out = np.repeat(np.arange(len(columns.width)), columns.width).tolist()
        feeders: dict[int, list[int]] = {}
        for slot, out in zip(slots.tolist(), outs.tolist(), strict=True):
            feeders.setdefault(slot, []).append(out)
        wanted = np.zeros(len(columns.width), dtype=bool)
        waiting = [owner_of_out[o] for o in np.flatnonzero(reached & self.outputs).tolist()]
        while waiting:
            s = waiting.pop()
            if wanted[s]:
                continue
            wanted[s] = True
            for i, need in enumerate(self.inputs[s]):
                if need:
                    found = feeders.get(int(columns.first_slot[s]) + i, ())
                    waiting.extend(owner_of_out[o] for o in found if self.outputs[o])
        wanted.setflags(write=False)
        return wanted


def find_needs(
    program: Program,
    shared_needs: Sequence[bool],
    constant_needs: Mapping[int, bool],
    *,
    known_needs: np.ndarray | None = None,
) -> Needs:
    """shared_needs: a signature, whether any shared operand of it requires a gradient; constant_needs: a
    constant signature, whether any of its tensors does; known_needs: bool [program.known]."""
    found = survey(program)
    early = early_needs(program, known_needs) or bytes(int(program.columns.first_slot[-1]))
    present = found.counts.nonzero()[0].tolist()
    begin = tuple(s for s in present if shared_needs[s] or constant_needs.get(s))
    return _spread(program.signatures, *found.graph.key, tuple(present), begin, early)


def early_needs(program: Program, known_needs: np.ndarray | None) -> bytes:
    """A byte an input slot of the signatures: whether it reads an early value with a gradient; b"" where none does."""
    if known_needs is None or not known_needs.any():
        return b""
    slot_needs = np.zeros(int(program.columns.first_slot[-1]), dtype=bool)
    early = program.inputs < program.known
    slot_needs[flat_slots(program)[early][known_needs[program.inputs[early]]]] = True
    return slot_needs.tobytes()


@functools.lru_cache(maxsize=256)
def _spread(
    signatures: tuple[Signature, ...],
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
    columns = signature_columns(signatures)
    first_slot, first_out = columns.first_slot, columns.first_output
    out_needs = np.zeros(int(first_out[-1]), dtype=bool)
    owner = np.repeat(np.arange(len(signatures)), columns.arity)
    readers: dict[int, list[int]] = {}
    for slot, out in zip(slots.tolist(), outs.tolist(), strict=True):
        readers.setdefault(out, []).append(slot)
    own = set(begin)
    waiting = [s for s in present if s in own or slot_needs[first_slot[s] : first_slot[s + 1]].any()]
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


def find_wanted(phases: Sequence[tuple[Program, Needs]], results: np.ndarray) -> list[np.ndarray]:
    """bool [signatures] a phase: whose outputs reach, by differentiable inputs, one of the values `results`, or what
    a later phase reads."""
    if Native.loops is None:
        reached = _find_reached(phases, results)
    else:
        columns = [(p.sig, p.columns.first_output, p.inputs, p.known) for p, _ in phases]
        reached = Native.loops.reached(columns, results, count_values(phases[-1][0]))
    return [needs.wanted(p.columns, outs) for (p, needs), outs in zip(phases, reached, strict=True)]


def _find_reached(phases: Sequence[tuple[Program, Needs]], results: np.ndarray) -> list[bytes]:
    """A byte an output of the signatures: whether a value of it is a result, or read by a later phase."""
    found = []
    for program, _ in reversed(phases):
        mine = results[results < program.values]
        hit = np.zeros(int(program.columns.first_output[-1]), dtype=bool)
        hit[program.output_of_value[mine[mine >= program.known] - program.known]] = True
        found.append(hit.tobytes())
        results = np.concatenate([mine[mine < program.known], program.inputs[program.inputs < program.known]])
    return found[::-1]
