"""A model as the last minibatch of traces met it: its fingerprint, and the ids of the signatures of its traces.

In: a table and a model. Out: what was found, while every module of its tree is as it was; else a new look.

    known = known_model(table, model)
    known.fingerprint                # what a trace depends on
    known.ids[trace.digest]          # int32: the table's id of each signature of such traces, once they were found
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fxbatch.trace.body_reads import Reads
from fxbatch.trace.described import fingerprint
from fxbatch.trace.kept import as_they_were, picture
from fxbatch.trace.table import SignatureTable


class KnownModel:
    """What lasts while the modules are as `parts` says, and what their code reads is as it was."""

    __slots__ = ("fingerprint", "ids", "model", "parts", "reads")

    def __init__(self, forward: Callable[..., Any] | None, model: torch.nn.Module | None) -> None:
        self.model = model
        self.parts = None if model is None else picture(model)
        self.reads = Reads.of_forward(forward, model)  # what the code of the forward and of its modules reads
        self.fingerprint = (*fingerprint(model), *self.reads.lines())
        self.ids: dict[bytes, np.ndarray] = {}

    def is_true(self, model: torch.nn.Module | None) -> bool:
        """Whether it still holds."""
        return (
            self.model is model
            and self.parts is not None
            and as_they_were(self.parts)
            and self.reads.unchanged()
        )


def known_model(table: SignatureTable, model: torch.nn.Module | None) -> KnownModel:
    """What is known of a model."""
    found = table.known_model
    if found is None or not found.is_true(model):
        found = table.known_model = KnownModel(table.forward, model)
    return found
