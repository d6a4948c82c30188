"""Attributes that a forward sets again and again, `self.state = ...` at each step: noted once or twice, and right
where a call reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.trace.module_changes import ModuleChanges
from fxbatch.trace.recorded_calls import RecordedCalls
from tests.trace.made import check_state, linear, model

STEPS = 7


def stateful(self: Any, x: Tensor) -> Tensor:
    self.h = x
    for step in range(STEPS):
        self.before = self.h
        self.h = torch.tanh(self.l(self.h))
        self.seen = (step, self.h)
    return self.h + self.before


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.k = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.k


def read_from_the_first_call_on(self: Any, x: Tensor) -> Tensor:
    for k in range(3):
        x = self.s(x)
        self.s.k = k
    return x


def read_later(self: Any, x: Tensor) -> Tensor:
    for k in (5, 4, 3):  # nothing has read it yet
        self.s.k = k
    x = self.s(x)
    self.s.k = 2
    return self.s(x)


def becomes_a_module(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        self.part = x
    self.part = self.s
    x = self.part(x)
    self.part.k = 4
    x = self.part(x)
    del self.part
    return x


def taken_away_and_set(self: Any, x: Tensor) -> Tensor:
    for k in range(3):
        self.s.k = k + 1
        x = self.s(x)
        del self.s.k
        self.s.k = 2
    return self.s(x)


def xs(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4) for _ in range(count)]


@pytest.mark.parametrize(
    "forward",
    [stateful, read_from_the_first_call_on, read_later, becomes_a_module, taken_away_and_set],
    ids=lambda f: f.__name__,
)
def test_values_gradients_and_the_state_left_are_the_loops(forward: Callable[..., Any]) -> None:
    check_state(model(forward, {"adaptive": False}, l=linear, s=Scaled), xs(6), times=3)


def test_what_is_set_at_each_step_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    note = ModuleChanges.note

    def counted(self: ModuleChanges, module: nn.Module, name: str, *value: object) -> None:
        noted.append(name)
        note(self, module, name, *value)

    monkeypatch.setattr(ModuleChanges, "note", counted)
    made = model(stateful, {"adaptive": False}, l=linear)
    for count in (4, 64):
        noted.clear()
        made(xs(count))
        # Once more after the first call of a module, as it may read them.
        assert sorted(noted) == ["before", "before", "h", "h", "seen"]


class Counted(nn.Module):
    """A buffer that a forward adds to: the attribute is set to the tensor that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.steps += 1
        return x


def test_an_attribute_that_stays_what_it_is_makes_nobody_look_at_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[object] = []
    look = RecordedCalls.look_at_modules
    monkeypatch.setattr(RecordedCalls, "look_at_modules", lambda self: looked.append(self) or look(self))
    batched, xs = Counted(), list(torch.randn(6, 4))
    for _ in range(3):
        looked.clear()
        batched(xs)
    assert len(looked) <= 1
    assert batched.steps == 3 * 6 * 3
    again = batched(xs)
    with fxbatch.disabled():
        torch.testing.assert_close(again, batched(xs))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_a_hook_sets_before_each_call_are_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.normed = linear(), nn.utils.weight_norm(linear())

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.normed(torch.tanh(self.first(x)))

    forgotten: list[object] = []
    forget = RecordedCalls.forget_modules
    monkeypatch.setattr(RecordedCalls, "forget_modules", lambda self: forgotten.append(self) or forget(self))
    batched, xs = Normed(), list(torch.randn(6, 4))
    for _ in range(3):
        forgotten.clear()
        found = batched(xs)
    assert not forgotten
    with fxbatch.disabled():
        torch.testing.assert_close(found, batched(xs))
