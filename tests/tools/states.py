"""Targets whose loop gives something else when it runs again, and one that can't be copied.

states.py:counted
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor, nn

import fxbatch

calls = {"n": 0}


class Counted(nn.Module):
    """The result depends on how many instances it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = 0

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x) / self.seen


class CountedOutside(Counted):
    """As Counted, in a global that no copy of the module has for itself, and that a check puts back."""

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        calls["n"] += 1
        return self.linear(x) * calls["n"]


class Drawn(Counted):
    """A number that no seed repeats."""

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * int.from_bytes(os.urandom(4), "little")


def _minibatch(model: nn.Module) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    return model, [torch.randn(4) for _ in range(8)]


def counted() -> tuple[nn.Module, list[Any]]:
    """State of the module itself."""
    return _minibatch(Counted())


def counted_outside() -> tuple[nn.Module, list[Any]]:
    """State of the program."""
    return _minibatch(CountedOutside())


def drawn_from_the_system() -> tuple[nn.Module, list[Any]]:
    """No state at all."""
    return _minibatch(Drawn())


def locked() -> tuple[nn.Module, list[Any]]:
    """A module that holds a lock."""
    made = Counted()
    made.lock = threading.Lock()  # type: ignore[assignment]  # no tensor and no module
    return _minibatch(made)
