"""Sequence to sequence with attention, greedy and beam decoding, written for ONE sequence.

In: a sequence of letters, as ids. Out: its translation: the letters in reverse order, capitals copied to the
front. Decoding ends when the model says so, so how long it runs differs from sequence to sequence and depends
on values. Attention as in Luong et al. 2015 (dot product).

    model, pairs = minibatch()
    losses = model([p.source for p in pairs], [p.target for p in pairs])    # [pairs]
    outputs = model.greedy([p.source for p in pairs])                       # [[3, 1, 2], ...]
    outputs = model.beam([p.source for p in pairs])                         # [Hypothesis(...), ...]
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fxbatch_examples.command import device, positive, run
from rich.progress import track
from torch import Tensor, nn

import fxbatch

END = 0  # the id that starts and ends an output
State = tuple[Tensor, Tensor]


class Pair(NamedTuple):
    """Ids (tensors without dimensions) of a source, and of a target that ends with END."""

    source: Sequence[Tensor]
    target: Sequence[Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A decoded output (ids without END) and its log probability, END included."""

    output: list[int]
    score: float


class Translator(nn.Module):
    """LSTM encoder and decoder; the decoder attends to the encoder's states."""

    letters: Tensor

    def __init__(self, letters: int, *, embedding: int = 32, hidden: int = 64):
        super().__init__()
        self.embed = nn.Embedding(letters, embedding)
        self.encoder = nn.LSTMCell(embedding, hidden)
        self.decoder = nn.LSTMCell(embedding + hidden, hidden)
        self.combine = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, letters)
        self.register_buffer("letters", torch.arange(letters), persistent=False)

    def encode(self, source: Sequence[Tensor]) -> tuple[list[Tensor], State]:
        """The hidden states `[hidden]` after each letter, and the last state."""
        state: State | None = None
        memory = []
        for letter in source:
            state = self.encoder(self.embed(letter), state)
            memory.append(state[0])
        assert state is not None, "a source has at least one letter"
        return memory, state

    def attend(self, memory: Sequence[Tensor], query: Tensor) -> Tensor:
        """The memory, weighted by its similarity to the query: `[hidden]`."""
        weights = [torch.dot(item, query).exp() for item in memory]
        total, mixed = weights[0], weights[0] * memory[0]
        for weight, item in zip(weights[1:], memory[1:], strict=True):
            total, mixed = total + weight, mixed + weight * item
        return mixed / total

    def step(
        self, memory: Sequence[Tensor], state: State, context: Tensor, letter: Tensor
    ) -> tuple[State, Tensor, Tensor]:
        """One output letter: the new state, its context `[hidden]`, and log probabilities `[letters]`."""
        state = self.decoder(torch.cat([self.embed(letter), context]), state)
        found = self.attend(memory, state[0])
        context = torch.tanh(self.combine(torch.cat([state[0], found])))
        return state, context, F.log_softmax(self.out(context), 0)

    @fxbatch.autobatch
    def forward(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        """The negative log likelihood of a target, END included: no dimensions."""
        memory, state = self.encode(source)
        letter, context = self.letters[END], torch.zeros_like(state[0])
        losses = []
        for wanted in target:
            state, context, scores = self.step(memory, state, context, letter)
            losses.append(F.nll_loss(scores, wanted))
            letter = wanted
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    @fxbatch.autobatch(out="list", shared=("limit",))
    def greedy(self, source: Sequence[Tensor], limit: int = 30) -> list[int]:
        """The best letter each time, until END or `limit` letters."""
        memory, state = self.encode(source)
        letter, context = END, torch.zeros_like(state[0])
        output: list[int] = []
        while len(output) < limit:
            state, context, scores = self.step(memory, state, context, self.letters[letter])
            letter = int(scores.argmax())
            if letter == END:
                break
            output.append(letter)
        return output

    @fxbatch.autobatch(out="list", shared=("width", "limit"))
    def beam(self, source: Sequence[Tensor], width: int = 4, limit: int = 30) -> Hypothesis:
        """The best of the outputs that keeping the `width` best prefixes finds."""
        memory, state = self.encode(source)
        beams = [(0.0, [END], state, torch.zeros_like(state[0]))]
        finished: list[Hypothesis] = []
        for _ in range(limit):
            grown = []
            for score, output, state, context in beams:
                state, context, scores = self.step(memory, state, context, self.letters[output[-1]])
                best = scores.topk(min(width, len(self.letters)))
                for letter, gain in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    grown.append((score + gain, [*output, letter], state, context))
            grown.sort(key=lambda item: -item[0])
            beams = [item for item in grown[:width] if item[1][-1] != END]
            finished += [Hypothesis(o[1:-1], score) for score, o, *_ in grown[:width] if o[-1] == END]
            best_score = max((h.score for h in finished), default=-float("inf"))
            if not beams or beams[0][0] <= best_score:  # log probabilities only fall
                break
        unfinished = [Hypothesis(output[1:], score) for score, output, *_ in beams]
        return max(finished or unfinished, key=lambda hypothesis: hypothesis.score)


def build(letters: int, *, embedding: int = 32, hidden: int = 64) -> Translator:
    """The model; id 0 is END."""
    return Translator(letters, embedding=embedding, hidden=hidden)


def draw_pair(chance: random.Random, letters: int, longest: int, device: str = "cpu") -> Pair:
    """A random source of 1 to `longest` ids; the upper half of the ids are capitals."""
    source = [chance.randrange(1, letters) for _ in range(chance.randint(1, longest))]
    capitals = [letter for letter in source if letter > letters // 2]
    target = capitals + [letter for letter in reversed(source) if letter <= letters // 2] + [END]
    tensors = [torch.tensor(ids, device=device).unbind() for ids in (source, target)]
    return Pair(*tensors)


def minibatch(*, pairs: int = 6, hidden: int = 8, seed: int = 0) -> tuple[Translator, list[Pair]]:
    """A small model and random pairs of 1 to 6 letters."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    return build(9, embedding=6, hidden=hidden), [draw_pair(chance, 9, 6) for _ in range(pairs)]


@torch.no_grad()
def evaluate(model: Translator, pairs: Sequence[Pair]) -> tuple[float, float]:
    """The share of pairs translated without a mistake, by greedy and by beam decoding."""
    sources = [pair.source for pair in pairs]
    targets = [[int(letter) for letter in pair.target[:-1]] for pair in pairs]
    greedy = sum(map(list.__eq__, model.greedy(sources), targets))
    beam = sum(found.output == target for found, target in zip(model.beam(sources), targets, strict=True))
    return greedy / len(pairs), beam / len(pairs)


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train on drawn pairs; the share of exact translations after each epoch, greedy and beam."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="not used: the pairs are drawn")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--limit", type=positive, default=6400, help="pairs an epoch")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--longest", type=positive, default=8)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one pair at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed)
    letters = 13
    model = build(letters).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    dev = [draw_pair(chance, letters, args.longest, args.device) for _ in range(100)]
    found = (0.0, 0.0)
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            total = 0.0
            for _ in track(range(0, args.limit, args.batch_size), description=f"epoch {epoch}"):
                batch = [
                    draw_pair(chance, letters, args.longest, args.device) for _ in range(args.batch_size)
                ]
                loss = model([pair.source for pair in batch], [pair.target for pair in batch]).sum()
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                total += loss.item()
            found = evaluate(model, dev)
            print(
                f"epoch {epoch}: loss a pair {total / args.limit:.3f}, "
                f"exact: greedy {found[0]:.0%}, beam {found[1]:.0%}"
            )
    return found


if __name__ == "__main__":
    run(main)
