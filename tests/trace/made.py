"""Small decorated models out of a forward and parts, compared with the loop: values, gradients, the state left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxbatch
from fxbatch.trace.state import current_recorder
from tests.oracle import assert_same, check_equal


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def model(forward: Callable[..., Any], options: dict[str, Any] | None = None, **parts: Any) -> Any:
    """A module with these attributes whose forward is decorated; the same parameters each time."""
    torch.manual_seed(0)

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part() if callable(part) and not isinstance(part, nn.Module) else part)

    decorated = fxbatch.autobatch(**options)(forward) if options else fxbatch.autobatch(forward)
    Made.forward = decorated  # type: ignore[method-assign]  # as a class body would
    return Made()


def value(x: Any) -> Any:
    """A tensor of an instance as a value while something is recorded, as what a module gives is."""
    recorder = current_recorder()
    return x if recorder is None else recorder.constant(x)


def instances(count: int = 4, *shape: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*(shape or (4,))) for _ in range(count)]


def check(forward: Callable[..., Any], options: dict[str, Any] | None = None, **parts: Any) -> None:
    """The decorated model equals the loop, twice, on four vectors."""
    check_equal(model(forward, options, **parts), instances())


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a module's attributes hold besides parameters, submodules and the engine; tensors as lists."""
    skipped = ("_fxbatch_engines", "_parameters", "_buffers", "_modules")
    return {k: _plain(v) for k, v in vars(module).items() if k not in skipped}


def _plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return [round(n, 4) for n in x.detach().double().reshape(-1).tolist()]
    return [_plain(y) for y in x] if isinstance(x, (list, tuple)) else x


def check_state(made: Any, xs: Sequence[Any], *, times: int = 2) -> None:
    """Results, gradients and the state left on the module are those of the loop, minibatch after minibatch."""
    looped = copy.deepcopy(made)
    for _ in range(times):
        with fxbatch.disabled():
            expected = looped(list(xs))
        found = made(list(xs))
        assert_same(found, expected)
        assert found.requires_grad == expected.requires_grad
        if expected.requires_grad:
            for m, y in ((looped, expected), (made, found)):
                m.zero_grad()
                y.sum().backward()
            ours, theirs = ([p.grad for p in m.parameters()] for m in (made, looped))
            assert [g is None for g in ours] == [g is None for g in theirs]
            assert_same(ours, theirs)
        assert state_of(made) == state_of(looped)
