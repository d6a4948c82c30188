"""One binary Tree-LSTM written in the ways in which people write such models: the same mathematics and parameters.

In: a Node with words at its leaves and a label at every node. Out: the sum of the cross entropies of all nodes.

    torch.manual_seed(0)
    model = WAYS["explicit stack"](Sizes(hidden=150))      # after the same seed all ways have the same parameters
    model([random_tree(random.Random(k), leaves=20, words=2000) for k in range(64)])      # a minibatch
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

import fxbatch

CLASSES = 5
State = tuple[Tensor, Tensor]  # [H] both


@dataclass(frozen=True)
class Sizes:
    """Of a model: words in the vocabulary, features of a word, of a state."""

    words: int = 2000
    embedding: int = 300
    hidden: int = 150


class Node:
    """A node of a binary tree: a leaf has a word, an int64 scalar, others a left and a right child."""

    def __init__(self, label: Tensor, word: Tensor | None = None, *children: Node) -> None:
        self.label, self.word, self.children = label, word, list(children)
        self.left, self.right = children or (None, None)
        self.state: Any = None  # a model may leave something here


def random_tree(rng: random.Random, leaves: int, words: int) -> Node:
    """A tree of so many leaves, its shape, words and labels by chance."""
    label = torch.tensor(rng.randrange(CLASSES))
    if leaves == 1:
        return Node(label, torch.tensor(rng.randrange(words)))
    left = rng.randint(1, leaves - 1)
    return Node(label, None, random_tree(rng, left, words), random_tree(rng, leaves - left, words))


class Leaf(nn.Module):
    """A word `[E]` -> its state."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.cell = nn.Linear(sizes.embedding, sizes.hidden)
        self.gate = nn.Linear(sizes.embedding, sizes.hidden)

    def forward(self, x: Tensor) -> State:
        c = self.cell(x)
        return torch.sigmoid(self.gate(x)) * torch.tanh(c), c


class Compose(nn.Module):
    """The states of two children -> their parent's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> State:
        i, f, g, o, u = self.gates(torch.cat([hl, hr], -1)).chunk(5, -1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * cl + torch.sigmoid(g) * cr
        return torch.sigmoid(o) * torch.tanh(c), c


class Way(nn.Module):
    """Base class of all ways: the parameters, the loss of a node, and `forward`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.hidden = sizes.hidden
        self.embed = nn.Embedding(sizes.words, sizes.embedding)
        self.leaf = Leaf(sizes)
        self.compose = Compose(sizes.hidden)
        self.out = nn.Linear(sizes.hidden, CLASSES)

    def loss(self, h: Tensor, n: Any) -> Tensor:
        """Of one node."""
        return F.cross_entropy(self.out(h), n.label)

    def total(self, tree: Any) -> Any:
        """Of all nodes of a tree."""
        raise NotImplementedError

    @fxbatch.autobatch(adaptive=False)
    def forward(self, tree: Any) -> Any:
        return self.total(tree)


class Modules(Way):
    """The cells are modules; recursion returns states and losses."""

    def encode(self, n: Any) -> Any:
        if n.left is None:
            h, c = self.leaf(self.embed(n.word))
            return h, c, self.loss(h, n)
        hl, cl, a = self.encode(n.left)
        hr, cr, b = self.encode(n.right)
        h, c = self.compose(hl, cl, hr, cr)
        return h, c, self.loss(h, n) + (a + b)

    def total(self, tree: Any) -> Any:
        return self.encode(tree)[2]


class Inline(Modules):
    """The cells' code stands in the recursion."""

    def encode(self, n: Any) -> Any:
        if n.left is None:
            x = self.embed(n.word)
            c = self.leaf.cell(x)
            h = torch.sigmoid(self.leaf.gate(x)) * torch.tanh(c)
            return h, c, self.loss(h, n)
        hl, cl, a = self.encode(n.left)
        hr, cr, b = self.encode(n.right)
        i, f, g, o, u = self.compose.gates(torch.cat([hl, hr], -1)).chunk(5, -1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * cl + torch.sigmoid(g) * cr
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c, self.loss(h, n) + (a + b)


class Functions(Modules):
    """Functions in place of operators, `split`, states of `[1, H]` that are squeezed for the loss."""

    def encode(self, n: Any) -> Any:
        if n.left is None:
            x = self.embed(n.word).unsqueeze(0)
            c = self.leaf.cell(x)
            h = torch.mul(F.sigmoid(self.leaf.gate(x)), F.tanh(c))
            return h, c, self.loss(h.squeeze(0), n)
        hl, cl, a = self.encode(n.left)
        hr, cr, b = self.encode(n.right)
        parts = torch.split(self.compose.gates(torch.cat((hl, hr), dim=1)), self.hidden, dim=1)
        i, f, g, o, u = parts
        i, f, g, o, u = F.sigmoid(i), F.sigmoid(f), F.sigmoid(g), F.sigmoid(o), F.tanh(u)
        c = torch.mul(i, u) + torch.mul(f, cl) + torch.mul(g, cr)
        h = torch.mul(o, F.tanh(c))
        return h, c, self.loss(h.squeeze(0), n) + (a + b)


class Attributes(Way):
    """States are left on the nodes, losses in a list."""

    def encode(self, n: Any, losses: list[Any]) -> None:
        for child in n.children:
            self.encode(child, losses)
        if n.children:
            n.state = self.compose(*n.left.state, *n.right.state)
        else:
            n.state = self.leaf(self.embed(n.word))
        losses.append(self.loss(n.state[0], n))

    def total(self, tree: Any) -> Any:
        losses: list[Any] = []
        self.encode(tree, losses)
        return torch.stack(losses).sum()


class Writes(Way):
    """A zero state made at each leaf and filled in place; a loss that is added to in place."""

    def encode(self, n: Any, total: Any) -> Any:
        if n.left is None:
            x = self.embed(n.word)
            zero = x.detach().new(1, self.hidden).fill_(0.0)
            h, c = self.leaf(x)
            h = h + zero[0]
        else:
            hl, cl = self.encode(n.left, total)
            hr, cr = self.encode(n.right, total)
            h, c = self.compose(hl, cl, hr, cr)
        total += self.loss(h, n)
        return h, c

    def total(self, tree: Any) -> Any:
        total = torch.zeros(())
        self.encode(tree, total)
        return total


class Children(Modules):
    """Any number of children: `zip(*map(...))`, `stack`, `sum`."""

    def encode(self, n: Any) -> Any:
        if not n.children:
            h, c = self.leaf(self.embed(n.word))
            return h, c, self.loss(h, n)
        hs, cs, losses = zip(*map(self.encode, n.children), strict=True)
        h, c = torch.stack(hs), torch.stack(cs)
        h, c = self.compose(h[0], c[0], h[-1], c[-1])
        return h, c, self.loss(h, n) + sum(losses)


class Postfix(Way):
    """The tree in postfix order, all words looked up at once, states in a list by position."""

    def total(self, tree: Any) -> Any:
        order: list[Any] = []
        collect(tree, order)
        words = self.embed(torch.stack([n.word for n in order if n.left is None]))
        states: list[State] = []
        loss: Any = 0.0
        k = 0
        for n in order:
            if n.left is None:
                h, c = self.leaf(words[k])
                k += 1
            else:
                (hl, cl), (hr, cr) = states[-2], states[-1]
                del states[-2:]
                h, c = self.compose(hl, cl, hr, cr)
            states.append((h, c))
            loss = loss + self.loss(h, n)
        return loss


def collect(n: Any, order: list[Any]) -> None:
    """Append the nodes below and n itself, children first."""
    for child in n.children:
        collect(child, order)
    order.append(n)


class Dicts(Modules):
    """States in dicts."""

    def encode(self, n: Any) -> Any:
        if n.left is None:
            h, c = self.leaf(self.embed(n.word))
            return {"h": h, "c": c, "loss": self.loss(h, n)}
        left, right = self.encode(n.left), self.encode(n.right)
        h, c = self.compose(left["h"], left["c"], right["h"], right["c"])
        return {"h": h, "c": c, "loss": self.loss(h, n) + (left["loss"] + right["loss"])}

    def total(self, tree: Any) -> Any:
        return self.encode(tree)["loss"]


@dataclass
class Encoded:
    """A node's state and the loss of its subtree."""

    h: Tensor
    c: Tensor
    loss: Tensor


class Dataclasses(Modules):
    """States in dataclasses."""

    def encode(self, n: Any) -> Encoded:
        if n.left is None:
            h, c = self.leaf(self.embed(n.word))
            return Encoded(h, c, self.loss(h, n))
        left, right = self.encode(n.left), self.encode(n.right)
        h, c = self.compose(left.h, left.c, right.h, right.c)
        return Encoded(h, c, self.loss(h, n) + (left.loss + right.loss))

    def total(self, tree: Any) -> Any:
        return self.encode(tree).loss


class Generators(Way):
    """A generator yields the loss of each node and returns the state (`yield from`)."""

    def encode(self, n: Any) -> Generator[Tensor, None, State]:
        if n.left is None:
            h, c = self.leaf(self.embed(n.word))
        else:
            hl, cl = yield from self.encode(n.left)
            hr, cr = yield from self.encode(n.right)
            h, c = self.compose(hl, cl, hr, cr)
        yield self.loss(h, n)
        return h, c

    def total(self, tree: Any) -> Any:
        return sum(self.encode(tree))


class Reduce(Way):
    """Children are folded into their parent, and losses into their sum, by `functools.reduce`."""

    def encode(self, n: Any, losses: list[Any]) -> State:
        if n.children:
            states = [self.encode(child, losses) for child in n.children]
            h, c = functools.reduce(lambda left, right: self.compose(*left, *right), states)
        else:
            h, c = self.leaf(self.embed(n.word))
        losses.append(self.loss(h, n))
        return h, c

    def total(self, tree: Any) -> Any:
        losses: list[Any] = []
        self.encode(tree, losses)
        return functools.reduce(operator.add, losses)


class Stack(Way):
    """No recursion: an explicit stack of nodes, another one of states."""

    def total(self, tree: Any) -> Any:
        todo: list[tuple[Any, bool]] = [(tree, False)]
        states: list[State] = []
        losses: list[Any] = []
        while todo:
            n, has_children = todo.pop()
            if n.left is not None and not has_children:
                todo += [(n, True), (n.right, False), (n.left, False)]
                continue
            if n.left is None:
                state = self.leaf(self.embed(n.word))
            else:
                right, left = states.pop(), states.pop()
                state = self.compose(*left, *right)
            states.append(state)
            losses.append(self.loss(state[0], n))
        return sum(losses)


class ByIndex(Modules):
    """The cells stand in an `nn.ModuleList` and are taken by index."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.cells = nn.ModuleList([self.leaf, self.compose])
        del self.leaf, self.compose

    def encode(self, n: Any) -> Any:
        if n.left is None:
            h, c = self.cells[0](self.embed(n.word))
            return h, c, self.loss(h, n)
        hl, cl, a = self.encode(n.left)
        hr, cr, b = self.encode(n.right)
        h, c = self.cells[1](hl, cl, hr, cr)
        return h, c, self.loss(h, n) + (a + b)


class Slices(Modules):
    """A state is one tensor `[2H]`, its halves are slices."""

    def encode(self, n: Any) -> Any:
        size = self.hidden
        if n.left is None:
            state = torch.cat(self.leaf(self.embed(n.word)))
            return state, self.loss(state[:size], n)
        left, a = self.encode(n.left)
        right, b = self.encode(n.right)
        state = torch.cat(self.compose(left[:size], left[size:], right[:size], right[size:]))
        return state, self.loss(state[:size], n) + (a + b)

    def total(self, tree: Any) -> Any:
        return self.encode(tree)[1]


class Variables(Way):
    """As before torch 0.4: `Variable(torch.zeros(H))`, `.data`, `h.data.new(...).requires_grad_()`."""

    def encode(self, n: Any) -> Any:
        if n.left is None:
            x = self.embed(Variable(n.word))
            h, c = self.leaf(x)
            h = h + Variable(torch.zeros(self.hidden))
            c = c + Variable(h.data.new(*h.size()).zero_().requires_grad_())
            return h, c, self.loss(h, n)
        hl, cl, a = self.encode(n.left)
        hr, cr, b = self.encode(n.right)
        h, c = self.compose(hl, cl, hr, cr)
        return h, c, self.loss(h, n) + (a + b)

    def total(self, tree: Any) -> Any:
        return self.encode(tree)[2] + Variable(torch.zeros(1))[0]


WAYS: dict[str, type[Way]] = {
    "modules": Modules,
    "cells inline": Inline,
    "functions, [1, H]": Functions,
    "attributes of nodes": Attributes,
    "writes in place": Writes,
    "any number of children": Children,
    "postfix order": Postfix,
    "dicts": Dicts,
    "dataclasses": Dataclasses,
    "generators": Generators,
    "functools.reduce": Reduce,
    "explicit stack": Stack,
    "ModuleList by index": ByIndex,
    "slices of a state": Slices,
    "old Variables": Variables,
}
