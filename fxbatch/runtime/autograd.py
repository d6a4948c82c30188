"""Autograd enters once a minibatch: results of a Run as outputs of one torch.autograd.Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import GradientError
from fxbatch.runtime.backward import run_backward
from fxbatch.runtime.differentiable import DifferentiableRun
from fxbatch.runtime.operands import any_of, requiring_grad
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.run import Run, differentiable_constants
from fxbatch.torch_private import apply_outside_functorch, backward_keeps_graph, inside_functorch


class MinibatchFunction(torch.autograd.Function):
    """Forward hands out rows that the run has computed; backward walks the run's steps in reverse."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        requests: Sequence[np.ndarray],
        needs: Sequence[bool],
        ids: Sequence[int],
        *inputs: torch.Tensor,
    ) -> Any:
        ctx.run = run
        ctx.ids = ids
        ctx.requests = requests
        ctx.set_materialize_grads(False)
        outputs = tuple([run.rows(values) for values in requests])
        plain = [o for o, needed in zip(outputs, needs, strict=True) if not needed]
        ctx.mark_non_differentiable(*plain)
        ctx.save_for_backward(*inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise GradientError(
                'backward="compiled" gives first derivatives only; create_graph=True (double backward) needs '
                '@fxbatch.autobatch(backward="autograd")'
            )
        run: Run = ctx.run
        _ = ctx.saved_tensors  # raises torch's own error when the graph was freed or a tensor changed
        found = run_backward(run, ctx.requests, grads)
        if not backward_keeps_graph() and not run.lasting:
            run.release()
        return (None, None, None, None, *map(found.get, ctx.ids))


class LazyRun(Run):
    """A Run that values are taken from again and again, for `fxbatch.lazy`."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner, grad=torch.is_grad_enabled())
        self.lasting = True

    def materialise(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real tensors that carry gradients, by one autograd function."""
        return self.by_type(values, lambda requests: [t.unbind(0) for t in take_results(self, requests)])


def mixes_constants(run: Run) -> bool:
    """Whether some constants of a type require gradients and others don't."""
    return any(
        0 < len(differentiable_constants(phase.program, s)) < len(phase.program.constants[s])
        for phase in run.phases
        for s in phase.program.constants
    )


def differentiable_inputs(run: Run) -> dict[int, torch.Tensor]:
    """The tensors that gradients of a run go to, by id: shared operands and constants that require them."""
    if not run.grad:
        return {}
    found = requiring_grad(list(run.operands.values()))
    for phase in run.phases:
        for s in phase.program.constants:
            found.update((id(t), t) for t in differentiable_constants(phase.program, s))
    return found


def take_results(run: Run | DifferentiableRun, requests: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """One tensor [len(values), *shape] a request (values of one type), attached to autograd."""
    if not requests:
        return []
    if isinstance(run, DifferentiableRun):
        return [run.rows(values) for values in requests]
    inputs = differentiable_inputs(run)
    needs = [any_of(run.value_needs, values) for values in requests] if inputs else []
    if not any(needs):
        if not torch.is_grad_enabled():
            return [run.rows(values) for values in requests]
        with torch.no_grad():
            return [run.rows(values) for values in requests]
    if inside_functorch():
        raise GradientError(
            'torch.func transforms can\'t go through backward="compiled"; use '
            '@fxbatch.autobatch(backward="autograd")'
        )
    return list(
        apply_outside_functorch(MinibatchFunction, run, requests, needs, list(inputs), *inputs.values())
    )
