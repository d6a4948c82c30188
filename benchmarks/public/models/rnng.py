"""Recurrent neural network grammar (Dyer et al. 2016): a parser whose stack is an LSTM that can go back.

The training loop of the repository gives it a sentence, its tags and the actions of its tree, one at a time. Made-up
sentences of 6 to 14 words under random trees, encoders of 128 in two layers, as the repository has them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

WORDS, TAGS, NONTERMINALS = 1000, 20, 12
REDUCE, SHIFT, FIRST_NONTERMINAL = 0, 1, 2
FILE = "rnng/models.py"

SOURCE = Source(
    "kmkurn/pytorch-rnng",
    "9861a9b96093276e3ee3c6ae9defa272768791d3",
    folder="src",
    edits=(
        Edit(FILE, r"init\.(orthogonal|constant|xavier_uniform)\(", r"init.\1_(", "torch"),
        Edit(FILE, r"\.data\[0\]", ".item()", "torch"),
        Edit(FILE, r"F\.log_softmax\(([^)]*)\)", r"F.log_softmax(\1, dim=-1)", "torch"),
        Edit(FILE, r", volatile=not self\.training", "", "torch"),
        Edit(FILE, r"self\._new\(range\((.*?)\)\)", r"self._new(list(range(\1)))", "torch"),
    ),
)


def build(load: Load) -> Driver:
    models = load("rnng.models")

    class Parser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.DiscRNNG(WORDS, TAGS, NONTERMINALS)

        def forward(self, words: Tensor, tags: Tensor, actions: Tensor) -> Tensor:
            return -self.net(words, tags, actions)

    return Driver(Parser, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Words, tags, and the actions of a random tree over them."""
    choose = random.Random(number)
    found = []
    for _ in range(count):
        length = choose.randint(6, 14)
        words = [choose.randrange(WORDS) for _ in range(length)]
        tags = [choose.randrange(TAGS) for _ in range(length)]
        found.append((torch.tensor(words), torch.tensor(tags), torch.tensor(actions(length, choose))))
    return found


def actions(length: int, choose: random.Random) -> list[int]:
    """Open a constituent, its parts, close it: over `length` words."""
    opened = FIRST_NONTERMINAL + choose.randrange(NONTERMINALS)
    parts, left = [], length
    while left:
        part = choose.randint(1, left) if parts else choose.randint(1, max(1, left - 1))
        parts.append(part)
        left -= part
    inner = [a for part in parts for a in ([SHIFT] if part == 1 else actions(part, choose))]
    return [opened, *inner, REDUCE]


MODEL = PublicModel("RNNG", "transition parser", SOURCE, build)
