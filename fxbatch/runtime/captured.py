"""A plan's forward and backward, captured on memory of their own that is lent to one run at a time.

In: a run and its planned phase. Out: a Captured, which replays where the steps would be walked.

    captured = Captured(run, phase, capture)
    captured.lend(run, phase)             # constants written, all other steps replayed: the run is on this memory
    captured.run_backward(run, given)     # gradients of results written, the walk replayed; copies of what it found
    run.release()                         # the memory is free for the next run of the plan

Nothing is copied but what goes in and out: constants and gradients of results in, results (Run.rows) and gradients
of parameters out, all on the current stream. A graph reads parameters where they are, so that new values in
them are seen, and holds them, so that no others can come to lie there.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from fxbatch.codegen.compile_graph import first_line, warn_uncompiled
from fxbatch.codegen.looped import Scratch, group_type
from fxbatch.codegen.workspace import Workspace
from fxbatch.passes.plan_arenas import is_constant
from fxbatch.runtime.backward import Backward, Given, Gradients
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.forward import lay_out_forward, run_steps
from fxbatch.runtime.phase import Layout, Phase
from fxbatch.runtime.run import Run

Work = Callable[[], None]
# Runs the work at least once, so that it allocates what it needs and its indices are there, and then captures it.
# What it returns launches the same on the same memory; the work itself need not be called again.
Capture = Callable[[Work], Work]
Key = tuple[tuple[int, bytes], ...]  # which values the results are that gradients are given of
_BACKWARDS = 4  # captured a plan: which results have gradients seldom changes


class StaticRun(Run):
    """A run whose memory stays where it is, and whose steps only launch what torch can capture."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.engine, grad=run.grad)
        self.shared = dict(run.shared)
        self.native = False
        self._workspace = Workspace()  # enter_run is not called: what depends on parameters is in the graph

    def workspace(self) -> Workspace:
        return self._workspace


class Captured:
    """A plan on memory of its own. `busy`: a run is on it."""

    def __init__(self, run: Run, phase: Phase, capture: Capture) -> None:
        self.capture = capture
        self.busy = False
        self.refused = ""  # why backward isn't captured
        self.captures = 0  # of backward
        self.replays = 0
        self.run = StaticRun(run)
        self.run.type_numbers(phase.program)
        for compiled in phase.compiled:
            if compiled is None:
                continue
            rows = self.run.operation_rows(compiled)
            if compiled.graphs is not None:  # the thread's own may be allocated anew when it grows
                groups = range(len(compiled.layout.groups))
                rows.scratch = Scratch([group_type(compiled.graphs, g) for g in groups])
        self.phase = dataclasses.replace(phase, tapes={}, pieces=[], layout=None)
        self.layout: Layout = lay_out_forward(self.run, self.phase)
        self.run.phases.append(self.phase)
        self.constants = leading_constants(phase)
        self.launches = sum(not is_constant(c.signature) for c in operations_of(phase))
        self.sparse = any(map(makes_sparse, operations_of(phase)))
        self._backwards: dict[Key, tuple[Backward, Work] | None] = {}  # None: it can't be captured
        self._lock = threading.Lock()
        self._write_constants(self.run, self.phase)
        self._replay = capture(self._steps)

    def _write_constants(self, run: Run, phase: Phase) -> None:
        run_steps(run, phase, self.layout, self.run.workspace(), range(self.constants))

    def _steps(self) -> None:
        steps = range(self.constants, len(self.phase.plan))
        run_steps(self.run, self.phase, self.layout, self.run.workspace(), steps)

    def lend(self, run: Run, phase: Phase) -> None:
        """Put a run on this memory, and run its phase there. The caller has set `busy`."""
        run.lent = self
        assert list(run.type_ids) == list(self.run.type_ids), "one plan, one numbering of types"
        run.arenas, run.rows_of = self.run.arenas, self.run.rows_of
        phase.layout, phase.pieces = self.layout, self.phase.pieces
        self._write_constants(run, phase)
        self._replay()
        run.launches += self.launches

    def take_back(self) -> None:
        """The run that was on this memory is released."""
        self.busy = False

    def run_backward(self, run: Run, given: Sequence[Given]) -> Gradients | None:
        """Copies of the gradients of what the run read; None: the steps are to be walked one by one."""
        self.refused = self._against_backward(run.phases[0])
        if self.refused:
            return None
        key = tuple((g.kind, g.values.tobytes()) for g in given)
        with self._lock:  # the same graph may be differentiated by two threads
            found = self._backwards[key] if key in self._backwards else self._capture(key, run, given)
            if found is None:
                return None
            backward, replay = found
            backward.write(given)
            replay()
            self.replays += 1
            return {tensor: grad.clone() for tensor, grad in backward.found.items()}

    def _against_backward(self, phase: Phase) -> str:
        """Why the backward of a run on this memory is to be walked; "" where it may be replayed."""
        if any(carries_gradient(phase, s) for s in phase.program.constants):
            return "constants require gradients"
        return "a gradient is sparse" if self.sparse else ""

    def _capture(self, key: Key, run: Run, given: Sequence[Given]) -> tuple[Backward, Work] | None:
        if len(self._backwards) >= _BACKWARDS:
            self.refused = "gradients are given of ever other results"
            return None
        self._backwards[key] = None
        self.run.value_type = run.value_type
        backward = Backward(self.run, given)
        backward.write(given)
        try:
            replay = self.capture(backward.walk)
        except RuntimeError as error:  # what CUDA can't capture
            self.refused = first_line(error)
            warn_uncompiled("the backward of a repeated plan", f"CUDA could not capture it: {self.refused}")
            return None
        self.captures += 1
        self._backwards[key] = backward, replay
        return backward, replay


def carries_gradient(phase: Phase, s: int) -> bool:
    """Whether gradients go to the constants of a signature."""
    first, last = phase.program.columns.first_output[s : s + 2]
    return bool(phase.needs.outputs[first:last].any())


def makes_sparse(compiled: CompiledOperation) -> bool:
    """Whether an operation gives a sparse gradient, whose size is a matter of the data."""
    if compiled.graphs is None or compiled.graphs.parameters is None:
        return False
    results = compiled.graphs.parameters.graph.output_node().all_input_nodes
    return any(x.meta["values"][0].is_sparse for x in results)


def operations_of(phase: Phase) -> list[CompiledOperation]:
    """The operation of each step, constants among them."""
    found = [phase.compiled[s] for s in phase.plan.step_signature.tolist()]
    return [x for x in found if x is not None]


def leading_constants(phase: Phase) -> int:
    """How many steps there are before the first that is no constant."""
    kinds = [is_constant(x.signature) for x in operations_of(phase)]
    return kinds.index(False) if False in kinds else len(kinds)
