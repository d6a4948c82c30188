"""torch.func inside a forward: right, or refused with the user's line; never wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fxbatch
from fxbatch.errors import TraceError
from tests.oracle import check_equal


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4, bias=False))
        self.body = body

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.linear(x))


def weights(module: nn.Module, factor: Any) -> dict[str, torch.Tensor]:
    return {name: p * factor for name, p in module.named_parameters()}


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "values as weights": lambda s, v: functional_call(
        s.linear, {"weight": torch.outer(v, v), "bias": v.sin()}, (v,)
    ),
    "some of the weights": lambda s, v: functional_call(s.linear, {"bias": v.sin()}, (v,)),
    "not a tuple": lambda s, v: functional_call(s.linear, {"bias": v.sin()}, v),
    "weights of a module of modules": lambda s, v: functional_call(s.inner, weights(s.inner, v[0]), (v,)),
    "weights without values": lambda s, v: functional_call(s.linear, weights(s.linear, 2.0), (v,)),
    "no values at all": lambda s, v: (
        functional_call(s.linear, weights(s.linear, 2.0), (torch.ones_like(s.linear.bias),)) + v
    ),
    "a part that was met before": lambda s, v: (
        s.inner[0](v).sum() + functional_call(s.inner, {"0.bias": v[:3]}, (v,)) + s.inner[0](v).sum()
    ),
    "its own again afterwards": lambda s, v: functional_call(s.linear, {"bias": v}, (v,)) + s.linear(v),
}


@pytest.mark.parametrize("name", CALLS)
def test_functional_call(name: str) -> None:
    torch.manual_seed(0)
    check_equal(Model(CALLS[name]), torch.randn(5, 4))


def test_functional_call_is_batched() -> None:
    torch.manual_seed(0)
    found = fxbatch.explain(Model(CALLS["weights of a module of modules"]), torch.randn(16, 4))
    assert not found.unbatched
    assert found.launches_after <= 8 < found.launches_before


def test_nobody_waits_within_a_functional_call() -> None:
    """What ran then would find the weights that were given."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if y.sum() > 0 else -2 * y

    model = Model(lambda s, v: s.inner.linear(v) + functional_call(s.inner, {"linear.bias": v}, (v,)))
    model.inner = Branching()
    with pytest.raises(TraceError, match="within a functional_call of a Branching"):
        model(torch.randn(3, 4))


def test_functional_call_of_a_module_that_counts() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x) * self.calls

    model = Model(lambda s, v: s.inner.linear(v) + functional_call(s.inner, {"linear.bias": v}, (v,)))
    model.inner, x, found = Counting(), torch.randn(5, 4), []
    for run in (fxbatch.disabled(), contextlib.nullcontext()):
        model.inner.calls = 0
        with run:
            found.append((model(x), model.inner.calls))
    torch.testing.assert_close(found[1], found[0])


def test_functional_call_follows_the_mode() -> None:
    torch.manual_seed(0)

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.part = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return functional_call(self.part, {"0.bias": x}, (x,))

    model = Drop()
    x = torch.randn(4, 64)
    zeros = (model(x) == 0).float().mean().item()
    assert 0.3 < zeros < 0.7
    assert not (model(x)[0] == model(x)[0]).all(), "drawn anew"
    model.eval()
    assert not (model(x) == 0).any()
    check_equal(model, x)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda s, v: v.sum() + torch.func.grad(lambda y: y.sin().sum())(v).sum(),
    "jacrev": lambda s, v: torch.func.jacrev(torch.sin)(v).sum() + v,
    "jacfwd": lambda s, v: torch.func.jacfwd(torch.sin)(v).sum() + v,
    "vjp": lambda s, v: torch.func.vjp(torch.sin, v)[0],
    "vmap": lambda s, v: torch.func.vmap(lambda y: y * 2)(v),
    "vmap over a parameter": lambda s, v: torch.func.vmap(lambda w: w * v)(s.linear.weight).sum(0),
    "autograd.grad": lambda s, v: torch.autograd.grad(v.sin().sum(), v)[0],
    "autograd.backward": lambda s, v: torch.autograd.backward([v.sum()]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_of_values_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match=r"torch\.func|backward\(\).*test_transforms\.py") as caught:
        Model(REFUSED[name])(torch.randn(3, 4))
    assert "(test_transforms.py:" in str(caught.value)
    check_equal(Model(CALLS["some of the weights"]), torch.randn(2, 4))  # nothing is left behind


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).sum()


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(self.energy)(x)


def test_transforms_in_a_submodule_are_batched() -> None:
    """What the message advises."""

    class Motion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.force = nn.Linear(4, 4), Force()

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            for _ in range(2):
                x = x - 0.1 * self.force(x)
            return x

    torch.manual_seed(0)
    model = Motion()
    check_equal(model, torch.randn(3, 4))
    assert not fxbatch.explain(model, torch.randn(3, 4)).unbatched


class Words(nn.Module):
    """Known calls of a forward under a transform are learnt outside of it: look-ups, indices, layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 4), nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    @fxbatch.autobatch(backward="autograd")
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(words)[None])[0][0].mean(0))


def test_a_forward_of_layers_under_a_transform() -> None:
    torch.manual_seed(0)
    model, words = Words(), [torch.randint(20, (n,)) for n in (3, 1, 4)]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    square = lambda p: functional_call(model, p, (words,)).square().sum()  # noqa: E731
    found = torch.func.grad(square)(parameters)
    with fxbatch.disabled():
        expected = torch.func.grad(square)(parameters)
    torch.testing.assert_close(found, expected)
