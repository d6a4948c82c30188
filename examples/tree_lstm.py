"""Binary constituency Tree-LSTM with a sentiment label at every node (Tai, Socher & Manning 2015).

In: a binary tree with a word at each leaf and a label 0-4 at each node. Out: the loss of all its nodes and
the root's scores. Everything below is written for ONE tree; `@fxbatch.autobatch` makes minibatches of it.

    model = TreeLSTM(words=len(vocabulary))
    loss, scores = model(trees)          # a list of trees in, [trees] and [trees, 5] out
    loss.mean().backward()

`python tree_lstm.py` trains it, on the Stanford Sentiment Treebank where it is found (`fxbatch data get sst`), else on
generated trees; `--help` lists the options. `fxbatch demo` does so with checkpoints and with the paper's settings.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbatch
from fxbatch.data.generated import generate_treebank
from fxbatch.data.paths import file_in, locate
from fxbatch.data.sst import CLASSES, SPLITS, Tree, read_trees
from fxbatch.data.vocabulary import Vocabulary

Node = Tree[Tensor, Tensor]  # words and labels are 0-dim int64 tensors
State = tuple[Tensor, Tensor]  # h and c, [hidden] each


class Leaf(nn.Module):
    """The state of a leaf from its word's vector: no input gate, since nothing is below (their code)."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.Linear(embedding, hidden)
        self.gate = nn.Linear(embedding, hidden)

    def forward(self, x: Tensor) -> State:
        c = self.cell(x)
        return torch.sigmoid(self.gate(x)) * torch.tanh(c), c


class Composer(nn.Module):
    """The state of an inner node from those of its two parts, with a forget gate each (section 3.2)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> State:
        i, fl, fr, o, u = self.gates(torch.cat([hl, hr], dim=-1)).chunk(5, dim=-1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(fl) * cl + torch.sigmoid(fr) * cr
        return torch.sigmoid(o) * torch.tanh(c), c


class TreeLSTM(nn.Module):
    """Sentiment of every node: embedding, leaf, composer, and a classifier under dropout."""

    def __init__(
        self,
        words: int,
        *,
        embedding: int = 300,
        hidden: int = 150,
        classes: int = CLASSES,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, embedding, sparse=True)  # a step touches few words
        self.leaf = Leaf(embedding, hidden)
        self.compose = Composer(hidden)
        self.classify = nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, classes))
        nn.init.normal_(self.embed.weight, std=0.1)

    def encode(self, node: Node) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h, c and scores of a node, and the summed loss of its subtree."""
        if node.left is None or node.right is None:
            h, c = self.leaf(self.embed(node.word))
            scores = self.classify(h)
            return h, c, scores, F.cross_entropy(scores, node.label)
        hl, cl, _, left = self.encode(node.left)
        hr, cr, _, right = self.encode(node.right)
        h, c = self.compose(hl, cl, hr, cr)
        scores = self.classify(h)
        return h, c, scores, F.cross_entropy(scores, node.label) + (left + right)

    @fxbatch.autobatch
    def forward(self, tree: Node) -> tuple[Tensor, Tensor]:
        """Loss of all nodes of one tree, summed: no dimensions; scores of the root: [classes]."""
        _, _, scores, loss = self.encode(tree)
        return loss, scores


def model_class(schedule: str) -> type[TreeLSTM]:
    """TreeLSTM with another schedule than the default one. Always batched: a training that is taken up again repeats
    itself bit by bit, whatever minibatch it begins with."""

    class Scheduled(TreeLSTM):
        forward = fxbatch.autobatch(schedule=schedule, adaptive=False)(TreeLSTM.forward.__wrapped__)  # type: ignore[attr-defined]

    return Scheduled


def read_data(
    data: str | None = None, seed: int = 0, names: Sequence[str] = SPLITS
) -> tuple[dict[str, list[Node]], Vocabulary]:
    """These splits, words and labels as tensors, and the vocabulary of "train"; generated ones where none are found."""
    folder = locate("sst", data)
    if folder is None:
        splits = generate_treebank(seed)
    else:
        splits = {name: read_trees(file_in(folder, f"{name}.txt")) for name in names}
    vocabulary = Vocabulary.build(leaf.word or "" for tree in splits["train"] for leaf in tree.leaves())
    return {name: [vocabulary.encode_tree(tree) for tree in splits[name]] for name in names}, vocabulary


def minibatch(
    trees: int = 64, hidden: int = 150, embedding: int = 300, seed: int = 0, data: str | None = None
) -> tuple[TreeLSTM, list[Node]]:
    """A model and its first trees: the target of `fxbatch dump examples/tree_lstm.py:minibatch`."""
    splits, vocabulary = read_data(data, seed, ("train",))
    torch.manual_seed(seed)
    model = TreeLSTM(len(vocabulary), embedding=embedding, hidden=hidden)
    return model, splits["train"][:trees]


def accuracy(model: TreeLSTM, trees: Sequence[Node], size: int = 256) -> float:
    """The share of trees whose root gets its label."""
    model.eval()
    with torch.no_grad():
        right = [
            int((scores.argmax(1) == torch.stack([tree.label for tree in batch])).sum())
            for batch in (trees[i : i + size] for i in range(0, len(trees), size))
            for _, scores in [model(list(batch))]
        ]
    model.train()
    return sum(right) / len(trees)


def main(argv: Sequence[str] | None = None) -> float:
    """Train by Adagrad, as in the paper; the accuracy on dev after each epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="folder that holds sst/ (default: the usual places)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--limit", type=int, help="train on the first LIMIT trees, test on as many")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one tree at a time, undecorated")
    args = parser.parse_args(argv)
    splits, vocabulary = read_data(args.data, args.seed)
    train, dev = (splits[split][: args.limit] for split in ("train", "dev"))
    torch.manual_seed(args.seed)
    model = TreeLSTM(len(vocabulary), hidden=args.hidden)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    order, score = random.Random(args.seed), 0.0
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            begin = time.perf_counter()
            order.shuffle(train)
            for i in range(0, len(train), args.batch_size):
                loss, _ = model(train[i : i + args.batch_size])
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
            seconds, score = time.perf_counter() - begin, accuracy(model, dev)
            print(f"epoch {epoch}: {seconds:.1f} s, {score:.1%} of the dev trees right")
    return score


if __name__ == "__main__":
    main()
