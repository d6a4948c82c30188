"""Generated programs and minibatches: batched equals the loop, under every schedule and mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F

from fxbatch.trace.state import current_recorder
from tests.oracle import check_equal
from tests.trust.generated import Case, Instance, Marked, Step, cases, check, interpret, parts
from tests.trust.programs import model, vectors


@settings(max_examples=50)
@given(case=cases(max_instances=3, max_steps=5))
def test_generated_programs(case: Case) -> None:
    check(case)


def test_the_check_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that gives something else when it is recorded fails."""

    def wrong(self: object, instance: Instance) -> object:
        found = interpret(self, instance)
        return [x * 1.001 if current_recorder() is not None else x for x in found]

    made = model(wrong, parts(), out="list")
    step = Step("unary", "tanh")
    with pytest.raises(AssertionError):
        check_equal(made, [Instance([Step("module", "linear"), step], vectors(4), 0, [], [-1])])


# Shrunk failures, by name


def test_constants_of_two_phases_get_their_own_gradients() -> None:
    """A second constant of one type, met after a wait, took the gradient of the first."""

    def forward(self: Any, sample: Any) -> Any:
        x, y, late = sample
        a, b = self.marked(x, x)
        a[0].item()
        return torch.lerp(b, y, 0.3) if late else b

    pairs = [(*vectors(4, 4), True), (*vectors(4, 4), False), (*vectors(4, 4), True)]
    check_equal(model(forward, {"marked": Marked()}, out="list"), pairs)


def test_operations_without_gradients_write_none() -> None:
    """The gradient of `angle` of reals is zero whatever arrives: its rows were never written."""
    made = model(lambda self, x: torch.angle(self.a(x)) + x, parts={"a": torch.nn.Linear(4, 4)})
    for _ in range(3):
        check_equal(made, vectors(4, 4))


def test_call_by_call_operations_with_integer_outputs() -> None:
    """An output without gradients beside one with them, in an operation that can't be batched."""

    def forward(self: Any, x: Any) -> Any:
        samples = torch.full((1, 1, 3), 0.5, dtype=x.dtype)
        return F.fractional_max_pool3d_with_indices(
            self.a(x).expand(1, 4, 4, 4), 2, 2, _random_samples=samples
        )[0]

    check_equal(model(forward, {"a": torch.nn.Linear(4, 4)}), vectors(4, 4))


def test_positions_in_real_tensors_are_indices() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        return y[torch.tensor(1)] + y[:, torch.tensor(2)].sum()

    check_equal(model(forward, {"a": torch.nn.Linear(4, 4)}), [torch.randn(3, 4) for _ in range(2)])


def test_waiting_inside_torch_ops_ends_nothing() -> None:
    """A greenlet switch inside a binding of torch.ops ended the process."""

    def forward(self: Any, x: Any) -> Any:
        y = torch.sin(self.a(x))
        rows = torch.ops.aten.nonzero(y > 0)
        return y[rows[:, 0]].sum() + torch.ops.aten.masked_select(y, y < 0).sum()

    check_equal(model(forward, {"a": torch.nn.Linear(4, 4)}), vectors(4, 4, 4, 4))
