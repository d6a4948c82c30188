"""An operation that can't be batched, run call by call on rows, with local autograd.

kernel = UnbatchedKernel(signature)
tape = kernel.taped(inputs, shared, input_needs=(True,), shared_needs=(True,), n=n, outs=outs)
input_grads, shared_grads = kernel.backward(tape, [grad_of_output])
outputs = kernel(n, *inputs, *shared)            # under the autograd of now
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from fxbatch.codegen.body import devices_of, entered_modes
from fxbatch.errors import TraceError
from fxbatch.ir import Modes, Signature
from fxbatch.signature import Body, tensors_of
from fxbatch.torch_private import any_autocast, run_backward, set_grad_enabled
from fxbatch.trace.operations import NOT_DIFFERENTIABLE

Tensors = list[torch.Tensor]
_TENSOR = {torch.Tensor}


class RowTape(NamedTuple):
    """The tensors that one step of an unbatched operation keeps for its backward: of each output and input, by row."""

    outputs: list[Sequence[torch.Tensor]]
    inputs: list[Sequence[torch.Tensor]]
    shared: Sequence[torch.Tensor]


class UnbatchedKernel(nn.Module):
    """Runs `signature`'s body once a row. Inputs are `[n, *shape]` each; results are stacked."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.signature = signature

    def forward(self, n: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs of inputs and shared operands, differentiable as often as the body is."""
        signature = self.signature
        inputs, shared = tensors[: len(signature.inputs)], tensors[len(signature.inputs) :]
        modes = replace(signature.modes, grad=signature.modes.grad and torch.is_grad_enabled())
        with contextlib.nullcontext() if _are_present(modes) else entered_modes(modes, self._devices):
            rows = [signature.run([x[i] for x in inputs], shared) for i in range(n)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def keeps_rows(self, grad: bool) -> bool:
        """Whether rows that it is given must be its own: it may write to them, or backward reads them."""
        return grad or self.signature.only_reads is None

    def bare(self, shared: Sequence[torch.Tensor]) -> Body | None:
        """The function to call with rows where they lie, in the modes of now but for autograd; None where it may write
        to them, or needs other modes."""
        modes = self.signature.modes
        other = modes.autocast or any_autocast() or torch.get_default_dtype() != modes.default_dtype
        return None if other else self.signature.direct(shared)

    def taped(
        self,
        groups: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        *,
        input_needs: Sequence[bool],
        shared_needs: Sequence[bool],
        n: int,
        outs: Sequence[torch.Tensor],
    ) -> RowTape | None:
        """The tape, if anything needs gradients. Outputs `[n, *shape]` are written to `outs`; see `keeps_rows` for the
        memory of groups."""
        grad = self.signature.modes.grad and (True in input_needs or True in shared_needs)
        before = torch.is_grad_enabled()
        try:
            tape = self._run(groups, shared, input_needs, shared_needs, n, grad, outs)
        except RuntimeError as error:
            if NOT_DIFFERENTIABLE not in str(error):
                raise
            # Needs are those of all calls of a signature: an argument that takes no gradients needs none.
            takes = [need and self._takes_gradient(groups, shared, i) for i, need in enumerate(input_needs)]
            tape = self._run(groups, shared, takes, shared_needs, n, grad, outs)
        finally:
            set_grad_enabled(before)
        return tape if grad else None

    def _takes_gradient(self, groups: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], i: int) -> bool:
        """Whether the operation lets its input i require a gradient."""
        needs = [k == i for k in range(len(groups))]
        try:
            row = [x[:1].detach().clone() for x in groups]
            self._run(row, shared, needs, [False] * len(shared), 1, True, [])
        except RuntimeError as error:
            if NOT_DIFFERENTIABLE not in str(error):
                raise
            return False
        return True

    def _run(
        self,
        groups: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        input_needs: Sequence[bool],
        shared_needs: Sequence[bool],
        n: int,
        grad: bool,
        outs: Sequence[torch.Tensor],
    ) -> RowTape:
        """Call the body with each row, and stack what it gives. It leaves autograd off."""
        signature = self.signature
        set_grad_enabled(False)
        inputs = [x.unbind(0) for x in groups]
        if grad:
            once = len(set(map(id, shared))) == len(shared)  # else each would be given the gradient of all
            shared = [_leaf(x, need, once) for x, need in zip(shared, shared_needs, strict=True)]
            for rows, kind, need in zip(inputs, signature.inputs, input_needs, strict=True):
                if need and kind.differentiable:
                    for row in rows:
                        row.requires_grad_()
        call = self.bare(shared)
        if call is None:
            with entered_modes(signature.modes, self._devices, grad), signature.prepared(shared) as call:
                # copies, so that an operation may write to them, and finds them at the start of their memory
                columns = [[x.clone() for x in rows] for rows in inputs] if grad or n > 1 else inputs
                outputs = self.called(call, columns, n)
        else:
            set_grad_enabled(grad)
            outputs = self.called(call, inputs, n)
        set_grad_enabled(False)
        for column, out in zip(outputs, outs, strict=False):
            torch.stack(column, out=out)
        return RowTape(outputs, inputs, shared)

    def called(
        self, call: Body, columns: Sequence[Sequence[torch.Tensor]], n: int
    ) -> list[Sequence[torch.Tensor]]:
        """By output, what n calls of it give, with a column an input; TraceError where types are not as recorded."""
        if not n:
            return []
        signature = self.signature
        results = [*map(call, *columns)] if columns else [call() for _ in range(n)]
        outputs: list[Sequence[torch.Tensor]] = [results]
        if len(signature.outputs) != 1 or set(map(type, results)) != _TENSOR:
            outputs = [*zip(*map(tensors_of, results), strict=True)]
        # What runs gives what was recorded: the shapes that PyTorch foretells are not always those it gives.
        for i, (column, kind) in enumerate(zip(outputs, signature.outputs, strict=True)):
            for x in column:
                if x.shape != kind.shape or x.dtype is not kind.dtype:
                    raise TraceError(
                        f"{signature.name}: output {i} is {x.dtype}{list(x.shape)}, but on fake tensors "
                        f"{kind.dtype}{list(kind.shape)}: call it on real tensors, outside of the forward"
                    )
        return outputs

    @functools.cached_property
    def _devices(self) -> list[str]:
        return devices_of(self.signature)

    def backward(
        self,
        tape: RowTape,
        grad_outputs: Sequence[torch.Tensor | Sequence[torch.Tensor | None] | None],
        *,
        keep: bool = False,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the inputs, `[n, *shape]` or None, and of the shared operands, summed over rows.

        grad_outputs: of each `[n, *shape]`, or row by row, with None for those that have none. keep: the tape may be
        asked again.
        """
        ends: Tensors = []
        starts: Tensors = []
        for column, grads in zip(tape.outputs, grad_outputs, strict=True):
            if grads is not None:
                of_rows = grads.unbind(0) if isinstance(grads, torch.Tensor) else grads
                rows = zip(column, of_rows, strict=True)
                needed = [(x, grad) for x, grad in rows if grad is not None and x.requires_grad]
                ends += [x for x, _ in needed]
                # memory of its own for code of others': as_strided counts from its start
                may_write = self.signature.only_reads is None
                starts += [grad.clone() if may_write else grad for _, grad in needed]
        wanted = [x for column in (*tape.inputs, tape.shared) for x in column if x.requires_grad]
        gradients = iter(())
        if ends and wanted:
            leaves, starting = tuple(wanted), tuple(starts)
            gradients = iter(
                run_backward(tuple(ends), starting, keep, False, leaves, True, accumulate_grad=False)
            )
        columns = [
            _column([next(gradients, None) if x.requires_grad else None for x in rows], rows)
            for rows in tape.inputs
        ]
        return columns, [next(gradients, None) if x.requires_grad else None for x in tape.shared]


def _are_present(modes: Modes) -> bool:
    """Whether these modes hold right now; entering them would only break a compiled graph."""
    casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    same = modes.grad == torch.is_grad_enabled() and modes.default_dtype == torch.get_default_dtype()
    return same and not casts and not modes.autocast


def _column(grads: list[torch.Tensor | None], rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if all(grad is None for grad in grads):
        return None
    return torch.stack([torch.zeros_like(x) if g is None else g for g, x in zip(grads, rows, strict=True)])


def _leaf(x: torch.Tensor, need: bool, once: bool) -> torch.Tensor:
    """A leaf with a tensor's memory: a parameter that is there once, and nobody listens to, is its own."""
    need = need and (x.is_floating_point() or x.is_complex())
    if once and x.requires_grad is need and x.is_leaf and x._backward_hooks is None:
        return x
    return x.detach().requires_grad_(need)
