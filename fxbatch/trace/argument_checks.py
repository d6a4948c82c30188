"""Argument checks of `torch.distributions`, for which no instance waits: they are looked at once for all.

    Categorical(probs=p)     # `if not torch._is_all_true(valid): raise ValueError(...)`, of the p of each instance

A check is taken to hold, and read as soon as it was computed, at the latest when the minibatch is over. Where one fails
the recording ends with a TraceError: by default the plain loop runs, and raises what torch raises there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fxbatch.errors import TraceError
from fxbatch.signature import Numbers, Signature
from fxbatch.trace.user_line import UserPlace, line_of, user_place
from fxbatch.trace.values import Value

# Torch's own function that `torch.distributions` (2.11, 2.13) asks before it raises, and nothing else in torch.
_CHECK = "_is_all_true"


class ArgumentCheckError(TraceError, ValueError):
    """An argument check of `torch.distributions` fails, or something else did before it was looked at."""


class ArgumentChecks:
    """The checks of one recording that were not looked at yet. first: the number of its first instance, in messages."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.pending: list[tuple[int, int, UserPlace]] = []  # number of the value, instance, the user's line

    @staticmethod
    def is_one(signature: Signature) -> bool:
        """Whether a call is that of a check."""
        return signature.operation.name == _CHECK

    def add(self, v: Value, instance: int) -> None:
        """An instance goes on as if this value were true."""
        self.pending.append((v.id, self.first + instance, user_place()))

    def with_values(self, others: np.ndarray) -> np.ndarray:
        """Distinct ids of these and of other values, others first."""
        mine = [number for number, *_ in self.pending]
        return np.array(list(dict.fromkeys([*others.tolist(), *mine])), dtype=np.int64) if mine else others

    def verify(self, numbers: Callable[[Sequence[int]], Sequence[Numbers]]) -> None:
        """ArgumentCheckError where one fails. numbers: gives those of values, all of which have run."""
        pending, self.pending = self.pending, []
        holds = numbers([number for number, *_ in pending])
        for (_, instance, place), fine in zip(pending, holds, strict=True):
            if not fine:
                raise ArgumentCheckError(
                    f"an argument of torch.distributions is invalid in instance {instance} ({line_of(place)})"
                )

    def before(self, error: Exception) -> Exception:
        """What a recording fails with that fails so: a check comes before other errors."""
        if not self.pending or isinstance(error, TraceError):
            return error
        return ArgumentCheckError(f"argument checks of torch.distributions were not looked at: {error}")
