"""Softmax and weighted sums over segments, in loops: values and gradients against each instance by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fxbatch.ragged.lengths import LOOPED, Lengths, looped
from fxbatch.ragged.segment_loops import COMPILED

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 beside float64
SIZES = ([3, 1, 5], [0, 2, 0, 1], [1], [4, 4])
FORMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "softmax": (lambda size, x: size.softmax(x), lambda x: x.softmax(0), (2,)),
    "weighted": (lambda size, w, x: size.weighted(w, x), lambda w, x: (w * x).sum(0), (1, 3)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_as_each_instance(name: str, sizes: list[int]) -> None:
    packed, alone, widths = FORMS[name]
    size = Lengths(np.array(sizes), torch.device("cpu"))
    torch.manual_seed(0)
    given = [torch.randn(sum(sizes), width, requires_grad=True) for width in widths]
    exact = [x.detach().double().requires_grad_() for x in given]
    assert all(map(looped, given)) == COMPILED
    made = packed(size, *given)
    parts = [alone(*one) for one in zip(*[x.split(sizes) for x in exact], strict=True)]
    wanted = torch.cat(parts) if name == "softmax" else torch.stack(parts)
    torch.testing.assert_close(made.double(), wanted, equal_nan=True, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(packed(size, *given), made.detach(), equal_nan=True)

    weight = torch.linspace(0.5, 1.5, made.numel()).reshape(made.shape)
    first = torch.autograd.grad((made * weight).sum(), given, retain_graph=True)
    again = torch.autograd.grad((made * weight).sum(), given, create_graph=True)
    true = torch.autograd.grad((wanted * weight).sum(), exact, create_graph=True)
    for a, b, c in zip(first, again, true, strict=True):
        torch.testing.assert_close(a.double(), c, **CLOSE)
        torch.testing.assert_close(b.double(), c, **CLOSE)
    second = torch.autograd.grad(sum((g * g).sum() for g in again), given)  # type: ignore[arg-type]  # of tensors
    for a, b in zip(second, torch.autograd.grad(sum((g * g).sum() for g in true), exact), strict=True):  # type: ignore[arg-type]  # of tensors
        torch.testing.assert_close(a.double(), b, **CLOSE)


def test_rows_that_are_not_in_one_piece() -> None:
    size = Lengths(np.array([2, 3]), torch.device("cpu"))
    rows, weights = torch.randn(3, 5).t(), torch.rand(5, 2)[:, :1]
    parts = zip(weights.split([2, 3]), rows.split([2, 3]), strict=True)
    torch.testing.assert_close(size.weighted(weights, rows), torch.stack([(w * x).sum(0) for w, x in parts]))
    torch.testing.assert_close(size.softmax(rows), torch.cat([x.softmax(0) for x in rows.split([2, 3])]))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite(special: float) -> None:
    size = Lengths(np.array([2, 2, 1]), torch.device("cpu"))
    rows = torch.tensor([[special], [0.0], [1.0], [2.0], [special]])
    for made, alone in (
        (size.softmax(rows), lambda x: x.softmax(0)),
        (size.mean(rows), lambda x: x.mean(0, True)),
    ):
        wanted = torch.cat([alone(x) for x in rows.split([2, 2, 1])])
        torch.testing.assert_close(made, wanted, equal_nan=True)


def test_what_torch_does() -> None:
    """Other types, and rows that are worth all threads."""
    assert not looped(torch.zeros(3, 1, dtype=torch.float64))
    assert not looped(torch.zeros(LOOPED + 1, 1))
    assert not looped(torch.zeros(0, 1))
