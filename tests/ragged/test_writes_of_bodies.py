"""Writes in a body with sizes of its own: to what nothing else shows they are values, else the body is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fxbatch.ragged.check import check_against_body
from fxbatch.ragged.packed_function import PackedFunction
from fxbatch.ragged.symbolic import NoPackedForm

Tensors = list[torch.Tensor]


def to_a_view_alone(x: torch.Tensor) -> Tensors:
    y = (x * 2).t().unsqueeze(0)
    y.mul_(3)
    return [y, y.squeeze(0) + 1]


def to_energies(x: torch.Tensor) -> Tensors:
    """As attention does (`energies.squeeze(1).view(1, -1).masked_fill_(mask, -1e12)`)."""
    y = x.sum(1, keepdim=True).squeeze(1).view(x.shape[0], 1).transpose(0, 1)
    y = y.masked_fill_(x[:, 0] > 0.5, -1e12)
    return [torch.softmax(y, 1)]


def to_a_view_that_was_read(x: torch.Tensor) -> Tensors:
    y = (x * 2).t()
    z = y.mul(3)
    y.add_(1)
    return [y, z]


def to_a_part_of_a_split(x: torch.Tensor) -> Tensors:
    y, z = (x * 2).split([3, 5], 1)
    y.add_(1)
    return [y * 1, z * 1]


def to_what_dropout_leaves(x: torch.Tensor) -> Tensors:
    y = F.dropout(x * 2, 0.5, False)
    return [y.add_(1)]


def to_what_was_split(x: torch.Tensor) -> Tensors:
    y = x * 2
    z, _ = y.chunk(2, 1)
    z.add_(1)
    return [y]


def to_a_row_of_many(x: torch.Tensor) -> Tensors:
    y = x * 2
    y.unbind(1)[2].add_(1)
    return [y]


def to_what_was_seen_otherwise(x: torch.Tensor) -> Tensors:
    y = x * 2
    z = y.t()
    y.add_(1)
    return [z]


def to_a_view_of_what_is_read(x: torch.Tensor) -> Tensors:
    y = x * 2
    y.t().add_(1)
    return [y.sum(1)]


def to_the_input(x: torch.Tensor) -> Tensors:
    y = x.t()
    y.add_(1)
    return [y, x * 1]


@pytest.mark.parametrize(
    "body",
    [to_a_view_alone, to_energies, to_a_view_that_was_read, to_a_part_of_a_split, to_what_dropout_leaves],
)
def test_what_nothing_else_shows_is_written_to(body: Callable[..., Tensors]) -> None:
    function = PackedFunction.of(body, [torch.rand(5, 8)], [(0,)], [], flags_known=False, code=[body])
    check_against_body(function, [[torch.rand(n, 8) for n in (5, 3, 1, 7, 8)]], [])


@pytest.mark.parametrize(
    "body",
    [
        to_what_was_split, to_a_row_of_many, to_what_was_seen_otherwise, to_a_view_of_what_is_read,
        to_the_input,
    ],
)  # fmt: skip
def test_what_others_show_is_not(body: Callable[..., Tensors]) -> None:
    with pytest.raises(NoPackedForm, match="others share"):
        PackedFunction.of(body, [torch.rand(5, 8)], [(0,)], [], flags_known=False, code=[body])
