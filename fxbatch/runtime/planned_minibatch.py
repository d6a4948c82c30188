"""Traced instances, and minibatches of them that are ready to run.

ready = ReadyMinibatch.of(engine, traced, recording)        # rewrite, schedule, plan
ready("stack")                                              # run, results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxbatch.errors import MinibatchError, TraceError
from fxbatch.ir import Modes, Program
from fxbatch.runtime.differentiable import DifferentiableRun
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.results import Results
from fxbatch.runtime.run import Renumber, Run, kernel_modes, renumbering
from fxbatch.trace.integers import IntegerColumn
from fxbatch.trace.minibatch import Recording
from fxbatch.trace.module_state import known_model
from fxbatch.trace.state import modes_now, still_hold
from fxbatch.trace.traces import Trace


@dataclass(eq=False)
class TracedInstance:
    """One instance with its trace, if it has one that may be kept. Picklable."""

    args: tuple[Any, ...] | None  # None: a bare trace, whose instance is not known
    shared: dict[str, Any] = field(default_factory=dict)
    trace: Trace | None = None
    reason: str = ""  # why there is no trace

    @staticmethod
    def of(args: tuple[Any, ...], shared: dict[str, Any], make: Callable[[], Trace]) -> TracedInstance:
        """Trace an instance; one that can't be traced ahead is kept without a trace, with the reason."""
        try:
            made = make()
        except TraceError as error:
            return TracedInstance(args, shared, None, str(error))
        if made.not_cacheable:
            return TracedInstance(args, shared, None, made.not_cacheable)
        return TracedInstance(args, shared, made)

    def fresh(self, fingerprint: tuple[str, ...], now: Modes) -> bool:
        """Whether the trace fits a model with this fingerprint, and these modes (a bare trace is checked when it is
        merged)."""
        if self.trace is None or self.args is None:
            return True
        return self.trace.fingerprint == fingerprint and still_hold(self.trace.under, now)


@dataclass(eq=False)
class ReadyMinibatch:
    """A minibatch that is recorded and planned: calling the decorated model with it only runs it."""

    engine: Engine
    run: Run | DifferentiableRun
    instances: list[TracedInstance]
    found: Results
    renumber: Renumber
    phase: Phase | None  # planned, for a Run
    program: Program | None  # for the other kinds of run
    fingerprint: tuple[str, ...]
    operands: list[tuple[Any, torch.Tensor, bool]]  # shared operand, the tensor planned for, requires_grad
    under: Modes  # the modes that it was planned for
    integers: Sequence[IntegerColumn]  # constants whose numbers were read when it was planned
    used: bool = False

    @staticmethod
    def of(
        engine: Engine,
        instances: list[TracedInstance],
        recording: Recording,
        run: Run | DifferentiableRun | None = None,
    ) -> ReadyMinibatch:
        """Rewrite, schedule and plan a recording, under the modes of now."""
        run = engine.execution() if run is None else run
        found = Results(recording.results, recording.left)
        values = found.values
        program = recording.recorder.final_program(values)
        phase = None
        renumber: Renumber = lambda ids: ids  # noqa: E731
        if len(program) and isinstance(run, Run):
            program, schedule = engine.rewrite(program)
            renumber = renumbering(values, program.outputs)
            if len(program):
                phase = run.plan_phase(program, schedule, last=True)
        operands = [
            (operand, tensor, tensor.requires_grad)
            for signature, tensors in (run.memory.shared if isinstance(run, Run) else {}).items()
            for operand, tensor in zip(signature.shared, tensors, strict=True)
        ]
        return ReadyMinibatch(
            engine, run, instances, found, renumber, phase, None if isinstance(run, Run) else program,
            known_model(engine.table, engine.root).fingerprint, operands, modes_now(), recording.integers,
        )  # fmt: skip

    def __call__(self, out: str) -> Any:
        """Run it and assemble its results."""
        run = self.run
        if self.phase is not None:
            assert isinstance(run, Run)
            with kernel_modes():
                run.launch(self.phase)
        elif self.program is not None:
            self.renumber = run.finish(self.program, self.found.values)
        self.used = True
        return self.engine.assemble(run, self.found, self.renumber, out)

    def stale(self) -> bool:
        """Whether it was run already, or the model, a mode or a number has changed since it was planned."""
        return (
            self.used
            or self.under != modes_now()
            or self.fingerprint != known_model(self.engine.table, self.engine.root).fingerprint
            or any(o.resolve() is not t or t.requires_grad != r for o, t, r in self.operands)
            or any(column.written_to() for column in self.integers)
        )


def is_traced(x: Any) -> bool:
    """Whether an argument is a ready minibatch, or a list of traces or traced instances."""
    if isinstance(x, ReadyMinibatch):
        return True
    return isinstance(x, (list, tuple)) and bool(x) and isinstance(x[0], (Trace, TracedInstance))


def traced_items(batch: Any) -> list[TracedInstance]:
    """The traced instances of such an argument."""
    if isinstance(batch, ReadyMinibatch):
        return batch.instances
    items: Sequence[Any] = batch
    found: list[TracedInstance] = []
    for i, item in enumerate(items):
        if isinstance(item, Trace):
            item = TracedInstance(None, {}, item)
        if not isinstance(item, TracedInstance):
            wanted = (
                "of traces or of instances, not of both"
                if found
                else "of traces here (fxbatch.TracedDataset)"
            )
            raise MinibatchError(f"a minibatch is {wanted}: item {i} is {type(item).__name__}")
        found.append(item)
    return found
