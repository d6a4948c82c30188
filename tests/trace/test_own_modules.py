"""Modules that a forward makes for itself: their parts are recorded, nothing is kept of them, they may be changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch import autobatch


class Scaled(nn.Module):
    """A layer that is another's, a parameter of its own, and a count of its calls."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0
        self.scale = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return torch.tanh(self.layer(x) * self.scale * self.calls)


def wrapped(self: Any, x: Any) -> Any:
    own = Scaled(self.layer)
    first = own(x)
    own.extra = 3
    return (first + own(first)).sum() * own.extra


def waits_between_changes(self: Any, x: Any) -> Any:
    own = Scaled(self.layer)
    own.state = torch.zeros(8)
    for _ in range(3):
        own.state = own(x) + own.state
        if own.state.sum() > 0:
            own.calls += 1
    return own.state.sum() * own.calls


def nested(self: Any, x: Any) -> Any:
    return Scaled(Scaled(Scaled(self.layer)))(x).sum()


def sequence(self: Any, x: Any) -> Any:
    own = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), self.layer)
    own.eval()
    return own(self.layer(x)).sum()


def recurrent(self: Any, x: Any) -> Any:
    return nn.LSTM(8, 8)(self.layer(x)[None])[0].sum()


def given_a_parameter(self: Any, x: Any) -> Any:
    return self.layer(Scaled(self.layer).scale).sum() + self.layer(x).sum()


def hooked(self: Any, x: Any) -> Any:
    own = nn.ReLU()
    own.register_forward_hook(lambda _module, _args, result: result * 2)
    return own(self.layer(x)).sum()


def copied(self: Any, x: Any) -> Any:
    own = copy.deepcopy(self.layer)
    own.weight.data.mul_(2)
    return own(self.layer(x)).sum()


def parameters(self: Any, x: Any) -> Any:
    state = nn.Parameter(torch.ones(8))
    return (state * self.layer(x) + torch.cat([state[:4], self.layer(state)[:4]])).sum()


FORWARDS = (
    parameters,
    copied,
    wrapped,
    waits_between_changes,
    nested,
    sequence,
    recurrent,
    given_a_parameter,
    hooked,
)


def pair(forward: Callable[..., Any]) -> tuple[Any, Any]:
    """A model with this forward, and its twin that batches it."""
    plain, batched = [type("Model", (nn.Module,), {"forward": f}) for f in (forward, autobatch(forward))]
    torch.manual_seed(0)
    models = plain(), batched()
    models[0].layer = nn.Linear(8, 8)
    models[1].layer = nn.Linear(8, 8)
    models[1].load_state_dict(models[0].state_dict())
    return models


def run(model: Any, xs: list[torch.Tensor], *, batched: bool) -> tuple[Any, Any]:
    torch.manual_seed(1)  # modules draw their parameters
    results = torch.stack(list(model(xs) if batched else map(model, xs)))
    return results, torch.autograd.grad(results.sum(), list(model.parameters()))


def kept_of(model: Any) -> tuple[int, ...]:
    """How much the engine keeps."""
    table = type(model).forward.__fxbatch__.engine(model).table
    return len(table.modules), len(table.owners), len(table.signatures)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_the_loops_and_nothing_grows(forward: Callable[..., Any]) -> None:
    plain, batched = pair(forward)
    kept = []
    for _ in range(5):
        xs = [torch.randn(8) for _ in range(6)]
        torch.testing.assert_close(run(batched, xs, batched=True), run(plain, xs, batched=False))
        kept.append(kept_of(batched))
    assert kept[2] == kept[-1]
    assert kept[-1][0] == 1 and not kept[-1][1]  # modules: the layer alone


def test_what_becomes_a_part_of_the_model_is_no_longer_the_instances_own() -> None:
    def forward(self: Any, x: Any) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        return self.late(self.layer(x)).sum()

    plain, batched = pair(forward)
    for _ in range(3):
        xs = [torch.randn(8) for _ in range(6)]
        found, wanted = run(batched, xs, batched=True), run(plain, xs, batched=False)
        torch.testing.assert_close(found, wanted)
    assert len(found[1]) == 4
    assert kept_of(batched)[0] == 2  # `late` is one operation
