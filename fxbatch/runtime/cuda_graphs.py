"""CUDA graphs for plans that repeat: forward and backward of a whole minibatch, captured and replayed.

In: a run and its planned phase. Out: True where a graph has run it, on memory of its own, else False: run the steps.

    graphs = GraphedPlans(capture_cuda)
    graphs.run(run, phase) or execute_forward(run, phase)

A plan that comes the second time is captured (runtime/captured.py); its memory is lent to one run at a time, in
training until the backward pass, and whoever meets it in use runs the steps. The key is the plan itself, the shared
operands and where they lie, and the stream; the number of graphs is bounded. Random operations, operations that run
call by call, more than one device and the CPU are left alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from fxbatch.codegen.compile_graph import first_line, warn_uncompiled
from fxbatch.ir import Plan
from fxbatch.passes.plan_arenas import is_constant
from fxbatch.runtime.captured import Capture, Captured, Work, leading_constants, operations_of
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.run import Run

SIZE = 8  # graphs kept; each keeps the arenas of its plan, in training also what backward needs
IN_USE = "its memory is in use"


@dataclass(frozen=True, eq=False)
class PlanPlace:
    """A plan by identity, what its kernels read beside it, where that lies, and the stream."""

    plan: Plan
    operands: tuple[int, ...]  # ids: a graph that was captured holds the tensors
    addresses: tuple[int, ...]
    stream: int

    @staticmethod
    def of(run: Run, phase: Phase) -> PlanPlace:
        """The place of a phase that is about to run."""
        tensors = [t for c in operations_of(phase) for t in run.shared[c.signature]]
        device = next(iter(phase.plan.arenas)).device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return PlanPlace(phase.plan, tuple(map(id, tensors)), tuple(t.data_ptr() for t in tensors), stream)

    def _key(self) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
        return id(self.plan), self.operands, self.addresses, self.stream

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanPlace) and self._key() == other._key()


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

    @property
    def kept(self) -> tuple[Captured, ...]:
        """The plans that are captured now."""
        return tuple(self._captured.values())

    def clear(self) -> None:
        """Give the memory of all graphs back."""
        with self._lock:
            for table in (self._seen, self._captured, self._failed):
                table.clear()

    def run(self, run: Run, phase: Phase) -> bool:
        """Replay the phase's plan, or capture it where it repeats; False: nothing was done."""
        reason = reason_against(run, phase)
        if reason:
            return self._refuse(reason)
        place = PlanPlace.of(run, phase)
        with self._lock:
            found = self._captured.get(place)
            if found is not None and found.busy:
                return self._refuse(IN_USE)
            found = found or self._capture(place, run, phase)
            if found is None:
                return False
            self._captured.move_to_end(place)
            found.busy = True
            self.replays += 1
        found.lend(run, phase)
        return True

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        return False

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


def reason_against(run: Run, phase: Phase, device: str = "cuda") -> str:
    """Why a phase is not to be captured; "" where it may be."""
    if not phase.whole:
        return "instances wait for values"
    devices = {t.device: None for t in phase.plan.arenas}
    if len(devices) != 1 or next(iter(devices)).type != device:
        return f"not on one {device} device"
    for compiled in operations_of(phase)[leading_constants(phase) :]:
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
    with torch.cuda.graph(
        graph, capture_error_mode="thread_local"
    ):  # others may launch and allocate meanwhile
        work()
    return graph.replay
