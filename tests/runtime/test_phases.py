"""What a phase asks again and what it does not: pointers, numbers that never varied, rows by a Python index."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.runtime.pointer_table import PointerTable
from fxbatch.runtime.run import Run
from fxbatch.trace import calls
from fxbatch.trace.state import _fast
from tests.oracle import check_equal
from tests.trace.made import value


class Steps(nn.Module):
    """A cell that runs until its count is over, and looks at a number after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.stop = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, count: int, slope: float) -> torch.Tensor:
        for _ in range(count):
            x = torch.tanh(self.cell(x)) * slope
            if self.stop(x).item() > 1e9:
                break
        return x[1] + x[-1]


def minibatch(slopes: list[float], count: int = 9) -> tuple[list[torch.Tensor], list[int], list[float]]:
    return list(torch.randn(len(slopes), 4)), [count + i for i in range(len(slopes))], slopes


@pytest.fixture
def batched() -> Any:
    torch.manual_seed(0)
    model = Steps()
    return fxbatch.autobatch(adaptive=False)(Steps.forward).__get__(model)


def test_pointers_are_asked_for_again_only_where_memory_moved(
    batched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    fill = PointerTable.fill

    def counted(self: PointerTable, *args: Any, **kwargs: Any) -> Any:
        filled.append(self)
        return fill(self, *args, **kwargs)

    with torch.no_grad():
        batched(*minibatch([0.5, 0.5]))
        monkeypatch.setattr(PointerTable, "fill", counted)
        batched(*minibatch([0.5, 0.5], 30))
    assert 0 < len(filled) < 15, "of 30 phases"


def test_parameters_that_move_between_phases_are_read_where_they_are() -> None:
    model = Steps()
    moved = torch.randn(4, 4)

    def forward(self: Steps, x: torch.Tensor) -> torch.Tensor:
        for k in range(4):
            x = torch.tanh(self.cell(x))
            if x.sum().item() > 1e9:
                break
            if k == 2:
                self.cell.weight.data = moved
        return x

    x, alone = torch.randn(4), copy.deepcopy(model)
    with torch.no_grad():
        found = fxbatch.autobatch(adaptive=False)(forward).__get__(model)([x])[0]
        torch.testing.assert_close(found, forward(alone, x))


def test_a_number_that_never_varied_is_recorded_in_c(batched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    lifted = calls.call_lifted

    def counted(recorder: Any, func: Any, args: Any) -> Any:
        asked.append(func)
        return lifted(recorder, func, args)

    monkeypatch.setattr(calls, "call_lifted", counted)
    batched(*minibatch([0.5, 0.5]))
    first = len(asked)
    batched(*minibatch([0.5, 0.5]))
    second = len(asked) - first
    batched(*minibatch([0.5, 0.5]))
    assert first and second <= 1 and len(asked) == first + second


@pytest.mark.parametrize("slopes", [[0.5, 0.5, 0.5], [0.5, 0.25, 0.5], [0.25, 0.25, 0.25], [0.5, 0.5, -0.0]])
def test_a_number_that_begins_to_vary(slopes: list[float]) -> None:
    """Values and gradients whatever numbers came before; from the minibatch after the first other number on, all calls
    share their steps again."""
    model = Steps()
    forward = fxbatch.autobatch(adaptive=False)(Steps.forward)

    class Batched(Steps):
        pass

    Batched.forward = forward  # type: ignore[method-assign]  # the decorated one
    made = Batched()
    made.load_state_dict(model.state_dict())
    for given in ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], slopes, slopes):
        check_equal(made, *minibatch(given, 3))


def test_calls_with_a_number_that_varies_share_their_steps_again() -> None:
    @fxbatch.autobatch(adaptive=False)
    def forward(x: torch.Tensor, slope: float) -> torch.Tensor:
        return (value(x) * slope).sum()

    xs = list(torch.randn(4, 3))
    for slopes in ([0.5] * 4, [0.5] * 4, [0.5, 0.25, 0.5, 0.75]):
        found = forward(xs, slopes)
        torch.testing.assert_close(
            found, torch.stack([(x * s).sum() for x, s in zip(xs, slopes, strict=True)])
        )
    launches = fxbatch.explain(forward, xs, [0.5, 0.5, 0.125, 0.5]).launches_after
    assert launches == 1


READS: dict[str, Any] = {
    "item": lambda v: v.item(), "tolist": lambda v: v.tolist(), "bool": bool, "int": int, "float": float,
    "index": operator.index, "list": lambda v: v.reshape(1).tolist(), "one": lambda v: v.reshape(1).item(),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool]
)
def test_numbers_that_were_computed_are_what_eager_gives(dtype: torch.dtype, read: str) -> None:
    def forward(x: torch.Tensor, log: list[str]) -> torch.Tensor:
        x = value(x)
        for _ in range(3):
            a, b = x.sum().to(dtype), (x + 1).prod().to(dtype)
            for v in (a, b, a):
                try:
                    found = READS[read](v)
                    log.append(f"{type(found).__name__} {found!r}")
                except (TypeError, RuntimeError, ValueError) as error:
                    log.append(type(error).__name__)
            x = x * 0.5
        return x

    given = [torch.tensor([0.5, -2.0, 7.25]), torch.zeros(3), torch.tensor([float("nan"), 1, 1])]
    given = given if dtype.is_floating_point else given[:2]
    logs: list[list[str]] = [[] for _ in given]
    alone: list[list[str]] = [[] for _ in given]
    fxbatch.autobatch(adaptive=False)(forward)(given, logs)
    for x, log in zip(given, alone, strict=True):
        forward(x, log)
    assert logs == alone


def test_numbers_that_were_computed_are_read_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    if _fast is None:
        pytest.skip("in C")

    @fxbatch.autobatch(adaptive=False)
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = value(x)
        for _ in range(5):
            scores = [(x * k).sum() for k in range(8)]
            best = max(s.item() for s in scores)
            x = x * (0.5 if best > 0 else 0.25)
        return x

    asked = []
    numbers = Run.numbers

    def counted(self: Run, values: Any) -> Any:
        asked.append(values)
        return numbers(self, values)

    monkeypatch.setattr(Run, "numbers", counted)
    forward(list(torch.randn(4, 3)))
    assert len(asked) == 5, "once a phase"


def test_what_was_computed_to_be_asked_for_alone_gives_its_parameters_no_gradients() -> None:
    """None and not zeros, as in the loop: an optimizer with momentum or decay would move them."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.used = nn.Linear(4, 4), nn.Linear(4, 4)
            self.start = nn.Parameter(torch.randn(4))

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, steps = torch.tanh(self.used(x)), 0
            waits = torch.tanh(self.start + torch.tanh(x))
            while waits.abs().max() > 0.3 and steps < 3:
                waits, steps = torch.tanh(self.asked(waits)) * 0.5, steps + 1
            return y if steps < 2 else torch.tanh(self.used(y))

    torch.manual_seed(0)
    model = Asks()
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == {"used.weight", "used.bias"}
    check_equal(model, torch.randn(6, 4))
