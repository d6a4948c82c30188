"""Suspension: instances that ask for values, exceptions, modes, threads."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import greenlet
import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import TraceError
from fxbatch.trace.minibatch import record_minibatch
from fxbatch.trace.table import SignatureTable
from tests.trace.oracle import check_equal, recorded
from tests.trace.reference import ReferenceExecution

LIN = nn.Linear(4, 4)
X = [torch.randn(4, generator=torch.Generator().manual_seed(k)) for k in range(6)]


def countdown(x: Any) -> Any:
    h, n = LIN(x), 0
    while h.abs().sum().item() > 0.1:
        h = h * 0.5 + 0.01 * LIN(h).tanh()
        n += 1
        if n > 8:
            break
    return h, n


def test_loops_on_values_advance_together() -> None:
    recording, execution = check_equal(countdown, X, list(LIN.parameters()))
    phases = recording.statistics.phases
    assert len(phases) <= 9
    assert phases[0].instances == len(X)
    assert len(execution.reads) == len(phases)
    assert list(recording.statistics.lines) == ["test_minibatch.py:27"]


def test_one_instance_runs_where_it_is_called() -> None:
    here, inside = greenlet.getcurrent(), contextvars.ContextVar("inside", default=0)
    ran: list[Any] = []

    def fn(x: Any) -> Any:
        ran.append(greenlet.getcurrent())
        inside.set(1)
        return countdown(x)

    got, recording, _ = recorded(fn, X[:1])
    assert got[0][1] == countdown(X[0])[1] and inside.get() == 0
    assert ran == [here] and {p.instances for p in recording.statistics.phases} == {1}
    recorded(fn, X[:2])
    assert here not in ran[1:]


def test_many_instances() -> None:
    _, recording, _ = recorded(countdown, [torch.randn(4) for _ in range(300)])
    assert len(recording.statistics.phases) <= 9


def test_values_that_a_phase_has_run_are_read_without_a_wait() -> None:
    def fn(x: Any) -> Any:
        return [v.item() for v in LIN(x)]

    got, recording, _ = recorded(fn, X)
    assert got == [LIN(x).tolist() for x in X]
    assert recording.statistics.suspensions == len(X), (
        "for the first of its numbers, which are all there then"
    )
    assert len(recording.statistics.phases) == 1 and not recording.statistics.hint()


def test_tensors_read_one_at_a_time_get_a_hint() -> None:
    def fn(x: Any) -> Any:
        y = LIN(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # elsewhere, what has run is at hand
            return [v.numpy(force=True).item() for v in y]

    got, recording, _ = recorded(fn, X)
    assert got == [LIN(x).tolist() for x in X]
    assert "tolist" in recording.statistics.hint()


def test_no_grad_does_not_leak_into_other_instances() -> None:
    def fn(pair: Any) -> Any:
        quiet, x = pair
        with torch.set_grad_enabled(not quiet):
            y = LIN(x)
            if y.sum().item() > -100:
                y = y * 2
            return y, torch.is_grad_enabled()

    pairs = [((i % 2 == 0, x),) for i, x in enumerate(X)]
    got, _, _ = recorded(fn, pairs)
    assert [g[0].requires_grad for g in got] == [i % 2 == 1 for i in range(len(X))]
    assert [g[1] for g in got] == [i % 2 == 1 for i in range(len(X))]
    assert torch.is_grad_enabled()


def test_autocast_does_not_leak() -> None:
    def fn(pair: Any) -> Any:
        on, x = pair
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            y = LIN(x)
            y.sum().item()
            return LIN(x).dtype, y.dtype

    got, _, _ = recorded(fn, [((i % 2 == 0, x),) for i, x in enumerate(X)])
    want = [(torch.bfloat16,) * 2 if i % 2 == 0 else (torch.float32,) * 2 for i in range(len(X))]
    assert got == want


def test_an_exception_names_the_instance_and_closes_the_others() -> None:
    closed: list[int] = []

    def fn(given: Any) -> Any:
        i, x, closed = given  # its own: a variable of all would be changed in turn
        try:
            LIN(x).sum().item()
            if i == 3:
                raise KeyError("mine")
            LIN(x).sum().item()
        finally:
            closed.append(i)

    with pytest.raises(KeyError) as caught:
        recorded(fn, [((i, x, closed),) for i, x in enumerate(X)])
    assert "instance 3" in caught.value.__notes__[0]
    assert sorted(closed) == list(range(len(X)))
    assert any(e.name == "fn" for e in caught.traceback)


def test_return_exceptions() -> None:
    def fn(pair: Any) -> Any:
        i, x = pair
        if LIN(x).sum().item() > -1000 and i == 1:
            raise KeyError("mine")
        return LIN(x)

    got, _, _ = recorded(fn, [((i, x),) for i, x in enumerate(X)], return_exceptions=True)
    assert isinstance(got[1], KeyError)
    torch.testing.assert_close(got[2], LIN(X[2]))


def test_keyboard_interrupt_closes_everything() -> None:
    closed: list[int] = []

    def fn(given: Any) -> Any:
        i, x, closed = given
        try:
            LIN(x).sum().item()
            raise KeyboardInterrupt
        finally:
            closed.append(i)

    with pytest.raises(KeyboardInterrupt):
        recorded(fn, [((i, x, closed),) for i, x in enumerate(X)])
    assert sorted(closed) == list(range(len(X)))


def test_recursion_error_is_told() -> None:
    def fn(x: Any) -> Any:
        return fn(x + LIN(x))

    with pytest.raises(RecursionError) as caught:
        recorded(fn, X[:1])
    assert any("setrecursionlimit" in note for note in caught.value.__notes__)


def test_context_variables_of_the_caller_are_seen() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def fn(x: Any) -> Any:
        before = variable.get()
        LIN(x).sum().item()
        return before, variable.get()

    got, _, _ = recorded(fn, X)
    assert got == [(7, 7)] * len(X)


def test_generators_and_context_managers_survive() -> None:
    def rows(x: Any) -> Any:
        for row in LIN(x):
            if row.item() > 0:
                yield row * 2

    check_equal(lambda x: list(rows(x)), X)


def test_threads_do_not_disturb_each_other() -> None:
    outcomes: list[Any] = []

    def run() -> None:
        got, _, _ = recorded(countdown, X)
        outcomes.append([g[1] for g in got])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert outcomes == [[countdown(x)[1] for x in X]] * 4


def test_a_value_of_another_minibatch_is_an_error() -> None:
    kept: list[Any] = []

    def fn(x: Any) -> Any:
        kept.append(LIN(x))
        return kept[0] + LIN(x)

    table = SignatureTable()
    recorded(fn, X[:2], table)
    with pytest.raises(TraceError, match="another minibatch"):
        recorded(fn, X[:1], table)


def test_reading_after_the_minibatch_is_an_error() -> None:
    kept: list[Any] = []
    recorded(lambda x: kept.append(LIN(x)), X[:1])
    with pytest.raises(TraceError, match="over"):
        kept[0].item()


def test_dropout_is_drawn_anew_and_random_is_noted() -> None:
    drop = nn.Dropout(0.5)
    execution = ReferenceExecution()
    recording = record_minibatch(
        lambda x: drop(LIN(x)), [((X[0],), {}) for _ in range(64)], SignatureTable(), execution
    )
    got = torch.stack(execution.results(recording))
    assert 0.3 < (got == 0).float().mean() < 0.7
    assert (got != got[0]).any()
    (dropout,) = [s for s in execution.programs[0].signatures if s.name == "dropout"]
    assert dropout.operation.random


def test_modules_that_instances_make_with_floats_of_their_own_build_nothing_for_each() -> None:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor, slope: float) -> torch.Tensor:
            return nn.LeakyReLU(slope)(self.cell(x))

    model = Made()
    x, slopes = list(torch.randn(60, 4)), [0.01 * i for i in range(60)]
    expected = torch.stack(
        [nn.functional.leaky_relu(model.cell(a), s) for a, s in zip(x, slopes, strict=True)]
    )
    torch.testing.assert_close(model(x, slopes), expected)
    report = fxbatch.explain(model, x, slopes)
    assert {row.operation for row in report.operations} == {"cell", "leaky_relu"}
    assert {row.reason for row in report.unbatched} == {"an argument of it keeps changing"}


KNOWN = [torch.randn(4) for _ in range(4)]
NUMBERS, IDS = {x: i for i, x in enumerate(KNOWN)}, {id(x): i for i, x in enumerate(KNOWN)}


def is_second(x: Any) -> bool:
    return x is KNOWN[1]


class AsksWhich(nn.Module):
    """What is done to a vector depends on which object it is."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.lin, self.asks = LIN, asks

    def which(self, x: Any) -> Any:
        return self.asks(x)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Any) -> Any:
        return self.lin(x.sin()) * (1 + float(self.which(x)))


class AsksItself(AsksWhich):
    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Any) -> Any:
        return self.lin(x) if x is KNOWN[0] or type(x) is not torch.Tensor else x * 2


class AsksBelow(AsksWhich):
    def which(self, x: Any) -> Any:
        return is_second(x) + NUMBERS.get(x, 9) + IDS.get(id(x), 9)


@pytest.mark.parametrize("kind", [AsksItself, AsksBelow])
def test_vectors_whose_identity_is_asked_for_keep_it(kind: type[AsksWhich]) -> None:
    model = kind(float)
    with fxbatch.disabled():
        wanted = model(KNOWN)
    torch.testing.assert_close(model(KNOWN), wanted)


def test_vectors_with_attributes_keep_them() -> None:
    xs = [x.clone() for x in KNOWN]
    for i, x in enumerate(xs):
        x.place = i  # type: ignore[attr-defined]
    model = AsksWhich(lambda x: getattr(x, "place", 9))
    with fxbatch.disabled():
        wanted = model(xs)
    torch.testing.assert_close(model(xs), wanted)


def test_identity_asked_for_in_a_submodule() -> None:
    class Part(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * IDS.get(id(x), 9)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.lin = Part(), LIN

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: Any) -> Any:
            return self.lin(self.part(x[0]))

    model, xs = Whole(), [[x] for x in KNOWN]
    with fxbatch.disabled():
        wanted = model(xs)
    torch.testing.assert_close(model(xs), wanted)
