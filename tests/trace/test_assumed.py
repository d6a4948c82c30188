"""Tests that only raise, as `torch.distributions` checks arguments: no instance waits, and the error is the loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Normal

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch, Trial
from fxbatch.trace.minibatch import Turns
from tests.trace.asserting import Asserts, Falls, Takes, WritesAfter


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile turns them off for the process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


class Policy(nn.Module):
    """Log-probability and entropy of actions, step by step, as policy gradients have them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.scale = nn.GRUCell(3, 4), nn.Linear(4, 5), nn.Linear(4, 1)
        self.shift = 0.0

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h, loss = x.new_zeros(1, 4), x.new_zeros(())
        for row, action in zip(x, actions, strict=True):
            h = self.cell(row.unsqueeze(0), h)
            chosen = Categorical(probs=self.head(h).softmax(-1) + self.shift)
            noise = Normal(self.scale(h), self.scale(h).exp() * width)
            loss = loss - chosen.log_prob(torch.tensor([action])).sum() - 0.1 * chosen.entropy().sum()
            loss = loss - noise.log_prob(row[0]).sum()
        return loss


def minibatch(widths: list[float]) -> tuple[list[torch.Tensor], list[list[int]], list[float]]:
    xs = [torch.randn(2 + i % 3, 3) for i in range(len(widths))]
    return xs, [[(i + k) % 5 for k in range(len(x))] for i, x in enumerate(xs)], widths


def waits(model: nn.Module, given: Any) -> tuple[torch.Tensor, int]:
    """Results of a batched call, and how many phases it took."""
    found: list[int] = []
    before = Turns._answer

    def counted(self: Turns) -> None:
        found.append(1)
        before(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "_answer", counted)
        return fxbatch.autobatch(type(model).forward, adaptive=False)(model, *given), len(found)


def test_no_instance_waits_for_a_check() -> None:
    model = Policy()
    given = minibatch([1.0, 0.5, 2.0, 1.5])
    loss, count = waits(model, given)
    assert count == 0
    loss.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected = torch.stack([model(*x) for x in zip(*given, strict=True)])
    expected.sum().backward()
    torch.testing.assert_close(loss, expected)
    for found, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_check_that_fails_is_the_loops_error(
    adaptive: bool, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    model = Policy()
    good, bad = minibatch([1.0, 0.5, 2.0]), minibatch([1.0, -0.5, 2.0])
    call = fxbatch.autobatch(Policy.forward, adaptive=adaptive)
    with torch.set_grad_enabled(grad):
        with pytest.raises(ValueError, match=r"scale.*to satisfy the constraint"):
            [model(*x) for x in zip(*bad, strict=True)]
        with pytest.raises(ValueError, match=r"scale.*to satisfy the constraint"):
            call(model, *bad)
        found = call(model, *good)
        torch.testing.assert_close(found, torch.stack([model(*x) for x in zip(*good, strict=True)]))


class Catches(Policy):
    """Goes on where a check fails, as the loop does; or fails otherwise before the check is looked at."""

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        try:
            return super().forward(x, actions, width)
        except ValueError:
            return x.sum()


class FailsLater(Policy):
    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        loss = super().forward(x, actions, width)
        return loss * {1.0: 1.0, 2.0: 2.0}[width]


def test_a_check_that_fails_may_be_caught() -> None:
    model, given = Catches(), minibatch([1.0, -1.0, 2.0])
    found, _ = waits(model, given)
    torch.testing.assert_close(found, torch.stack([model(*x) for x in zip(*given, strict=True)]))


def test_a_check_comes_before_what_fails_later() -> None:
    with pytest.raises(ValueError, match="scale"):
        waits(FailsLater(), minibatch([1.0, -1.0, 2.0]))
    with pytest.raises(KeyError):
        waits(FailsLater(), minibatch([1.0, 3.0, 2.0]))


def test_checks_are_looked_at_where_an_instance_waits() -> None:
    class Acts(Policy):
        def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
            h, taken = x.new_zeros(1, 4), []
            for row in x:
                h = self.cell(row.unsqueeze(0), h)
                best = Categorical(logits=self.head(h) * width).probs.argmax()
                taken.append(int(best))
                h = h * (1.0 + taken[-1]) + Normal(h, h.abs() + width).mean
            return torch.tensor(taken).sum()

    with torch.no_grad():
        model, given = Acts(), minibatch([1.0, 0.5, 2.0])
        found, count = waits(model, given)
        assert torch.equal(found, torch.stack([model(*x) for x in zip(*given, strict=True)]))
        assert count == 4, "of the best ones of the longest"
        with pytest.raises(ValueError, match="scale"):
            waits(model, minibatch([1.0, -9.0, 2.0]))


def test_asserts_are_not_waited_for() -> None:
    model, given = Asserts(), minibatch([1.0, 0.5, 2.0])
    found, count = waits(model, given)
    torch.testing.assert_close(found, torch.stack([model(*x) for x in zip(*given, strict=True)]))
    assert count == 0
    with pytest.raises(AssertionError, match="numbers, not"):
        waits(model, minibatch([1.0, float("nan"), 2.0]))


def test_what_users_raise_is_waited_for() -> None:
    model, given = Asserts(), minibatch([1.0, 0.5, 2.0])
    model.ends = True
    found, count = waits(model, given)
    torch.testing.assert_close(found, torch.stack([model(*x) for x in zip(*given, strict=True)]))
    assert count >= 3


def test_a_test_is_of_what_its_value_was() -> None:
    model, given = WritesAfter(), minibatch([1.0, 0.5, 2.0])
    found, count = waits(model, given)
    torch.testing.assert_close(found, torch.stack([model(*x) for x in zip(*given, strict=True)]))
    assert count == 0
    with pytest.raises(AssertionError):
        waits(model, minibatch([1.0, float("nan"), 2.0]))


def test_a_test_that_fails_gives_no_results_of_another_recording() -> None:
    model, nan = Takes(), minibatch([1.0, float("nan"), 2.0])
    with pytest.raises(AssertionError, match="did not wait") as caught:
        waits(model, nan)
    assert "asserting.py:" in str(caught.value) and "instance 1" in caught.value.__notes__[0]
    with pytest.raises(AssertionError):
        waits(model, (nan[0], [[0], [0], [0]], nan[2]))


def test_a_test_within_a_try_is_waited_for() -> None:
    model = Falls()
    given = minibatch([1.0, float("nan"), 2.0])
    expected = [model(x, [*a], w) for x, a, w in zip(*given, strict=True)]
    found, count = waits(model, given)
    torch.testing.assert_close(found, torch.stack(expected))
    assert count == 1


def test_results_that_may_be_errors_are_waited_for() -> None:
    given = minibatch([1.0, float("nan"), 2.0])
    call = fxbatch.autobatch(Asserts.forward, adaptive=False, out="list", return_exceptions=True)
    first, second, third = call(Asserts(), *given)
    assert (
        isinstance(second, AssertionError)
        and isinstance(first, torch.Tensor)
        and isinstance(third, torch.Tensor)
    )


def test_a_trial_that_is_recorded_anew_has_each_instance_once() -> None:
    """The first attempt ends at an instance, and a test of it fails: the next begins them all."""
    trial = Trial(1.0, 1.0)
    call = fxbatch.autobatch(Asserts.forward, adaptive=False, out="list")
    model, given = Asserts(), minibatch([1.0, float("nan"), 2.0])
    call(model, *minibatch([1.0, 0.5, 2.0]))
    (engine,) = model.__dict__["_fxbatch_engines"].values()
    trial.begun = 2
    instances = [((model, *x), {}) for x in zip(*given, strict=True)]
    with pytest.raises(AssertionError):
        engine.call(Asserts.forward, instances, "list", trial=trial)
    assert trial.begun is None
