"""ASTactic's encoder of Coq terms (Yang & Deng 2019): a Tree-LSTM over the syntax trees of a proof's context.

It goes through the trees of one proof by height, and adds children up in place. Three to six terms of 5 to 20 nodes,
embeddings of 256, as the repository has them; a score of the goal beside each premise stands for the tactic decoder.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

DIMENSION = 256

SOURCE = Source(
    "princeton-vl/CoqGym",
    "a739d99cdf5b0451dd8a362d3c541ca3b66112d3",
    folder="ASTactic/models",
    stubs={"lark": (), "lark.tree": ("Tree",), "gallina": ("traverse_postorder",)},
)


class Term:
    """A node of a syntax tree: its kind, its children, and how high it stands."""

    def __init__(self, data: str, children: list[Term]) -> None:
        self.data, self.children = data, children
        self.height = 1 + max((c.height for c in children), default=-1)


def traverse_postorder(node: Term, callback: Any) -> None:
    """The repository's function, over nodes that need no parser."""
    for child in node.children:
        traverse_postorder(child, callback)
    callback(node)


def build(load: Load) -> Driver:
    encoders = load("term_encoder")
    encoders.traverse_postorder = traverse_postorder  # type: ignore[attr-defined]
    kinds = encoders.nonterminals

    class Goal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoders.TermEncoder(SimpleNamespace(term_embedding_dim=DIMENSION, device="cpu"))
            self.score = nn.Linear(DIMENSION, DIMENSION)

        def forward(self, terms: list[Term], wanted: Tensor) -> Tensor:
            embeddings = self.encoder(terms)
            scores = embeddings[1:] @ self.score(embeddings[0])
            return F.cross_entropy(scores[None], wanted) if self.training else scores.argmax()

    def instances(number: int, count: int) -> list[tuple[Any, ...]]:
        choose = random.Random(number)

        def grown(nodes: int) -> Term:
            children: list[Term] = []
            left = nodes - 1
            while left:
                part = choose.randint(1, left)
                children.append(grown(part))
                left -= part
            return Term(choose.choice(kinds), children)

        found = []
        for _ in range(count):
            terms = [grown(choose.randint(5, 20)) for _ in range(choose.randint(3, 6))]
            found.append((terms, torch.tensor([choose.randrange(len(terms) - 1)])))
        return found

    return Driver(Goal, instances)


MODEL = PublicModel("CoqGym terms", "syntax trees", SOURCE, build)
