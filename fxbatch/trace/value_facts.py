"""The phases that have run, and what can be told of their values: tensor types, and which would require a gradient.

In: the columns of a recording, phase by phase. Out: the type id of each value that phases have computed, as one array;
`requires_grad` of a value as eager autograd has it, worked out only when the user's code asks.

    phases.add(sig, inputs, constants, known)
    phases.types(known)         # int32 [known], None where nothing is known
    value.requires_grad         # follows calls back to parameters and constants that require gradients
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fxbatch.trace.table import SignatureTable

Constants = dict[int, tuple[Any, torch.Tensor, int | None]]  # a recorder's


class Phases:
    """The calls that have run, and one number and one flag a value, extended up to what was asked for."""

    known = 0  # values that are computed
    _types = np.empty(0, dtype=np.int32)
    _typed = 0  # values that have a type ...
    _phases_typed = 0  # ... and the phases that they are of
    phase_done = 0
    calls_done = 0  # calls of the pending part that have flags
    inputs_done = 0
    leaves: frozenset[int] = frozenset()  # constants that require gradients and were let go

    def __init__(self, table: SignatureTable) -> None:
        self.table = table
        self.columns: list[tuple[np.ndarray, np.ndarray]] = []  # signatures and inputs of each phase
        self.constants: list[dict[int, Any]] = []  # of each phase, by signature
        self.flags = bytearray()

    def add(self, sig: np.ndarray, inputs: np.ndarray, constants: dict[int, Any], known: int) -> None:
        """A phase with these columns runs. known: how many values there are then."""
        self.columns.append((sig, inputs))
        self.constants.append(constants)
        self.known = known

    # Types

    def types(self, known: int) -> np.ndarray | None:
        """int32 [known]: the types of the first values that are computed."""
        if not known:
            return None
        for sig, _ in self.columns[self._phases_typed :]:
            self._add(sig)
        self._phases_typed = len(self.columns)
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

    # Gradients

    def keep_leaves(self, constants: Constants) -> None:
        """Note which constants require gradients: the recorder is about to let them go."""
        self.leaves |= frozenset([v._value for v, t, _ in constants.values() if t.requires_grad])

    def requires_gradient(self, number: int) -> bool | None:
        """Whether the value of this number requires a gradient; None where that is to be found first."""
        return bool(self.flags[number]) if number < len(self.flags) else None

    def extend_flags(self, constants: Constants, sigs: Any, inputs: Any, base: int) -> None:
        """Find the flags of all values of a recording: of its phases, and of the calls that wait."""
        self.keep_leaves(constants)
        leaves = {number - base for number in self.leaves}  # only looked up
        while self.phase_done < len(self.columns):
            sig, read = self.columns[self.phase_done]
            # Numbers that were put back into their operation have left the inputs: start of the phase anew.
            if self.calls_done:
                self.inputs_done = int(self.table.arity()[sig[: self.calls_done]].sum())
            self._flag(sig.tolist(), read.tolist(), leaves)
            self.phase_done += 1
            self.calls_done = self.inputs_done = 0
        pending = memoryview(inputs).tolist()
        self._flag(memoryview(sigs).tolist(), [i - base for i in pending], leaves)

    def _flag(self, sigs: list[int], inputs: list[int], leaves: set[int]) -> None:
        signatures = self.table.signatures
        at = self.inputs_done
        flags = self.flags
        for sid in sigs[self.calls_done :]:
            s = signatures[sid]
            arity = len(s.inputs)
            if s.operation.kind == "constant":
                flags.append(len(flags) in leaves)
            else:
                wanted = s.modes.grad and (
                    any(flags[i] for i in inputs[at : at + arity])
                    or any(o.resolve().requires_grad for o in s.shared)
                )
                carries = self.table.gradients[sid]
                flags.extend(wanted and c for c in carries)
            at += arity
        self.calls_done = len(sigs)
        self.inputs_done = at
