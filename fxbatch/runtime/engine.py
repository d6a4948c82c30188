"""Engine: what lives as long as a decorated callable: signatures, compiled operations, plans, buffers.

>>> engine = Engine(Options())                                # doctest: +SKIP
>>> engine.call(fn, instances)                                # doctest: +SKIP
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fxbatch.codegen.inductor import CompileOptions, warn_uncompiled
from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.step_functions import Scratch, group_type
from fxbatch.codegen.unrolled import Unrolled
from fxbatch.errors import GradientError, TraceError
from fxbatch.ir import Plan, Program, Schedule, Signature
from fxbatch.passes.fold import add_pass_through_calls
from fxbatch.passes.fuse import Fuser
from fxbatch.passes.order_rows import RowOrderer
from fxbatch.passes.pipeline import Pipeline
from fxbatch.passes.plan import plan_arenas
from fxbatch.passes.schedule import make_policy
from fxbatch.passes.signature_graph import survey
from fxbatch.runtime.buffers import BufferPool
from fxbatch.runtime.compiled import CompiledOperation, Needs, OperationCache
from fxbatch.runtime.count_run import count_run
from fxbatch.runtime.differentiable import DifferentiableRun
from fxbatch.runtime.family import Family, OperationSet
from fxbatch.runtime.function import LazyRun, take_results
from fxbatch.runtime.gradient_memory import GradientMemory
from fxbatch.runtime.options import Options, deduplication
from fxbatch.runtime.packed_route import NOT_PACKED, PackedRoute
from fxbatch.runtime.plans import ContentCache, PlanKey
from fxbatch.runtime.postponed import Postponed
from fxbatch.runtime.ready import ReadyMinibatch
from fxbatch.runtime.results import Results, nest, separate, stack
from fxbatch.runtime.run import Renumber, Run, kernel_modes
from fxbatch.runtime.slab import SlabPlan, plan_slab
from fxbatch.runtime.strategy import Strategy, Switch
from fxbatch.runtime.unrolled_run import UnrolledRun
from fxbatch.runtime.wanted import Wanted
from fxbatch.torch_private import inside_functorch, memory_is_real
from fxbatch.trace.minibatch import Execution, Recording, record_minibatch
from fxbatch.trace.table import SignatureTable

Instance = tuple[tuple[Any, ...], dict[str, Any]]


class Planned(NamedTuple):
    """A program's steps, where values live and what steps read, and where all of it lies."""

    schedule: Schedule
    plan: Plan
    slab: SlabPlan | None


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()
        self.scratch: dict[CompiledOperation, Scratch] = {}


class Engine:
    """The state of one decorated callable of one module."""

    def __init__(self, options: Options, root: torch.nn.Module | None = None) -> None:
        self.options = options
        self.root = root
        self.table = SignatureTable(verify=options.verify)
        self.policy = make_policy("depth" if options.schedule == "fold" else options.schedule)
        self.packed = PackedRoute(options, root)
        self.pool = BufferPool()
        self.gradient_memory = GradientMemory()
        self.operations = OperationCache()
        self.postponed = Postponed()
        self.schedules: ContentCache[Schedule] = ContentCache()
        self.plans: ContentCache[Planned] = ContentCache()
        self._wanted: ContentCache[Wanted] = ContentCache()
        self.operation_sets: ContentCache[OperationSet] = ContentCache()
        self.families: ContentCache[Family] = ContentCache()
        self.order_rows = RowOrderer()
        self.modules: ContentCache[Unrolled] = ContentCache()
        chosen = [
            "eliminate_dead",
            "unstack_sums",
            *(["fuse"] if options.fuse else []),
            *deduplication(options),
        ]
        self.rewrites = Pipeline(chosen, verify=options.verify)
        self.compile_options = CompileOptions.of(options.compile, options.compile_options)
        if options.mode == "unrolled" and self.compile_options is not None:
            self.compile_options = None  # an unrolled module runs no kernels of operations
            warn_uncompiled('mode="unrolled"', "pass the unrolled module itself to torch.compile")
        elif options.backward == "autograd" and self.compile_options is not None:
            warn_uncompiled(
                'backward="autograd"', "what Inductor makes can't be differentiated; used without gradients"
            )
        self._sticky: dict[Signature, tuple[bool, ...]] = {}
        self._local = _PerThread()
        self.calls = 0  # of the decorated callable, where some are checked
        self._strategy = Strategy() if options.chooses else None
        self.warned: set[str] = set()  # what checks have warned of

    def table_for_recording(self) -> SignatureTable:
        """The table for a new recording: another one where this is full. Recordings under way go on with theirs."""
        if self.table.full:
            self.table = SignatureTable(
                self.table.limit, verify=self.options.verify, forward=self.table.forward
            )
        return self.table

    # -- what a Run asks for ------------------------------------------------------------------------

    def workspace(self) -> Workspace:
        """The kernels' workspace of this thread."""
        return self._local.workspace

    def scratch_of(self, compiled: CompiledOperation) -> Scratch:
        """Rows that a step gathers and nobody keeps, one a thread and operation."""
        found = self._local.scratch.get(compiled)
        if found is None:
            kinds = []
            if compiled.graphs is not None:
                kinds = [group_type(compiled.graphs, g) for g in range(len(compiled.layout.groups))]
            if len(self._local.scratch) >= self.operations.size:
                self._local.scratch.clear()  # what the cache of operations dropped must not live on here
            found = self._local.scratch[compiled] = Scratch(kinds)
        return found

    def compiled(
        self,
        signature: Signature,
        needs: Needs,
        shared: Sequence[torch.Tensor],
        grad: bool,
        *,
        late: bool = False,
    ) -> CompiledOperation:
        """The operation of a signature. Needs only grow from call to call, so that graphs are not remade.

        late: it runs call by call this time, its graphs are built later.
        """
        if grad:
            before = self._sticky.get(signature)
            inputs = (
                needs[0] if before is None else tuple(a or b for a, b in zip(needs[0], before, strict=True))
            )
            if before is None and len(self._sticky) >= self.operations.size:
                self._sticky.clear()
            self._sticky[signature] = inputs
            needs = (inputs, needs[1])
        unused = grad and self.options.backward == "autograd"  # `explain` runs what autograd would not
        made = self.operations.get(
            signature,
            needs,
            shared,
            verify=self.options.verify,
            native=self.options.native,
            compile=None if unused else self.compile_options,
            late=late,
        )
        if made.reason and not late and signature.operation.kind == "graph":
            fuser = self.rewrites.passes.get("fuse")
            if isinstance(fuser, Fuser):
                fuser.refuse(signature)  # its members may batch: from the next minibatch on they are tried
        return made

    def prepare(self, program: Program) -> tuple[Program, Schedule]:
        """Rewrites before scheduling, then the schedule."""
        program = self.rewrites(program)
        if self.options.schedule == "fold":
            return add_pass_through_calls(program)
        return program, self.schedule(program)

    def family(self, program: Program, grad: bool) -> Family:
        """What this program has in common with those met before."""
        found = survey(program)
        counts = found.counts.tolist()
        key = (program.signatures, found.graph, tuple([n > 0 for n in counts]), grad)
        return self.families.get(key, lambda: Family(program, counts, grad=grad))

    def operation_set(self, program: Program, compiled: tuple[CompiledOperation | None, ...]) -> OperationSet:
        """The one object for these operations of a program's signatures."""
        key = (program.signatures, compiled)
        return self.operation_sets.get(key, lambda: OperationSet.of(program, compiled))

    def schedule(self, program: Program) -> Schedule:
        """The steps of a program, by the policy of the options; found again for the same content."""
        key = PlanKey.of(program, self.options.schedule)
        return self.schedules.get(key, lambda: self.policy(program))

    def plan(
        self,
        program: Program,
        schedule: Schedule,
        operations: OperationSet,
        known_rows: np.ndarray | None = None,
        used: np.ndarray | None = None,
        before: np.ndarray | None = None,
        *,
        whole: bool = True,
        reuse: bool = False,
        into: np.ndarray | None = None,
    ) -> Planned:
        """Where values live and what steps read. whole: the only phase of its minibatch; then rows are put in
        order where that saves copies, and the plan is found again by content. into: where the rows of values go,
        those known at the start of it, for phases that follow one another."""

        def make() -> Planned:
            slots = operations.slots
            ordered = self.order_rows(program, schedule, slots) if whole else schedule
            plan = plan_arenas(
                program, ordered, operations.layouts,
                slots=slots, known_rows=known_rows, used=used, run_before=before, reuse=reuse, into=into,
            )  # fmt: skip
            slab = None if operations.memory is None or not whole else plan_slab(operations.memory, plan)
            return Planned(ordered, plan, slab)

        if not whole:
            return make()
        return self.plans.get((PlanKey.of(program, self.options.schedule), operations, reuse), make)

    def wanted(self, compiled: Sequence[CompiledOperation | None], reached: np.ndarray) -> Wanted:
        """What backward does with the operations of a phase, given which of them the results depend on."""
        operations = tuple(compiled)
        return self._wanted.get((operations, reached.tobytes()), lambda: Wanted.of(operations, reached))

    def unrolled(self, program: Program, emit: Callable[[], Unrolled]) -> Unrolled:
        """The unrolled module of a program's structure, emitted when it is new."""
        return self.modules.get(PlanKey.of(program, self.options.schedule), emit)

    def late(self, signatures: Sequence[Signature], counts: Sequence[int]) -> frozenset[int]:
        """Positions of the signatures that run call by call for now, their graphs being built later."""
        strategy = self.strategy
        if strategy is not None and strategy.building is not None:
            return strategy.put_off(signatures, counts)
        late = self.postponed.choose(signatures, counts)
        if strategy is not None:
            strategy.note_built([s for s, n in zip(signatures, counts, strict=True) if n], late)
        return late

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
        if self.options.backward == "autograd" and grad:
            return DifferentiableRun(self)
        return Run(self, grad=grad)

    def lasting(self) -> LazyRun | DifferentiableRun:
        """The state of a lazy block, which runs and is read from again and again."""
        run = self.execution()
        return LazyRun(self) if isinstance(run, Run) else run

    def call(self, fn: Callable[..., Any], instances: Sequence[Instance], out: str) -> Any:
        """Record all instances, run what is pending, put the results together."""
        packed = self.packed.call(fn, instances, out)
        if packed is not NOT_PACKED:
            return packed
        run = self.execution()
        return self.finish(run, self.record(fn, instances, run), out)

    @property
    def strategy(self) -> Strategy | None:
        """What chooses between batching and the plain loop; None where all is batched."""
        return self._strategy if Switch.on else None

    def call_counted(
        self, fn: Callable[..., Any], instances: Sequence[Instance], out: str, *, first: int = 0
    ) -> Any:
        """`call`, paid and judged by the strategy. first: the number of the first instance in the minibatch."""
        strategy, grad = self.strategy, torch.is_grad_enabled()
        assert strategy is not None
        known = len(self.table.signatures)
        run = self.execution()
        try:
            recording = self.record(fn, instances, run, first=first)
            result = self.finish(run, recording, out)
        finally:
            strategy.building = None
        counts = None
        if isinstance(run, Run) and strategy.judges(len(instances), grad=grad):
            counts = count_run(run, recording, new=max(0, len(self.table.signatures) - known))
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
        return record_minibatch(
            fn,
            instances,
            self.table_for_recording(),
            run,
            return_exceptions=self.options.return_exceptions,
            roots=() if self.root is None else (self.root,),
            runs_now=True,
            ahead=ahead,
            first=first,
        )

    def run_ready(self, ready: ReadyMinibatch, out: str) -> Any:
        """Run a planned minibatch and assemble its results."""
        run = ready.run
        if ready.phase is not None:
            assert isinstance(run, Run)
            with kernel_modes():
                run.launch(ready.phase)
        elif ready.program is not None:
            ready.renumber = run.finish(ready.program, ready.found.values)
        ready.used = True
        return self.assemble(run, ready.found, ready.renumber, out)

    def finish(self, run: Run | DifferentiableRun, recording: Recording, out: str) -> Any:
        """Run the last phase and assemble the results."""
        found = Results(recording.results, recording.left)
        values = found.values
        program = recording.recorder.final_program(values)
        return self.assemble(run, found, run.finish(program, values), out)

    def assemble(self, run: Run | DifferentiableRun, found: Results, renumber: Renumber, out: str) -> Any:
        """The result of the decorated call from the values of a finished run."""
        take = lambda requests: take_results(run, requests)  # noqa: E731
        left = found.left
        if left is not None:
            take = left.together(take, renumber)
        try:
            if out == "stack":
                return stack(found, renumber, take)
            results = separate(found, renumber, take)
            return nest(results) if out == "nested" else results
        finally:
            if left is not None:
                left.abandon()  # where something was raised first
