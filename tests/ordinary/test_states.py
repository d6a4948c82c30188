"""Stale bodies, side effects, instances mixed: twins with state, one batched and one in the loop, call after call."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch, Choice, Strategy
from fxbatch.stopwatch import Timing
from fxbatch.torch_private import tree_flatten
from tests.oracle import compare, compare_in_autocast, run
from tests.ordinary.states import DEFINED, MAY_REFUSE, PRELUDE, sources

SOURCES = sources()
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autograd": {"backward": "autograd"},
    "unrolled": {"mode": "unrolled"},
    "not fused": {"fuse": False},
}

# Not right yet: each is a fault that is known. One that has become right is told, so that it goes from here.
KNOWN: set[str] = set()


@dataclass
class Twin:
    """A model with globals of its own, run batched or in the loop."""

    world: dict[str, Any]
    batched: bool

    @staticmethod
    def of(name: str, options: dict[str, Any], *, batched: bool) -> Twin:
        _seed()
        world: dict[str, Any] = {"__name__": "world", "FILE": __file__}
        world["xs"] = [torch.randn(4).requires_grad_() for _ in range(4)]
        for source in (PRELUDE, DEFINED, SOURCES[name][0]):
            exec(compile(source, f"<{name}>", "exec"), world)  # our own table
            if source is PRELUDE:
                world["model"] = _with(options, world["model"])
        return Twin(world, batched)

    def call(self, step: str) -> tuple[list[Any], Any, Any]:
        """Tensors with their gradients, what else is in the results, and what else is seen."""
        _seed()
        exec(compile(step, "<step>", "exec"), self.world)
        call = self.world.get("call", lambda: self.world["m"](self.world["xs"]))
        results: list[Any] = []

        class Whole(torch.nn.Module):
            def forward(self, xs: Any) -> Any:
                results.append(call())
                return results[0]

        whole = Whole()
        whole.m = self.world["m"]
        if self.batched:
            tensors = run(whole, [self.world["xs"]])
        else:
            with fxbatch.disabled():
                tensors = run(whole, [self.world["xs"]])
        leaves, spec = tree_flatten(results[0])
        plain = [x for x in leaves if not isinstance(x, torch.Tensor)]
        return tensors, (str(spec), plain), copy.deepcopy(self.world.get("seen", lambda: None)())


def _seed() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002  # what forwards may draw from


def _with(options: dict[str, Any], make: Any) -> Any:
    return lambda f, opts={}, **parts: make(f, {**options, **opts}, **parts)


def difference(name: str, options: dict[str, Any], steps: Sequence[str] | None = None) -> str:
    """What differs from the loop at some call, or ""."""
    batched, loop = (Twin.of(name, options, batched=b) for b in (True, False))
    for n, step in enumerate(["", "", *(SOURCES[name][1] if steps is None else steps), ""]):
        expected = loop.call(step)
        try:
            found = batched.call(step)
        except fxbatch.FxbatchError as error:
            return "" if name in MAY_REFUSE else f"call {n} ({step}): {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  # told with the case
            return f"call {n} ({step}): {type(error).__name__}: {str(error)[:300]}"
        if found[1:] != expected[1:]:
            return f"call {n} ({step}): {found[1:]}, the loop has {expected[1:]}"
        try:
            if "autocast" in name:
                compare_in_autocast(found[0], expected[0], torch.bfloat16)
            elif name == "default precision within":  # float32 is computed, float64 is given back
                compare_in_autocast(found[0], expected[0], torch.float32)
            else:
                compare(found[0], expected[0], expected[0])
        except AssertionError as error:
            return f"call {n} ({step}): {str(error)[:300]}"
    return ""


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_with_state_equals_its_loop(name: str) -> None:
    found = difference(name, {})
    if name in KNOWN:
        assert found, f"{name} is right now: take it out of KNOWN"
    else:
        assert not found, found


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
@pytest.mark.parametrize("name", [name for name in SOURCES if name not in KNOWN])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_in_every_way(name: str, way: str) -> None:
    found = difference(name, WAYS[way])
    assert not found, found


@pytest.mark.parametrize("by", ["loop", "batched"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_as_the_strategy_runs_them(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scouts in the loop, timed, and the others by the loop too, or batched: one by one, none knows of it."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(by == "batched", 2, Timing(2)))
    names = [name for name in SOURCES if name not in KNOWN]
    found = {name: difference(name, {}) for name in names[:: 3 if by == "loop" else 8]}
    assert not any(found.values()), {name: text for name, text in found.items() if text}


def test_a_wrong_twin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the batched twin alone does: another number, another log, an error."""
    recorded = "fxbatch.trace.state.current_recorder() is not None"
    monkeypatch.setitem(
        SOURCES,
        "wrong",
        (
            "import fxbatch.trace.state\n"
            f"m = model(lambda self, x: self.l(x) * (2 if self.g and {recorded} else 1), l=L(), g=0)",
            [],
        ),
    )
    assert difference("wrong", {}) == ""
    assert "call 2 (m.g = 1): tensor 0: error" in difference("wrong", {}, ["m.g = 1"])
    assert "[True, True, True, True]), the loop has" in difference(
        "wrong", {}, [f"n = []; m.l.register_forward_hook(lambda *a: n.append({recorded})); seen = lambda: n"]
    )
    assert "ValueError: invalid literal" in difference(
        "wrong", {}, [f"m.l.register_forward_hook(lambda *a: int('no') if {recorded} else None)"]
    )
