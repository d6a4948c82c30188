"""Shorthands of the trust tests: a per-instance function as a model, and the loop that it must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxbatch
from tests.oracle import check_equal


def model(fn: Callable[[Any, Any], Any], parts: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """A module whose decorated forward is `fn(self, instance)`."""
    made = type("Model", (nn.Module,), {"forward": fxbatch.autobatch(**options)(fn)})()
    for name, part in (parts or {}).items():
        setattr(made, name, part)
    return made


def assert_equal(
    fn: Callable[[Any, Any], Any],
    instances: Sequence[Any],
    parts: dict[str, Any] | None = None,
    *,
    gradients: bool = True,
    **options: Any,
) -> nn.Module:
    """Check the decorated call against the loop; the model, for more questions."""
    made = model(fn, parts, **options)
    check_equal(made, list(instances), gradients=gradients)
    return made


def vectors(*lengths: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One random vector a length."""
    made = [torch.randn(n, dtype=torch.float32).to(dtype) for n in lengths]
    return [x.requires_grad_(grad) for x in made]


def two() -> dict[str, Any]:
    """Two layers, for a model's parts."""
    return {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


class Inner(nn.Module):
    """A decorated layer, to nest and to copy; at the top of a module, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x))
