"""The models of the papers' benchmarks, each written for one instance, and instances for them.

Tree-LSTMs here have every size as a parameter and come in two forms: cells as modules (batched as units), and
cells as bare torch functions (batched function by function, as DyNet does). The labeller is the example's.
`losses_once` runs them one by one with the embedding looked up once a minibatch, so that eager isn't slowed
by a dense gradient of the whole table for each word.

    model = TreeLSTM(words=1000, embedding=300, hidden=150, classes=5)
    trees = random_trees(64, leaves=20, words=1000)
    model.loss(trees).sum().backward()          # batched
    losses_once(model, trees).sum().backward()  # one by one
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbatch
from examples.bilstm_tagger import Sentence, Tagger, sum_losses
from fxbatch.data.sst import Tree

Node = Tree[Tensor, Tensor]  # words and labels are tensors without dimensions
State = tuple[Tensor, Tensor]


class LeafCell(nn.Module):
    """The state `[..., hidden]` of a leaf from its word's vector `[..., embedding]`."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(embedding, 3 * hidden)

    def forward(self, x: Tensor) -> State:
        i, o, u = self.gates(x).chunk(3, -1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class NodeCell(nn.Module):
    """The state `[..., hidden]` of an inner node from its two children's (Tai et al. 2015, section 3.2)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> State:
        return gated(self.gates(torch.cat([hl, hr], -1)), cl, cr)


def gated(gates: Tensor, cl: Tensor, cr: Tensor) -> State:
    """State and memory from the gates `[..., 5 * hidden]` and the children's memories."""
    i, fl, fr, o, u = gates.chunk(5, -1)
    c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(fl) * cl + torch.sigmoid(fr) * cr
    return torch.sigmoid(o) * torch.tanh(c), c


class TreeLSTM(nn.Module):
    """Binary Tree-LSTM; classifies the root, or every node with `all_nodes`."""

    def __init__(
        self, words: int, *, embedding: int = 300, hidden: int = 150, classes: int = 5, all_nodes: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, embedding)
        self.leaf = LeafCell(embedding, hidden)
        self.cell = NodeCell(hidden)
        self.out = nn.Linear(hidden, classes)
        self.all_nodes = all_nodes

    def leaf_state(self, x: Tensor) -> State:
        return self.leaf(x)

    def node_state(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> State:
        return self.cell(hl, cl, hr, cr)

    def encode(self, tree: Node, rows: Iterator[Tensor] | None = None) -> State:
        """State and memory `[hidden]` of the root; `rows` are the words' vectors, left to right."""
        if tree.left is None or tree.right is None:
            return self.leaf_state(self.embed(tree.word) if rows is None else next(rows))
        return self.node_state(*self.encode(tree.left, rows), *self.encode(tree.right, rows))

    def encode_all(self, tree: Node, rows: Iterator[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """State and memory of the root, and the loss of all nodes, summed."""
        if tree.left is None or tree.right is None:
            h, c = self.leaf_state(self.embed(tree.word) if rows is None else next(rows))
            return h, c, F.cross_entropy(self.out(h), tree.label)
        hl, cl, left = self.encode_all(tree.left, rows)
        hr, cr, right = self.encode_all(tree.right, rows)
        h, c = self.node_state(hl, cl, hr, cr)
        return h, c, F.cross_entropy(self.out(h), tree.label) + (left + right)

    def loss_of(self, tree: Node, rows: Iterator[Tensor] | None = None) -> Tensor:
        """The loss of one tree: no dimensions."""
        if self.all_nodes:
            return self.encode_all(tree, rows)[2]
        return F.cross_entropy(self.out(self.encode(tree, rows)[0]), tree.label)

    @fxbatch.autobatch
    def forward(self, tree: Node) -> Tensor:
        """Scores `[classes]` of the root."""
        return self.out(self.encode(tree)[0])

    @fxbatch.autobatch
    def loss(self, tree: Node) -> Tensor:
        """The loss of one tree: no dimensions."""
        return self.loss_of(tree)

    def words_of(self, tree: Node) -> list[Tensor]:
        """The words that `rows` stand for, in order."""
        return [leaf.word for leaf in tree.leaves() if leaf.word is not None]


class BareTreeLSTM(TreeLSTM):
    """The Tree-LSTM with its cells written out: every torch function is an operation of its own."""

    def leaf_state(self, x: Tensor) -> State:
        i, o, u = F.linear(x, self.leaf.gates.weight, self.leaf.gates.bias).chunk(3, -1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c

    def node_state(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> State:
        return gated(F.linear(torch.cat([hl, hr], -1), self.cell.gates.weight, self.cell.gates.bias), cl, cr)


class Labeller(Tagger):
    """The BiLSTM labeller of Neubig et al. 2017, figure 2, with the one-by-one variant."""

    def loss_of(self, sentence: Sentence, rows: Iterator[Tensor]) -> Tensor:
        """The loss of one sentence from its words' vectors."""
        return sum_losses(self.scores(list(rows)), sentence.tags)

    def words_of(self, sentence: Sentence) -> Sequence[Tensor]:
        """The words that `rows` stand for, in order."""
        return sentence.words


def losses_once(model: Any, instances: Sequence[Any]) -> Tensor:
    """Losses `[instances]`, one instance after the other, the embedding looked up once for all of them.

    `model` has `embed`, `words_of(instance)` and `loss_of(instance, rows)`.
    """
    words = [model.words_of(instance) for instance in instances]
    table = model.embed(torch.stack([word for sentence in words for word in sentence]))
    rows = iter(table.unbind())
    losses = []
    for instance, sentence in zip(instances, words, strict=True):
        losses.append(model.loss_of(instance, iter([next(rows) for _ in sentence])))
    return torch.stack(losses)


def figure_2_labeller() -> Labeller:
    """Vocabulary 1000, 300 labels, embeddings of 200, 2 layers of 256 a direction."""
    return Labeller(1000, 300, embedding=200, hidden=256, layers=2)


def random_sentences(
    count: int, *, length: int = 40, words: int = 1000, tags: int = 300, ragged: bool = False, seed: int = 0
) -> list[Sentence]:
    """Sentences of `length` random words, or of 1 to `length` with `ragged`."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, length) if ragged else length for _ in range(count)]
    return [
        Sentence(
            numbers([chance.randrange(words) for _ in range(n)]),
            numbers([chance.randrange(tags) for _ in range(n)]),
        )
        for n in lengths
    ]


def numbers(values: Sequence[int]) -> list[Tensor]:
    """Tensors without dimensions."""
    return [torch.tensor(value) for value in values]


def random_trees(
    count: int, *, leaves: int, words: int = 1000, classes: int = 5, equal: bool = False, seed: int = 0
) -> list[Node]:
    """Random binary trees of `leaves` leaves, each of another shape, or all of one shape with `equal`.

    The shape is drawn as in Looks et al. 2017, section 3.5: the leaves of a node are split at random.
    """
    chance = random.Random(seed)
    shape = random.Random(seed + 1)
    word_tensors, label_tensors = numbers(range(words)), numbers(range(classes))
    state = shape.getstate()
    trees = []
    for _ in range(count):
        if equal:
            shape.setstate(state)
        trees.append(_random_tree(leaves, shape, chance, word_tensors, label_tensors))
    return trees


def _random_tree(
    leaves: int, shape: random.Random, chance: random.Random, words: list[Tensor], labels: list[Tensor]
) -> Node:
    label = chance.choice(labels)
    if leaves == 1:
        return Tree(label, chance.choice(words))
    left = shape.randint(1, leaves - 1)
    parts = [_random_tree(n, shape, chance, words, labels) for n in (left, leaves - left)]
    return Tree(label, None, *parts)
