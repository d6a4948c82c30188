"""CUDA graphs for plans that repeat: the forward of a whole minibatch without gradients, captured and replayed.

In: a run and its planned phase. Out: True where a graph has written the run's arenas, else False: run the steps.

    graphs = GraphedPlans(capture_cuda)
    graphs.run(run, phase) or execute_forward(run, phase)

A plan that comes the second time is captured on memory of its own: constants are written there, the graph is
replayed, and its arenas are copied to the run's, so that what users hold never points into it. The key is the plan
itself and where the shared operands lie; the number of graphs is bounded. A new value in a parameter is read by the
next replay. Random operations, operations that run call by call, more than one device and the CPU are left alone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxbatch.codegen.compile_graph import first_line, warn_uncompiled
from fxbatch.codegen.kernels import Workspace
from fxbatch.codegen.looped import Scratch, group_type
from fxbatch.ir import Plan
from fxbatch.passes.plan_arenas import is_constant
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.forward import lay_out_forward, run_steps
from fxbatch.runtime.phase import Layout, Phase
from fxbatch.runtime.run import Run

Work = Callable[[], None]
Capture = Callable[[Work], Work]
SIZE = 8  # graphs kept; each keeps the arenas of its plan


@dataclass(frozen=True, eq=False)
class PlanPlace:
    """A plan by identity, and the addresses of what its kernels read beside it."""

    plan: Plan
    addresses: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((id(self.plan), self.addresses))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanPlace) and self.plan is other.plan and self.addresses == other.addresses


class Captured:
    """The steps of a plan on memory of their own; `replay()` runs all but the constants."""

    def __init__(self, run: Run, phase: Phase, capture: Capture) -> None:
        self.run = Run(run.engine, grad=False)
        self.run.shared = dict(run.shared)
        self.run.type_numbers(phase.program)
        for compiled in phase.compiled:
            if compiled is None:
                continue
            rows = self.run.operation_rows(compiled)
            if compiled.graphs is not None:  # the thread's own may be allocated anew when it grows
                groups = range(len(compiled.layout.groups))
                rows.scratch = Scratch([group_type(compiled.graphs, g) for g in groups])
        self.phase = dataclasses.replace(phase, tapes={}, pieces=[])
        self.layout: Layout = lay_out_forward(self.run, self.phase)
        self.workspace = Workspace()  # enter_run is not called: what depends on parameters is in the graph
        self.constants = leading_constants(phase)
        self._fill()
        self.replay = capture(self._steps)

    def _fill(self) -> None:
        run_steps(self.run, self.phase, self.layout, self.workspace, range(self.constants))

    def _steps(self) -> None:
        steps = range(self.constants, len(self.phase.plan))
        run_steps(self.run, self.phase, self.layout, self.workspace, steps)

    def write(self, run: Run, phase: Phase) -> None:
        """This minibatch's constants in, its arenas out; all on the current stream."""
        self.phase.program = phase.program
        self._fill()
        self.replay()
        for a, kind in enumerate(phase.plan.arenas):
            rows = int(phase.plan.capacity[a])
            source = self.run.arenas[self.run.type_ids[kind]].tensor
            assert source is not None
            run.arenas[run.type_ids[kind]].reserve(rows)[:rows].copy_(source[:rows])
        run.launches += sum(not is_constant(c.signature) for c in _of_steps(phase))


class GraphedPlans:
    """Captured plans, least recently used last out; hits, captures and refusals are counted."""

    def __init__(self, capture: Capture, size: int = SIZE) -> None:
        self.capture = capture
        self.size = size
        self.replays = 0
        self.captures = 0
        self.refused: dict[str, int] = {}  # reason -> minibatches
        self._seen: OrderedDict[PlanPlace, None] = OrderedDict()
        self._captured: OrderedDict[PlanPlace, Captured] = OrderedDict()
        self._failed: OrderedDict[PlanPlace, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Give the memory of all graphs back."""
        with self._lock:
            for table in (self._seen, self._captured, self._failed):
                table.clear()

    def run(self, run: Run, phase: Phase) -> bool:
        """Replay the phase's plan, or capture it where it repeats; False: nothing was done."""
        reason = reason_against(run, phase)
        if reason:
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return False
        tensors = [t for c in _of_steps(phase) for t in run.shared[c.signature]]
        place = PlanPlace(phase.plan, tuple(t.data_ptr() for t in tensors))
        with self._lock:
            found = self._captured.get(place) or self._capture(place, run, phase)
            if found is None:
                return False
            self._captured.move_to_end(place)
            found.write(run, phase)
            self.replays += 1
        return True

    def _capture(self, place: PlanPlace, run: Run, phase: Phase) -> Captured | None:
        """Capture a plan that was seen before; None: it is new, or its capture failed."""
        if place in self._failed or place not in self._seen:
            _remember(self._seen, place, 8 * self.size)
            return None
        try:
            made = Captured(run, phase, self.capture)
        except RuntimeError as error:  # what CUDA can't capture
            _remember(self._failed, place, 8 * self.size)
            warn_uncompiled("a repeated plan", f"CUDA could not capture it: {first_line(error)}")
            return None
        del self._seen[place]
        self._captured[place] = made
        self.captures += 1
        if len(self._captured) > self.size:
            self._captured.popitem(last=False)
        return made


def _remember(table: OrderedDict[PlanPlace, None], place: PlanPlace, size: int) -> None:
    table[place] = None
    table.move_to_end(place)
    if len(table) > size:
        table.popitem(last=False)


def _of_steps(phase: Phase) -> list[CompiledOperation]:
    """The operation of each step, constants among them."""
    found = [phase.compiled[s] for s in phase.plan.step_signature.tolist()]
    return [x for x in found if x is not None]


def leading_constants(phase: Phase) -> int:
    """How many steps there are before the first that is no constant."""
    kinds = [is_constant(x.signature) for x in _of_steps(phase)]
    return kinds.index(False) if False in kinds else len(kinds)


def reason_against(run: Run, phase: Phase, device: str = "cuda") -> str:
    """Why a phase is not to be captured; "" where it may be."""
    if run.grad:
        return "gradients are recorded"
    if not phase.whole:
        return "instances wait for values"
    devices = {t.device: None for t in phase.plan.arenas}
    if len(devices) != 1 or next(iter(devices)).type != device:
        return f"not on one {device} device"
    for compiled in _of_steps(phase)[leading_constants(phase) :]:
        if is_constant(compiled.signature):
            return "constants come after other steps"  # rows that are used again may be theirs by then
        if compiled.graphs is None:
            return "an operation runs call by call"
        if compiled.graphs.random:
            return "an operation draws random numbers"
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a capture is under way"
    return ""


def capture_cuda(work: Work) -> Work:
    """Run the work once to allocate what it needs, on a stream of its own, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
