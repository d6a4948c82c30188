"""Per-instance models for tests: small, each a shape of computation that users bring."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fxbatch


@dataclass(eq=False)
class Tree:
    word: torch.Tensor | None = None
    children: list[Tree] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        return not self.children


def random_tree(rng: random.Random, leaves: int, words: int = 20) -> Tree:
    """A binary tree with that many leaves."""
    if leaves == 1:
        return Tree(torch.tensor(rng.randrange(words)))
    left = rng.randrange(1, leaves)
    return Tree(None, [random_tree(rng, left, words), random_tree(rng, leaves - left, words)])


def wide_tree(rng: random.Random, nodes: int, words: int = 20) -> Tree:
    """A tree whose nodes have any number of children, each node with a word."""
    root = Tree(torch.tensor(rng.randrange(words)))
    every = [root]
    for _ in range(nodes - 1):
        child = Tree(torch.tensor(rng.randrange(words)))
        rng.choice(every).children.append(child)
        every.append(child)
    return root


class Leaf(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 3 * hidden)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, o, u = self.linear(x).chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


class Cell(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, hl: Any, cl: Any, hr: Any, cr: Any) -> tuple[torch.Tensor, torch.Tensor]:
        i, fl, fr, o, u = self.linear(torch.cat([hl, hr], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """Binary Tree-LSTM; `options` go to the decorator by subclassing (see `decorated`)."""

    def __init__(self, words: int = 20, size: int = 6, hidden: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.leaf = Leaf(size, hidden)
        self.cell = Cell(hidden)
        self.out = nn.Linear(hidden, classes)

    def encode(self, tree: Tree) -> Any:
        if tree.is_leaf:
            return self.leaf(self.embed(tree.word))
        left, right = tree.children
        return self.cell(*self.encode(left), *self.encode(right))

    @fxbatch.autobatch
    def forward(self, tree: Tree) -> torch.Tensor:
        h, _ = self.encode(tree)
        return self.out(h)


class ChildSum(nn.Module):
    """Child-sum Tree-LSTM over any number of children, written with bare operators."""

    def __init__(self, words: int = 20, size: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.iou = nn.Linear(2 * size, 3 * size)
        self.forget = nn.Linear(2 * size, size)
        self.zero = nn.Buffer(torch.zeros(size))

    def encode(self, tree: Tree) -> Any:
        x = self.embed(tree.word)
        states = [self.encode(child) for child in tree.children]
        h = sum((s[0] for s in states), start=self.zero)
        i, o, u = self.iou(torch.cat([x, h])).chunk(3)
        c = torch.sigmoid(i) * torch.tanh(u)
        for hk, ck in states:
            c = c + torch.sigmoid(self.forget(torch.cat([x, hk]))) * ck
        return torch.sigmoid(o) * torch.tanh(c), c

    @fxbatch.autobatch
    def forward(self, tree: Tree) -> torch.Tensor:
        return self.encode(tree)[0]


class RNN(nn.Module):
    """An Elman network over the rows of a sequence, with a bare parameter as its first state."""

    def __init__(self, size: int = 4, hidden: int = 5) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(hidden))
        self.cell = nn.RNNCell(size, hidden)

    @fxbatch.autobatch
    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        h = self.start
        for x in sequence:
            h = self.cell(x[None], h[None])[0]
        return h


class Tagger(nn.Module):
    """A BiLSTM tagger: a list of scores a word, so results are ragged."""

    def __init__(self, words: int = 20, size: int = 4, hidden: int = 3, tags: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.ahead = nn.LSTMCell(size, hidden)
        self.back = nn.LSTMCell(size, hidden)
        self.out = nn.Linear(2 * hidden, tags)
        self.hidden = hidden

    def scan(self, cell: nn.LSTMCell, xs: list[Any]) -> list[Any]:
        h, c = torch.zeros(self.hidden), torch.zeros(self.hidden)
        h, c = h.to(cell.weight_ih.dtype), c.to(cell.weight_ih.dtype)
        out = []
        for x in xs:
            h, c = cell(x, (h, c))
            out.append(h)
        return out

    @fxbatch.autobatch(out="list")
    def forward(self, words: list[torch.Tensor]) -> list[Any]:
        xs = [self.embed(w) for w in words]
        ahead, back = self.scan(self.ahead, xs), self.scan(self.back, xs[::-1])[::-1]
        return [self.out(torch.cat([a, b])) for a, b in zip(ahead, back, strict=True)]


@dataclass(eq=False)
class Molecule:
    atoms: torch.Tensor  # float [atoms, features]
    bonds: torch.Tensor  # i64 [bonds, 2]


class GraphNet(nn.Module):
    """Message passing over one molecule; every molecule has its own shapes."""

    def __init__(self, features: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden)
        self.message = nn.Linear(hidden, hidden)
        self.update = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    @fxbatch.autobatch
    def forward(self, molecule: Molecule) -> torch.Tensor:
        h = torch.relu(self.enter(molecule.atoms))
        begin, end = molecule.bonds[:, 0], molecule.bonds[:, 1]
        for _ in range(2):
            messages = torch.zeros_like(h).index_add(0, end, self.message(h[begin]))
            h = self.update(messages, h)
        return self.out(h.sum(0))


class Tied(nn.Module):
    """One parameter in three roles: embedding table, bare matrix, linear layer's weight."""

    def __init__(self, words: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 5)
        self.out = nn.Linear(5, words, bias=False)
        self.out.weight = self.embed.weight

    @fxbatch.autobatch
    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        h = torch.stack([self.embed(w) for w in words]).mean(0)
        h = torch.tanh(h @ self.embed.weight.t() @ self.embed.weight)
        return F.log_softmax(self.out(h), -1)


class WithDropout(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.dropout = nn.Dropout(0.5)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


class Chain(nn.Module):
    """A cell applied many times, as deep as asked."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.cell = nn.Linear(size, size)

    @fxbatch.autobatch(shared="steps")
    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self.cell(x))
        return x


def trees(seed: int, sizes: list[int]) -> list[Tree]:
    rng = random.Random(seed)
    return [random_tree(rng, n) for n in sizes]


def with_options(model: nn.Module, **options: Any) -> nn.Module:
    """The same model with other options of the decorator on its forward."""
    plain = type(model).forward.__fxbatch__
    known = {k: getattr(plain.options, k) for k in ("out", "shared")}
    forward = fxbatch.autobatch(**{**known, **options})(plain.fn)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
    return model
