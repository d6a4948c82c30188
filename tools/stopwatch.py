"""Time by phase and by operation: names the parts of a run, for a table and for torch.profiler.

    watch = Stopwatch(torch.device("cpu"))
    with watch.instrumented():
        run()
    watch.phases["forward"].seconds
    watch.operations["cell forward"].calls

A phase's time is its own: without the phases that run inside it. Each part is a `record_function` too, so
that a trace of torch.profiler shows phases, and in them steps, as `cell x37 forward`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.profiler import record_function

from fxbatch.runtime import backward as backward_module
from fxbatch.runtime import forward as forward_module
from fxbatch.runtime.backward import Backward, NativeKernels
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.forward import NativeSteps
from fxbatch.runtime.run import Run
from fxbatch.trace.record import Recorder

# What each phase is: (owner, attribute, phase). A part that has moved fails a test by name.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (Engine, "record", "trace"),
    (Recorder, "pending_program", "merge"),
    (Engine, "rewrite", "rewrite"),
    (Engine, "schedule", "schedule"),
    (Engine, "plan", "plan"),
    (Engine, "compiled", "compile"),
    (forward_module, "fill_constants", "constants"),
    (Run, "launch", "forward"),
    (Engine, "assemble", "results"),
    (Backward, "__init__", "backward"),
    (backward_module, "add_parameter_gradients", "parameter gradients"),
)
KERNELS = (("forward", "forward"), ("backward", "backward"), ("parameters", "parameter gradients"))
# What is around these: of a decorated call besides, of torch's autograd besides.
AROUND = ("call", "autograd", "zero gradients")
PHASES = (*AROUND, *(name for _, _, name in PARTS))


@dataclass
class Spent:
    """Seconds, how often, and how many calls of the program that was for."""

    seconds: float = 0.0
    times: int = 0
    calls: int = 0


@dataclass
class Stopwatch:
    """Collects; `device` is waited for before each reading of the clock, where it is a CUDA device."""

    device: torch.device
    phases: dict[str, Spent] = field(default_factory=lambda: {name: Spent() for name in PHASES})
    operations: dict[str, Spent] = field(default_factory=dict)
    _open: list[float] = field(default_factory=list)  # seconds of parts inside, a running phase each

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time its own seconds, without those of phases inside."""
        self._open.append(0.0)
        start = self.now()
        try:
            with record_function(name):
                yield
        finally:
            whole = self.now() - start
            inside = self._open.pop()
            spent = self.phases[name]
            spent.seconds += whole - inside
            spent.times += 1
            if self._open:
                self._open[-1] += whole

    @contextmanager
    def operation(self, name: str, kind: str, calls: int) -> Iterator[None]:
        """Time one step of an operation; phases go on meanwhile."""
        start = self.now()
        try:
            yield  # the engine has a range of that name for profilers
        finally:
            spent = self.operations.setdefault(f"{name}\t{kind}", Spent())
            spent.seconds += self.now() - start
            spent.times += 1
            spent.calls += calls

    @contextmanager
    def instrumented(self) -> Iterator[None]:
        """Within it, everything that runs is timed; afterwards all is as before: what was inherited is again."""
        with ExitStack() as patches:

            def replace(owner: Any, name: str, wrapper: Any) -> None:
                patches.enter_context(mock.patch.object(owner, name, wrapper))

            for owner, name, phase in PARTS:
                replace(owner, name, self._timed(getattr(owner, name), phase))
            replace(NativeSteps, "forward", self._native_forward(NativeSteps.forward))
            replace(NativeSteps, "backward", self._native_backward(NativeSteps.backward))
            replace(NativeKernels, "run", self._native_kernels(NativeKernels.run))
            launch = Run.launch  # timed already

            def launch_timed(run: Run, phase: Any) -> None:
                for compiled in phase.compiled:
                    for part, kind in KERNELS:
                        kernel = getattr(compiled, part, None)
                        if kernel is not None and not isinstance(kernel, TimedKernel):
                            replace(compiled, part, TimedKernel(self, compiled.signature.name, kernel, kind))
                launch(run, phase)

            replace(Run, "launch", launch_timed)
            yield

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return timed

    def _native_forward(self, run: Callable[[NativeSteps, int, int], int]) -> Callable[..., int]:
        """Native steps one at a time, each timed."""

        def timed(steps: NativeSteps, first: int, last: int) -> int:
            for k in range(first, last):
                if not steps.begins_at(k):
                    return k
                with self._step(steps, k, "forward"):
                    stop = run(steps, k, k + 1)
                if stop == k:
                    return k
            return last

        return timed

    def _native_backward(self, run: Callable[[NativeSteps, int, int], int]) -> Callable[..., int]:
        def timed(steps: NativeSteps, last: int) -> int:
            for k in range(last, 0, -1):
                if not steps.begins_at(k - 1):
                    if run(steps, k, k - 1) == k:
                        return k
                    continue  # passed over
                with self._step(steps, k - 1, "backward"):
                    stop = run(steps, k, k - 1)
                if stop == k:
                    return k
            return 0

        return timed

    @contextmanager
    def _step(self, steps: NativeSteps, k: int, kind: str) -> Iterator[None]:
        plan = steps.phase.plan
        compiled = steps.phase.compiled[int(plan.step_signature[k])]
        assert compiled is not None
        with self.operation(compiled.signature.name, kind, int(plan.step_rows[k])):
            yield

    def _native_kernels(self, run: Callable[[NativeKernels, int, int], bool]) -> Callable[..., bool]:
        """Native kernels one at a time, each timed."""

        def timed(kernels: NativeKernels) -> bool:
            for i, (step, n) in enumerate(zip(kernels.steps, kernels.counts, strict=True)):
                with self.operation(step.name, "parameter gradients", n):
                    if not run(kernels, i, i + 1):
                        return False
            return True

        return timed


class TimedKernel:
    """A step function or kernel, whose first argument is the step or its number of rows, with its time taken."""

    def __init__(self, watch: Stopwatch, name: str, kernel: Callable[..., Any], kind: str) -> None:
        self.watch, self.name, self.kernel, self.kind = watch, name, kernel, kind

    def __call__(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        with self.watch.operation(self.name, self.kind, getattr(step, "n", step)):
            return self.kernel(step, *args, **kwargs)
