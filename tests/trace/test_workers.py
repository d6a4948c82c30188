"""Greenlets that run instances are used again, and nothing of one minibatch is left in them for the next."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import greenlet
import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.trace.state import _fast, state, take_worker

pytestmark = pytest.mark.skipif(_fast is None, reason="greenlets are used again where C ends their stack")


class Seen:
    """What instances have seen: an object with slots, which is not looked into, so that they may wait."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[Any] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen = Seen()

    def look(self, x: Tensor) -> Any:
        return greenlet.getcurrent()

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Tensor) -> Tensor:
        found = self.look(x)
        self.seen.found.append(found)
        h = self.layer(x)
        return self.layer(h) if h.sum() > 0 else h


def rows(n: int) -> list[Tensor]:
    return [torch.randn(3) for _ in range(n)]


def test_one_is_used_again() -> None:
    model = Model()
    model(rows(3))
    before = set(map(id, model.seen.found))
    model.seen.found.clear()
    model(rows(3))
    assert set(map(id, model.seen.found)) <= before


def test_one_that_lies_higher_on_the_stack_is_not() -> None:
    main = greenlet.getcurrent()

    def made() -> greenlet.greenlet:
        worker = take_worker(main)
        worker.switch(lambda: None)
        return worker

    def deep(n: int) -> greenlet.greenlet:
        return made() if not n else next(map(deep, [n - 1]))

    state.idle.clear()
    high = made()
    assert made() is high
    low = deep(20)
    assert low is not high
    assert deep(20) is low
    assert made() is low


def test_what_torch_refuses_is_raised_in_one_that_is_used_again() -> None:
    class Wrong(Model):
        def look(self, x: Tensor) -> Any:
            return torch.zeros(2) @ torch.zeros(3)  # torch's exceptions look at all callers

    model = Wrong()
    Model()(rows(2))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size"):
            model(rows(2))


def test_variables_of_a_context_are_those_of_the_call() -> None:
    variable = contextvars.ContextVar("variable", default=0)

    class Counting(Model):
        def look(self, x: Tensor) -> Any:
            found = variable.get()
            variable.set(found + 1)
            return found

    model = Counting()
    for given in (0, 5):
        variable.set(given)
        model.seen.found.clear()
        model(rows(1))
        assert model.seen.found == [given]
    assert variable.get() == 5


@pytest.mark.parametrize("begin", [sys.settrace, sys.setprofile])
def test_who_traces_from_now_on_sees_the_forward(begin: Callable[[Any], None]) -> None:
    model, called = Model(), []
    model(rows(2))
    begin(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        model(rows(2))
    finally:
        begin(None)
    assert called.count("look") == 2


def test_an_idle_one_holds_nothing_and_ends_with_its_thread() -> None:
    class Held:
        pass

    alive: list[weakref.ref[Any]] = []

    def run() -> None:
        model, held = Model(), Held()
        variable: contextvars.ContextVar[Any] = contextvars.ContextVar("held")
        variable.set(held)
        model(rows(2))
        alive.extend([weakref.ref(model), weakref.ref(held)])

    context = contextvars.copy_context()
    context.run(run)
    del context
    gc.collect()
    assert [x() for x in alive] == [None, None]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    gc.collect()
    assert [x() for x in alive] == [None] * 4
