"""Plans by program content: a minibatch of a structure that was met before is not planned again.

The key is the content itself (columns as bytes, the signatures and compiled operations by identity), compared
whole. Bounded; hits and misses are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from fxbatch.ir import Plan, Program, Schedule


@dataclass(frozen=True)
class PlanKey:
    """Everything that schedule and plan depend on."""

    signatures: tuple[Any, ...]
    sig: bytes
    inputs: bytes
    outputs: bytes
    policy: str

    @staticmethod
    def of(program: Program, policy: str) -> PlanKey:
        return PlanKey(
            tuple(map(id, program.signatures)),
            program.sig.tobytes(),
            program.inputs.tobytes(),
            program.outputs.tobytes(),
            policy,
        )


@dataclass(frozen=True)
class Planned:
    """What is kept: the signatures are held so that their ids in the key stay theirs."""

    program: Program
    schedule: Schedule
    plan: Plan
    layouts: tuple[Any, ...]


class PlanCache:
    """Least recently used plans."""

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[PlanKey, Planned] = OrderedDict()

    def get(self, key: PlanKey) -> Planned | None:
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._entries.move_to_end(key)
        return found

    def put(self, key: PlanKey, planned: Planned) -> None:
        self._entries[key] = planned
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
