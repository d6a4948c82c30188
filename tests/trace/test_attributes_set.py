"""Attributes that a forward sets again and again, `self.state = ...` at each step: noted once or twice, and right
where a call reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxbatch
from fxbatch.errors import FxbatchError, InPlaceError
from fxbatch.runtime.strategy import AdaptiveSwitch
from fxbatch.trace.module_changes import ModuleChanges
from fxbatch.trace.recorded_calls import RecordedCalls
from tests.oracle import check_equal
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


class Gated(nn.Module):
    """An operation that reads a tensor which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = linear(), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gate


class Setting(nn.Module):
    def __init__(self, change: Callable[[Gated, Tensor], object], **options: Any) -> None:
        super().__init__()
        self.part, self.change = Gated(), change
        kind = type("Batched", (Setting,), {"forward": fxbatch.autobatch(**options)(Setting.forward)})
        self.__class__ = kind

    def forward(self, x: Tensor) -> Tensor:
        before = self.part(x)
        self.change(self.part, x)
        return before + self.part(x)  # type: ignore[no-any-return]


def test_a_tensor_that_each_instance_sets_is_its_own() -> None:
    """`self.part.gate = ...` before the call: all instances read the last one's."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.part = linear(), Gated()

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            self.part.gate = (x > 0).to(x.dtype).detach()
            return self.part(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]

    model = Masks()
    for _ in range(3):
        check_equal(model, xs(5))


CHANGES: dict[str, Callable[[Gated, Tensor], object]] = {
    "set": lambda part, x: setattr(part, "gate", x.detach()),
    "written": lambda part, x: part.gate.add_(x.detach()),
    "item": lambda part, x: part.gate.__setitem__(0, 2.0),
    "in the dictionary": lambda part, x: vars(part).update(gate=x.detach()),
    "deleted": lambda part, x: (delattr(part, "gate"), setattr(part, "gate", x.detach())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_that_an_operation_has_read_stays_what_it_was(change: Callable[..., object]) -> None:
    """Or it is an error: its calls run after the instances."""
    with pytest.raises(FxbatchError, match=r"Gated\.gate"):
        Setting(change, adaptive=False)(xs(5))


@pytest.mark.parametrize("change", ["set", "deleted"])
@pytest.mark.filterwarnings("ignore::fxbatch.errors.LoopWarning")
def test_then_the_loop_runs_where_it_can_be_put_back(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    model, batch = Setting(CHANGES[change]), xs(9)
    found = model(batch)
    model.part.gate = torch.ones(4)
    with fxbatch.disabled():
        torch.testing.assert_close(found, model(batch))


def test_where_it_can_not_be_put_back_that_is_an_error() -> None:
    with pytest.raises(InPlaceError, match=r"Gated\.gate"):
        Setting(CHANGES["written"])(xs(9))


class Leaves(nn.Module):
    """A part that leaves a tensor behind which nothing reads, as `init_hidden` of old code does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate(x + h))

    def begin(self) -> torch.Tensor:
        weight = next(self.parameters()).data
        self.ones = weight.new(1, 1).zero_() + 1.0
        return weight.new(1, 4).zero_()


class TwoLeave(nn.Module):
    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaves(), Leaves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.first.begin(), self.second.begin()
        y = self.second(self.first(x, states[0]), states[1])
        return y.sum() * self.first.ones.sum() if self.reads else y.sum()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_tensor_that_no_operation_reads_may_be_replaced(
    adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    for reads in (False, True):
        model = TwoLeave()
        model.reads = reads
        xs = [torch.randn(1, 4) for _ in range(8)]
        batched = fxbatch.autobatch(TwoLeave.forward, adaptive=adaptive)
        for _ in range(3):
            assert_close(batched(model, xs), torch.stack([model(x) for x in xs]))


class ReadsIt(Leaves):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate(x + h)) * self.ones


def test_a_refusal_puts_back_what_instances_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop can run the minibatch then: what was set is as it was, though operations had read it."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    model = TwoLeave()
    model.first, model.second = ReadsIt(), ReadsIt()
    xs = [torch.randn(1, 4) for _ in range(8)]
    batched = fxbatch.autobatch(TwoLeave.forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        for _ in range(3):
            assert_close(batched(model, xs), torch.stack([model(x) for x in xs]))
