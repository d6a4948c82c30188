"""Plans by program content: a minibatch of a structure that was met before is not planned again.

The key is the content itself (columns as bytes, the signatures and compiled operations by identity), compared
whole. Bounded; hits and misses are counted.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fxbatch.ir import Program
from fxbatch.passes.select import checksum

T = TypeVar("T")


@dataclass(frozen=True)
class PlanKey:
    """Everything that schedule and plan depend on."""

    signatures: tuple[Any, ...]  # Signature objects, compared by identity
    sig: bytes
    inputs: bytes
    outputs: bytes
    known: int
    policy: str
    checksum: int  # of the columns

    def __hash__(self) -> int:
        return self.checksum

    @staticmethod
    def of(program: Program, policy: str) -> PlanKey:
        """The key; made once a program and policy, since schedule and plan ask for the same."""
        found = _KEYS.get(program)
        if found is None or found.policy != policy:
            found = _KEYS[program] = PlanKey(
                program.signatures,
                program.sig.tobytes(),
                program.inputs.tobytes(),
                program.outputs.tobytes(),
                program.known,
                policy,
                checksum(program.sig, program.inputs, program.outputs),
            )
        return found


_KEYS: weakref.WeakKeyDictionary[Program, PlanKey] = weakref.WeakKeyDictionary()


class ContentCache(Generic[T]):
    """Least recently used things made from a program's content.

    Bounded by their number, and by that of the signatures in their keys: a key keeps compiled operations alive,
    also those that the cache of operations has dropped.
    """

    def __init__(self, size: int = 64, *, signatures: int = 4096) -> None:
        self.size = size
        self.signatures = signatures
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for this content, made now if it is new."""
        found = self._entries.get(key)
        if found is not None:
            self.hits += 1
            self._entries[key] = self._entries.pop(
                key, found
            )  # to the end; another thread may have dropped it
            return found
        self.misses += 1
        made = self._entries[key] = make()
        wide = width_of(key) * self.size > self.signatures  # narrow keys have few, however many they are
        while len(self._entries) > self.size or (
            wide and len(self._entries) > 1 and sum(map(width_of, list(self._entries))) > self.signatures
        ):
            self._entries.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def width_of(key: Hashable) -> int:
    """How many signatures a key has: a PlanKey, or a tuple that begins with one or with the signatures."""
    first = key[0] if isinstance(key, tuple) else key
    if isinstance(first, PlanKey):
        return len(first.signatures)
    return len(first) if isinstance(first, tuple) else 1
