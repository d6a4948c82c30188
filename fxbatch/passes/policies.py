"""The batching policies by name, and the one that tries them and keeps the winner.

Comes in: a name. Goes out: a function from a Program to its Schedule.

    schedule = POLICIES["agenda"](program)
    policy = make_policy("best")          # one a decorated callable: it remembers
    policy(program)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from fxbatch.errors import OptionError
from fxbatch.ir import Program, Schedule, Signature
from fxbatch.passes.batch_by_agenda import batch_by_agenda
from fxbatch.passes.batch_by_depth import batch_by_depth
from fxbatch.passes.batch_by_lookahead import batch_by_lookahead
from fxbatch.passes.frontier import count_signatures
from fxbatch.passes.steps_in_order import steps_in_order

Policy = Callable[[Program], Schedule]

# `fold` batches by depth too, but a program that `add_pass_through_calls` has rewritten before.
POLICIES: dict[str, Policy] = {
    "depth": batch_by_depth,
    "agenda": batch_by_agenda,
    "lookahead": batch_by_lookahead,
    "none": steps_in_order,
}

# Cheapest first: of policies with equally few steps, the first is kept.
CANDIDATES = ("depth", "agenda", "lookahead")

SCHEDULES = (*POLICIES, "best", "fold")


def make_policy(name: str) -> Policy:
    """The policy of that name; `best` is a fresh BestPolicy. OptionError for an unknown name."""
    if name == "best":
        return BestPolicy()
    if name not in POLICIES:
        raise OptionError(f"schedule: unknown {name!r}; known are {', '.join(map(repr, SCHEDULES))}")
    return POLICIES[name]


class BestPolicy:
    """Tries the candidates once for a family of programs, and uses the winner for the family from then on.

    A family is the set of signatures that occur in a program. The cache is bounded (least recently used
    goes first); `hits`, `misses` and `clear()` as for every cache.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.hits = self.misses = 0
        self.winners: OrderedDict[tuple[int, ...], tuple[tuple[Signature, ...], str]] = OrderedDict()

    def __call__(self, program: Program) -> Schedule:
        members = family(program)
        key = tuple(map(id, members))  # the entry holds the signatures, so their ids stay theirs
        found = self.winners.get(key)
        if found is not None:
            self.hits += 1
            self.winners.move_to_end(key)
            return POLICIES[found[1]](program)
        self.misses += 1
        tried = {name: POLICIES[name](program) for name in CANDIDATES}
        winner = min(CANDIDATES, key=lambda name: len(tried[name]))
        self.winners[key] = (members, winner)
        if len(self.winners) > self.capacity:
            self.winners.popitem(last=False)
        return tried[winner]

    def clear(self) -> None:
        """Forget all families."""
        self.winners.clear()
        self.hits = self.misses = 0


def family(program: Program) -> tuple[Signature, ...]:
    """The signatures that occur in the program, in an order that does not depend on its numbering."""
    present = np.flatnonzero(count_signatures(program))
    return tuple(sorted((program.signatures[s] for s in present.tolist()), key=id))
