"""Autograd enters once a minibatch: results of a Run as outputs of one torch.autograd.Function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import GradientError
from fxbatch.passes.signature_graph import find_wanted
from fxbatch.runtime.backward import operands_behind, run_backward
from fxbatch.runtime.operands import any_of, requiring_grad
from fxbatch.runtime.run import Run, differentiable_constants
from fxbatch.torch_private import (
    apply_outside_functorch,
    backward_keeps_graph,
    inside_functorch,
    saved_tensors_are_packed,
)
from fxbatch.trace.constants import RowColumn, sources_of

NO_TRANSFORMS = (
    'torch.func transforms can\'t go through backward="compiled": use @fxbatch.autobatch(backward="autograd")'
)


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
    ) -> object:
        ctx.run = run
        ctx.ids = ids
        ctx.requests = requests
        ctx.set_materialize_grads(False)
        outputs = tuple([run.rows(values) for values in requests])
        plain = [o for o, needed in zip(outputs, needs, strict=True) if not needed]
        ctx.mark_non_differentiable(*plain)
        packed = saved_tensors_are_packed() is not None  # a checkpoint counts what is saved
        tensors: list[torch.Tensor] = [] if packed else run.read_back(run.phases)
        ctx.save_for_backward(*inputs, *tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> object:
        run: Run = ctx.run
        if torch.is_grad_enabled():
            reason = (
                'backward="compiled" gives first derivatives only; create_graph=True (double backward) needs '
                '@fxbatch.autobatch(backward="autograd")'
            )
            run.planner.refuse(reason)
            raise GradientError(reason)
        _ = ctx.saved_tensors  # raises torch's own error when the graph was freed or a tensor changed
        gradients = run_backward(run, ctx.requests, grads)
        if not backward_keeps_graph() and not run.lasting:
            run.release()
        return (None, None, None, None, *map(gradients.get, ctx.ids))


class RowsApart(torch.autograd.Function):
    """The rows of a result as tensors of their own. Those that got no gradient are noted: zeros that torch puts in
    their place would be NaN once they meet what is infinite."""

    @staticmethod
    def forward(ctx: Any, run: Run, values: np.ndarray, rows: torch.Tensor) -> object:
        ctx.run, ctx.values = run, values
        ctx.shape, ctx.dtype, ctx.device = rows.shape[1:], rows.dtype, rows.device
        ctx.set_materialize_grads(False)
        return rows.unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> object:
        without = [v for v, grad in zip(ctx.values.tolist(), grads, strict=True) if grad is None]
        ctx.run.left_out.difference_update(ctx.values.tolist())  # what a pass has left there that failed
        ctx.run.left_out.update(without)
        if without:
            zero = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
            grads = tuple(zero if grad is None else grad for grad in grads)
        return None, None, torch.stack(grads)  # type: ignore[arg-type]  # there is none without


def apart(run: Run, rows: torch.Tensor, values: np.ndarray) -> tuple[torch.Tensor, ...]:
    """The rows of the result of these values, each a tensor of its own."""
    if run.blocks is not None or not rows.requires_grad:
        return rows.unbind(0)
    return tuple(RowsApart.apply(run, values, rows))


def materialise(run: Run, values: Sequence[int]) -> list[torch.Tensor]:
    """The values as real tensors that carry gradients: by one autograd function a type."""
    if run.blocks is not None:
        return [run.rows(np.array([v], dtype=np.int64))[0] for v in values]

    def take(requests: list[np.ndarray]) -> list[tuple[torch.Tensor, ...]]:
        return [apart(run, t, v) for t, v in zip(take_results(run, requests), requests, strict=True)]

    return run.by_type(values, take)


def mixes_constants(run: Run) -> bool:
    """Whether some constants of a type require gradients and others don't."""
    return any(
        0 < len(differentiable_constants(phase.program, s)) < len(sources_of(payload))
        for phase in run.phases
        for s, payload in phase.program.constants.items()
    )


def differentiable_inputs(run: Run) -> dict[int, torch.Tensor]:
    """The tensors that gradients of a run go to, by id: shared operands and constants that require them."""
    if not run.grad:
        return {}
    tensors = requiring_grad(list(run.operands.values()))
    for phase in run.phases:
        for s in phase.program.constants:
            tensors.update((id(t), t) for t in differentiable_constants(phase.program, s))
    return tensors


def _has_hooks(t: torch.Tensor) -> bool:
    return t._backward_hooks is not None or t._post_accumulate_grad_hooks is not None


def _reached(run: Run, results: np.ndarray, inputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those of the inputs that lead to results: hooks of the others, as of a score that was asked for alone, would be
    called with None."""
    reached, reaching = find_wanted([(p.program, p.needs) for p in run.phases], results)
    operands = operands_behind(run.phases, run.memory, reached, reaching)
    for phase in run.phases:
        program = phase.program
        for s, payload in program.constants.items():
            marks = reaching[program.first_value[np.flatnonzero(program.sig == s)]]
            read = payload.take(np.flatnonzero(marks)).sources if isinstance(payload, RowColumn) else None
            operands.update(map(id, itertools.compress(payload, marks.tolist()) if read is None else read))
    return {key: t for key, t in inputs.items() if key in operands}


def take_results(run: Run, requests: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """One tensor [len(values), *shape] a request (values of one type), attached to autograd."""
    if not requests:
        return []
    if run.blocks is not None:
        return [run.rows(values) for values in requests]
    inputs = differentiable_inputs(run)
    if any(not t.is_leaf or _has_hooks(t) for t in inputs.values()):  # somebody may notice what was asked for
        hooked = {key for key, t in inputs.items() if _has_hooks(t)}
        reached = [_reached(run, values, inputs) for values in requests] if hooked else []
        if any(hooked & reached_values.keys() != hooked & reached[0].keys() for reached_values in reached):
            run.lasting = True  # each result goes backward by itself: a loss may depend on some of them alone
            pairs = zip(requests, reached, strict=True)
            return [_attached(run, [values], inputs_of)[0] for values, inputs_of in pairs]
        inputs = _reached(run, np.concatenate(requests), inputs)
    return _attached(run, requests, inputs)


def _attached(
    run: Run, requests: Sequence[np.ndarray], inputs: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors of `take_results`, by one autograd function of these inputs."""
    needs = [any_of(run.value_needs, values) for values in requests] if inputs else []
    if not any(needs):
        with torch.no_grad():
            return [run.rows(values) for values in requests]
    if inside_functorch():
        raise GradientError(NO_TRANSFORMS)
    return list(
        apply_outside_functorch(MinibatchFunction, run, requests, needs, list(inputs), *inputs.values())
    )
