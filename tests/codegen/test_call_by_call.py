"""What runs call by call: its arguments are filled in as the pytree would, and modules are made ready once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch import signature as module
from fxbatch.ir import Slot, Template
from fxbatch.runtime import postponed
from tests.oracle import check_equal


@pytest.mark.parametrize(
    "arguments",
    [
        ((Slot("input", 1), 2, Slot("shared", 0)), {"x": Slot("input", 0), "y": None}),
        (([Slot("input", 0), Slot("shared", 0)], (Slot("input", 1),)), {}),
        ((), {"rows": {"a": Slot("input", 1)}, "b": Slot("input", 0)}),
        ((), {}),
    ],
)
def test_a_filler_gives_what_the_template_gives(arguments: Any) -> None:
    template = Template.of(arguments)
    inputs, shared = [torch.ones(1), torch.ones(2)], [torch.ones(3)]
    fill = template.filler(shared)
    for _ in range(2):
        assert repr(fill(inputs)) == repr(template.fill(input=inputs, shared=shared))


class Model(nn.Module):
    """Operations of all kinds, of which nothing is built."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)
        self.norm = nn.LayerNorm(3)

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        h = (torch.zeros_like(x), torch.zeros_like(x))
        for _ in range(3):
            h = self.cell(x, h)
            x = self.norm(torch.cat([h[0], x]).view(2, 3).sum(0)) * 2
        return torch.stack([x, h[1]], dim=1).softmax(dim=0)


def test_calls_one_by_one_equal_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postponed, "MANY", -1)
    monkeypatch.setattr(postponed, "ENOUGH", 10**9)
    twins: list[Any] = []
    made = module.structural_twin
    model, data = Model(), [torch.randn(3) for _ in range(12)]
    check_equal(model, data)
    report = fxbatch.explain(model, data)
    assert len(report.unbatched) == len(report.operations)

    def counted(m: nn.Module, known: Any) -> nn.Module:
        twins.append(m)
        return made(m, known)

    monkeypatch.setattr(module, "structural_twin", counted)
    model(data)
    assert len(twins) <= report.steps, "one a step, not one a call"
