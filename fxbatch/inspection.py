"""Look inside: the plan and module of one minibatch, and why what was batched how.

minibatch = fxbatch.compile_minibatch(model, trees)
print(minibatch.program, minibatch.schedule, minibatch.code)
print(fxbatch.explain(model, trees))
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.batched_graph import BatchedGraph
from fxbatch.codegen import products
from fxbatch.decorator import Autobatched, find_autobatched
from fxbatch.errors import TraceError
from fxbatch.explanation import Explanation, UnbatchedRow, describe_operations
from fxbatch.ir import INDEX, Plan, Program, Schedule
from fxbatch.packed_explanation import explain_packed, packed_call_lines
from fxbatch.passes.fold import batch_calls
from fxbatch.passes.plan import is_constant
from fxbatch.passes.schedule import longest_chains
from fxbatch.runtime.argument_objects import Instance
from fxbatch.runtime.autograd import take_results
from fxbatch.runtime.blocks import Unrolled, emit_unrolled
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.options import Options
from fxbatch.runtime.packed_calls import after_packed_calls
from fxbatch.runtime.reasons import reasons, recording_share
from fxbatch.runtime.results import Results, stack
from fxbatch.runtime.run import Run, renumbering
from fxbatch.stopwatch import Timing
from fxbatch.trace.minibatch import Recording


@dataclasses.dataclass(eq=False)
class Minibatch:
    """One minibatch with all its stages: what `compile_minibatch` returns.

    Call it to run it again with the parameters as they are now. Where instances waited for values, `program`,
    `rewritten`, `schedule` and `plan` are those of the last phase.

    Fields:
        program: the calls as they were recorded; prints as text.
        rewritten: the calls after the rewrites.
        schedule: the launches in their order, each with its calls.
        plan: where in memory each launch reads and writes.
        phases: all phases that ran.
        operations: the operations that were built, in order of first use.
        code: the generated source of all operations.
        graph_module: an fx.GraphModule of the batched operations of this one structure.
        batched_graph: a networkx graph whose nodes are batched calls.
        seconds: what recording took, and all of it; 0 where something was built, which says little of later steps.

    Errors:
        ValueError: it is called again, and instances waited for values.

    Example:
        >>> minibatch = fxbatch.compile_minibatch(model, [[1]])
        >>> print(minibatch.program)
        program instances=1
        ...
          v0 = s0 constant() = 1 @0
          v1 = s1 embed(v0) @0
          v2 = s2 constant() @0
          v3 = s3 cell(v1, v2) @0
          return v3
    """

    engine: Engine
    recording: Recording
    program: Program
    rewritten: Program
    schedule: Schedule
    plan: Plan
    phases: tuple[Phase, ...]
    results: Results
    values: np.ndarray
    seconds: tuple[float, float]

    @property
    def operations(self) -> list[CompiledOperation]:
        """The compiled operations in order of first use."""
        found: dict[CompiledOperation, None] = {}
        for phase in self.phases:
            for s in phase.plan.step_signature.tolist():
                compiled = phase.compiled[s]
                if compiled is not None and not is_constant(compiled.signature):
                    found.setdefault(compiled)
        return list(found)

    @property
    def code(self) -> str:
        """The instructions of the kernels of each operation, forwards and backwards."""
        return "\n\n".join(
            c.source if c.source else f"# {c.signature}\n# runs call by call: {c.reason}"
            for c in self.operations
        )

    @functools.cached_property
    def batched_graph(self) -> BatchedGraph:
        """The networkx graph whose nodes are batched calls."""
        return batch_calls(self.rewritten, self.schedule)

    @functools.cached_property
    def unrolled(self) -> Unrolled:
        """The unrolled module with what its arguments and results are."""
        return emit_unrolled(self.engine, self.rewritten, self.schedule)

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The unrolled module: an fx.GraphModule of gathers, batched operations and cats."""
        return self.unrolled.graph_module

    def __call__(self) -> Any:
        """Run again; the stacked results."""
        if len(self.phases) > 1:
            raise ValueError("instances waited for values: only a whole minibatch can be run again")
        run = Run(self.engine, grad=torch.is_grad_enabled())
        run.execute(self.rewritten, self.schedule)
        renumber = renumbering(self.values, self.rewritten.outputs)
        return stack(self.results, renumber, lambda requests: take_results(run, requests))


def compile_minibatch(model: Any, *args: Any, **options: Any) -> Minibatch:
    """Record, rewrite, schedule, plan and run one minibatch, and keep every stage to look at.

    Arguments:
        model: a module with a decorated method, or a decorated function.
        args: minibatches, as for a call of it.
        options: those of `autobatch`, instead of the decorator's.

    Errors:
        MinibatchError: these are no arguments of the model.
        TraceError: there is nothing to batch.

    Example:
        >>> minibatch = fxbatch.compile_minibatch(model, sentences)
        >>> len(minibatch.operations)
        2
        >>> minibatch().shape
        torch.Size([2, 4])
    """
    return _compiled(model, args, options, live=False)


def _compiled(model: Any, args: Sequence[Any], options: dict[str, Any], *, live: bool) -> Minibatch:
    """live: with what the model has learnt and built until now, and not anew."""
    recorded, running = Timing(1), Timing(1)
    engine, recording, run, program, found = _record(model, args, options, recorded, running, live=live)
    values = found.values
    rewritten, schedule = program, engine.schedule(program)
    if len(program):
        rewritten, schedule = running.forward_of(lambda: engine.prepare(program))
        running.forward_of(lambda: run.execute(rewritten, schedule))
    last = run.phases[-1] if run.phases else None
    if last is None:
        raise TraceError(
            "there is nothing to batch: no instance called a module, or used a parameter. Arithmetic on input tensors "
            "alone runs one instance at a time; @fxbatch.operation on a function makes it batch"
        )
    phases = tuple(phase for part in (*run.segments, run) for phase in part.phases)
    between = 0.0 if run.phases_timed is None else run.phases_timed.forward
    seconds = recorded.forward - between, recorded.forward + running.forward
    if recorded.building or running.building:
        seconds = 0.0, 0.0  # all was new, which says little of the steps that follow
    return Minibatch(
        engine, recording, program, rewritten, schedule, last.plan, phases, found, values, seconds
    )


def minibatch_of(
    model: Any, args: Sequence[Any], options: dict[str, Any]
) -> tuple[Autobatched, Any, Options, Sequence[Instance]]:
    """The decorated callable behind a model, its owner, its options with these, and the instances of a call."""
    autobatched, owner = find_autobatched(model)
    chosen = Options.of(**{**dataclasses.asdict(autobatched.options), **options})
    given = tuple(args)
    if owner is None:
        owner, given = autobatched.split_owner(given)
    instances = autobatched.split(owner, given, {})
    return autobatched, owner, chosen, instances


def _record(
    model: Any, args: Sequence[Any], options: dict[str, Any], recorded: Timing, running: Timing, *, live: bool
) -> tuple[Engine, Recording, Run, Program, Results]:
    autobatched, owner, chosen, instances = minibatch_of(model, args, options)
    if live:
        engine = autobatched.engine(owner)
    else:
        engine = Engine(chosen, owner if isinstance(owner, torch.nn.Module) else None)
    run = Run(engine, grad=torch.is_grad_enabled())
    run.phases_timed = Timing(1)
    recording = recorded.forward_of(lambda: engine.record(autobatched.fn, instances, run, checks=True))
    found = Results(recording.results)
    if recording.held is not None:
        recording.held.abandon()
    program = recording.pending_program(found.values)
    program = running.forward_of(lambda: after_packed_calls(run, program)) if live else program
    return engine, recording, run, run.resolved(program), found


def _whole(model: Any, args: Sequence[Any]) -> Explanation | None:
    """The explanation of a minibatch whose whole forward is packed."""
    autobatched, owner = find_autobatched(model)
    given = tuple(args)
    if owner is None:
        owner, given = autobatched.split_owner(given)
    instances = autobatched.split(owner, given, {})
    return explain_packed(autobatched.engine(owner), autobatched.fn, autobatched.name, instances)


def _runs_native(phases: Sequence[Phase]) -> bool:
    called = [phase.compiled[s] for phase in phases for s in set(phase.plan.step_signature.tolist())]
    return any(compiled is not None and compiled.native_forward is not None for compiled in called)


def explain(model: Any, *args: Any, **options: Any) -> Explanation:
    """Run a minibatch once, and describe what batching made of it and why. Prints as a table.

    It runs with what was built for the minibatches before; with options that replace the decorator's, from the start.

    Arguments:
        model: a module with a decorated method, or a decorated function.
        args: minibatches, as for a call of it.
        options: those of `autobatch`, instead of the decorator's.

    Errors:
        MinibatchError: these are no arguments of the model.
        TraceError: no instance called a module or a function on anything but its own tensors.

    Example:
        >>> explanation = fxbatch.explain(model, sentences)
        >>> explanation.launches_before, explanation.launches_after
        (8, 4)
        >>> explanation.unbatched
        []
    """
    whole = None if options else _whole(model, args)
    explanation = whole or _describe(_compiled(model, args, options, live=not options))
    autobatched, _ = find_autobatched(model)
    if not autobatched.decorates:
        return dataclasses.replace(
            explanation, strategy=f"{autobatched.name} of one instance: {_UNDECORATED}"
        )
    return explanation


_UNDECORATED = "it is not decorated; with @fxbatch.autobatch on it they run as above"


def _describe(minibatch: Minibatch) -> Explanation:
    """The explanation of a minibatch that has run."""
    steps = before = after = indexed = elided = bytes_copied = bytes_read = 0
    bound = 0
    unbatched: dict[str, UnbatchedRow] = {}
    for phase in minibatch.phases:
        chains = longest_chains(phase.program)
        bound += sum(
            n for s, n in zip(phase.program.signatures, chains.tolist(), strict=True) if not is_constant(s)
        )
        for k, s in enumerate(phase.plan.step_signature.tolist()):
            compiled, n = phase.compiled[s], int(phase.plan.step_rows[k])
            assert compiled is not None
            if is_constant(compiled.signature):
                continue
            steps += 1
            before += n
            after += n if compiled.reason else 1
            if compiled.reason:
                row = unbatched.setdefault(
                    str(compiled.signature),
                    UnbatchedRow(str(compiled.signature), compiled.reason, compiled.signature.location, 0),
                )
                row.calls += n
        kinds = phase.plan.gather_kind
        indexed += int((kinds == INDEX).sum())
        elided += int((kinds != INDEX).sum())
        sizes = np.array([t.numel * t.dtype.itemsize for t in phase.plan.arenas], dtype=np.int64)
        read = sizes[phase.plan.gather_arena] * phase.plan.gather_rows
        bytes_copied += int(read[kinds == INDEX].sum())
        bytes_read += int(read.sum())
    table = minibatch.engine.table
    return Explanation(
        instances=len(minibatch.recording.results),
        operations=describe_operations(minibatch.phases),
        launches_before=before,
        launches_after=after,
        steps=steps,
        lower_bound=bound,
        gathers_indexed=indexed,
        gathers_elided=elided,
        bytes_gathered=bytes_copied,
        bytes_read=bytes_read,
        packed=packed_call_lines(minibatch.engine),
        kept=minibatch.engine.structures.counts(),
        kept_bytes=minibatch.engine.structures.bytes,
        bytes_held=minibatch.engine.pool.bytes,  # its only run has given everything back
        deduplicated=sum(
            r.before - r.after - r.constants
            for r in minibatch.engine.rewrites.records
            if r.name.startswith("deduplicate")
        ),
        unbatched=list(unbatched.values()),
        traced_through=[dataclasses.asdict(t) for t in table.traced_through.values()],
        reasons=_reasons(minibatch),
        phases=len(minibatch.phases),
        products=products.described() if _runs_native(minibatch.phases) else "",
        statistics=minibatch.recording.statistics,
        strategy=_strategy(minibatch),
    )


def _reasons(minibatch: Minibatch) -> list[str]:
    """Why batching gains little, if it does."""
    recording, step = minibatch.seconds
    share = recording_share(recording=recording, step=step)
    found = reasons(minibatch.phases, minibatch.recording.statistics, minibatch.engine.table.forward)
    return [*found, *([share] if share else [])]


def _strategy(minibatch: Minibatch) -> str:
    """How minibatches like this one are run, in words; "" where all are batched."""
    engine = minibatch.engine
    chosen = engine.strategy
    if reason := engine.refusals.reason(training=engine.training):
        return f"the plain loop: {reason}"
    count = len(minibatch.recording.results)
    return "" if chosen is None else chosen.describe(count, grad=torch.is_grad_enabled())
