"""Deepire (Suda 2021): a recursive network over the derivations of a theorem prover, one problem a forward.

A clause's embedding is made of its parents' by the rule that derived it; selected clauses are scored. As in the
repository's workers, a module is made for each problem from the shared parts. Derivations of 12 to 30 clauses,
embeddings of 128.
"""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

AXIOMS, RULES = 40, {101: 1, 102: 2, 103: 2, 104: 3, 105: 2, 106: 1}

SOURCE = Source("quickbeam123/deepire3.1", "38e0ecbeb4f0f64a7840a76a10d35422bcede158")


def build(load: Load) -> Driver:
    common, settings = load("inf_common"), load("hyperparams")
    settings.DROPOUT, settings.USE_SINE = 0.0, False  # type: ignore[attr-defined]

    class Problem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = common.get_initial_model(range(AXIOMS), set(), RULES)

        def forward(self, init: Any, deriv: Any, pars: Any, positive: Any, negative: Any) -> Tensor:
            all_positive, all_negative = sum(positive.values()), sum(negative.values())
            problem = common.LearningModel(
                *self.parts, init, deriv, pars, positive, negative, all_positive, all_negative
            )
            loss, _, _ = problem()
            return loss.sum()

    return Driver(Problem, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Axioms, derived clauses with rule and parents, and how often each was needed or selected in vain."""
    choose = random.Random(number)
    found = []
    for _ in range(count):
        given = choose.randint(4, 8)
        init = [(i, (choose.randrange(AXIOMS), 0)) for i in range(given)]
        deriv, pars = [], {}
        for i in range(given, given + choose.randint(8, 22)):
            rule = choose.choice(list(RULES))
            parents = RULES[rule] if RULES[rule] < 3 else choose.randint(3, 4)
            deriv.append((i, rule))
            pars[i] = [choose.randrange(i) for _ in range(parents)]
        scored = [i for i, _ in deriv if choose.random() < 0.5] or [deriv[-1][0]]
        positive = {i: float(choose.random() < 0.4) for i in scored}
        found.append((init, deriv, pars, positive, {i: 1.0 - p for i, p in positive.items()}))
    return found


MODEL = PublicModel("Deepire", "derivations of a prover", SOURCE, build)
