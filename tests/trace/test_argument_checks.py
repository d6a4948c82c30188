"""Argument checks of `torch.distributions`: no instance waits for one, and one that fails is an error or the loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Normal

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch
from fxbatch.trace.argument_checks import ArgumentCheckError
from fxbatch.trace.minibatch import Turns


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
@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_a_check_that_fails_is_an_error(adaptive: bool, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch's own, from the loop; where all is batched one that names the instance and the line."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    model = Policy()
    good, bad = minibatch([1.0, 0.5, 2.0]), minibatch([1.0, -0.5, 2.0])
    call = fxbatch.autobatch(Policy.forward, adaptive=adaptive)
    text = r"scale.*to satisfy the constraint"
    with torch.set_grad_enabled(grad):
        with pytest.raises(ValueError, match=text):
            [model(*x) for x in zip(*bad, strict=True)]
        ours = r"an argument of torch.distributions is invalid in instance 1 \(test_argument_checks.py:\d+\)"
        with pytest.raises(ValueError, match=text if adaptive else ours):
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


@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_a_check_that_fails_may_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = Catches(), minibatch([1.0, -1.0, 2.0])
    with pytest.raises(ArgumentCheckError, match="in instance 1"):
        waits(model, given)
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    found = fxbatch.autobatch(Catches.forward)(model, *given)
    torch.testing.assert_close(found, torch.stack([model(*x) for x in zip(*given, strict=True)]))


def test_a_check_comes_before_what_fails_later() -> None:
    with pytest.raises(ValueError, match="in instance 1"):
        waits(FailsLater(), minibatch([1.0, -1.0, 2.0]))
    with pytest.raises(KeyError):
        waits(FailsLater(), minibatch([1.0, 3.0, 2.0]))


class Samples(Policy):
    """Draws by what a check refuses: the kernel fails before the check is looked at."""

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h = self.cell(x[:1] * width)
        return Categorical(probs=self.head(h).softmax(-1)).sample().float().sum()


def test_a_kernel_that_fails_before_a_check() -> None:
    with pytest.raises(ValueError, match="argument"):
        waits(Samples(), minibatch([1.0, float("nan"), 2.0]))


def test_results_that_may_be_errors_are_waited_for() -> None:
    given = minibatch([1.0, -0.5, 2.0])
    call = fxbatch.autobatch(Policy.forward, adaptive=False, out="list", return_exceptions=True)
    first, second, third = call(Policy(), *given)
    assert isinstance(first, torch.Tensor) and isinstance(third, torch.Tensor)
    assert isinstance(second, ValueError) and "scale" in str(second)


class Takes(Policy):
    """Takes its arguments apart before a check fails."""

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h = x.new_zeros(1, 4)
        while actions:
            h = self.cell(x[:1], h) + actions.pop()
            h = h + Normal(h, self.scale(h).exp() * width).mean
        return h.sum()


@pytest.mark.parametrize("adaptive", [False, True])
def test_instances_that_have_changed_what_they_were_given_give_no_results(
    adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", adaptive)
    call = fxbatch.autobatch(Takes.forward, adaptive=adaptive)
    with pytest.raises(ValueError, match=r"scale|in instance 1"):
        call(Takes(), *minibatch([1.0, -0.5, 2.0]))


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
        with pytest.raises(ValueError, match="in instance 1"):
            waits(model, minibatch([1.0, -9.0, 2.0]))
