"""Checks of arguments that torch's own code makes, for which no instance waits: they are looked at once for all.

    Categorical(probs=p)     # `if not valid.all(): raise ValueError(...)`, of the p of each instance

Such a check is taken to hold, and what it asked is read as soon as it was computed, at the latest when the minibatch is
over. Where one fails, or anything else does in between, the minibatch is recorded anew with waits: the error is the one
that the plain loop gives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import torch

from fxbatch.errors import TraceError
from fxbatch.trace.values import Value

_FILE = os.path.join(os.path.dirname(torch.__file__), "distributions", "distribution.py")
_CHECKS = (
    "__init__",
    "_validate_sample",
)  # of torch.distributions.Distribution, as torch 2.11 and 2.13 have it


class AssumptionError(TraceError):
    """A check that was taken to hold does not, or something failed before it was looked at."""

    def __init__(self) -> None:
        super().__init__("a check of torch.distributions was taken to hold, which may not")


def is_check(caller: FrameType) -> bool:
    """Whether code that asks for a boolean is such a check, and raises where it is false."""
    return caller.f_code.co_name in _CHECKS and caller.f_code.co_filename == _FILE


class Assumed:
    """The checks of one recording that were taken to hold."""

    def __init__(self) -> None:
        self.values: list[Value] = []

    def with_values(self, others: np.ndarray) -> np.ndarray:
        """Distinct ids of these and of other values, others first."""
        mine = [v.id for v in self.values]
        return np.array(list(dict.fromkeys([*others.tolist(), *mine])), dtype=np.int64) if mine else others

    def verify(self, numbers: Callable[[Sequence[int]], Sequence[object]]) -> None:
        """AssumptionError where one fails. numbers: gives those of values, all of which have run."""
        values, self.values = self.values, []
        if not all(numbers([v.id for v in values])):
            raise AssumptionError
