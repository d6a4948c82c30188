"""What backward does with each signature of a phase: the same for all runs of the same operations.

wanted = engine.wanted(tuple(phase.compiled), reached)      # reached: bool a signature, see passes/signature_graph.py
wanted.outputs[s]                                           # the outputs whose gradients signature s takes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxbatch.passes.plan import is_constant
from fxbatch.runtime.compiled import CompiledOperation


@dataclass(frozen=True, eq=False)
class Wanted:
    """The tuples are one a signature, as in `PhaseGradients`."""

    groups: tuple[tuple[int, ...], ...]  # groups whose gradients the operation's backward gives
    outputs: tuple[tuple[int, ...], ...]  # outputs whose gradients it takes
    hands_on: tuple[bool, ...]
    running: tuple[CompiledOperation, ...]  # batched operations that run, the last signature first
    given: tuple[int, ...]  # signatures whose backward only keeps gradients, where they have a single step
    idle: np.ndarray  # bool a signature: backward has nothing to do for it, whatever other phases want

    @staticmethod
    def of(operations: Sequence[CompiledOperation | None], reached: np.ndarray) -> Wanted:
        """What is wanted of each operation, given which of them the results depend on."""
        chosen = [c if r else None for c, r in zip(operations, reached.tolist(), strict=True)]
        outputs = tuple(() if c is None else (0,) if is_constant(c.signature) else takes(c) for c in chosen)
        idle = [not o and (c is None or not c.extra_types) for o, c in zip(outputs, operations, strict=True)]
        batched = {s: c for s, c in enumerate(chosen) if c is not None and takes(c) and c.graphs is not None}
        return Wanted(
            tuple(c.grad_groups if c is not None and takes(c) else () for c in chosen),
            outputs,
            tuple(c is not None and c.hands_on for c in operations),
            tuple(c for _, c in reversed(batched.items())),
            tuple(s for s, c in batched.items() if c.extra_given),
            np.array(idle, dtype=bool),
        )


def takes(compiled: CompiledOperation) -> tuple[int, ...]:
    """The outputs whose gradients an operation's backward takes: none where no gradient reaches it (`angle` of reals,
    which then writes none either)."""
    return compiled.grad_outputs if compiled.needs_gradient else ()
