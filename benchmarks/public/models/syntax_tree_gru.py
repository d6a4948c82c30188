"""A tree network with a GRU cell a grammar rule, and a decoder that unfolds the same tree: words in, words out.

Random trees of 6 to 16 words, 8 rules, hidden 128.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

WORDS, RULES, PRETERMINALS, HIDDEN = 500, 8, 6, 128

SOURCE = Source(
    "EricElmoznino/syntax_tree_network",
    "31db4195a2d4ff840925f00f429c6c9bd4dbd2cb",
)


class Node:
    """A node, as the repository's TreeTensor: a word, a part of speech over one, or a rule over two nodes."""

    def __init__(self, node: Any, rule: int | None, children: list[Node]) -> None:
        self.node, self.rule, self.children = node, rule, children
        self.is_preterminal = len(children) == 1


def build(load: Load) -> Driver:
    encoders, decoders = load("models.SyntaxTreeGRU"), load("models.DecoderSyntaxTreeGRU")

    class TreeToTree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoders.SyntaxTreeGRU(WORDS, HIDDEN, RULES, RULES + PRETERMINALS)
            self.decoder = decoders.DecoderSyntaxTreeGRU(
                WORDS, HIDDEN, RULES, PRETERMINALS, RULES + PRETERMINALS
            )
            for bias in self.encoder.nonterminal_biases:
                nn.init.zeros_(bias)  # the repository leaves what happens to be in memory

        def forward(self, tree: Node, words: Tensor) -> Tensor:
            encoding = self.encoder(tree)
            predictions = self.decoder.recursive_forward(tree, encoding)
            scores = torch.cat(predictions)
            return F.cross_entropy(scores, words) if self.training else scores.argmax(1)

    return Driver(TreeToTree, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Trees, and the words below them."""
    choose = random.Random(number)
    found = []
    for _ in range(count):
        words = [choose.randrange(WORDS) for _ in range(choose.randint(6, 16))]
        found.append((grown(words, choose), torch.tensor(words)))
    return found


def grown(words: list[int], choose: random.Random) -> Node:
    """A random binary tree over words."""
    if len(words) == 1:
        kind = choose.randrange(PRETERMINALS)
        return Node(RULES + kind, kind, [Node(torch.tensor(words), None, [])])
    at = choose.randint(1, len(words) - 1)
    return Node(
        choose.randrange(RULES),
        choose.randrange(RULES),
        [grown(words[:at], choose), grown(words[at:], choose)],
    )


MODEL = PublicModel("syntax tree GRU", "tree to tree", SOURCE, build, {"out": "list"})
