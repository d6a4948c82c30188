"""The phases of a recording that have run: their columns, and the tensor types of the values that they have computed.

phases.add(sig, inputs, constants, known)
phases.types(known)         # int32 [known], None where nothing is known
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fxbatch.trace.table import SignatureTable


class Phases:
    """The calls that have run, and a type for each value, extended up to what was asked for."""

    known = 0  # values that are computed
    _types = np.empty(0, dtype=np.int32)
    _typed = 0  # values that have a type ...
    _phases_typed = 0  # ... and the phases that they are of

    def __init__(self, table: SignatureTable) -> None:
        self.table = table
        self.columns: list[tuple[np.ndarray, np.ndarray]] = []  # signatures and inputs of each phase
        self.constants: list[dict[int, Any]] = []  # of each phase, by signature

    def add(self, sig: np.ndarray, inputs: np.ndarray, constants: dict[int, object], known: int) -> None:
        """A phase with these columns runs. known: how many values there are then."""
        self.columns.append((sig, inputs))
        self.constants.append(constants)
        self.known = known

    def types(self, known: int) -> np.ndarray | None:
        """int32 [known]: the types of the first values that are computed."""
        if not known:
            return None
        for sig, _ in self.columns[self._phases_typed :]:
            self._add(sig)
        self._phases_typed = len(self.columns)
        return self._types[:known]

    def _add(self, sig: np.ndarray) -> None:
        _, columns = self.table.snapshot_and_columns()
        counts = columns.width[sig]
        values, typed = int(counts.sum()), self._typed
        within = np.arange(values) - (counts.cumsum() - counts).repeat(counts)
        if typed + values > len(self._types):
            grown = np.empty(max(1024, 2 * (typed + values)), dtype=np.int32)
            grown[:typed] = self._types[:typed]
            self._types = grown
        outputs = columns.first_output[sig].repeat(counts) + within
        self._types[typed : typed + values] = columns.output_types[outputs]
        self._typed += values
