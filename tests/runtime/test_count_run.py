"""What a batched minibatch was made of, as the strategy is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.runtime.costs import Counts
from fxbatch.runtime.engine import WRITE
from fxbatch.runtime.strategy import AdaptiveSwitch, Strategy


def test_a_write_in_place_counts_as_several_calls_recorded_in_python(
    _always_batched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
            total = torch.zeros(4)
            for w in words:
                total += self.layer(w)
            return total

    found: list[Counts] = []
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "_best", lambda *_: "batched")
    monkeypatch.setattr(Strategy, "ran", lambda self, counts, *_, **__: found.append(counts))
    model = Sums()
    f = fxbatch.autobatch(model.forward)
    for _ in range(3):
        f([list(torch.randn(5, 4)) for _ in range(6)])
    assert found[-1].long_calls >= WRITE * 6 * 5
