"""Parameters and buffers that the forward writes to are shared by all instances: read and written is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Model(nn.Module):
    def __init__(self, after: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.shifted, self.after = nn.Linear(3, 3), Shifted(), after
        self.register_buffer("steps", torch.zeros(()))

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shifted(self.linear(x))
        with torch.no_grad():
            self.after(self)
        return h


@pytest.mark.parametrize(
    ("after", "name"),
    [
        (lambda m: m.shifted.shift.add_(1), "Shifted.shift"),
        (lambda m: m.linear.weight.mul_(0.5), "Linear.weight"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_an_operand_that_is_written_to_is_refused(after: Any, name: str, grad: bool) -> None:
    model = Model(after)
    for _ in range(2):  # the second minibatch begins with what the first one knew
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(fxbatch.InPlaceError, match=rf"{name}, which .* reads"),
        ):
            model(torch.ones(2, 3))


def test_a_counter_that_no_call_reads_counts() -> None:
    model = Model(lambda m: m.steps.add_(1))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    assert model.steps == 4


def test_steps_of_an_optimizer_between_minibatches_are_no_writes() -> None:
    model = Model(lambda m: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = fxbatch.TracedDataset(model, list(torch.ones(4, 3)))
    twin = copy.deepcopy(model)
    steps = torch.optim.SGD(twin.parameters(), lr=0.1)
    for ready in fxbatch.prefetch(model, [[data[0], data[1]], [data[2], data[3]]]):
        model(ready).sum().backward()
        optimizer.step()
        with fxbatch.disabled():
            twin(torch.ones(2, 3)).sum().backward()
        steps.step()
    with fxbatch.disabled():
        expected = twin(torch.ones(2, 3))
    torch.testing.assert_close(model(torch.ones(2, 3)), expected)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
