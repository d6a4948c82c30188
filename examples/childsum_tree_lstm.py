"""Child-sum Tree-LSTM over dependency trees, written for ONE tree.

In: a dependency tree; a node has any number of children. Out: scores of the relation of each word to its
head, from the word and everything below it (Tai et al. 2015, equations 2 to 8). UD English Web Treebank;
accuracy.

    model, trees = minibatch()
    scores = model(trees)                # a list of trees in, a list of lists of scores out
    model.loss(trees).sum().backward()
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fxbatch_examples.command import device, positive, run
from rich.progress import track
from torch import Tensor, nn

import fxbatch
from fxbatch.data.conllu import Sentence, read_conllu
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Node:
    """A word and its label (tensors without dimensions) and the nodes below it."""

    word: Tensor
    label: Tensor
    children: tuple[Node, ...] = ()

    def nodes(self) -> list[Node]:
        """All nodes, children before their parents."""
        return [node for child in self.children for node in child.nodes()] + [self]


class ForgottenMemory(nn.Module):
    """The part of one child's memory that a node keeps: a forget gate of its own (equations 4 and 7)."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(inputs + hidden, hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(torch.cat([x, h]))) * c


class NodeCell(nn.Module):
    """State and memory of a node from the sums over its children (equations 3 and 5 to 8)."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 3 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.gates(torch.cat([x, h])).chunk(3)
        memory = torch.sigmoid(i) * torch.tanh(u) + c
        return torch.sigmoid(o) * torch.tanh(memory), memory


class ChildSumTreeLSTM(nn.Module):
    """A child-sum Tree-LSTM and scores of the labels."""

    zero: Tensor

    def __init__(self, words: int, labels: int, *, embedding: int = 100, hidden: int = 150):
        super().__init__()
        self.embed = nn.Embedding(words, embedding)
        self.keep = ForgottenMemory(embedding, hidden)
        self.cell = NodeCell(embedding, hidden)
        self.out = nn.Linear(hidden, labels)
        self.register_buffer("zero", torch.zeros(hidden), persistent=False)

    def encode(self, node: Node, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """State and memory `[hidden]` of a node; the states of all nodes below are put into `states`."""
        below = [self.encode(child, states) for child in node.children]
        x = self.embed(node.word)
        h, c = self.zero, self.zero
        if below:
            h = add([h for h, _ in below])
            c = add([self.keep(x, h, c) for h, c in below])
        state, memory = self.cell(x, h, c)
        states.append(state)
        return state, memory

    @fxbatch.autobatch(out="list")
    def forward(self, tree: Node) -> list[Tensor]:
        """Scores `[labels]` of each node, children before their parents."""
        states: list[Tensor] = []
        self.encode(tree, states)
        return [self.out(state) for state in states]

    @fxbatch.autobatch
    def loss(self, tree: Node) -> Tensor:
        """Cross entropy, summed over the nodes: no dimensions."""
        states: list[Tensor] = []
        self.encode(tree, states)
        pairs = zip(states, tree.nodes(), strict=True)
        return add([F.cross_entropy(self.out(state), node.label) for state, node in pairs])


def add(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of one vector or more, pairwise: few additions wait for each other."""
    while len(vectors) > 1:
        pairs = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + list(vectors[len(pairs) * 2 :])
    return vectors[0]


def build(words: int, labels: int, *, embedding: int = 100, hidden: int = 150) -> ChildSumTreeLSTM:
    """The model, at the size of Tai et al. 2015 unless told otherwise."""
    return ChildSumTreeLSTM(words, labels, embedding=embedding, hidden=hidden)


def minibatch(*, trees: int = 6, hidden: int = 8, seed: int = 0) -> tuple[ChildSumTreeLSTM, list[Node]]:
    """A small model and random trees of 1 to 9 nodes."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    instances = []
    for _ in range(trees):
        n = chance.randint(1, 9)
        heads = [0] + [chance.randrange(node) + 1 for node in range(1, n)]
        words, labels = torch.randint(0, 20, (n,)).unbind(), torch.randint(0, 5, (n,)).unbind()
        instances.append(build_tree(heads, words, labels))
    return build(20, 5, embedding=6, hidden=hidden), instances


def build_tree(heads: Sequence[int], words: Sequence[Tensor], labels: Sequence[Tensor]) -> Node:
    """The tree of heads (1-based, 0 = root)."""

    def node(word: int) -> Node:
        children = tuple(node(i) for i, head in enumerate(heads) if head == word + 1)
        return Node(words[word], labels[word], children)

    return node(list(heads).index(0))


def encode(sentence: Sentence, words: Vocabulary, labels: Vocabulary) -> Node:
    """Forms and universal relations of a sentence as a tree of numbers."""
    forms = words.encode(t.form for t in sentence.tokens)
    relations = labels.encode(t.relation.partition(":")[0] for t in sentence.tokens)
    return build_tree([t.head for t in sentence.tokens], forms, relations)


@torch.no_grad()
def accuracy(model: ChildSumTreeLSTM, trees: Sequence[Node], batch_size: int) -> float:
    """The share of words whose best relation is the right one."""
    right = words = 0
    for start in range(0, len(trees), batch_size):
        batch = trees[start : start + batch_size]
        for tree, scores in zip(batch, model(batch), strict=True):
            wanted = torch.stack([node.label for node in tree.nodes()])
            right += int((torch.stack(list(scores)).argmax(1) == wanted).sum())
            words += len(wanted)
    return right / words


def main(argv: Sequence[str] | None = None) -> float:
    """Train on EWT; the accuracy on its dev sentences after each epoch, the last one returned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="folder that holds ud_ewt/")
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--limit", type=positive, help="train on the first LIMIT sentences, test on as many")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one tree at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)
    folder = find_data("ud_ewt", args.data)
    raw, raw_dev = (
        read_conllu(file_in(folder, f"en_ewt-ud-{part}.conllu"))[: args.limit] for part in ("train", "dev")
    )
    tokens = [token for sentence in raw for token in sentence.tokens]
    words = Vocabulary.build((t.form for t in tokens), min_count=2, device=args.device)
    labels = Vocabulary.build((t.relation.partition(":")[0] for t in tokens), device=args.device)
    train, dev = ([encode(sentence, words, labels) for sentence in part] for part in (raw, raw_dev))
    model = build(len(words), len(labels)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters())
    found = 0.0
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            batches = [train[i : i + args.batch_size] for i in range(0, len(train), args.batch_size)]
            total = 0.0
            for batch in track(batches, description=f"epoch {epoch}"):
                loss = model.loss(batch).sum()
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                optimizer.step()
                total += loss.item()
            found = accuracy(model, dev, args.batch_size)
            print(f"epoch {epoch}: loss a sentence {total / len(train):.3f}, dev accuracy {found:.2%}")
    return found


if __name__ == "__main__":
    run(main)
