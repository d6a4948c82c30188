"""The minibatch of the pictures: a Tree-LSTM over four short sentences.

model, trees = minibatch()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxbatch


class Cell(nn.Module):
    """(h, c) of two children -> (h, c), as Tai et al. 2015, section 3.2."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> tuple[Tensor, Tensor]:
        i, fl, fr, o, g = self.gates(torch.cat([hl, hr], -1)).chunk(5, -1)
        c = i.sigmoid() * g.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


class Leaf(nn.Module):
    """A word's vector -> (h, c)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(hidden, 2 * hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        o, c = self.gates(x).chunk(2, -1)
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """Words are ints, inner nodes are pairs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, hidden)
        self.leaf, self.cell, self.out = Leaf(hidden), Cell(hidden), nn.Linear(hidden, 5)

    def encode(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            return self.leaf(self.embed(torch.tensor(tree)))
        return self.cell(*self.encode(tree[0]), *self.encode(tree[1]))

    @fxbatch.autobatch
    def forward(self, tree: Any) -> Tensor:
        return self.out(self.encode(tree)[0])


TREES: list[Any] = [
    ((11, 12), (13, (14, 15))),
    (21, (22, 23)),
    (((31, 32), (33, 34)), (35, (36, 37))),
    (41, 42),
]


def minibatch(hidden: int = 16) -> tuple[TreeLSTM, list[Any]]:
    """The model and its four trees."""
    torch.manual_seed(0)
    return TreeLSTM(hidden), TREES
