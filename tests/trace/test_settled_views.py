"""Views, indexing and unbinding that were met before take the short way, and share memory as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.trace import calls
from tests.oracle import check_equal


class Views(nn.Module):
    """Many kinds of views of one value, each several times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)
        self.tag = torch.tensor(1)

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        m = self.linear(x).view(3, 4)
        total = torch.zeros(())
        for k in range(3):
            a = m[:, 1:3].sum() + m[:, 1:4].sum() * 2 + m[None].sum() + m[..., 2].prod() + m[k, 1:].sum()
            rows = list(m) + list(m.unbind(1))
            b = (
                m.t()[1:].sum()
                + m.unsqueeze(0).squeeze().view(-1)[3]
                + sum(r[0] for r in rows)
                + m[self.tag][2]
            )
            c = m[:, None].mean() + m[0:2].sum() + m[:2].sum() * 3 + m.chunk(2, 1)[1].sum() + m[1:, 1:].sum()
            total = total + a + b * 2 + c * 3
        return total


class Writes(nn.Module):
    """A view that was taken before, taken again and written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).view(2, 2).clone()
        for _ in range(3):
            row = h[:, 1]
            row += 1.5
            h.t()[0].mul_(2.0)
        return h.sum() + h[0, 1]


@pytest.mark.parametrize("model", [Views, Writes])
def test_views_that_were_met_equal_the_loop(model: Any) -> None:
    check_equal(model(), [torch.randn(4) for _ in range(5)])


def test_views_that_were_met_take_the_short_way(monkeypatch: pytest.MonkeyPatch, recorded_by: str) -> None:
    if recorded_by == "python":
        pytest.skip("the table of calls is in C")
    model, data = Views(), [torch.randn(4) for _ in range(5)]
    model(data)
    long_way: list[Any] = []
    arguments = calls.Arguments

    def counted(*args: Any, **kwargs: Any) -> Any:
        long_way.append(args)
        return arguments(*args, **kwargs)

    monkeypatch.setattr(calls, "Arguments", counted)
    model(data)
    assert len(long_way) <= 1, "of some hundred calls"


def test_different_indices_are_different_calls() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        @fxbatch.autobatch(out="list")
        def forward(self, x: Tensor) -> Any:
            m = self.linear(x).view(2, 3)
            found = [
                m[0:1],
                m[0:2],
                m[:1],
                m[::2],
                m[None],
                m[..., 0],
                m[:, 0],
                m[:, 0:1],
                m[0:, None],
                m[None, 0],
            ]
            return [*found, m.view(3, 2), m.view(6), m.view((6,)), m.unsqueeze(0), m.unsqueeze(1), m[:, True]]

    model, data = Model(), [torch.randn(4) for _ in range(3)]
    model(data)
    with fxbatch.disabled():
        expected = model(data)
    for ours, theirs in zip(model(data), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b)
