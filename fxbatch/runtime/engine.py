"""Engine: what lives as long as a decorated callable: it records minibatches, runs them, and assembles the results.

>>> engine = Engine(Options())                                # doctest: +SKIP
>>> engine.call(fn, instances)                                # doctest: +SKIP
>>> ready = ReadyMinibatch.of(engine, traced, recording)      # doctest: +SKIP
>>> ready("stack")                                            # doctest: +SKIP
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fxbatch.caches import guard
from fxbatch.errors import GradientError, MinibatchError, TraceError
from fxbatch.ir import Modes, SharedOperand
from fxbatch.mistakes import runs_operations
from fxbatch.runtime.argument_objects import Instance
from fxbatch.runtime.autograd import NO_TRANSFORMS, apart, mixes_constants, take_results
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.options import Options
from fxbatch.runtime.packed_calls import PackedCalls, after_packed_calls
from fxbatch.runtime.packed_route import PackedRoute
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.reasons import reasons, recording_share
from fxbatch.runtime.refusals import unheard_mode
from fxbatch.runtime.results import Results, gather, separate, stack
from fxbatch.runtime.run import Run, kernel_modes
from fxbatch.runtime.strategy import Trial
from fxbatch.stopwatch import Timing
from fxbatch.torch_private import forward_mode, inside_functorch, memory_is_real, without_saved_tensor_hooks
from fxbatch.trace.constants import IntegerColumn, sources_of, versions_of
from fxbatch.trace.held import Renumber, Take
from fxbatch.trace.minibatch import Recording, record_minibatch
from fxbatch.trace.module_state import known_model
from fxbatch.trace.state import modes_now, plain_tensors, still_hold
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.traces import Trace


class Engine(Planner):
    """The state of one decorated callable of one module."""

    def __init__(self, options: Options, root: torch.nn.Module | None = None) -> None:
        super().__init__(options, root)
        self.packed = PackedRoute(options, root, self.queue.may_build, self.queue.may_try)
        self.packed_calls: PackedCalls | None = None
        if options.packs and options.backward == "compiled":
            self.packed_calls = PackedCalls(verify=options.verify, may_try=self.queue.may_try)
        self.table = self._new_table()
        self.changes = ""  # what instances were seen to change of modules
        self.calls = 0  # of the decorated callable, where some are checked
        self.warned: set[str] = set()  # what checks have warned of

    def table_for_recording(self) -> SignatureTable:
        """The table for a new recording: another one where this is full. Recordings under way go on with theirs."""
        if self.table.full:
            full, self.table = self.table, self._new_table()
            self.table.limit, self.table.forward = full.limit, full.forward
        return self.table

    def _new_table(self) -> SignatureTable:
        table = SignatureTable(verify=self.options.verify)
        table.sized = self.packed_calls
        return table

    # -- the call -----------------------------------------------------------------------------------

    def execution(self, *, lasting: bool = False) -> Run:
        """The state of a new minibatch. lasting: of a lazy block, which runs and is read from again and again."""
        grad = torch.is_grad_enabled()
        if not memory_is_real():
            raise TraceError(
                "traces and lazy blocks compute on real tensors: not under FakeTensorMode, make_fx or torch.jit.trace"
            )
        if mode := unheard_mode():
            raise TraceError(f"traces and lazy blocks are run by batched kernels: {mode}")
        if inside_functorch() and self.options.backward != "autograd":
            raise GradientError(NO_TRANSFORMS)
        differentiable = (self.options.backward == "autograd" and grad) or forward_mode()
        return Run(
            self, grad=grad, differentiable=differentiable or self.options.mode == "unrolled", lasting=lasting
        )

    def call(
        self,
        fn: Callable[..., object],
        instances: Sequence[Instance],
        out: str,
        *,
        run: Run | None = None,
        first: int = 0,
        trial: Trial | None = None,
    ) -> object:
        """Record all instances, run what is pending, put the results together. run: a new one, where what it ran is to
        be looked at. first: the number of the first instance in the minibatch. trial: how many instances are begun;
        where these are not all, the results are a list."""
        run = self.execution() if run is None else run
        recording = self.record(fn, instances, run, first=first, trial=trial, checks=True)
        return self.finish(run, recording, out if len(recording.results) == len(instances) else "list")

    def call_with_reasons(
        self, fn: Callable[..., object], instances: Sequence[Instance], out: str, trial: Trial | None
    ) -> tuple[object, Callable[[], list[str]]]:
        """`call`, and what gives the reasons why it took as long as it did."""
        run, recording, finishing = self.execution(), Timing(1), Timing(1)
        run.phases_timed = Timing(1)
        recorded = recording.forward_of(lambda: self.record(fn, instances, run, trial=trial, checks=True))
        out = out if len(recorded.results) == len(instances) else "list"
        result = finishing.forward_of(lambda: self.finish(run, recorded, out))
        phases = [phase for part in (*run.segments, run) for phase in part.phases]
        executed = run.phases_timed.forward
        step = recording.forward + finishing.forward

        def why() -> list[str]:
            share = recording_share(recording=recording.forward - executed, step=step)
            statement = "" if recorded.statistics.suspensions else self.packed.statement(fn, instances)
            return [*reasons(phases, recorded.statistics, fn), *filter(None, (statement, share))]

        return result, why

    def build_waiting(self) -> int:
        """Build some of what runs call by call. How much was built."""
        with kernel_modes():
            return self.queue.build()

    def record(
        self,
        fn: Callable[..., object],
        instances: Sequence[Instance],
        run: Run,
        *,
        ahead: bool = False,
        first: int = 0,
        trial: Trial | None = None,
        checks: bool = False,
    ) -> Recording:
        """Run the user's forward on each instance, recording; `run` executes what instances wait for.

        ahead: the last phase runs later, with parameters that may be others by then. checks: nobody waits for argument
        checks of torch.distributions; `finish` looks at them.
        """
        table, may_loop = self.table_for_recording(), self.may_loop
        if run.blocks is None and not run.lasting and not ahead:
            run.table, run.resolver = table, self.packed_calls
        with without_saved_tensor_hooks(), plain_tensors():  # of the user's graph the results are a part
            recording = record_minibatch(
                fn,
                instances,
                table,
                run,
                return_exceptions=self.options.return_exceptions,
                roots=() if self.root is None else (self.root,),
                runs_now=not ahead,
                first=first,
                changes=self.changes if may_loop else None,
                may_loop=may_loop,
                may_begin=None if trial is None else trial.may_begin,
                checks=checks and not self.options.return_exceptions,
            )
        self.changes = recording.changed or recording.recorder.changes.seen
        if recording.changed and may_loop:
            where = recording.recorder.changes.waited
            self.refuse(
                f"{recording.changed}, and an instance {where}: a local variable or a result would batch"
            )
        return recording

    @runs_operations
    def finish(self, run: Run, recording: Recording, out: str) -> Any:
        """Run the last phase and assemble the results."""
        recorder = recording.recorder
        checks = recorder.checks
        try:
            leaves = Results(recording.results, recording.held)
            if recorder.switched_on and not run.grad and any(x.requires_grad for x in leaves.all_values()):
                raise TraceError(
                    "gradients are switched on in a forward that is called without, where a batch has none: switch "
                    f"them on around the call{recorder.switched_on}"
                )
            values = leaves.values if checks is None else checks.with_values(leaves.values)
            program = recorder.final_program(values)
            with nullcontext() if run.blocks is not None else without_saved_tensor_hooks():
                renumber = run.finish(after_packed_calls(run, program), values)
            if checks is not None and checks.pending:
                checks.verify(lambda ids: run.numbers(renumber(np.array(ids)).tolist()))
            result = self.assemble(run, leaves, renumber, out)
        except Exception as error:
            failed = error if checks is None else checks.before(error)
            recorder.refuse(failed, may_loop=self.may_loop)
            if failed is error:
                raise
            raise failed from error
        recorder.changes.forget()
        return result

    def assemble(self, run: Run, leaves: Results, renumber: Renumber, out: str) -> object:
        """The result of the decorated call from the values of a finished run."""
        held = leaves.held
        take: Take = functools.partial(take_results, run)
        if held is not None:
            take = held.together(take, renumber, apart=run.blocks is None and mixes_constants(run))
        try:
            if out == "stack":
                return stack(leaves, renumber, take)
            needs = run.value_needs if run.blocks is None else None
            results = separate(leaves, renumber, take, needs, functools.partial(apart, run))
            return gather(results, out)
        finally:
            if held is not None:
                held.abandon()  # where something was raised first


# -- traced instances, and minibatches of them that are ready to run


@dataclass(eq=False)
class TracedInstance:
    """One instance with its trace, if it has one that may be kept. Picklable."""

    args: tuple[object, ...] | None  # None: a bare trace, whose instance is not known
    shared: dict[str, object] = field(default_factory=dict)
    trace: Trace | None = None
    reason: str = ""  # why there is no trace

    @staticmethod
    def of(args: tuple[object, ...], shared: dict[str, object], make: Callable[[], Trace]) -> TracedInstance:
        """Trace an instance; one that can't be traced ahead is kept without a trace, with the reason."""
        try:
            trace = make()
        except TraceError as error:
            return TracedInstance(args, shared, None, str(error))
        if trace.not_cacheable:
            return TracedInstance(args, shared, None, trace.not_cacheable)
        return TracedInstance(args, shared, trace)

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
    run: Run
    instances: list[TracedInstance]
    results: Results
    renumber: Renumber
    phase: Phase | None  # planned; None where there is nothing to run
    fingerprint: tuple[str, ...]
    operands: list[
        tuple[SharedOperand, torch.Tensor, bool]
    ]  # shared operand, the tensor planned for, requires_grad
    under: Modes  # the modes that it was planned for
    integers: Sequence[IntegerColumn]  # constants whose numbers were read when it was planned
    constants: list[torch.Tensor]  # of which rows may have been read
    versions: Sequence[int] | None  # of these constants
    used: bool = False

    @staticmethod
    def of(
        engine: Engine, instances: list[TracedInstance], recording: Recording, run: Run | None = None
    ) -> ReadyMinibatch:
        """Rewrite, schedule and plan a recording, under the modes of now."""
        run = engine.execution() if run is None else run
        results = Results(recording.results, recording.held)
        values = results.values
        program = recording.recorder.final_program(values)
        shapes = {s: program.signatures[s].outputs[0].shape for s in program.constants}
        whole = [t for s, payload in program.constants.items() if shapes[s] for t in sources_of(payload)]
        versions = versions_of(whole)
        phase, renumber = run.prepare(program, values)
        operands = [
            (operand, tensor, tensor.requires_grad)
            for signature, tensors in run.memory.shared.items()
            for operand, tensor in zip(signature.shared, tensors, strict=True)
        ]
        return ReadyMinibatch(
            engine, run, instances, results, renumber, phase,
            known_model(engine.table, engine.root).fingerprint, operands, modes_now(), recording.integers,
            whole, versions,
        )  # fmt: skip

    def __call__(self, out: str) -> Any:
        """Run it and assemble its results."""
        if self.phase is not None:
            self.run.start(self.phase)
        self.used = True
        return self.engine.assemble(self.run, self.results, self.renumber, out)

    @guard("model")
    def stale(self) -> bool:
        """Whether it was run already, or the model, a mode or a number has changed since it was planned."""
        return (
            self.used
            or self.under != modes_now()
            or self.fingerprint != known_model(self.engine.table, self.engine.root).fingerprint
            or any(o.resolve() is not t or t.requires_grad != r for o, t, r in self.operands)
            or any(column.written_to() for column in self.integers)
            or self.versions is None
            or versions_of(self.constants) != self.versions
        )


def is_traced(x: object) -> bool:
    """Whether an argument is a ready minibatch, or a list of traces or traced instances."""
    if isinstance(x, ReadyMinibatch):
        return True
    return isinstance(x, (list, tuple)) and bool(x) and isinstance(x[0], (Trace, TracedInstance))


def traced_items(batch: Any) -> list[TracedInstance]:
    """The traced instances of such an argument."""
    if isinstance(batch, ReadyMinibatch):
        return batch.instances
    items: Sequence[object] = batch
    traced: list[TracedInstance] = []
    for i, item in enumerate(items):
        if isinstance(item, Trace):
            item = TracedInstance(None, {}, item)
        if not isinstance(item, TracedInstance):
            wanted = (
                "of traces or of instances, not of both"
                if traced
                else "of traces here (fxbatch.TracedDataset)"
            )
            raise MinibatchError(f"a minibatch is {wanted}: item {i} is {type(item).__name__}")
        traced.append(item)
    return traced
