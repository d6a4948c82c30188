"""Lattice LSTM over characters and the words they may form, written for ONE string.

In: a string and the lexicon's words that occur in it. Out: scores of segmentation tags, a tensor a character.
A cell for each word runs from its first to its last character and enters the character's memory there through
gates (Zhang & Yang 2018, equations 10 to 15). Which words cross differs from string to string. The task: find
the word boundaries in strings without spaces, where words overlap.

    model, strings = minibatch()
    scores = model(strings)              # a list of strings in, a list of lists of scores out
    model.loss(strings).sum().backward()
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


@dataclass(frozen=True)
class String:
    """Character ids and tag ids (tensors without dimensions), and the lexicon's words in it.

    `words[j]` are the words that end at character j: (first character, word id).
    """

    characters: Sequence[Tensor]
    words: Sequence[Sequence[tuple[int, Tensor]]]
    tags: Sequence[Tensor]


class CharacterCell(nn.Module):
    """Candidate, input gate and output gate of a character (equation 10)."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 3 * hidden)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i, o, g = self.gates(torch.cat([x, h])).chunk(3)
        return torch.sigmoid(i), torch.sigmoid(o), torch.tanh(g)


class WordCell(nn.Module):
    """The memory of a word from the state at its first character (equation 12): no output gate."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 3 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        i, f, g = self.gates(torch.cat([x, h])).chunk(3)
        return torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)


class LinkGate(nn.Module):
    """How much of a word's memory enters the character at its end (equation 13)."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(inputs + hidden, hidden)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(torch.cat([x, c])))


class LatticeLSTM(nn.Module):
    """A lattice LSTM from left to right, and scores of the tags."""

    zero: Tensor

    def __init__(self, characters: int, words: int, tags: int, *, embedding: int = 32, hidden: int = 64):
        super().__init__()
        self.character = nn.Embedding(characters, embedding)
        self.word = nn.Embedding(words, embedding)
        self.character_cell = CharacterCell(embedding, hidden)
        self.word_cell = WordCell(embedding, hidden)
        self.link = LinkGate(embedding, hidden)
        self.out = nn.Linear(hidden, tags)
        self.register_buffer("zero", torch.zeros(hidden), persistent=False)

    def scores(self, string: String) -> list[Tensor]:
        """Scores `[tags]` of each character."""
        h, c = self.zero, self.zero
        states: list[tuple[Tensor, Tensor]] = []
        for character, words in zip(string.characters, string.words, strict=True):
            x = self.character(character)
            i, o, g = self.character_cell(x, h)
            memories = [self.word_cell(self.word(word), *states[first]) for first, word in words]
            if memories:
                weights = [i.exp(), *(self.link(x, memory).exp() for memory in memories)]
                c = weighted_mean(weights, [g, *memories])
            else:
                c = i * g + (1 - i) * c
            h = o * torch.tanh(c)
            states.append((h, c))
        return [self.out(h) for h, _ in states]

    @fxbatch.autobatch(out="list")
    def forward(self, string: String) -> list[Tensor]:
        """Scores `[tags]` of each character."""
        return self.scores(string)

    @fxbatch.autobatch
    def loss(self, string: String) -> Tensor:
        """Cross entropy, summed over the characters: no dimensions."""
        losses = [F.cross_entropy(*pair) for pair in zip(self.scores(string), string.tags, strict=True)]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


def weighted_mean(weights: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
    """The mean of vectors with a weight for each of their elements (equations 14 and 15)."""
    total, mixed = weights[0], weights[0] * items[0]
    for weight, item in zip(weights[1:], items[1:], strict=True):
        total, mixed = total + weight, mixed + weight * item
    return mixed / total


def build(characters: int, words: int, *, embedding: int = 32, hidden: int = 64) -> LatticeLSTM:
    """The model, with two tags: the character begins a word, or it does not."""
    return LatticeLSTM(characters, words, 2, embedding=embedding, hidden=hidden)


def draw_lexicon(chance: random.Random, words: int, letters: str = "abcdef") -> list[str]:
    """Different words of 1 to 4 letters."""
    found: dict[str, None] = {}
    while len(found) < words:
        found["".join(chance.choices(letters, k=chance.randint(1, 4)))] = None
    return list(found)


def draw_string(chance: random.Random, lexicon: Sequence[str], longest: int, device: str = "cpu") -> String:
    """2 to `longest` words of the lexicon in a row; all of its words of two letters or more that occur."""
    parts = chance.choices(lexicon, k=chance.randint(2, longest))
    text = "".join(parts)
    tags = [int(i == 0) for part in parts for i in range(len(part))]
    crossing: list[list[tuple[int, Tensor]]] = [[] for _ in text]
    for number, word in enumerate(lexicon):
        for first in range(len(text) - len(word) + 1):
            if len(word) > 1 and text.startswith(word, first):
                crossing[first + len(word) - 1].append((first, torch.tensor(number, device=device)))
    characters = torch.tensor([ord(letter) - ord("a") for letter in text], device=device)
    return String(characters.unbind(), crossing, torch.tensor(tags, device=device).unbind())


def minibatch(*, strings: int = 6, hidden: int = 8, seed: int = 0) -> tuple[LatticeLSTM, list[String]]:
    """A small model and random strings of 2 to 4 words."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    lexicon = draw_lexicon(chance, 20)
    model = build(26, len(lexicon), embedding=6, hidden=hidden)
    return model, [draw_string(chance, lexicon, 4) for _ in range(strings)]


@torch.no_grad()
def accuracy(model: LatticeLSTM, strings: Sequence[String]) -> float:
    """The share of characters with the right tag."""
    right = [
        bool(scores.argmax() == tag)
        for string, rows in zip(strings, model(strings), strict=True)
        for scores, tag in zip(rows, string.tags, strict=True)
    ]
    return sum(right) / len(right)


def main(argv: Sequence[str] | None = None) -> float:
    """Train on drawn strings; the share of right tags after each epoch, the last one returned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="not used: the strings are drawn")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--limit", type=positive, default=3200, help="strings an epoch")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one string at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed)
    lexicon = draw_lexicon(chance, 60)
    model = build(26, len(lexicon)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    dev = [draw_string(chance, lexicon, 8, args.device) for _ in range(200)]
    found = 0.0
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            total = 0.0
            for _ in track(range(0, args.limit, args.batch_size), description=f"epoch {epoch}"):
                batch = [draw_string(chance, lexicon, 8, args.device) for _ in range(args.batch_size)]
                loss = model.loss(batch).sum()
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                optimizer.step()
                total += loss.item()
            found = accuracy(model, dev)
            print(f"epoch {epoch}: loss a string {total / args.limit:.3f}, dev accuracy {found:.2%}")
    return found


if __name__ == "__main__":
    run(main)
