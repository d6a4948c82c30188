"""Instances that wait for values don't see each other's state: what each finds, and what is left, is the loop's."""

from __future__ import annotations

import contextlib
import decimal
import io
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import TraceError
from fxbatch.trace.instances import changes_of, holds_what_is_shared
from tests.trace.made import check_state, instances, linear, model

LOCK = threading.Lock()
LOCAL = threading.local()
COUNTS = {"n": 0}


class Manager:
    """A context manager over state that all share."""

    depth = 0

    def __enter__(self) -> Manager:
        Manager.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        Manager.depth -= 1


class Stateful(nn.Module):
    """A submodule with a counter and a last value, traced through since it branches."""

    def __init__(self) -> None:
        super().__init__()
        self.l = linear()
        self.seen = 0
        self.last: Any = None

    def forward(self, x: Any) -> Any:
        self.seen += 1
        self.last = self.l(x)
        if self.last.sum() > 0:
            self.seen += 1
        y = self.last * self.seen
        self.last = None
        return y


def held(self: Any, x: Any) -> Any:
    self.h = self.l(x)
    if self.h.sum() > 0:
        self.h = self.h * 2
    y, self.h = self.h, None
    return y


def counted(self: Any, x: Any) -> Any:
    self.n += 1
    if self.l(x).sum() > 0:
        self.n += 1
    return self.l(x) * self.n


def counted_after_waits_of_different_numbers(self: Any, x: Any) -> Any:
    if self.l(x).sum() > 0:
        self.n += 1
        if self.l(x)[0] > 0:
            self.n += 2
    return self.l(x) * self.n


def logged(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.log.append(round(h.detach().sum().item(), 3))
    return h * len(self.log)


def tallied(self: Any, x: Any) -> Any:
    h = self.l(x)
    self.calls["n"] += 1
    if h.sum() > 0:
        h = h * 2
        self.calls["m"] += 1
    return h * self.calls["n"] * (1 + self.calls["m"])


def made_late(self: Any, x: Any) -> Any:
    if not hasattr(self, "c"):
        self.c = 0
    if self.l(x).sum() > 0:
        self.c = self.c + 1
    return self.l(x) * (1 + self.c)


def taken_away(self: Any, x: Any) -> Any:
    before = getattr(self, "mark", 5)
    self.mark = 1
    if self.l(x).sum() > 0:
        del self.mark
    return self.l(x) * before


def submodule(self: Any, x: Any) -> Any:
    return self.s(x) + self.s(x * 2)


def switched_off(self: Any, x: Any) -> Any:
    self.d.eval()
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    h = h * (2 if self.d.training else 3)
    self.d.train()
    return h


def locked(self: Any, x: Any) -> Any:
    h = self.l(x)
    with LOCK:
        if h.sum() > 0:
            h = h * 2
    return h


def acquired(self: Any, x: Any) -> Any:
    h = self.l(x)
    LOCK.acquire()
    try:
        if h.sum() > 0:
            h = h * 2
    finally:
        LOCK.release()
    return h


def thread_local(self: Any, x: Any) -> Any:
    h = self.l(x)
    LOCAL.v = float(x.sum())
    if h.sum() > 0:
        h = h * 2
    return h * LOCAL.v


def default_dtype(self: Any, x: Any) -> Any:
    h = self.l(x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if h.sum() > 0:
        h = h * 2
    z = torch.ones(4) * h
    torch.set_default_dtype(before)
    return z + torch.ones(4)


def redirected(self: Any, x: Any) -> Any:
    h = self.l(x)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print("a")
        if h.sum() > 0:
            print("b")
        print("c")
    return h * len(out.getvalue())


def warned(self: Any, x: Any) -> Any:
    h = self.l(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if h.sum() > 0:
            warnings.warn("positive", stacklevel=1)
        warnings.warn("any", stacklevel=1)
    return h * len(caught)


def rounded(self: Any, x: Any) -> Any:
    h = self.l(x)
    with decimal.localcontext() as context:
        context.prec = 2 if x[0] > 0 else 5
        if h.sum() > 0:
            h = h * 2
        third = float(decimal.Decimal(1) / decimal.Decimal(7))
    return h * third


def managed(self: Any, x: Any) -> Any:
    h = self.l(x)
    with torch.no_grad(), Manager():
        if h.sum() > 0:
            h = h * 2
        h = h * Manager.depth
    return h + self.l(x)


class State:
    """A plain object that a model holds, and that its forwards change."""

    def __init__(self) -> None:
        self.h: Any = None
        self.known = {"a": 1}
        self.last = types.SimpleNamespace()

    def __eq__(self, other: object) -> bool:  # the values are compared as results
        return isinstance(other, State) and self.known == other.known

    __hash__ = None  # type: ignore[assignment]

    def keep(self, h: Any) -> Any:
        self.h = h
        return h

    def look_up(self, word: str) -> int:
        return self.known[word]


def plain_object(self: Any, x: Any) -> Any:
    self.state.h = self.l(x)
    if self.state.h.sum() > 0:
        self.state.h = self.state.h * 2
    return self.state.h


def plain_object_by_another_name(self: Any, x: Any) -> Any:
    state = self.state
    state.h = self.l(x)
    return state.h * 2 if state.h.sum() > 0 else state.h


def plain_object_by_a_method(self: Any, x: Any) -> Any:
    h = self.state.keep(self.l(x))
    return self.state.h * 2 if h.sum() > 0 else self.state.h


def plain_object_within_another(self: Any, x: Any) -> Any:
    self.state.last.h = self.l(x)
    return self.state.last.h * 2 if self.state.last.h.sum() > 0 else self.state.last.h


def plain_object_that_is_read(self: Any, x: Any) -> Any:
    h = self.l(x) * self.state.look_up("a")
    return h * 2 if h.sum() > 0 else h


FORWARDS: dict[Callable[..., Any], dict[str, Any]] = {
    held: {"h": None}, counted: {"n": 0}, counted_after_waits_of_different_numbers: {"n": 0}, logged: {"log": list},
    tallied: {"calls": lambda: {"n": 0, "m": 0}}, made_late: {}, taken_away: {}, submodule: {"s": Stateful},
    switched_off: {"d": nn.Dropout}, locked: {}, acquired: {}, thread_local: {}, default_dtype: {}, redirected: {},
    warned: {}, rounded: {}, managed: {}, plain_object: {"state": State},
    plain_object_by_another_name: {"state": State},
    plain_object_by_a_method: {"state": State}, plain_object_within_another: {"state": State},
    plain_object_that_is_read: {"state": State},
}  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_values_gradients_and_the_state_left_are_the_loops(forward: Callable[..., Any]) -> None:
    check_state(model(forward, l=linear, **FORWARDS[forward]), instances(5))
    assert not LOCK.locked()
    assert nn.Module.__getattr__.__module__ == nn.Module.__module__  # as torch has it


def test_globals_that_the_code_changes() -> None:
    def forward(self: Any, x: Any) -> Any:
        COUNTS["n"] += 1
        h = self.l(x)
        if h.sum() > 0:
            COUNTS["n"] += 1
        return h * COUNTS["n"]

    made, xs = model(forward, l=linear), instances()
    COUNTS["n"] = 0
    with fxbatch.disabled():
        expected = made(xs)
    left, COUNTS["n"] = COUNTS["n"], 0
    torch.testing.assert_close(made(xs), expected)
    assert COUNTS["n"] == left
    hint = fxbatch.explain(made, xs).statistics.hint()
    assert "the code changes COUNTS" in hint


def test_state_of_its_own_still_batches() -> None:
    phases = fxbatch.explain(model(held, l=linear, h=None), instances(8)).statistics.phases
    assert len(phases) == 1
    assert phases[0].instances == 8


def _aliased(self: Any, x: Any) -> Any:
    log = self.log
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    log.append(1)
    return h * len(log)


def _by_name(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    setattr(self, "st" + "ate", h.sum().item())
    return h * self.state


def _leaks(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    torch.set_default_dtype(torch.float64)
    return h * torch.ones(4)


def _buffer(self: Any, x: Any) -> Any:
    self.q.b = self.q.b + 1
    return self.l(x) * self.q.b


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.zeros(4))


REFUSED = {_aliased: "Made.log is changed", _by_name: "Made.state is changed", _leaks: "the default dtype changed",
           _buffer: "Buffered.b is replaced"}  # fmt: skip


@pytest.fixture
def float32_by_default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float32_by_default")
@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_what_cannot_be_told_apart_is_refused(forward: Callable[..., Any]) -> None:
    made = model(forward, l=linear, log=list, state=0, q=Buffered)
    with pytest.raises(TraceError, match=REFUSED[forward]):
        made(instances())
    assert nn.Module.__getattr__.__module__ == nn.Module.__module__


def test_an_exception_leaves_what_the_finished_instances_left() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.n += 1
        if self.l(x).sum() > -1e9 and self.n == 3:
            raise ValueError("third")
        return self.l(x)

    made = model(forward, l=linear, n=0)
    with pytest.raises(ValueError, match="third"):
        made(instances())
    assert made.n in (2, 3)
    assert list(vars(made))[-1] != "n"  # attributes keep their order


def test_two_threads() -> None:
    made = [model(counted, l=linear, n=0) for _ in range(2)]
    xs = instances()  # made here: all threads draw from one generator
    threads = [threading.Thread(target=lambda m=m: [m(xs) for _ in range(3)]) for m in made]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    alone = model(counted, l=linear, n=0)
    for _ in range(3):
        alone(xs)
    assert [m.n for m in made] == [alone.n, alone.n]


def test_what_code_changes() -> None:
    def local(self: Any) -> Any:
        out: list[Any] = [0]
        out.append(self.vocabulary["x"])
        out[0] = COUNTS["n"]
        return out

    assert changes_of([held, counted, logged, tallied], []).names == {"h", "n", "log", "calls"}
    assert changes_of([local], []) == changes_of([], [])
    assert changes_of([thread_local], []).shared == "LOCAL (thread_local)"
    assert changes_of([], [Stateful()]).names == {"seen", "last"}


def test_plain_objects_that_code_changes() -> None:
    def shared(forward: Any) -> str:
        return changes_of([forward], [model(forward, l=linear, state=State)]).shared

    assert shared(plain_object) == "State.h"
    assert shared(plain_object_by_another_name) == "State.h"
    assert shared(plain_object_by_a_method) == "State.h (State.keep)"
    assert shared(plain_object_within_another) == "SimpleNamespace.h"
    assert shared(plain_object_that_is_read) == ""
    assert shared(held) == ""


def test_which_managers_hold_what_is_shared() -> None:
    here = lambda: holds_what_is_shared(sys._getframe(1))  # noqa: E731
    with torch.no_grad():
        assert not here()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(True):
        assert not here()
    with LOCK:
        assert here()
        with torch.no_grad():
            assert here()
    with (
        torch.no_grad(),
        torch.enable_grad(),
    ):
        assert not here()
    with torch.no_grad() if COUNTS else LOCK:  # which of them can't be told
        assert here()
    try:
        with LOCK:
            raise ValueError
    except ValueError:
        assert not here()
