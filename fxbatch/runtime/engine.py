"""Engine: what lives as long as a decorated callable: it records minibatches, runs them, and assembles the results.

>>> engine = Engine(Options())                                # doctest: +SKIP
>>> engine.call(fn, instances)                                # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import GradientError, TraceError
from fxbatch.ir import CONSTANT_KINDS
from fxbatch.runtime.autograd import LazyRun, mixes_constants, take_results
from fxbatch.runtime.costs import Counts
from fxbatch.runtime.differentiable import DifferentiableRun, UnrolledRun
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.options import Options
from fxbatch.runtime.packed_calls import PackedCalls, after_packed_calls
from fxbatch.runtime.packed_route import PackedRoute
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.postponed import REASON
from fxbatch.runtime.results import Results, nest, separate, stack
from fxbatch.runtime.run import Renumber, Run
from fxbatch.torch_private import forward_mode, inside_functorch, memory_is_real
from fxbatch.trace.left_behind import handing_over
from fxbatch.trace.minibatch import Execution, Recording, record_minibatch
from fxbatch.trace.table import SignatureTable

Instance = tuple[tuple[Any, ...], dict[str, Any]]
WRITE = 4  # calls that are recorded in Python besides, which new contents in place take as long as
_CONSTANT, _NATIVE, _PYTHON, _UNBATCHED, _LATE = range(5)


class Engine(Planner):
    """The state of one decorated callable of one module."""

    def __init__(self, options: Options, root: torch.nn.Module | None = None) -> None:
        super().__init__(options)
        self.root = root
        self.table = SignatureTable(verify=options.verify)
        pays = (lambda *, whole: True) if self.strategy is None else self.strategy.pays_for_packing
        self.packed = PackedRoute(options, root, lambda: pays(whole=True))
        off = options.mode != "looped" or bool(options.compile) or options.schedule in ("none", "fold")
        if not off and options.backward == "compiled":
            self.table.packed = PackedCalls(verify=options.verify, may_build=lambda: pays(whole=False))
        self.calls = 0  # of the decorated callable, where some are checked
        self.warned: set[str] = set()  # what checks have warned of

    def table_for_recording(self) -> SignatureTable:
        """The table for a new recording: another one where this is full. Recordings under way go on with theirs."""
        if self.table.full:
            packed = self.table.packed
            self.table = SignatureTable(
                self.table.limit, verify=self.options.verify, forward=self.table.forward
            )
            self.table.packed = packed
        return self.table

    # -- the call -----------------------------------------------------------------------------------

    def execution(self) -> Run | DifferentiableRun:
        """The state of a new minibatch."""
        grad = torch.is_grad_enabled()
        if not memory_is_real():
            raise TraceError(
                "traces and lazy blocks compute on real tensors: not under FakeTensorMode, make_fx or torch.jit.trace"
            )
        if inside_functorch() and self.options.backward != "autograd":
            raise GradientError(
                'torch.func transforms can\'t go through backward="compiled": use '
                '@fxbatch.autobatch(backward="autograd")'
            )
        if self.options.mode == "unrolled":
            return UnrolledRun(self)
        if (self.options.backward == "autograd" and grad) or forward_mode():
            return DifferentiableRun(self)
        return Run(self, grad=grad)

    def lasting(self) -> LazyRun | DifferentiableRun:
        """The state of a lazy block, which runs and is read from again and again."""
        run = self.execution()
        return LazyRun(self) if isinstance(run, Run) else run

    def call(self, fn: Callable[..., Any], instances: Sequence[Instance], out: str) -> Any:
        """Record all instances, run what is pending, put the results together."""
        run = self.execution()
        return self.finish(run, self.record(fn, instances, run), out)

    def call_counted(
        self, fn: Callable[..., Any], instances: Sequence[Instance], out: str, *, first: int = 0
    ) -> Any:
        """`call`, paid and judged by the strategy. first: the number of the first instance in the minibatch."""
        strategy, grad = self.strategy, torch.is_grad_enabled()
        assert strategy is not None
        known = len(self.table.signatures)
        packed = 0 if self.table.packed is None else self.table.packed.steps
        run = self.execution()
        try:
            recording = self.record(fn, instances, run, first=first)
            result = self.finish(run, recording, out)
        finally:
            strategy.building = None
        counts = None
        if isinstance(run, Run) and strategy.judges(len(instances), grad=grad):
            packed = 0 if self.table.packed is None else self.table.packed.steps - packed
            counts = count_run(run, recording, new=max(0, len(self.table.signatures) - known), packed=packed)
        strategy.ran(counts, len(instances), grad=grad)
        return result

    def record(
        self,
        fn: Callable[..., Any],
        instances: Sequence[Instance],
        run: Execution,
        *,
        ahead: bool = False,
        first: int = 0,
    ) -> Recording:
        """Run the user's forward on each instance, recording; `run` executes what instances wait for.

        ahead: the last phase runs later, with parameters that may be others by then.
        """
        table = self.table_for_recording()
        if isinstance(run, Run) and not run.lasting and not ahead:
            run.table = table
        return record_minibatch(
            fn,
            instances,
            table,
            run,
            return_exceptions=self.options.return_exceptions,
            roots=() if self.root is None else (self.root,),
            runs_now=True,
            ahead=ahead,
            first=first,
        )

    def finish(self, run: Run | DifferentiableRun, recording: Recording, out: str) -> Any:
        """Run the last phase and assemble the results."""
        found = Results(recording.results, recording.left)
        values = found.values
        program = recording.recorder.final_program(values)
        if isinstance(run, Run):
            program = after_packed_calls(run, program)
        return self.assemble(run, found, run.finish(program, values), out)

    def assemble(self, run: Run | DifferentiableRun, found: Results, renumber: Renumber, out: str) -> Any:
        """The result of the decorated call from the values of a finished run."""
        left = found.left
        holder = found.all_values()[:1] or ([] if left is None else left.values)
        take = handing_over(
            found.values,
            holder,
            lambda requests: take_results(run, requests),
            renumber,
            lambda: isinstance(run, Run) and mixes_constants(run),
        )
        if left is not None:
            take = left.together(take, renumber)
        try:
            if out == "stack":
                return stack(found, renumber, take)
            results = separate(found, renumber, take, run.value_needs if isinstance(run, Run) else None)
            return nest(results) if out == "nested" else results
        finally:
            if left is not None:
                left.abandon()  # where something was raised first


def count_run(run: Run, recording: Recording, *, new: int, packed: int = 0) -> Counts:
    """What a batched minibatch was made of, once its run has been through all its phases.

    Asked once in a while, so it may look at each phase: about 10 microseconds a phase.

    new: signatures that it met first; packed: steps of packed calls.
    """
    steps, calls = np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64)
    late: set[CompiledOperation] = set()
    phases = [phase for part in (*run.segments, run) for phase in part.phases]
    for phase in phases:
        kinds = np.array([_CONSTANT if c is None else _kind(c) for c in phase.compiled], dtype=np.int64)
        of_step = kinds[phase.plan.step_signature]
        steps += np.bincount(of_step, minlength=5)
        calls += np.bincount(of_step, weights=phase.plan.step_rows, minlength=5).astype(np.int64)
        late.update(c for c in phase.compiled if c is not None and c.reason == REASON)
    return Counts(
        instances=len(recording.results),
        calls=int(calls.sum()),
        long_calls=recording.recorder.long_calls + WRITE * len(recording.recorder.rewritten),
        new=new,
        steps=int(steps[_NATIVE]),
        python_steps=int(steps[_PYTHON]) + packed,
        unbatched=int(calls[_UNBATCHED]),
        late_steps=int(steps[_LATE]),
        late=len(late),
        late_calls=int(calls[_LATE]),
        phases=len(phases),
        waits=recording.statistics.suspensions,
        grad=run.grad,
    )


def _kind(compiled: CompiledOperation) -> int:
    if compiled.signature.operation.kind in CONSTANT_KINDS:
        return _CONSTANT
    if compiled.reason:
        return _LATE if compiled.reason == REASON else _UNBATCHED
    return _PYTHON if compiled.native_forward is None else _NATIVE
