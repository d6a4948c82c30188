"""Packed calls on what recorded calls compute: attention over the states of a cell, a loss over a stack of rows.

In: the program of a whole minibatch. Out: the program that is left. What packed calls need runs first, as a minibatch
of its own, a segment; its values are constants of the rest, through which gradients go.

    program = after_packed_calls(run, program)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fxbatch.ir import CONSTANT_KINDS, Program
from fxbatch.passes.select import calls_behind, number_segments, select_calls
from fxbatch.runtime.autograd import take_results
from fxbatch.runtime.packed_calls import PackedCalls
from fxbatch.runtime.run import Run
from fxbatch.trace.table import SignatureTable

MOST = 3  # segments: each is a run, which takes as long as several steps
STACKS = 4  # of an instance on average


def after_packed_calls(run: Run, program: Program) -> Program:
    """What is left of the program of a whole minibatch, renumbered, when its packed calls have run.

    The same object where it has none, or where they wait for one another too often.
    """
    table = run.table
    packed: PackedCalls | None = None if table is None else table.packed
    if table is None or packed is None or not packed.families or not len(program):
        return program
    program = run.resolved(program)
    waits = _packed_calls(packed, program)
    if program.known or not waits.any() or _stacks_too_often(packed, program):
        return program
    if _segment_of(program, waits).max() > MOST:
        return program
    before = len(program)
    while waits.any() and waits.sum() < before:  # some were packed
        before = waits.sum()
        program = _run_first(run, table, program, waits, waits & (_segment_of(program, waits) == 0))
        run.packed_values = {}  # values have other numbers now
        program = packed.resolve(table, program, {}, grad=run.grad)
        waits = _packed_calls(packed, program)
    return program


def _stacks_too_often(packed: PackedCalls, program: Program) -> bool:
    """Whether rows of many small tensors are stacked, as of the neighbours of each node: there sums over stacks are
    additions."""
    families = [packed.family_of(s) for s in program.signatures]
    stacks = np.array([f is not None and f.stacks for f in families])
    return int(stacks[program.sig].sum()) > STACKS * program.instances


def _packed_calls(packed: PackedCalls, program: Program) -> np.ndarray:
    """bool [calls]"""
    met = np.bincount(program.sig, minlength=len(program.signatures)).nonzero()[0].tolist()
    mine = [s for s in met if packed.family_of(program.signatures[s]) is not None]
    return np.isin(program.sig, mine)


def _segment_of(program: Program, packed: np.ndarray) -> np.ndarray:
    """int64 [calls]: after how many segments each call can run.

    A packed call runs at the end of the segment that gives it the last of its inputs, and so do packed calls that
    read it; what else reads it is in the next one.
    """
    columns = program.columns
    found = np.zeros(len(program), dtype=np.int64)
    number_segments(program.sig, columns.width, columns.arity, program.inputs, packed, found, program.known)
    return found


def _run_first(
    run: Run, table: SignatureTable, program: Program, packed: np.ndarray, first: np.ndarray
) -> Program:
    """The program with constants in place of what the first of its packed calls wait for."""
    maker = program.call_of_value
    segment = calls_behind(program, program.inputs[first[program.reader]]) & ~packed
    constant = np.array([s.operation.kind in CONSTANT_KINDS for s in program.signatures])[program.sig]
    ran = segment & ~constant
    read_later = np.concatenate([program.inputs[~ran[program.reader]], program.outputs])
    values = np.unique(read_later[ran[maker[read_later]]])
    tensors = _run(run, select_calls(dataclasses.replace(program, outputs=values), segment))
    return _with_constants(table, program, ran, values, tensors)


def _run(run: Run, program: Program) -> list[torch.Tensor]:
    """The outputs of a program, attached to autograd."""
    part = Run(run.planner, grad=run.grad)
    run.segments.append(part)
    renumber = part.finish(program, program.outputs)

    def attached(requests: list[np.ndarray]) -> Iterator[list[torch.Tensor]]:
        for values, rows in zip(requests, take_results(part, requests), strict=True):
            needs = part.value_needs[values].tolist()
            yield [row if need else row.detach() for row, need in zip(rows.unbind(0), needs, strict=True)]

    return part.by_type(renumber(program.outputs), attached)


def _with_constants(
    table: SignatureTable,
    program: Program,
    ran: np.ndarray,
    values: np.ndarray,
    tensors: Sequence[torch.Tensor],
) -> Program:
    """The program without the calls that ran (bool [calls]); these values of theirs are constants at its beginning."""
    kinds = program.type_of_value[values]
    of_kind = {k: table.constant(program.types[k]).sid for k in np.unique(kinds).tolist()}
    sids = [of_kind[k] for k in kinds.tolist()]
    kept = ~ran
    width, first = program.width[program.sig[kept]], program.first_value[:-1][kept]
    number = np.full(program.values, -1)
    number[values] = np.arange(len(values))
    old = np.repeat(first - (np.cumsum(width) - width), width) + np.arange(width.sum())
    number[old] = len(values) + np.arange(len(old))
    constants: dict[int, Sequence[object]] = dict(program.constants)
    for sid in dict.fromkeys(sids):
        made = [t for t, s in zip(tensors, sids, strict=True) if s == sid]
        constants[sid] = [*made, *constants.get(sid, ())]
    return dataclasses.replace(
        program,
        signatures=table.snapshot(),
        sig=np.concatenate([np.array(sids, dtype=program.sig.dtype), program.sig[kept]]),
        inputs=number[program.inputs[kept[program.reader]]],
        instance=np.concatenate([program.instance[program.call_of_value[values]], program.instance[kept]]),
        outputs=number[program.outputs],
        constants=constants,
    )
