"""NeuroSAT (Selsam et al. 2019): messages between literals and clauses, 26 rounds of two LSTMs, a vote at the end.

One problem of 5 to 10 variables a forward, dimension 128, 8 rounds (the repository has 26).
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

SOURCE = Source(
    "ryanzhangfan/NeuroSAT",
    "ca9e574c2cf026b867016701c682b5db1d864fe2",
    folder="src",
    edits=(Edit("neurosat.py", r"\.cuda\(\)", "", "device"),),
)


def build(load: Load) -> Driver:
    models = load("neurosat")

    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.NeuroSAT(SimpleNamespace(dim=128, n_rounds=8))

        def forward(self, problem: Any, satisfiable: Tensor) -> Tensor:
            vote = self.net(problem)
            return F.binary_cross_entropy_with_logits(vote, satisfiable) if self.training else vote.sum()

    return Driver(Solver, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Random clauses, as the cells (literal, clause) of the repository's Problem."""
    choose = random.Random(number)
    found = []
    for _ in range(count):
        variables = choose.randint(5, 10)
        clauses = [choose.sample(range(variables), choose.randint(2, 4)) for _ in range(4 * variables)]
        cells = [[v + variables * choose.randrange(2), c] for c, clause in enumerate(clauses) for v in clause]
        problem = SimpleNamespace(
            n_vars=variables, n_lits=2 * variables, n_clauses=len(clauses), n_cells=len(cells), is_sat=[True],
            L_unpack_indices=cells,
        )  # fmt: skip
        found.append((problem, torch.tensor([float(choose.random() < 0.5)])))
    return found


MODEL = PublicModel("NeuroSAT", "graph of clauses", SOURCE, build)
