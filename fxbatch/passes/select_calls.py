"""Program -> Program with fewer calls: what a rewrite keeps, renumbered.

keep = np.array([True, True, False]); value_of = np.arange(program.values)
select_calls(program, keep, value_of)       # value_of[v]: the kept value that stands for v
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fxbatch.ir import Program
from fxbatch.passes.native import Native
from fxbatch.trace.integers import IntegerColumn


def select_calls(program: Program, keep: np.ndarray, value_of: np.ndarray | None = None) -> Program:
    """The calls where `keep` (bool [calls]) holds; every read value goes through `value_of` first.

    `program.outputs` keep their places: output i of the result stands for output i of the program, so two
    of them can be the same value. The signatures stay as they are, also those without calls.
    """
    if Native.loops is not None and value_of is None:
        return _select_in_c(program, keep)
    new_value = np.full(program.values, -1, dtype=np.int64)
    new_value[: program.known] = np.arange(program.known)
    kept_values = np.repeat(keep, program.width[program.sig])
    new_value[program.known :][kept_values] = program.known + np.arange(int(kept_values.sum()))
    if value_of is not None:
        new_value = new_value[value_of]
    entries = np.repeat(keep, program.arity[program.sig])
    return dataclasses.replace(
        program,
        sig=program.sig[keep],
        inputs=new_value[program.inputs[entries]],
        instance=program.instance[keep],
        outputs=new_value[program.outputs],
        constants=kept_payloads(program, program.constants, keep),
    )


def _select_in_c(program: Program, keep: np.ndarray) -> Program:
    sig, instance = np.empty_like(program.sig), np.empty_like(program.instance)
    inputs, outputs = np.empty_like(program.inputs), np.empty_like(program.outputs)
    calls, entries = Native.loops.keep_calls(
        program.sig, program.instance, program.inputs, program.outputs, program.width, program.arity, keep,
        sig, instance, inputs, outputs, program.known,
    )  # fmt: skip
    return dataclasses.replace(
        program,
        sig=sig[:calls],
        inputs=inputs[:entries],
        instance=instance[:calls],
        outputs=outputs,
        constants=kept_payloads(program, program.constants, keep),
    )


def kept_payloads(
    program: Program, payloads: Mapping[int, Sequence[Any]], keep: np.ndarray
) -> dict[int, Sequence[Any]]:
    """The constants of the calls where `keep` (bool [calls]) holds."""
    left = np.bincount(program.sig[keep], minlength=len(program.signatures)).tolist()
    kept: dict[int, Sequence[Any]] = {}
    for s, payload in payloads.items():
        if left[s] == len(payload):
            kept[s] = payload
            continue
        mine = keep[program.sig == s].nonzero()[0]
        kept[s] = (
            payload.take(mine) if isinstance(payload, IntegerColumn) else [payload[i] for i in mine.tolist()]
        )
    return kept


def reorder(program: Program, order: np.ndarray) -> Program:
    """The same calls in another order (int64 [calls]: which call comes first, second, ...), renumbered.

    Constants of one signature must keep their order among themselves.
    """
    arity, width = program.arity[program.sig[order]], program.width[program.sig[order]]
    first = np.empty(len(program), dtype=np.int64)
    first[order] = program.known + np.cumsum(width) - width
    new_value = np.arange(program.values)
    call = program.call_of_value
    new_value[program.known :] += first[call] - program.first_value[call]
    within = np.arange(int(arity.sum())) - np.repeat(np.cumsum(arity) - arity, arity)
    return dataclasses.replace(
        program,
        sig=program.sig[order],
        inputs=new_value[program.inputs[np.repeat(program.input_offsets[order], arity) + within]],
        instance=program.instance[order],
        outputs=new_value[program.outputs],
    )
