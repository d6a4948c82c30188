"""An operation that can't be batched, run call by call on rows, with local autograd.

kernel = UnbatchedKernel(signature)
outputs, tape = kernel.forward(inputs, shared, input_needs=(True,), shared_needs=(True,))
input_grads, shared_grads = kernel.backward(tape, [grad_of_output])
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxbatch.codegen.body import devices_of, entered_modes
from fxbatch.errors import TraceError
from fxbatch.ir import Layout, Signature
from fxbatch.torch_private import run_backward

Tensors = list[torch.Tensor]
_NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"


@dataclass
class Tape:
    """What one step of an unbatched operation leaves for its backward: outputs and leaves, a row each."""

    outputs: list[Tensors] = field(default_factory=list)
    inputs: list[Tensors] = field(default_factory=list)
    shared: Tensors = field(default_factory=list)
    rows: int = 0


@dataclass(frozen=True, eq=False)
class UnbatchedKernel:
    """Runs `signature.run` once a row. Inputs are `[n, *shape]` each; results are stacked."""

    signature: Signature

    @property
    def layout(self) -> Layout:
        """Every input is a group of its own."""
        return Layout(tuple((i,) for i in range(len(self.signature.inputs))))

    def forward(
        self,
        groups: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        *,
        input_needs: Sequence[bool],
        shared_needs: Sequence[bool],
        n: int | None = None,
        outs: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Tensors, Tape | None]:
        """Outputs `[n, *shape]`; the tape, if anything needs gradients. Without inputs, `n` must be given.

        `outs`: memory that the outputs are written to. The groups' is the operation's to write to.
        """
        if n is None:
            n = len(groups[0])
        grad = self.signature.modes.grad and (any(input_needs) or any(shared_needs))
        try:
            tape = self._run(groups, shared, input_needs, shared_needs, n, grad)
            return self._stack(tape, outs), tape if grad else None
        except RuntimeError as error:
            if _NOT_DIFFERENTIABLE not in str(error):
                raise
        # Needs are those of all calls of a signature: an argument that takes no gradients needs none.
        input_needs = [need and self._takes_gradient(groups, shared, i) for i, need in enumerate(input_needs)]
        tape = self._run(groups, shared, input_needs, shared_needs, n, grad)
        return self._stack(tape, outs), tape if grad else None

    def _takes_gradient(self, groups: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], i: int) -> bool:
        """Whether the operation lets its input i require a gradient."""
        needs = [k == i for k in range(len(groups))]
        try:
            self._run([x[:1].clone() for x in groups], shared, needs, [False] * len(shared), 1, True)
        except RuntimeError as error:
            if _NOT_DIFFERENTIABLE not in str(error):
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
    ) -> Tape:
        tape = Tape(rows=n)
        if grad:
            tape.shared = [_leaf(x, need) for x, need in zip(shared, shared_needs, strict=True)]
        weights = tape.shared if grad else list(shared)
        with (
            entered_modes(self.signature.modes, self._devices, grad),
            self.signature.prepared(weights) as body,
        ):
            columns = [x.unbind(0) for x in groups]
            for row in range(n):
                inputs = [column[row] for column in columns]
                if grad:
                    inputs = [_leaf(x, need) for x, need in zip(inputs, input_needs, strict=True)]
                    tape.inputs.append(inputs)
                # copies, so that an operation may write to them, and finds them at the start of their memory
                tape.outputs.append(body([x.clone() for x in inputs] if grad or n > 1 else inputs))
        return tape

    @functools.cached_property
    def _devices(self) -> list[str]:
        return devices_of(self.signature)

    def _stack(self, tape: Tape, outs: Sequence[torch.Tensor] | None) -> Tensors:
        if not tape.outputs:
            return [torch.empty(0, *t.shape, dtype=t.dtype, device=t.device) for t in self.signature.outputs]
        self._check_types(tape)
        columns = zip(*tape.outputs, strict=True)
        if outs is None:
            return [torch.stack([x.detach() for x in column]) for column in columns]
        return [
            torch.stack([x.detach() for x in column], out=out)
            for column, out in zip(columns, outs, strict=True)
        ]

    def _check_types(self, tape: Tape) -> None:
        """What runs gives what was recorded: the shapes that PyTorch foretells are not always those it gives."""
        for outputs in tape.outputs:
            for i, (x, kind) in enumerate(zip(outputs, self.signature.outputs, strict=True)):
                if tuple(x.shape) != tuple(kind.shape) or x.dtype != kind.dtype:
                    raise TraceError(
                        f"{self.signature.name}: output {i} is {x.dtype}{list(x.shape)}, but PyTorch foretold "
                        f"{kind.dtype}{list(kind.shape)} (on fake tensors): call it on real tensors, outside"
                    )

    def backward(
        self, tape: Tape, grad_outputs: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the inputs, `[n, *shape]` or None, and of the shared operands, summed over rows."""
        ends: Tensors = []
        starts: list[torch.Tensor] = []
        for row, outputs in enumerate(tape.outputs):
            for out, grad in zip(outputs, grad_outputs, strict=True):
                if grad is not None and out.requires_grad:
                    ends.append(out)
                    starts.append(grad[row].clone())  # memory of its own: as_strided counts from its start
        leaves = [x for inputs in tape.inputs for x in inputs if x.requires_grad]
        wanted = [*leaves, *(x for x in tape.shared if x.requires_grad)]
        if ends and wanted:
            given = tuple(starts)
            found = iter(
                run_backward(tuple(ends), given, False, False, tuple(wanted), True, accumulate_grad=False)
            )
        else:
            found = iter(())
        by_row = [[next(found, None) if x.requires_grad else None for x in inputs] for inputs in tape.inputs]
        shared = [next(found, None) if x.requires_grad else None for x in tape.shared]
        columns = [
            _column([grads[i] for grads in by_row], tape, i) for i in range(len(self.signature.inputs))
        ]
        return columns, shared


def _column(grads: list[torch.Tensor | None], tape: Tape, index: int) -> torch.Tensor | None:
    if all(grad is None for grad in grads):
        return None
    rows = [
        torch.zeros_like(tape.inputs[row][index]) if grad is None else grad for row, grad in enumerate(grads)
    ]
    return torch.stack(rows)


def _leaf(x: torch.Tensor, need: bool) -> torch.Tensor:
    leaf = x.detach()
    if need and (x.is_floating_point() or x.is_complex()):
        leaf.requires_grad_()
    return leaf
