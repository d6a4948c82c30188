"""Which values would require a gradient: worked out only when the user's code asks.

In: the columns of a recording. Out: `requires_grad` of a value, as eager autograd has it.

    value.requires_grad      # follows calls back to parameters and constants that require gradients
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fxbatch.trace.columns import leaves_of

if TYPE_CHECKING:
    from fxbatch.trace.record import Recorder
    from fxbatch.trace.values import Value


class GradientFlags:
    """One flag a value, extended call by call up to what was asked for."""

    def __init__(self) -> None:
        self.phases: list[tuple[np.ndarray, np.ndarray]] = []
        self.flags = bytearray()
        self.phase_done = 0
        self.calls_done = 0  # calls of the pending part that have flags
        self.inputs_done = 0
        self.leaves: frozenset[int] = frozenset()  # constants that require gradients and were let go

    def keep_leaves(self, recorder: Recorder) -> None:
        """Note which constants require gradients: the recorder is about to let them go."""
        self.leaves |= frozenset(leaves_of(recorder.constants))

    def phase(self, sig: np.ndarray, inputs: np.ndarray) -> None:
        """Keep the columns of a phase that has become a program."""
        self.phases.append((sig, inputs))

    def of(self, recorder: Recorder, v: Value) -> bool:
        """Whether v requires a gradient."""
        number = v._value - recorder.base
        if number >= len(self.flags):
            self._extend(recorder)
        return bool(self.flags[number])

    def _extend(self, recorder: Recorder) -> None:
        self.keep_leaves(recorder)
        leaves = {number - recorder.base for number in self.leaves}  # only looked up
        while self.phase_done < len(self.phases):
            sig, inputs = self.phases[self.phase_done]
            # Numbers that were put back into their operation have left the inputs: start of the phase anew.
            if self.calls_done:
                self.inputs_done = int(recorder.table.arity()[sig[: self.calls_done]].sum())
            self._flag(recorder, sig.tolist(), inputs.tolist(), leaves)
            self.phase_done += 1
            self.calls_done = self.inputs_done = 0
        base = recorder.base
        pending = memoryview(recorder.inputs).tolist()
        self._flag(recorder, memoryview(recorder.sigs).tolist(), [i - base for i in pending], leaves)

    def _flag(self, recorder: Recorder, sigs: list[int], inputs: list[int], leaves: set[int]) -> None:
        signatures = recorder.table.signatures
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
                carries = recorder.table.gradients[sid]
                flags.extend(wanted and c for c in carries)
            at += arity
        self.calls_done = len(sigs)
        self.inputs_done = at
