"""An index out of an instance's range is an error where it is one in the loop: no other instance's rows, no zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from tests.oracle import check_equal


def _wide(i: torch.Tensor) -> torch.Tensor:
    return i[:, None].expand(-1, 4)


FORWARDS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda m, x, i: m.l(x)[i].sum(0),
    "index_select": lambda m, x, i: m.l(x).index_select(0, i).sum(0),
    "index_add": lambda m, x, i: torch.zeros_like(x).index_add(0, i, m.l(x)[: len(i)]).sum(0),
    "index_copy": lambda m, x, i: m.l(x).index_copy(0, i, x[: len(i)]).sum(0),
    "index_fill": lambda m, x, i: m.l(x).index_fill(0, i, 1.5).sum(0),
    "index_put": lambda m, x, i: m.l(x).index_put((i,), x[: len(i)]).sum(0),
    "scatter_add": lambda m, x, i: torch.zeros_like(x).scatter_add(0, _wide(i), m.l(x)[: len(i)]).sum(0),
    "gather": lambda m, x, i: m.l(x).gather(0, _wide(i)).sum(0),
    "F.embedding": lambda m, x, i: F.embedding(i, m.l(x)).sum(0),
    "a table's rows": lambda m, x, i: m.e.weight.index_select(0, i).sum(0) + m.l(x).sum(0),
    "bincount": lambda m, x, i: m.l(x).sum(0) + torch.bincount(i, minlength=6)[:4],
    "one_hot": lambda m, x, i: m.l(x).sum(0) * F.one_hot(i, 6).sum(0)[:4],
    "one_hot of values": lambda m, x, i: m.l(x).sum(0) * F.one_hot(i + m.e(i).argmax() * 0, 6).sum(0)[:4],
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.l, self.e = nn.Linear(4, 4), nn.Embedding(6, 4)
        self.name = name

    def one(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return FORWARDS[self.name](self, x, i)

    @fxbatch.autobatch
    def forward(self, x: Any, i: torch.Tensor) -> torch.Tensor:
        return self.one(x[0] if isinstance(x, list) else x, i)


def minibatch(own: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """own: sizes of the instance's own, packed; else recorded."""
    sizes = [3, 5, 2, 6, 4, 6] if own else [6] * 6
    xs = [torch.randn(t, 4) for t in sizes]
    return (xs if own else [[x] for x in xs]), [torch.arange(t)[:2] for t in sizes]


@pytest.mark.parametrize("own", [True, False], ids=["own sizes", "one size"])
@pytest.mark.parametrize("name", FORWARDS)
def test_errors_are_the_loops(name: str, own: bool) -> None:
    model = Model(name)
    for _ in range(3):
        model(*minibatch(own))
    for wrong in (-1, 6, 40, -9):
        xs, index = minibatch(own)
        index[3][1] = wrong
        loop = [x if own else x[0] for x in xs]
        try:
            wanted = torch.stack([model.one(x, i) for x, i in zip(loop, index, strict=True)])
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError)):
                model(xs, index)
        else:
            torch.testing.assert_close(model(xs, index), wanted)


class Padded(nn.Module):
    """Look-ups in a table of the instance's own, with a row that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 24)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        table = self.l(x).view(6, 4)
        found = F.embedding(i, table, padding_idx=2).square().sum()
        return found + F.embedding(i, table, padding_idx=-1).sum() + F.embedding(i[0], table, 0).sum()


def test_padding_rows_of_own_tables_get_no_gradient() -> None:
    check_equal(Padded(), list(torch.randn(5, 4)), [torch.tensor([k, 2, 5]) for k in range(5)])
