"""Gradients are eager's, also where they are not the derivative of what is computed: writes that autograd does not
see, custom functions, look-ups with padding, parameters that are frozen for a moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.errors import InPlaceError, TraceError
from tests.oracle import check_equal
from tests.trace.made import check, instances, linear, model

OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {}, "autograd": {"backward": "autograd"}, "unrolled": {"mode": "unrolled"},
}  # fmt: skip


class Doubled(torch.autograd.Function):
    """The gradient is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def _clamped(self: Any, h: Any, x: Any) -> Any:
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)
    return h


def _element(self: Any, h: Any, x: Any) -> Any:
    with torch.no_grad():
        h[0] = 0
    return h


def _masked(self: Any, h: Any, x: Any) -> Any:
    with torch.no_grad():
        h[h > 0] = 0
    return h


def _through_view(self: Any, h: Any, x: Any) -> Any:
    row = h[:2]
    with torch.no_grad():
        row.mul_(0)
    return torch.cat([row, h[2:]]) + h


def _below_view(self: Any, h: Any, x: Any) -> Any:
    row = h[:2]
    with torch.no_grad():
        h.mul_(0)
    return torch.cat([row, row]) + h


def _with_gradients(self: Any, h: Any, x: Any) -> Any:
    with torch.no_grad():
        h.copy_(self.k(x))
        h += 1
    h.add_(self.k(x))
    return h


def _detached(self: Any, h: Any, x: Any) -> Any:
    d = h.detach()
    d.copy_(self.k(x))
    return d + h


def _data(self: Any, h: Any, x: Any) -> Any:
    h.data.mul_(2)
    return h


def _copied(self: Any, h: Any, x: Any) -> Any:
    return copy.copy(h) + self.k(x)


def _custom(self: Any, h: Any, x: Any) -> Any:
    return Doubled.apply(h)


BODIES = (
    _clamped, _element, _masked, _through_view, _below_view, _with_gradients, _detached, _data, _copied, _custom,
)  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__.strip("_"))
def test_writes_that_autograd_does_not_see(body: Callable[..., Any], options: str) -> None:
    check(lambda self, x: self.k(body(self, self.l(x) * 1, x)), OPTIONS[options], l=linear, k=linear)


def _after_softmax(p: Any, x: Any) -> Any:
    p = p.softmax(-1)
    p.data.masked_fill_(x < 0, 1e-3)
    return p.log()


def _after_relu(p: Any, x: Any) -> Any:
    p = torch.relu(p)
    p.data[p.data < 0.1] = 0
    return p * p


def _after_a_product(p: Any, x: Any) -> Any:
    q = p[1:] * x[1:]
    p.data.mul_(0.5)
    return q + p[:1]


def _after_a_mask(p: Any, x: Any) -> Any:
    mask = p > 0
    q = p.masked_fill(mask, 2.0)
    mask.data.fill_(True)
    return q


def _of_scores(p: Any, x: Any) -> Any:
    p.data.masked_fill_(x < 0, -1e9)
    p.data[0] = p.data.max() / 2
    return p.softmax(-1) * x


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    "code",
    [_after_softmax, _after_relu, _after_a_product, _after_a_mask, _of_scores],
    ids=lambda f: f.__name__,
)
def test_what_is_saved_for_backward_is_not_written_to_unseen(code: Callable[..., Any]) -> None:
    xs = instances(12)
    for adaptive in (True, False):
        made = model(lambda self, x: code(self.l(x), x), {"adaptive": adaptive}, l=linear)
        if adaptive or code is _of_scores:
            for _ in range(3):
                check_equal(made, xs)
        else:
            with pytest.raises(InPlaceError, match="for its backward pass"):
                made(xs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("given", [{"padding_idx": 7}, {"scale_grad_by_freq": True}], ids=str)
def test_look_ups_with_their_own_backward(given: dict[str, Any], options: str) -> None:
    words = [torch.tensor([0, 1, 1, 7]), torch.tensor([7, 7, 2, 1]), torch.tensor([1, 1, 1, 1])]
    made = model(lambda self, x: self.e(x).sum(0), OPTIONS[options], e=lambda: nn.Embedding(9, 4, **given))
    check_equal(made, words)


@pytest.mark.parametrize("mode", ["autograd", "unrolled"])
def test_sparse_gradients_stay_sparse_under_autograd(mode: str) -> None:
    words = [torch.tensor([0, 1, 1]), torch.tensor([2, 2, 1])]
    made = model(lambda self, x: self.e(x).sum(0), OPTIONS[mode], e=lambda: nn.Embedding(4, 4, sparse=True))
    made(words).sum().backward()
    assert made.e.weight.grad.is_sparse
    assert made.e.weight.grad.to_dense()[:, 0].tolist() == [1, 3, 2, 0]


class Freezes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = linear()

    def forward(self, x: Any) -> Any:
        self.l.requires_grad_(False)
        y = self.l(x)
        self.l.requires_grad_(True)
        return y


def _toggled(self: Any, x: Any) -> Any:
    self.l.weight.requires_grad = False
    y = self.l(x)
    self.l.weight.requires_grad = True
    return y + self.k(x)


def _frozen_after(self: Any, x: Any) -> Any:
    y = self.l(x)
    self.l.requires_grad_(False)
    return y + self.k(x)


@pytest.mark.parametrize("forward", [Freezes.forward, _toggled, _frozen_after], ids=lambda f: f.__name__)
def test_parameters_frozen_between_their_calls_are_refused(forward: Callable[..., Any]) -> None:
    made = model(forward, l=linear, k=linear)
    with pytest.raises(TraceError, match=r"requires_grad of Linear.\w+ changes after .*test_eager_gradients"):
        made(instances())
    assert "requires_grad" not in vars(torch.Tensor)  # as torch has it


def test_parameters_frozen_before_their_calls_have_no_gradient() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.l.requires_grad_(False)
        return self.l(x) + self.k(x)

    made = model(forward, l=linear, k=linear)
    made(instances()).sum().backward()
    assert made.l.weight.grad is None
    assert made.k.weight.grad is not None


def test_a_tensor_that_an_instance_makes_may_require_gradients() -> None:
    check(lambda self, x: self.l(x) * torch.ones(4).requires_grad_(), l=linear)


def test_parameters_frozen_inside_a_submodule() -> None:
    made = model(lambda self, x: self.s(x) + self.k(x), s=Freezes, k=linear)
    try:
        made(instances()).sum().backward()
    except TraceError as error:
        assert "requires_grad of Linear" in str(error)
    else:
        assert made.s.l.weight.grad is None or not made.s.l.weight.grad.any()
