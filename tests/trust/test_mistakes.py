"""Mistakes inside fxbatch are raised with verify=True and warned of once otherwise; users' own are no such thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch import mistakes
from fxbatch.codegen import build_operation
from fxbatch.codegen.built import forget
from fxbatch.errors import InternalWarning
from fxbatch.trace import modules

XS = [torch.ones(3), torch.zeros(3)]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.table: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x).tanh()


def model(part: nn.Module, **options: Any) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        @fxbatch.autobatch(**options)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    return Model()


# In a pass over graphs whatever is raised is a mistake; where modules become operations, what PyTorch raises is none.
PLACES = {
    "a rewrite": (build_operation, "rewrite", RuntimeError),
    "a partition": (build_operation, "partition", KeyError),
    "a module": (modules, "changed_attribute", KeyError),
}


@pytest.fixture(params=PLACES)
def mistake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, error = PLACES[request.param]
    scope: dict[str, Any] = {"error": error}  # a function whose frame is one of fxbatch's own
    exec(compile("def wrong(*_, **__):\n    raise error('gone')", mistakes.__file__, "exec"), scope)
    monkeypatch.setattr(where, name, scope["wrong"])
    monkeypatch.delenv("FXBATCH_CACHE", raising=False)  # graphs that another test has built
    forget()
    monkeypatch.setattr(mistakes, "_warned", set())


def test_it_is_warned_of_once_and_the_results_are_right(mistake: None) -> None:
    with pytest.warns(InternalWarning, match="mistake inside fxbatch") as found:
        for _ in range(2):
            m = model(Part())
            result = m(XS)
            with fxbatch.disabled():
                torch.testing.assert_close(result, m(XS))
    assert len(found) == 1


def test_verify_raises_it(mistake: None) -> None:
    with pytest.raises((RuntimeError, KeyError)):
        model(Part(), verify=True)(XS)


def test_what_a_body_can_not_do_is_a_reason_and_no_mistake() -> None:
    class Odd(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x * self.table["missing"]
            except KeyError:
                assert x.sum() >= 0  # a value, which fake tensors don't have
                return super().forward(x)

    class Failing(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table["missing"]

    m = model(Odd(), verify=True)
    with fxbatch.disabled():
        expected = m(XS)
    torch.testing.assert_close(m(XS), expected)
    with pytest.raises(KeyError, match="missing"):
        model(Failing(), verify=True)(XS)
