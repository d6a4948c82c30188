"""Program -> Program in which the input projection of an LSTM cell is an operation of its own.

    v3, v4 = s2 lstm(v0, v1, v2)   ==>   v3 = s4 lstm.input(v0)
                                         v4, v5 = s5 lstm.step(v3, v1, v2)

    splitter = Splitter()          # one a decorated callable: it keeps the new Signatures
    program = splitter(program)

What a cell computes of its input does not wait for the recurrence, so it runs once for all time steps, as
one large product. Only cells that recur, and whose input does not come out of the same recurrence, are
split: elsewhere it would only add a launch.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fxbatch.ir import Operation, Program, Signature, Slot, Template, tensor_type
from fxbatch.passes.select_calls import reorder
from fxbatch.passes.survey import survey

_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def project(x: torch.Tensor, weight: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
    """What an LSTM cell computes of its input: `[4 * hidden]`."""
    return F.linear(x, weight, biases[0] + biases[1] if biases else None)


def step(p: torch.Tensor, h: torch.Tensor, c: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rest of the cell, from the projected input and the state."""
    i, f, g, o = (p + F.linear(h, weight)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class Splitter:
    """Splits recurrent LSTM cells; the same Signatures for the same cell."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.made: OrderedDict[Signature, tuple[Signature, Signature]] = OrderedDict()

    def __call__(self, program: Program) -> Program:
        """The program with split cells; the same object when none is split."""
        cells = [s for s, signature in enumerate(program.signatures) if splittable(signature)]
        cells = [s for s in cells if self._wins(program, s)] if cells else []
        for s in cells:
            program = self._split(program, s)
        return program

    def _wins(self, program: Program, s: int) -> bool:
        component, _, _ = survey(program).graph.components
        mine = np.flatnonzero(program.sig == s)
        if not len(mine):
            return False
        x, h = (program.inputs[program.input_offsets[mine] + i] for i in (0, 1))
        return bool(_from(program, h, component, s).any() and not _from(program, x, component, s).any())

    def _split(self, program: Program, s: int) -> Program:
        first, rest = self._signatures(program.signatures[s])
        signatures = (*program.signatures, first, rest)
        mine = np.flatnonzero(program.sig == s)
        calls, values = len(program), program.values
        at = program.input_offsets[mine]
        inputs = program.inputs.copy()
        x = inputs[at]
        inputs[at] = values + np.arange(len(mine))  # the projections' values, numbered after all others
        sig = program.sig.copy()
        sig[mine] = len(program.signatures) + 1
        position = np.concatenate([2 * np.arange(calls) + 1, 2 * mine])
        wide = dataclasses.replace(
            program,
            signatures=signatures,
            sig=np.concatenate([sig, np.full(len(mine), len(program.signatures))]).astype(np.int32),
            inputs=np.concatenate([inputs, x]),
            instance=np.concatenate([program.instance, program.instance[mine]]),
        )
        return reorder(wide, np.argsort(position, kind="stable"))

    def _signatures(self, cell: Signature) -> tuple[Signature, Signature]:
        if cell in self.made:
            return self.made[cell]
        shared = dict(zip(cell.shared_names, cell.shared, strict=True))
        x, h, c = cell.inputs
        wide = tensor_type((4 * h.shape[-1],), h.dtype, h.device)
        biases = [shared[n] for n in _NAMES[2:] if n in shared]
        parts = (
            ("input", project, (x,), (wide,), (shared["weight_ih"], *biases)),
            ("step", step, (wide, h, c), cell.outputs, (shared["weight_hh"],)),
        )
        made = []
        for name, target, inputs, outputs, operands in parts:
            slots = (
                *(Slot("input", i) for i in range(len(inputs))),
                *(Slot("shared", i) for i in range(len(operands))),
            )
            operation = Operation(f"{cell.name}.{name}", "function", target, "split off an LSTM cell")
            made.append(
                dataclasses.replace(
                    cell, operation=operation, inputs=inputs, outputs=outputs, shared=operands,
                    shared_names=(), arguments=Template.of((slots, {})),
                    result=Template.of(tuple(Slot("output", j) for j in range(len(outputs)))),
                )
            )  # fmt: skip
        self.made[cell] = (made[0], made[1])
        if len(self.made) > self.capacity:
            self.made.popitem(last=False)
        return self.made[cell]


def splittable(signature: Signature) -> bool:
    """An `nn.LSTMCell` called with one vector, its state given, its parameters as they come, no hooks."""
    op = signature.operation
    if isinstance(op.target, nn.Module) and (op.target._forward_hooks or op.target._forward_pre_hooks):
        return False
    if type(op.target) is not nn.LSTMCell or op.method is not None or signature.arguments is None:
        return False
    plain = Template.of(((Slot("input", 0), (Slot("input", 1), Slot("input", 2))), {}))
    names = _NAMES if op.target.bias else _NAMES[:2]
    return (
        signature.arguments == plain
        and sorted(signature.shared_names) == sorted(names)
        and len(signature.shared) == len(names)
        and all(len(t.shape) == 1 for t in signature.inputs)
        and not signature.modes.autocast
    )


def _from(program: Program, values: np.ndarray, component: np.ndarray, s: int) -> np.ndarray:
    """bool: whether each value is made inside the recurrence that signature s belongs to."""
    made = values >= program.known
    source = program.call_of_value[np.maximum(values - program.known, 0)]
    result: np.ndarray = made & (component[program.sig[source]] == component[s])
    return result
