"""A small target for the tests of the commands: a tree model, with what can go wrong to order.

target_model.py:minibatch --arg trees=3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxbatch


class Tree(nn.Module):
    """Words are ints, inner nodes are pairs; the result has three scores."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.cell = nn.Linear(16, 8)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(8, 3)

    def encode(self, tree: Any) -> Tensor:
        if isinstance(tree, tuple):
            left, right = self.encode(tree[0]), self.encode(tree[1])
            return torch.tanh(self.drop(self.cell(torch.cat([left, right]))))
        return self.embed(torch.tensor(tree))

    @fxbatch.autobatch
    def forward(self, tree: Any) -> Tensor:
        if tree == "broken":
            raise ValueError("no such tree")
        return self.out(self.encode(tree))


TREES = [((1, 2), 3), (1, 2), 5, ((1, 2), (7, (1, 2)))]


def minibatch(trees: int = 4, dropout: float = 0.0) -> tuple[Tree, list[Any]]:
    """A model and its first trees."""
    torch.manual_seed(0)
    return Tree(dropout), TREES[:trees]


class Bag(nn.Module):
    """Rows of the instance's own number; `mode` has no rule along rows, and runs instance by instance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).mean(0) + x.mode(0).values.sum()


class Outer(nn.Module):
    """Objects that can't be copied, so that the forward is recorded; their rows go through a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    @fxbatch.autobatch
    def forward(self, item: Item) -> Tensor:
        return self.inner(item.rows)[0]


class Item:
    """An instance that is an object with a `__new__` of its own, so that no copy is made from its attributes."""

    rows: Tensor

    def __new__(cls, rows: Tensor) -> Item:
        made = super().__new__(cls)
        made.rows = rows
        return made


def bags() -> tuple[Bag, list[Tensor]]:
    """Sizes of their own: the whole forward is packed."""
    return Bag(), [torch.randn(n, 4) for n in (3, 1, 5)]


def items() -> tuple[Outer, list[Item]]:
    """Sizes of their own in a submodule."""
    return Outer(), [Item(torch.randn(n, 4)) for n in (3, 2, 5, 4)]


def broken() -> tuple[Tree, list[Any]]:
    """A model whose forward raises."""
    return Tree(), [(1, 2), "broken"]


def empty() -> tuple[Tree, list[Any]]:
    """No instances."""
    return Tree(), []
