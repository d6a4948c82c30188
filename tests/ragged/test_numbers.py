"""Integers among the arguments that differ between instances (`forward(self, x, n)`) are sizes: packed, as the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests.oracle import to_double
from tests.ragged.own_size_models import LINEAR, D, parameter, rows
from tests.ragged.test_library_style_models import check_in_double
from tests.ragged.test_packed_forward import packed_of, variants_of
from tests.trust.programs import model

SIZES = ((4, 7, 2, 5), (3, 1, 6), (1, 1, 2, 9), (3, 3, 3))


def in_classes(self: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    kind = torch.arange(len(x)) % (n + 1)
    return torch.zeros(n + 1, D, dtype=x.dtype).index_add(0, kind, self.l(x))


def repeated(self: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = self.l(x)
    return x.sum(0)


PACKED: dict[str, Callable[..., Any]] = {
    "first rows": lambda self, x, n: self.out(self.l(x)[:n]).sum(0),
    "divided": lambda self, x, n: self.out(x).sum(0) / (n + 1),
    "new rows": lambda self, x, n: (torch.zeros(n + 1, D, dtype=x.dtype) @ x.t()).softmax(1) @ x,
    "a branch": lambda self, x, n: x.sum(0) * (2 if n > 2 else 1),
    "a row of a parameter": lambda self, x, n: self.table[n] + x.sum(0),
    "a row": lambda self, x, n: x[n - 1] if n > 0 else x.sum(0),
    "in classes": in_classes,
    "a tensor of it": lambda self, x, n: x.sum(0) * torch.tensor([n % 3]),
}
RECORDED: dict[str, Callable[..., Any]] = {
    "repeated": repeated,
    "looked up": lambda self, x, n: self.embed(torch.tensor(n)) + x.sum(0),
}


@pytest.mark.parametrize("name", [*PACKED, *RECORDED])
def test_numbers(name: str) -> None:
    forward = {**PACKED, **RECORDED}[name]
    torch.manual_seed(0)
    random.seed(0)
    parts = {**LINEAR(), "table": parameter(12, D), "embed": nn.Embedding(12, D)}
    made = to_double(model(lambda self, g: forward(self, *g), parts, adaptive=False, out="list"))
    for sizes in SIZES:
        check_in_double(made, to_double([(rows(t), random.randint(0, t)) for t in sizes]), gradients=True)
    assert bool(variants_of(made)) == (name in PACKED)


def test_a_number_that_was_the_same_at_first() -> None:
    class Model(nn.Module):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor, n: int, scale: float = 2.0) -> torch.Tensor:
            return x[:n].sum(0) * scale

    made = Model()
    given = [rows(t) for t in (4, 7, 3)]
    for numbers in ([2, 2, 2], [2, 3, 1], [3, 3, 3], [0, 1, 3], [2, -1, 2], [True, 2, 3]):
        wanted = torch.stack([x[:n].sum(0) * 2.0 for x, n in zip(given, numbers, strict=True)])
        torch.testing.assert_close(made(given, numbers), wanted)
    assert len(packed_of(made).families) <= 3
