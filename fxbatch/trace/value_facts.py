"""What can be told of the values of a recording: their tensor types, and which would require a gradient.

In: the columns of a recording, phase by phase. Out: the type id of each value that earlier phases have computed, as one
array; `requires_grad` of a value as eager autograd has it, worked out only when the user's code asks.

    types = KnownTypes(table)
    types.phase(sig)
    types.first(known)          # int32 [known], None where nothing is known
    value.requires_grad         # follows calls back to parameters and constants that require gradients
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fxbatch.trace.columns import leaves_of
from fxbatch.trace.table import SignatureTable

Constants = dict[int, tuple[Any, torch.Tensor, int | None]]  # a recorder's


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


class GradientFlags:
    """One flag a value, extended call by call up to what was asked for."""

    def __init__(self, table: SignatureTable) -> None:
        self.table = table
        self.phases: list[tuple[np.ndarray, np.ndarray]] = []
        self.flags = bytearray()
        self.phase_done = 0
        self.calls_done = 0  # calls of the pending part that have flags
        self.inputs_done = 0
        self.leaves: frozenset[int] = frozenset()  # constants that require gradients and were let go

    def keep_leaves(self, constants: Constants) -> None:
        """Note which constants require gradients: the recorder is about to let them go."""
        self.leaves |= frozenset(leaves_of(constants))

    def phase(self, sig: np.ndarray, inputs: np.ndarray) -> None:
        """Keep the columns of a phase that has become a program."""
        self.phases.append((sig, inputs))

    def of(self, number: int) -> bool | None:
        """Whether the value of this number requires a gradient; None where that is to be found first."""
        return bool(self.flags[number]) if number < len(self.flags) else None

    def extend(self, constants: Constants, sigs: Any, inputs: Any, base: int) -> None:
        """Find the flags of all values of a recording: of its phases, and of the calls that wait."""
        self.keep_leaves(constants)
        leaves = {number - base for number in self.leaves}  # only looked up
        while self.phase_done < len(self.phases):
            sig, read = self.phases[self.phase_done]
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
