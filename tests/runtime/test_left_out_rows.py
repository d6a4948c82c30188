"""What instances compute and give up has no gradient, however infinite it is: as in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch import autobatch

BAD = 3  # the instance whose first try is infinite


def tries_logarithm(layer: nn.Module, x: Tensor) -> Tensor:
    """A score that is infinite is not taken."""
    h = layer(x)
    score = torch.log(h.square().sum() * x[0])
    return h.sum() if not torch.isfinite(score) else score


def tries_factor(layer: nn.Module, x: Tensor) -> Tensor:
    """As psd_safe_cholesky of Gaussian processes: a matrix that has no factor is given some jitter."""
    h = layer(x)
    kernel = torch.exp(-((h[:, None] - h[None]) ** 2)) * (x[0] != 0)
    factor, info = torch.linalg.cholesky_ex(kernel)
    if info.any():
        factor = torch.linalg.cholesky_ex(kernel + 0.1 * torch.eye(len(h)))[0]
    return factor.diagonal().log().sum()


class Reciprocal(torch.autograd.Function):
    """Runs call by call, as numpy computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 1 / torch.from_numpy(x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -grad / x / x


def tries_by_calls(layer: nn.Module, x: Tensor) -> Tensor:
    """A try of an operation that is not batched."""
    h = layer(x)
    y = Reciprocal.apply(h * x[0]).sum() + h.sum()
    return h.sum() if not torch.isfinite(y) else y


def tries_weights(layer: nn.Module, x: Tensor) -> Tensor:
    """The infinite value goes through a layer, whose weights have gradients of others."""
    h = layer(x)
    y = layer(h / x[0]).sum()
    return h.sum() if not torch.isfinite(y) else y


class Trying(nn.Module):
    """A layer and a way to use it."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        """One instance."""
        return self.way(self.layer, x)


def instances() -> list[Tensor]:
    """Eight, one of which begins with zero."""
    xs = [torch.rand(3) + 0.5 for _ in range(8)]
    xs[BAD][0] = 0
    return xs


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Those of all parameters."""
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


WAYS = [tries_logarithm, tries_factor, tries_by_calls, tries_weights]


@pytest.mark.parametrize("native", [True, False], ids=["native", "float64"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_try_that_is_given_up_has_no_gradient(way: Any, native: bool) -> None:
    torch.manual_seed(0)
    model, xs = Trying(way), instances()
    if not native:
        model, xs = model.double(), [x.double() for x in xs]
    batched = autobatch(adaptive=False)(Trying.forward)
    for _ in range(3):
        expected = gradients(model, torch.stack([model(x) for x in xs]).sum())
        assert all(torch.isfinite(g).all() for g in expected)
        torch.testing.assert_close(gradients(model, batched(model, xs).sum()), expected)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_graph_that_is_kept_gives_them_again(way: Any) -> None:
    torch.manual_seed(0)
    model, xs = Trying(way), instances()
    expected = gradients(model, torch.stack([model(x) for x in xs]).sum())
    loss = autobatch(adaptive=False)(Trying.forward)(model, xs).sum()
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("asks", [False, True])
def test_an_instance_that_the_loss_leaves_out(asks: bool) -> None:
    """Of a list of results: one is NaN, and the loss is of the others."""
    torch.manual_seed(0)

    class Scoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if asks and h.sum() > 100:
                return h.sum()
            return (self.layer(h / x[0]) * x[0]).sum()

    model, xs = Scoring(), instances()
    batched = autobatch(adaptive=False, out="list")(Scoring.forward)
    for _ in range(3):
        expected = gradients(model, sum((y for x in xs if torch.isfinite(y := model(x))), torch.zeros(())))
        results = batched(model, xs)
        assert not torch.isfinite(results[BAD])
        loss = sum((y for y in results if torch.isfinite(y)), torch.zeros(()))
        torch.testing.assert_close(gradients(model, loss), expected)


def test_what_is_infinite_in_the_loop_stays_so() -> None:
    torch.manual_seed(0)
    model, xs = (
        Trying(lambda layer, x: (layer(x) / x[0]).sum() if layer(x).sum() < 100 else x.sum()),
        instances(),
    )
    loss = autobatch(adaptive=False)(Trying.forward)(model, xs).sum()
    assert not all(torch.isfinite(g).all() for g in gradients(model, loss))


def test_a_backward_pass_that_fails_leaves_nothing_out_of_the_next() -> None:
    torch.manual_seed(0)
    model, xs = Trying(lambda layer, x: torch.tanh(layer(x)).sum()), instances()
    results = autobatch(adaptive=False, out="list")(Trying.forward)(model, xs)
    with pytest.raises(fxbatch.GradientError):
        torch.autograd.grad(results[0], list(model.parameters()), create_graph=True)
    torch.testing.assert_close(gradients(model, results[1]), gradients(model, model(xs[1])))
