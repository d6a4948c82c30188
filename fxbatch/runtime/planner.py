"""Planner: all between a recorded program and its run, found again where it was made before.

In: a program of recorded calls. Out: the program rewritten, its schedule, compiled operations, and its plan. Lives as
long as a decorated callable, with its pool of memory.

    planner = Planner(Options())
    program, schedule = planner.prepare(program)
    schedule, found = planner.plan(program, None, template, reuse=True)
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxbatch.codegen.inductor import CompileOptions, warn_uncompiled
from fxbatch.codegen.kernel import Workspace
from fxbatch.ir import Program, Schedule, Signature
from fxbatch.passes.fold import add_pass_through_calls
from fxbatch.passes.fuse import Fuser
from fxbatch.passes.pipeline import Pipeline
from fxbatch.passes.plan import WholePlan, plan_whole
from fxbatch.passes.schedule import make_policy
from fxbatch.passes.signature_graph import survey
from fxbatch.runtime.build_queue import BuildQueue
from fxbatch.runtime.memory import keep_freed_memory
from fxbatch.runtime.operation_cache import (
    SECONDS_A_CALL,
    CompiledOperation,
    MetSignatures,
    NeededGradients,
    OperationCache,
)
from fxbatch.runtime.options import Options, deduplication
from fxbatch.runtime.pool import GradientMemory, Pool
from fxbatch.runtime.refusals import Refusals
from fxbatch.runtime.strategy import AdaptiveSwitch, Strategy
from fxbatch.runtime.structure_cache import (
    HELD,
    BackwardNeeds,
    Family,
    FamilyTemplate,
    OperationSet,
    PlanKey,
    StructureCache,
)
from fxbatch.torch_private import are_deterministic


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


@dataclass
class _LastOperations:
    """The operations that the signatures of some programs had last, and of how many programs."""

    operations: list[CompiledOperation | None]
    programs: int = 0


OWN_SETS = 24  # programs of the same signatures that have each a set of its own operations
LARGE = 200  # calls of ATen, above which an operation is not built while a minibatch waits for it
SMALL = 32  # up to which it is built after one, whatever its calls have taken


class Planner:
    """Options, policy, memory and caches of one decorated callable of one module; all of its runs use them."""

    def __init__(self, options: Options, root: torch.nn.Module | None = None) -> None:
        self.options = options
        self.root = root
        self.policy = make_policy("depth" if options.schedule == "fold" else options.schedule)
        keep_freed_memory()
        self.pool = Pool()
        self.gradient_memory = GradientMemory()
        self.operations = OperationCache()
        self.met = MetSignatures()
        self.queue = BuildQueue()
        self.structures = StructureCache()
        chosen = ["eliminate_dead", "unstack_rows", "unstack_sums"]
        chosen += ["fuse"] * options.fuse + deduplication(options)
        self.rewrites = Pipeline(chosen, verify=options.verify)
        self.compile_options = CompileOptions.of(options.compile, options.compile_options)
        if options.mode == "unrolled" and self.compile_options is not None:
            self.compile_options = None  # an unrolled module runs no kernels of operations
            warn_uncompiled('mode="unrolled"', "pass the unrolled module itself to torch.compile")
        elif options.backward == "autograd" and self.compile_options is not None:
            warn_uncompiled(
                'backward="autograd"', "what Inductor makes can't be differentiated; used without gradients"
            )
        self._local = _PerThread()
        self._strategy = Strategy() if options.chooses else None
        self.refusals = Refusals()

    def workspace(self) -> Workspace:
        """The kernels' workspace of this thread."""
        return self._local.workspace

    def compiled(
        self,
        signature: Signature,
        needs: NeededGradients,
        shared: Sequence[torch.Tensor],
        grad: bool,
        *,
        late: bool = False,
        calls: int | None = None,
        most: int | None = None,
    ) -> CompiledOperation:
        """The operation of a signature. Needs only grow from call to call, so that graphs are not remade.

        late: it runs call by call this time, its graphs are built later. calls: how many there are. most:
        calls of ATen above which it is put off; None for LARGE where building is bounded, else for any number.
        """
        met = self.met.of(signature)
        if grad:
            met.inputs = tuple(map(operator.or_, needs[0], met.inputs)) if met.inputs else needs[0]
            needs = (met.inputs, needs[1])
        unused = grad and self.options.backward == "autograd"  # `explain` runs what autograd would not
        compiled = self.operations.get(
            signature,
            needs,
            shared,
            verify=self.options.verify,
            native=self.options.native,
            compile=None if unused else self.compile_options,
            may_build=functools.partial(self.queue.may_build, calls),
            late=late,
            most=LARGE if most is None and self.queue.is_bounded else most,
        )
        met.late = compiled.is_late
        if met.late:
            if not late:

                def build(seconds: float) -> None:
                    calls = max(SMALL, int(seconds / SECONDS_A_CALL))
                    self.compiled(signature, needs, shared, grad, most=calls)

                self.queue.put((signature, needs), compiled, build)
        elif compiled.reason and signature.operation.kind == "graph":
            fuser = self.rewrites.passes.get("fuse")
            if isinstance(fuser, Fuser):
                fuser.refuse(signature)  # its members may batch: from the next minibatch on they are tried
        return compiled

    def await_graph(self, signature: Signature, seconds: float) -> None:
        """Calls took so long by another way, without gradients: its graph is built when that is worth it."""
        met = self.met.of(signature)
        if not self.queue.is_bounded or met.is_large:
            return
        needs = (False,) * len(signature.inputs), (False,) * len(signature.shared)

        def build(_: float) -> None:
            shared = [s.resolve() for s in signature.shared]
            met.is_large = self.compiled(signature, needs, shared, False, most=LARGE).is_late

        self.queue.runs_otherwise((signature, "otherwise"), seconds, build)

    @property
    def strategy(self) -> Strategy | None:
        """The object that chooses between batching and the plain loop; None if everything is to be batched."""
        return self._strategy if AdaptiveSwitch.on and not are_deterministic() else None

    @property
    def may_loop(self) -> bool:
        """Whether the plain loop may run what can't be recorded."""
        return self._strategy is not None and AdaptiveSwitch.on

    def refuse(self, reason: str) -> None:
        """Minibatches like this one run the loop from here on."""
        self.refusals.add(reason, training=self.training)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.root is None or self.root.training

    def late(self, signatures: Sequence[Signature], counts: Sequence[int]) -> frozenset[int]:
        """Positions of the signatures that run call by call for now, as counted where no clock is read."""
        if self.queue.is_bounded:
            return frozenset()
        return self.met.put_off(signatures, counts)

    def rewrite(self, program: Program) -> tuple[Program, Schedule | None]:
        """The program after the rewrites; and its schedule, where they make that too."""
        program = self.rewrites(program)
        return add_pass_through_calls(program) if self.options.schedule == "fold" else (program, None)

    def take_rows_first(self, program: Program) -> Program:
        """The program in which packed calls of which rows are read one by one are calls of these rows."""
        return self.rewrites.passes["unstack_rows"](program)

    def prepare(self, program: Program) -> tuple[Program, Schedule]:
        """Rewrites before scheduling, then the schedule."""
        program, schedule = self.rewrite(program)
        return program, self.schedule(program) if schedule is None else schedule

    def family(self, program: Program, grad: bool) -> Family:
        """The family of this program: what it shares with earlier programs of one signature graph."""
        facts = survey(program)
        return self.structures.get(
            "family",
            (facts.graph, facts.present, grad),  # a graph is of one tuple of signatures
            lambda: Family(program, facts.counts.tolist(), grad=grad),
            HELD * sum(facts.present) + program.columns.bytes,
        )

    def all_met(
        self, program: Program, compiled: Sequence[CompiledOperation | None], grad: bool
    ) -> OperationSet:
        """The set of these operations, None for signatures without calls. Where programs come again they have sets of
        their own; where they are ever others, a set is of all operations that such programs had, and is made once."""
        key = program.columns, grad
        size = HELD * sum(survey(program).present) + program.columns.bytes
        before = self.structures.get("met", key, lambda: _LastOperations(list(compiled)), size)
        before.programs += 1
        if before.programs <= OWN_SETS:
            return self.operation_set(program, tuple(compiled))
        union = tuple([last if c is None else c for c, last in zip(compiled, before.operations, strict=True)])
        before.operations = list(union)  # what another thread puts there meanwhile is none of this program's
        return self.operation_set(program, union)

    def operation_set(self, program: Program, compiled: tuple[CompiledOperation | None, ...]) -> OperationSet:
        """The one object for these operations of a program's signatures."""
        key = (program.signatures, compiled)
        size = 2 * HELD * sum(survey(program).present) + program.columns.bytes
        return self.structures.get("operations", key, lambda: OperationSet.of(program, compiled), size)

    def schedule(self, program: Program) -> Schedule:
        """The steps of a program, by the policy of the options."""
        return self.policy(program)

    def plan(
        self, program: Program, schedule: Schedule | None, template: FamilyTemplate, *, reuse: bool
    ) -> tuple[Schedule, WholePlan]:
        """The steps of a minibatch's only phase, where values live and what steps read, and where all of it lies; found
        again by content. schedule: by the policy of the options where it is not given. reuse: rows of values that have
        no further reader."""

        def make() -> tuple[Schedule, WholePlan]:
            steps, needs = self.schedule(program) if schedule is None else schedule, template.needs.outputs
            slots, table = template.operations.slots, template.operations.arrays.table
            return steps, plan_whole(program, steps, slots, table, needs, reuse=reuse)

        key = PlanKey(program, template, reuse)
        # Its columns are about as long as the program's.
        return self.structures.get("plan", key, make, 4 * key.bytes, may_be_rare=True)

    def backward_needs(
        self, compiled: Sequence[CompiledOperation | None], reached: np.ndarray
    ) -> BackwardNeeds:
        """The gradients that backward takes and gives in a phase. reached: whether results depend on each operation."""
        operations = tuple(compiled)
        key = operations, reached.tobytes()
        return self.structures.get(
            "backward", key, lambda: BackwardNeeds.of(operations, reached), HELD * int(reached.sum())
        )
