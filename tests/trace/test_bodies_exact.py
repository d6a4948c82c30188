"""What a body asks, and what it does besides: right as in the loop, whether it is one operation or its parts."""

from __future__ import annotations

import os
import queue
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fxbatch
from tests.oracle import check_equal


class Sub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)


class Model(nn.Module):
    """Calls `self.sub` as the test says."""

    def __init__(self, sub: nn.Module, call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.sub, self.first, self.call = sub, nn.Linear(4, 4), call

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


def vectors(n: int = 5) -> list[torch.Tensor]:
    return list(torch.randn(n, 4))


def check(model: nn.Module) -> None:
    for _ in range(3):
        check_equal(model, vectors())


# A container or an object that is given to a submodule


class FillsDict(Sub):
    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        h = torch.tanh(self.l(x) + state["h"])
        state["h"] = h
        return h


class AddsKey(Sub):
    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        h = torch.tanh(self.l(x) + state.get("before", x))
        state["before"] = h
        return h


class DeletesItem(Sub):
    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        h = torch.tanh(self.l(x) + len(state))
        state.pop("h", None)
        return h


class Appends(Sub):
    def forward(self, x: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
        keys.append(self.l(x))
        return torch.stack(keys).mean(0)


class WritesItem(Sub):
    def forward(self, x: torch.Tensor, layers: list[list[torch.Tensor]]) -> torch.Tensor:
        layers[0][0] = torch.tanh(self.l(x) + layers[0][0])
        return layers[0][0] * 2


class SetsAttribute(Sub):
    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        state.h = torch.tanh(self.l(x) + state.h)
        return torch.sin(state.h)


def zeros() -> torch.Tensor:
    return torch.zeros(4)


GIVEN: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "dictionary that is written": (FillsDict, lambda: {"h": zeros()}),
    "dictionary that grows": (AddsKey, dict),
    "dictionary that shrinks": (DeletesItem, lambda: {"h": zeros()}),
    "list that grows": (Appends, list),
    "list in a list": (WritesItem, lambda: [[zeros()]]),
    "object": (SetsAttribute, lambda: SimpleNamespace(h=zeros())),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_submodule_is_given_and_changes(name: str) -> None:
    kind, make = GIVEN[name]

    def call(self: Any, x: torch.Tensor) -> torch.Tensor:
        state = make()
        return sum((self.sub(self.first(x) + i, state) for i in range(3)), torch.zeros(4))

    check(Model(kind(), call))


# What a submodule asks of its arguments


class AsksGradient(Sub):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.l(h) if h.requires_grad else self.l(h) + 1


class AsksFunction(Sub):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.l(h) if h.grad_fn is None else self.l(h) + 2


class AsksLeaf(Sub):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.l(h) * (2 if h.is_leaf else 1)


class AsksWhetherOne(Sub):
    def forward(self, q: torch.Tensor, k: torch.Tensor | None = None) -> torch.Tensor:
        k = q if k is None else k
        return self.l(q) if q is k else self.l(q) + self.l(k) + 1


class AsksNote(Sub):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.l(h) * (3 if hasattr(h, "note") else 1)


class AsksWeight(Sub):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.l(h) if self.l.weight.grad is None else self.l(h) + 2


def both(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.first(x)
    with torch.no_grad():
        without = self.first(x) * 2
    return self.sub(h) + self.sub(x) + self.sub(without)


def one_or_two(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, g = self.first(x), self.first(x)
    return self.sub(h, h) + self.sub(h, g) + self.sub(g)


def noted(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, g = self.first(x), self.first(x + 1)
    h.note = 1  # type: ignore[attr-defined]
    return self.sub(h) + self.sub(g)


ASKS: dict[str, tuple[type[nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "requires_grad": (AsksGradient, both),
    "grad_fn": (AsksFunction, both),
    "is_leaf": (AsksLeaf, both),
    "is": (AsksWhetherOne, one_or_two),
    "an attribute of a tensor": (AsksNote, noted),
    "the gradient of a weight": (AsksWeight, both),
}


@pytest.mark.parametrize("name", ASKS)
def test_what_a_submodule_asks(name: str) -> None:
    kind, call = ASKS[name]
    check(Model(kind(), call))


@pytest.mark.parametrize("name", ASKS)
def test_what_a_packed_forward_asks(name: str) -> None:
    kind, call = ASKS[name]
    model = Model(kind(), call)
    for _ in range(2):
        check_equal(model, [torch.randn(t, 4) for t in (3, 1, 5, 2)])


def test_attention_asks_whether_its_arguments_are_one() -> None:
    def call(self: Any, x: torch.Tensor) -> torch.Tensor:
        h, g = self.first(x)[None], self.first(x + 1)[None]
        parts = [self.sub(a, b, c, need_weights=False)[0] for a, b, c in ((h, h, h), (h, g, g), (h, g, h))]
        return torch.cat(parts).sum(0)

    check(Model(nn.MultiheadAttention(4, 2), call))


# What a body does besides


HEARD: queue.Queue[int] = queue.Queue()


class Warns(Sub):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("a word", stacklevel=1)
        return self.l(x)


class Puts(Sub):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        HEARD.put(1)
        return self.l(x)


class SetsEnvironment(Sub):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.environ["FXBATCH_TEST_CALLS"] = str(int(os.environ.get("FXBATCH_TEST_CALLS", "0")) + 1)
        return self.l(x)


class SetsOfSys(Sub):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.calls_counted = getattr(sys, "calls_counted", 0) + 1  # type: ignore[attr-defined]
        return self.l(x)


def _heard() -> int:
    count = HEARD.qsize()
    while not HEARD.empty():
        HEARD.get()
    return count


COUNTS: dict[str, tuple[type[nn.Module], Callable[[], int]]] = {
    "a queue": (Puts, _heard),
    "the environment": (SetsEnvironment, lambda: int(os.environ.pop("FXBATCH_TEST_CALLS", "0"))),
    "sys": (SetsOfSys, lambda: int(sys.__dict__.pop("calls_counted", 0))),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_a_body_does_is_done_once_a_call(name: str) -> None:
    kind, count = COUNTS[name]
    model = Model(kind(), lambda self, x: self.sub(self.first(x)))
    for _ in range(3):
        model(vectors(4))
        assert count() == 4


def test_a_body_that_warns_is_heard_each_time() -> None:
    model = Model(Warns(), lambda self, x: self.sub(self.first(x)))
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(vectors(4))
        assert len([w for w in caught if str(w.message) == "a word"]) == 4


# Parametrizations


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).t()


def test_a_cached_parametrization() -> None:
    sub = nn.Linear(4, 4)
    parametrize.register_parametrization(sub, "weight", Symmetric())
    model = Model(sub, lambda self, x: self.sub(self.sub(self.first(x))))
    check(model)
    for _ in range(2):
        xs = vectors()
        with parametrize.cached():
            with fxbatch.disabled():
                expected = torch.stack(model(xs))
            found = torch.stack(model(xs))
        torch.testing.assert_close(found, expected)
        for x in (found, expected):
            x.sum().backward()
            original = sub.parametrizations.weight.original  # type: ignore[union-attr]
            gradient, original.grad = original.grad, None  # type: ignore[union-attr]
            torch.testing.assert_close(gradient, gradients.setdefault(str(xs), gradient))
    check(model)


gradients: dict[str, Any] = {}


# Numbers that change between two calls


def test_numbers_that_a_forward_changes_between_calls() -> None:
    scale = 1.0

    class Scales(Sub):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.l(x) * scale * self.factor

    def call(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal scale
        out = torch.zeros(4)
        for i in range(3):
            scale, Scales.factor = float(i), 1.0 + i
            out = out + self.sub(self.first(x))
        return out

    check(Model(Scales(), call))
