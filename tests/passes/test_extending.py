"""docs/extending.md: what it says is done here, word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import fxbatch
from fxbatch.ir import Program
from fxbatch.passes import pipeline, schedule
from fxbatch.ragged import rules
from fxbatch.runtime import options
from tests.passes.reference import check_schedule
from tests.passes.test_rewrites import check_same_results
from tests.programs import programs
from tests.ragged.against_loop import check_packed

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def code(title: str) -> dict[str, Any]:
    """What the Python of a section defines."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), found)
    return found


REWRITE, POLICY = code("Add a rewrite")["drop_double"], code("Add a policy")["batch_narrowly"]


class Doubled(nn.Module):
    """Doubles what is doubled already."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    @fxbatch.autobatch(deduplicate=False, fuse=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.double()).float().double().double()


def test_a_rewrite_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("eliminate_dead", lambda: REWRITE, "for this test in the place of another")
    monkeypatch.setattr(pipeline, "PASSES", (row, *pipeline.PASSES[1:]))
    model, instances = Doubled(), list(torch.randn(4, 3))
    with fxbatch.disabled():
        wanted = model(instances)
    torch.testing.assert_close(model(instances), wanted)
    names = [row.operation for row in fxbatch.explain(model, instances).operations]
    assert sorted(names) == ["double", "float", "linear"]  # of two doubles, the first has something to do


@given(programs())
def test_the_rewrite_leaves_others_as_they_are(program: Program) -> None:
    assert REWRITE(program) is program
    check_same_results(program, REWRITE(program))


@given(programs())
def test_the_policy_gives_a_schedule(program: Program) -> None:
    check_schedule(program, POLICY(program))
    check_schedule(program, POLICY(program, most=2))


def test_a_policy_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schedule.POLICIES, "narrow", POLICY)
    monkeypatch.setitem(options.CHOICES, "schedule", (*options.CHOICES["schedule"], "narrow"))
    model, instances = Doubled(), list(torch.randn(4, 3))
    wanted = model(instances)
    batched = fxbatch.autobatch(schedule="narrow")(type(model).forward.__wrapped__)
    torch.testing.assert_close(batched(model, instances), wanted)


def test_a_rule_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        lowest, highest = x.aminmax(dim=0)
        return highest - 2 * lowest

    def alone() -> object:
        function = check_packed(body, lambda t: [torch.randn(t, 3)], [(5,), (2,), (4,)], ((0,),))
        return function.lowered.alone

    assert alone()
    monkeypatch.setattr(rules, "OVER", dict(rules.OVER))
    code("Add a rule for rows of own sizes")
    assert not alone()
