"""Where batched first differs from the loop: the first call, in recorded order, whose outputs differ.

    first = first_difference(minibatch)        # None, or a Place: operation, instance, line
    parameter_users(minibatch, "cell.weight", model)

Each call is run alone, on the values that its inputs have alone, in the model's own precision and in
float64; the batched value is read from where the step put it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import fxbatch
from fxbatch.errors import FxbatchError
from fxbatch.ir import Program
from fxbatch.runtime.run import Run, kernel_modes
from fxbatch.views import constant_tensor
from fxbatch.viz.picture import is_constant

from .compare import difference


@dataclass(frozen=True, slots=True)
class Place:
    """The first call that differs."""

    signature: str
    instance: int
    location: str
    message: str

    def __str__(self) -> str:
        line = f" ({self.location})" if self.location else ""
        return f"{self.signature}, instance {self.instance}{line}: {self.message}"


def first_difference(minibatch: fxbatch.Minibatch) -> Place | None:
    """None where all calls agree, or where random operations forbid the comparison."""
    if any(o.signature.operation.random for o in minibatch.operations):
        return None
    run = Run(minibatch.engine, grad=False)
    alone: list[torch.Tensor] = []
    exact: list[torch.Tensor] = []
    for phase in minibatch.phases:
        # All values are results here: their rows are not used again by later steps.
        every = np.arange(phase.program.values)
        run.execute(dataclasses.replace(phase.program, outputs=every), phase.schedule)
        with torch.no_grad(), kernel_modes():
            found = _walk(phase.program, run, alone, exact)
        if found is not None:
            return found
    return None


def _walk(program: Program, run: Run, alone: list[torch.Tensor], exact: list[torch.Tensor]) -> Place | None:
    """The first call of this phase that differs; `alone` and `exact` grow by its values."""
    payload = {s: iter(p) for s, p in program.constants.items()}
    shared: dict[int, list[torch.Tensor]] = {}
    first, at, inputs = program.first_value.tolist(), program.input_offsets.tolist(), program.inputs.tolist()
    for c, s in enumerate(program.sig.tolist()):
        signature = program.signatures[s]
        if is_constant(signature):
            value = constant_tensor(signature, next(payload[s])).detach()
            alone.append(value)
            exact.append(_double(value))
            continue
        operands = shared.setdefault(s, [o.resolve().detach() for o in signature.shared])
        reads = inputs[at[c] : at[c + 1]]
        outputs = signature.run([alone[v] for v in reads], operands)
        try:
            precise = signature.run([exact[v] for v in reads], [_double(t) for t in operands])
        except (RuntimeError, FxbatchError):
            precise = outputs  # an operation that fixes its precision
        alone.extend(outputs)
        exact.extend(precise)
        for j, (own, true) in enumerate(zip(outputs, precise, strict=True)):
            batched = run.read([first[c] + j])[0]
            message, _ = difference(batched, own, true)
            if message:
                return Place(
                    str(signature), int(program.instance[c]), signature.location, f"output {j}: {message}"
                )
    return None


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.dtype.is_floating_point else t


def parameter_users(minibatch: fxbatch.Minibatch, name: str, module: Any) -> Sequence[str]:
    """Signatures that read the parameter of that name, in order of first use."""
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = module.get_parameter(name)
    return [
        f"{o.signature} ({o.signature.location})"
        for o in minibatch.operations
        if any((s.owner is owner and s.name == own) or s.resolve() is parameter for s in o.signature.shared)
    ]
