"""Rows that a mask picks: how many they are depends on values. Packed, equal to the loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from tests.oracle import to_double
from tests.ragged.own_size_models import LINEAR, K, rows
from tests.ragged.test_library_style_models import check_in_double
from tests.ragged.test_packed_forward import packed_of, variants_of
from tests.trust.programs import model

SIZES = ((4, 7, 2, 5), (3, 1, 6), (1, 1, 2, 9), (3, 3, 3))


def marked(t: int) -> tuple[torch.Tensor, ...]:
    """Rows, a mask that picks none of some, classes."""
    return rows(t), torch.rand(t) > 0.6, torch.randint(K, (t,))


def attend(self: Any, x: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x[m]
    return self.out((h @ x.t()).softmax(-1) @ x).sum(0) + ((h @ h.t()).softmax(-1) @ h).sum()


def masks_of_masks(self: Any, x: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.l(x)[m]
    h = h[h[:, 0] > 0]
    return torch.cat([h.sum(0), x[~m].sum(0), x.mean(0)])


def centred(self: Any, x: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x[m]
    return (h - h.sum(0) / max(len(h), 1)).pow(2).sum(0) + torch.arange(len(h), dtype=x.dtype).sum()


PACKED: dict[str, Callable[..., Any]] = {
    "its own size": lambda self, x, m, y: self.l(x)[m],
    "loss": lambda self, x, m, y: F.cross_entropy(self.out(x[m]), y[m], reduction="sum"),
    "mean loss": lambda self, x, m, y: F.cross_entropy(self.out(x)[m], y[m]),
    "attention": attend,
    "masks of masks": masks_of_masks,
    "two parts": lambda self, x, m, y: self.out(torch.cat([x[m], x[~m]])).mean(0),
    "one mask twice": lambda self, x, m, y: (x[m] * self.l(x)[m]).sum(0),
    "centred": centred,
    "first of them": lambda self, x, m, y: x[m][:3].sum(0),
    "classes": lambda self, x, m, y: torch.stack([x[y == k].sum(0) for k in range(K)]),
    "columns": lambda self, x, m, y: x.t()[:, m].sum(1),
    "nonzero": lambda self, x, m, y: self.out(x[m.nonzero().squeeze(1)]).sum(0) + x[torch.where(~m)[0]].sum(),
    "of numbers": lambda self, x, m, y: (
        x[y.nonzero().squeeze(1)].sum(0) + x[torch.where(x[:, 0].round())[0]].sum(0)
    ),
    "where": lambda self, x, m, y: m.nonzero(as_tuple=True)[0],
}
# What is asked of how many they are, or of values, has no answer for all instances at once.
RECORDED: dict[str, Callable[..., Any]] = {
    "squeezed": lambda self, x, m, y: x[m].squeeze().sum(),
    "whether any": lambda self, x, m, y: x[m].amax(0) if m.any() else x.sum(0),
    "columns of its own": lambda self, x, m, y: x[:, x[0] > 0].sum() if len(x) else x.sum(),
}
if torch.__version__ < "2.12":  # which does not say how long a slice of so many is
    RECORDED["first of them"] = PACKED.pop("first of them")


@pytest.mark.parametrize("name", [*PACKED, *RECORDED])
def test_masks(name: str) -> None:
    forward = {**PACKED, **RECORDED}[name]
    torch.manual_seed(1)
    made = to_double(model(lambda self, g: forward(self, *g), LINEAR(), adaptive=False, out="list"))
    for sizes in SIZES:
        check_in_double(made, to_double([marked(t) for t in sizes]), gradients=name != "where")
    assert bool(variants_of(made)) == (name in PACKED)
    assert not any(v.function.lowered.alone for v in variants_of(made))


def test_as_columns_and_nested() -> None:
    class Positive(nn.Module):
        @fxbatch.autobatch(out="nested", adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.sum(1) > 0]

    made, given = Positive(), [rows(t) for t in (4, 7, 3)]
    found = made(given)
    for x, part in zip(given, found.unbind(), strict=True):
        torch.testing.assert_close(part, x[x.sum(1) > 0])
    assert packed_of(made).families


def test_a_submodule_that_picks_rows_is_recorded() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.sum(1) > 0].sum(0)

    class Item:
        def __new__(cls, *_: Any) -> Any:  # what packing does not look into
            return super().__new__(cls)

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def forward(self: Any, item: Any) -> torch.Tensor:
        return self.out(self.chosen(self.l(item.x)))

    made = to_double(model(forward, {**LINEAR(), "chosen": Chosen()}, adaptive=False))
    for sizes in ((3, 5, 4), (2, 6, 7), (8, 3, 4)):
        given = to_double([Item(rows(t)) for t in sizes])
        wanted = torch.stack([forward(made, item) for item in given])
        torch.testing.assert_close(made(given), wanted)
