"""Padded values whose padding takes no part in gradients.

In: tensors [n, longest, ...] or [n, longest, longest, ...]. Out: the same numbers; going back, what reaches padding is
dropped before it is added to anything. It would be zero times a derivative: zero, but NaN where that is infinite, as
padding that repeats a row of infinities gives.

    without_gradients(padded, [(rows, 1)])                # the gradient at padding along dimension 1 becomes zero
    multiplied(left, right, [(rows, -2)], [(rows, -1)])    # torch.matmul(left, right)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxbatch.ragged.lengths import Gradients, Lengths

# Sizes of the instances' own, and the dimensions that they are padded along.
Along = Sequence[tuple[Lengths, int]]


def _have_gradients(along: Along, *tensors: torch.Tensor) -> bool:
    """Whether there is padding, and gradients would reach it."""
    reached = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return reached and not all(size.uniform for size, _ in along)


def without_gradients(padded: torch.Tensor, along: Along) -> torch.Tensor:
    """The padded tensor itself; its padding has no gradient."""
    if not _have_gradients(along, padded):
        return padded
    return _WithoutGradients.apply(padded, along)


def expanded(value: torch.Tensor, along: Along, rank: int) -> torch.Tensor:
    """A value that broadcasts to [n, ...] of this rank, repeated along dimensions; or itself without gradients."""
    if not _have_gradients(along, value):
        return value
    value = value.reshape((1,) * (rank - value.dim()) + value.shape)
    shape = [along[0][0].n, *value.shape[1:]]
    for size, dim in along:
        shape[dim] = size.longest
    return without_gradients(value.expand(shape), along)


def multiplied(
    left: torch.Tensor, right: torch.Tensor, left_along: Along, right_along: Along
) -> torch.Tensor:
    """torch.matmul of [n, ..., rows, k] and [n, ..., k, columns], each padded along some dimensions, which are counted
    from the end."""
    if not _have_gradients((*left_along, *right_along), left, right):
        return torch.matmul(left, right)
    return _Product.apply(left, right, left_along, right_along)


def cleared(padded: torch.Tensor, along: Along) -> torch.Tensor:
    """The padded tensor with zeros as its padding."""
    for size, dim in along:
        padded = size.hide(padded, dim % padded.dim(), 0)
    return padded


class Padded(torch.autograd.function.FunctionCtx):
    """Along which dimensions a tensor is padded."""

    along: Along


class Factors(torch.autograd.function.FunctionCtx):
    """Two factors, and along which dimensions each is padded."""

    along: tuple[Along, Along]
    saved_tensors: tuple[torch.Tensor, torch.Tensor]
    needs_input_grad: tuple[bool, ...]


class _WithoutGradients(torch.autograd.Function):
    """The identity in forward; backward sets the gradients of padding to zero."""

    @staticmethod
    def forward(ctx: Padded, padded: torch.Tensor, along: Along) -> torch.Tensor:
        ctx.along = along
        return padded.view_as(padded)

    @staticmethod
    def backward(ctx: Padded, *gradients: torch.Tensor) -> Gradients:
        return cleared(gradients[0], ctx.along), None


class _Product(torch.autograd.Function):
    """A product; going back, padding is zero in both factors and in the gradient of the product."""

    @staticmethod
    def forward(
        ctx: Factors, left: torch.Tensor, right: torch.Tensor, left_along: Along, right_along: Along
    ) -> torch.Tensor:
        product = torch.matmul(left, right)
        # Autocast multiplies in its own type, and so does backward.
        ctx.save_for_backward(left.to(product.dtype), right.to(product.dtype))
        ctx.along = left_along, right_along
        return product

    @staticmethod
    def backward(ctx: Factors, *gradients: torch.Tensor) -> Gradients:
        left_along, right_along = ctx.along
        left, right = ctx.saved_tensors
        outer = [(size, dim) for size, dim in left_along if dim != -1]
        outer += [(size, dim) for size, dim in right_along if dim != -2]
        gradient = cleared(gradients[0], list(dict.fromkeys(outer)))
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = (gradient @ cleared(right, right_along).mT).sum_to_size(left.shape)
        if ctx.needs_input_grad[1]:
            of_right = (cleared(left, left_along).mT @ gradient).sum_to_size(right.shape)
        return of_left, of_right, None, None
