"""The short way of a call whose strategy has settled on the loop: taken, exact, and left where anything is unusual."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxbatch
from fxbatch import stopwatch
from fxbatch.decorator import Autobatched
from fxbatch.plain_loop import switch
from fxbatch.runtime.strategy import AdaptiveSwitch
from fxbatch.trace.state import current_recorder


class Small(nn.Module):
    """One layer, in inference: the loop is faster than anything."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.seen += 1
        Small.seconds += 1.0 if current_recorder() is None else 4.0
        if scale < 0:
            raise ValueError("negative")
        return self.layer(x) * scale + torch.rand(2)


@pytest.fixture
def long_way(_always_batched: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an item a call that took the long way. An instance takes a second by the loop, four when it is
    recorded."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(stopwatch, "now", lambda: Small.seconds)
    taken: list[int] = []
    call = Autobatched.__call__

    def counted(self: Autobatched, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken.append(len(args))
        return call(self, owner, args, kwargs)

    monkeypatch.setattr(Autobatched, "__call__", counted)
    return taken


def settled(out: str = "stack") -> tuple[Any, Small]:
    """A decorated forward of two columns of eight that runs the loop until minibatch 102, and its model."""
    model = Small().eval()
    f = fxbatch.autobatch(model.forward, out=out)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        for _ in range(70):
            f(list(torch.randn(8, 4)), [2.0] * 8)
    return f, model


def the_loop(model: Small, *columns: Any) -> Tensor:
    return torch.stack([Small.forward(model, *row) for row in zip(*columns, strict=True)])


@torch.no_grad()
@pytest.mark.parametrize("out", ["stack", "list"])
def test_values_random_numbers_and_state_are_the_loops(out: str, long_way: list[int]) -> None:
    f, model = settled(out)
    before, seen = len(long_way), model.seen
    for columns in ([list(torch.randn(8, 4)), [0.5] * 8], [torch.randn(8, 4), tuple(range(8))]):
        state = torch.get_rng_state()
        ours = f(*columns)
        ours = ours if out == "stack" else torch.stack(ours)
        torch.set_rng_state(state)
        assert torch.equal(ours, the_loop(model, *columns))
    assert len(long_way) == before and model.seen == seen + 4 * 8


@torch.no_grad()
def test_it_is_left_where_minibatches_modes_or_options_differ(long_way: list[int]) -> None:
    f, model = settled()
    x, scale = list(torch.randn(8, 4)), [2.0] * 8

    def is_long(*args: Any, **kwargs: Any) -> bool:
        before = len(long_way)
        f(*args, **kwargs)
        return len(long_way) > before

    assert not is_long(x, scale)
    assert is_long(x[:7], scale[:7]), "another number of instances"
    assert is_long(x, scale=scale)
    assert is_long(x, scale) is False
    with torch.enable_grad():
        assert is_long(x, scale)
    with FlopCounterMode(display=False), pytest.warns(fxbatch.LoopWarning, match="a torch dispatch mode"):
        f(x, scale)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert is_long(x, scale)
    with fxbatch.disabled():
        assert is_long(x, scale)
    with pytest.raises(fxbatch.MinibatchError, match="different lengths"):
        f(x, scale[:7])
    model.layer.register_forward_hook(lambda m, a, y: y + 1)
    assert not is_long(x, scale), "hooks run in the loop as ever"
    state = torch.get_rng_state()
    ours = f(x, scale)
    torch.set_rng_state(state)
    assert torch.equal(ours, the_loop(model, x, scale))


@torch.no_grad()
def test_rounds_are_timed_when_their_minibatch_comes(long_way: list[int]) -> None:
    f, _ = settled()
    before = len(long_way)
    for _ in range(300):
        f(list(torch.randn(8, 4)), [2.0] * 8)
    assert 2 <= len(long_way) - before <= 9  # in two or three rounds, each with a trial or two


@torch.no_grad()
def test_an_error_names_its_instance_and_leaves_nothing_switched_off(long_way: list[int]) -> None:
    f, _ = settled()
    x, before = list(torch.randn(8, 4)), len(long_way)
    with pytest.raises(ValueError, match="negative") as caught:
        f(x, [1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert caught.value.__notes__ == ["fxbatch: in instance 2 of the minibatch"]
    assert len(long_way) == before and not switch.disabled
    assert f(x, [1.0] * 8).shape == (8, 2)
