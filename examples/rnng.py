"""Recurrent neural network grammar, written for ONE tree.

In: a phrase-structure tree. Out: the negative log likelihood of the tree and its words under a top-down
generative parser: OPEN a phrase, GENERATE a word, or CLOSE the phrase, scored from the states of a stack LSTM
and of an LSTM over the words; a closed phrase is composed by a BiLSTM over its children (Dyer et al. 2016).
The stack is a linked list of LSTM states, so popping is dropping a reference. Trees are drawn from a small
grammar whose verbs agree with their subjects: what lies between must be looked through.

    model, trees = minibatch()
    losses = model(trees)                # a list of trees in, [trees] out
    losses.sum().backward()
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fxbatch_examples.command import device, positive, run
from rich.progress import track
from torch import Tensor, nn

import fxbatch

PHRASES = ("S", "NP", "VP", "PP")
WORDS = (
    *("dog", "cat", "bird", "dogs", "cats", "birds", "the", "some", "near", "with"),
    *("sees", "likes", "sleeps", "see", "like", "sleep"),
)
GENERATE, CLOSE = len(PHRASES), len(PHRASES) + 1  # actions 0 .. len(PHRASES) - 1 open a phrase


@dataclass(frozen=True)
class Phrase:
    """A phrase: its kind (a place in PHRASES) and its children, phrases and words (places in WORDS)."""

    kind: int
    children: tuple[Phrase | int, ...]

    def actions(self) -> Iterator[tuple[int, int]]:
        """(action, word) of its derivation from the top down; word is 0 where the action brings none."""
        yield self.kind, 0
        for child in self.children:
            if isinstance(child, Phrase):
                yield from child.actions()
            else:
                yield GENERATE, child
        yield CLOSE, 0


@dataclass(frozen=True)
class Entry:
    """A stack of vectors: the entry below, the stack LSTM's state with this entry on top, and the vector.

    `kind` is the kind of an open phrase, None for a closed phrase or a word.
    """

    below: Entry | None
    state: tuple[Tensor, Tensor]
    vector: Tensor
    kind: int | None = None


class Grammar(nn.Module):
    """The generative model: a stack LSTM, a word LSTM and a composition BiLSTM."""

    numbers: Tensor

    def __init__(self, *, hidden: int = 64):
        super().__init__()
        self.word = nn.Embedding(len(WORDS), hidden)
        self.phrase = nn.Embedding(len(PHRASES), hidden)
        self.start = nn.Embedding(1, hidden)
        self.stack = nn.LSTMCell(hidden, hidden)
        self.history = nn.LSTMCell(hidden, hidden)
        self.compose_forth = nn.LSTMCell(hidden, hidden)
        self.compose_back = nn.LSTMCell(hidden, hidden)
        self.compose = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh())
        self.summary = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh())
        self.action = nn.Linear(hidden, len(PHRASES) + 2)
        self.next_word = nn.Linear(hidden, len(WORDS))
        numbers = torch.arange(max(len(WORDS), len(PHRASES) + 2))
        self.register_buffer("numbers", numbers, persistent=False)

    def push(self, top: Entry, vector: Tensor, kind: int | None = None) -> Entry:
        """The stack with a vector on top."""
        return Entry(top, self.stack(vector, top.state), vector, kind)

    def close(self, top: Entry) -> Entry:
        """The stack with the entries down to the last open phrase replaced by their composition."""
        children: list[Tensor] = []
        while top.kind is None:
            children.append(top.vector)
            assert top.below is not None, "CLOSE needs an open phrase"
            top = top.below
        assert top.below is not None, "the start entry is never closed"
        phrase = self.phrase(self.numbers[top.kind])
        forth = last_state(self.compose_forth, [phrase, *reversed(children)])
        back = last_state(self.compose_back, [phrase, *children])
        return self.push(top.below, self.compose(torch.cat([forth, back])))

    @fxbatch.autobatch
    def forward(self, tree: Phrase) -> Tensor:
        """The negative log likelihood of a tree with its words in nats: no dimensions."""
        start = self.start(self.numbers[0])
        top = Entry(None, self.stack(start), start)
        history = self.history(start)
        losses = []
        for action, word in tree.actions():
            state = self.summary(torch.cat([top.state[0], history[0]]))
            losses.append(F.cross_entropy(self.action(state), self.numbers[action]))
            if action == CLOSE:
                top = self.close(top)
            elif action == GENERATE:
                losses.append(F.cross_entropy(self.next_word(state), self.numbers[word]))
                vector = self.word(self.numbers[word])
                top, history = self.push(top, vector), self.history(vector, history)
            else:
                top = self.push(top, self.phrase(self.numbers[action]), action)
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


def last_state(cell: nn.Module, vectors: Sequence[Tensor]) -> Tensor:
    """The hidden state `[hidden]` of an LSTM cell after all vectors."""
    state = None
    for vector in vectors:
        state = cell(vector, state)
    assert state is not None
    return state[0]


def build(*, hidden: int = 64) -> Grammar:
    """The model."""
    return Grammar(hidden=hidden)


def draw_tree(chance: random.Random) -> Phrase:
    """A sentence: a noun phrase and a verb phrase that agree in number."""
    plural = chance.random() < 0.5
    verbs = ("see", "like", "sleep") if plural else ("sees", "likes", "sleeps")
    verb = WORDS.index(chance.choice(verbs))
    rest = () if WORDS[verb].startswith("sleep") else (draw_noun_phrase(chance, chance.random() < 0.5, 0.3),)
    return Phrase(0, (draw_noun_phrase(chance, plural, 0.5), Phrase(2, (verb, *rest))))


def draw_noun_phrase(chance: random.Random, plural: bool, longer: float) -> Phrase:
    """A determiner and a noun, with a prepositional phrase of another number at a chance of `longer`."""
    nouns = ("dogs", "cats", "birds") if plural else ("dog", "cat", "bird")
    words = (chance.choice(("the", "some")), chance.choice(nouns))
    phrase = Phrase(1, tuple(map(WORDS.index, words)))
    if chance.random() >= longer:
        return phrase
    inner = draw_noun_phrase(chance, chance.random() < 0.5, longer / 2)
    return Phrase(1, (phrase, Phrase(3, (WORDS.index(chance.choice(("near", "with"))), inner))))


def minibatch(*, trees: int = 6, hidden: int = 8, seed: int = 0) -> tuple[Grammar, list[Phrase]]:
    """A small model and trees from the grammar."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    return build(hidden=hidden), [draw_tree(chance) for _ in range(trees)]


def main(argv: Sequence[str] | None = None) -> float:
    """Train on drawn trees; perplexity an action on fresh trees after each epoch, the last one returned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="not used: the trees are drawn")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--limit", type=positive, default=3200, help="trees an epoch")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one tree at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed)
    model = build().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    dev = [draw_tree(chance) for _ in range(200)]
    actions = sum(len(list(tree.actions())) for tree in dev)
    found = math.inf
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            total = 0.0
            for _ in track(range(0, args.limit, args.batch_size), description=f"epoch {epoch}"):
                batch = [draw_tree(chance) for _ in range(args.batch_size)]
                loss = model(batch).sum()
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                optimizer.step()
                total += loss.item()
            with torch.no_grad():
                found = math.exp(model(dev).sum().item() / actions)
            print(
                f"epoch {epoch}: loss a tree {total / args.limit:.3f}, dev perplexity an action {found:.3f}"
            )
    return found


if __name__ == "__main__":
    run(main)
