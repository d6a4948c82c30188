"""A model with asserts, in a file of its own: pytest writes those of files of tests anew."""

from __future__ import annotations

import torch
from torch import nn


class Asserts(nn.Module):
    """Tests as users write them; the last one is no assert, and is waited for."""

    ends = False

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h = self.cell(x[:1] * width)
        assert not torch.isnan(h).any(), f"numbers, not {h.shape}"
        assert (h < 1.0).all()
        assert h.sum() != 5.0 and h.max() < 2.0, "too large"
        try:
            while self.ends:
                h = h + 1.0
                if (h > 3.0).any():
                    raise StopIteration
        except StopIteration:
            h = h * 2.0
        return h.sum()


class WritesAfter(Asserts):
    """What was tested is written to afterwards: the test is of what it was."""

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h = self.cell(x[:1] * width)
        n = (h < 1.0).sum()
        assert n == 4
        fine = (h == h).all()
        assert fine
        fine.fill_(False)
        n -= 1
        return h.sum() * n * (1.0 - fine.float())


class Takes(Asserts):
    """Takes its arguments apart before a test fails: a second recording finds nothing."""

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h = self.cell(x[:1] * width)
        while actions:
            actions.pop()
            h = self.cell(x[:1] * width, h)
            assert not torch.isnan(h).any()
        return h.sum()


class Falls(Asserts):
    """Goes on where a test fails."""

    def forward(self, x: torch.Tensor, actions: list[int], width: float) -> torch.Tensor:
        h = self.cell(x[:1] * width)
        actions.pop()
        try:
            with torch.no_grad():
                assert not torch.isnan(h).any()
        except AssertionError:
            h = x[:1]
        return h.sum() * len(actions)
