"""Sizes of 0 and 1 that the code asks about, where a symbol would have answered for all sizes from 2 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import check_equal
from tests.trust.programs import model

FORWARDS: dict[str, Callable[[Any, Any], Any]] = {
    "at least 1": lambda self, x: self.l(x).sum(0) / max(len(x), 1),
    "at most 1": lambda self, x: self.l(x).sum(0) * min(len(x), 1),
    "none": lambda self, x: self.l(x).amax(0) if len(x) else x.new_zeros(6),
    "not none": lambda self, x: self.l(x)[-1] if len(x) > 0 else self.l(x.new_zeros(6)),
    "one": lambda self, x: self.l(x).sum(0) * (3 if len(x) == 1 else 1),
    "fewer than two": lambda self, x: x.sum(0) if len(x) < 2 else self.l(x).sum(0),
    "a slice": lambda self, x: self.l(x).reshape(-1)[:1].sum(),
    "a square": lambda self, x: self.l(x).sum(0) + len(x) * x.shape[0],
}
MINIBATCHES = ((3, 5, 2), (0, 4, 1), (0, 0, 3), (1, 1, 7), (2, 3, 0, 1), (1, 0))


@pytest.mark.parametrize("name", FORWARDS)
def test_small_sizes(name: str) -> None:
    made = model(FORWARDS[name], {"l": nn.Linear(6, 6)}, adaptive=False)
    for sizes in MINIBATCHES:
        check_equal(made, [torch.randn(n, 6) for n in sizes])


def test_constants_made_of_a_small_size() -> None:
    """A graph with the same nodes, and another number in a tensor that is made of the size."""
    made = model(lambda self, x: x.sum(0) * torch.tensor([len(x) % 3]), adaptive=False)
    for sizes in ((5, 8, 2), (5, 1, 8), (5, 0, 2)):
        check_equal(made, [torch.randn(n, 6) for n in sizes])
