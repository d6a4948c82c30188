"""Tensor types of the values that earlier phases computed, worked out when a phase asks.

In: the signature column of each phase that has run. Out: the type id of each known value, as one array.

    types = KnownTypes(table)
    types.phase(sig)
    types.first(known)          # int32 [known], None where nothing is known
"""

from __future__ import annotations

import numpy as np

from fxbatch.trace.table import SignatureTable


class KnownTypes:
    """One number a value, phase after phase, without copying those of the phases before."""

    def __init__(self, table: SignatureTable) -> None:
        self.table = table
        self._types = np.empty(0, dtype=np.int32)
        self._typed = 0
        self._untyped: list[np.ndarray] = []  # signature columns of phases whose types are not known yet

    def phase(self, sig: np.ndarray) -> None:
        """A phase with these signatures has run."""
        self._untyped.append(sig)

    def first(self, known: int) -> np.ndarray | None:
        """int32 [known]: the types of the values known so far."""
        if not known:
            return None
        for sig in self._untyped:
            self._add(sig)
        self._untyped.clear()
        return self._types[:known]

    def _add(self, sig: np.ndarray) -> None:
        flat, width = self.table.output_types()
        counts = width[sig]
        starts = width.cumsum() - width
        made, typed = int(counts.sum()), self._typed
        within = np.arange(made) - (counts.cumsum() - counts).repeat(counts)
        if typed + made > len(self._types):
            grown = np.empty(max(1024, 2 * (typed + made)), dtype=np.int32)
            grown[:typed] = self._types[:typed]
            self._types = grown
        self._types[typed : typed + made] = flat[starts[sig].repeat(counts) + within]
        self._typed += made
