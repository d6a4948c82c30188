"""Record a minibatch: every instance's forward once, suspended where it asks for a value; and lazy blocks.

In: the user's forward, the arguments of each instance, an Execution that can run programs. Out: a Recording: results
with Values as leaves, what is still pending, and counts.

    recording = record_minibatch(model.forward, [((tree,), {}) for tree in trees], table, execution)
    program = recording.pending_program(recording.output_ids())
    recording.statistics.phases[0].instances      # how many were suspended in the first phase

In a lazy block, per-instance code is in a plain Python loop: torch functions and modules that meet `batch.value(x)` (or
real tensors, for modules) are recorded; reading a value, `.backward()` or leaving the block runs everything pending.

    with LazyBatch(table, execution, materialise, (model,)) as batch:
        losses = [model.loss(x) for x in data]
        sum(losses).backward()
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import operator
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, cast

import greenlet
import numpy as np
import torch

from fxbatch.errors import TraceError
from fxbatch.ir import Program
from fxbatch.mistakes import runs_forwards, runs_operations
from fxbatch.signature import SMALL, Numbers
from fxbatch.torch_private import tree_leaves, tree_map, warning_handler
from fxbatch.trace.argument_checks import ArgumentCheckError, ArgumentChecks
from fxbatch.trace.bare_parameters import unheard
from fxbatch.trace.constants import IntegerColumn
from fxbatch.trace.held import Held
from fxbatch.trace.module_changes import ModuleChanges
from fxbatch.trace.objects import leaves_of
from fxbatch.trace.places import first_changed
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import MANY_REFUSALS, ThreadModes, quicken, settings_now, state, take_worker, tracing
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.user_line import UserPlace, at_line, line_of, user_place
from fxbatch.trace.values import Value, View, is_stale, refresh, result_with_values
from fxbatch.trace.writes import note_uses


@dataclass(frozen=True)
class PhaseStatistics:
    """One batch that suspended instances waited for."""

    calls: int
    instances: int


class Statistics:
    """Counts of one minibatch."""

    suspensions = 0
    stayed = ""  # why an instance that asked was not left, so that others could not run

    def __init__(self, instances: int, every: int = 1) -> None:
        """every: of how many waits the place of one is looked for; it counts for them."""
        self.instances, self.every = instances, every
        self.phases: list[PhaseStatistics] = []
        # Where the user's code asked, and how often: by id of the code and place in it.
        self._places: dict[tuple[int, int] | None, UserPlace] = {}
        self._counts: Counter[tuple[int, int] | None] = Counter()

    def asked(self, inner: int = 1) -> None:
        """An instance asks for values. inner: how many frames from this one on are certainly ours."""
        self.suspensions += 1
        if (self.suspensions - 1) % self.every:
            return
        place = user_place(inner)
        key = None if place is None else (id(place[0]), place[1])
        self._places[key] = place
        self._counts[key] += self.every

    @property
    def lines(self) -> Counter[str]:
        """The user's lines that asked, and how often."""
        counts: Counter[str] = Counter()
        for key, place in list(self._places.items()):
            counts[line_of(place)] += self._counts[key]
        return counts

    @property
    def asked_most(self) -> UserPlace:
        """Where the user's code asked most often."""
        return self._places[self._counts.most_common(1)[0][0]] if self._counts else None

    def hint(self) -> str:
        """Advice when values are asked for in a way that prevents batching, else ""."""
        if self.instances < 2 or not self.phases:
            return ""
        if self.stayed:
            return f"instances ran one after the other, as {self.stayed}: a local variable or a result would batch"
        alone = sum(p.instances == 1 for p in self.phases)
        empty = sum(p.calls == 0 for p in self.phases)
        line, _ = self.lines.most_common(1)[0]
        if empty > len(self.phases) // 2:
            return f"{line} reads values one at a time: read them together with .tolist()"
        if alone > len(self.phases) // 2 and alone > 1:
            return f"{alone} of {len(self.phases)} phases ran for one instance alone, which asks for values at {line}"
        return ""


class Execution(Protocol):
    """Runs programs, and reads their values. Value numbers are those of the recording's programs."""

    def run(self, program: Program) -> None:
        """Run the calls of one phase; all earlier phases have run."""

    def read(self, values: Sequence[int]) -> list[torch.Tensor]:
        """Real detached tensors of values that have run, by one transfer from the device."""

    def numbers(self, values: Sequence[int]) -> list[object]:
        """`read`, as Python numbers in nested lists: `tolist` of each."""

    def settled(self, base: int) -> object:
        """Where C finds numbers like those that were asked for, until the next phase; None where it can't. base: the
        number of the recording's first value."""


@dataclass(eq=False)
class Recording:
    """A recorded minibatch."""

    recorder: Recorder
    results: list[object]  # per instance: the user's pytree, with Value leaves, or an exception
    statistics: Statistics
    integers: Sequence[IntegerColumn] = ()  # constants whose numbers were read already
    held: Held | None = None  # what the user holds of it, the results among that
    changed: str = ""  # what instances changed of modules, of which some waited; "" for nothing

    def pending_program(self, outputs: Sequence[int] | np.ndarray = ()) -> Program:
        """The calls that no phase has run yet, as a Program; they count as run from here on."""
        return self.recorder.pending_program(outputs)

    def output_ids(self) -> list[int]:
        """Numbers of the values in the results, each once, in order of first appearance."""
        leaves = (x for r in self.results for x in leaves_of(r))
        return list(dict.fromkeys(x.id for x in leaves if type(x) is Value))


def record_minibatch(
    fn: Callable[..., object],
    instances: Sequence[tuple[tuple[object, ...], dict[str, object]]],
    table: SignatureTable,
    execution: Execution,
    *,
    return_exceptions: bool = False,
    roots: Sequence[torch.nn.Module] | None = None,
    runs_now: bool = False,
    first: int = 0,
    changes: str | None = "",
    may_begin: Callable[[int], bool] | None = None,
    may_loop: bool = False,
    checks: bool = False,
) -> Recording:
    """Call `fn(*args, **kwargs)` for each instance and record what happens.

    roots: modules that are traced through and searched for parameters; by default the module that fn is a method of.
    An exception of an instance is raised with a note that names the instance, after all other instances were closed;
    with return_exceptions it becomes that instance's result.
    runs_now: all of it runs before parameters may be others. first: the number of the first instance, in messages.
    changes: what instances are known to change of modules: then none is left where it waits. None: where one waits, a
    change is an error. may_begin: asked with the number of each instance before it is begun; the results are those of
    the instances before the first that may not.
    A TraceError says by `again` whether modules are what they were before. may_loop: a mistake inside fxbatch is one.
    checks: nobody waits for argument checks of torch.distributions; who runs the last phase looks at those left then.
    """
    if roots is None:
        owner = getattr(fn, "__self__", instances[0][0][0] if instances and instances[0][0] else None)
        roots = (owner,) if isinstance(owner, torch.nn.Module) else ()
    recorder = Recorder(table, roots, len(instances), recalls=True)
    recorder.watches_operands = runs_now
    recorder.checks = ArgumentChecks(first) if checks else None
    if changes is not None:
        recorder.changes.watch(instances)
    run = Turns(fn, instances, recorder, execution, return_exceptions, changes)
    run.first, run.may_begin = first, may_begin
    try:
        with patched():
            quicken(recorder.knowledge.modules.classes)
            run.all()
    except Exception as error:
        recorder.refuse(error, may_loop=may_loop)
        raise
    recorder.instances = run.last
    del run.results[run.last :]
    try:
        refuse_foreign_values(recorder, run.results)
        held = Held.of(recorder)
        recorder.finish()
    except BaseException:
        run.abandon()
        raise
    changed = (recorder.changes.first() or run.unseen) if recorder.changes.waited else ""
    return Recording(recorder, run.results, run.statistics, held=held, changed=changed)


def refuse_foreign_values(recorder: Recorder, results: list[object]) -> None:
    for i, result in enumerate(results):
        for x in leaves_of(result):
            if type(x) is Value and x._recorder is not recorder:
                raise TraceError(
                    f"instance {i} returns a value of another minibatch: values live for one call"
                )


@dataclass(slots=True, eq=False)
class _Parked:
    """An instance that waits for values."""

    instance: int
    greenlet: greenlet.greenlet
    values: list[Value]
    plain: bool  # whether it waits for Python numbers
    modes: ThreadModes
    waits: bool = True
    answer: list[object] = field(init=False)


class Turns:
    """The loop over instances: one worker greenlet, another one whenever an instance is parked. The only instance of a
    minibatch has nobody to wait for, and runs where it is called."""

    first, counted = 0, True  # the number of the first instance, in messages; whether they have one
    may_begin: Callable[[int], bool] | None = None  # asked before each is begun
    running = 0  # the instance whose code runs now
    failed: BaseException | None = None
    closing = False
    unseen = ""  # a change of what modules hold that was not noted as it was made

    def __init__(
        self,
        fn: Callable[..., object],
        instances: Any,
        recorder: Recorder,
        execution: Execution,
        keep_exceptions: bool,
        known_changes: str | None,
    ) -> None:
        self.fn = fn
        self.instances = instances
        self.recorder = recorder
        self.execution = execution
        self.keeps: type[BaseException] | tuple[()] = Exception if keep_exceptions else ()  # as results
        self.changes: ModuleChanges = recorder.changes
        self.changes.refused = self.refuses_changes = known_changes is None
        self.stays = known_changes or ""  # why no instance is left where it waits
        self.last = len(instances)  # the first that is not begun
        self.to_begin = deque(range(len(instances)))  # instances to start, in order
        self.results: list[object] = [None] * len(instances)
        self.statistics = Statistics(len(instances))
        self.parked: list[_Parked] = []
        self.resuming: list[_Parked] = []  # those of the phase that runs: some go on, others still wait
        self.main = greenlet.getcurrent()
        self.modes = self.usual = ThreadModes()  # usual: those of the instance that asked last
        # The value of which some numbers were asked last, and its numbers.
        self.last_numbers: tuple[int, Numbers] = (-1, None)
        self.context = contextvars.copy_context()
        self.alone = len(instances) == 1
        self.settings = () if self.alone else settings_now()

    def all(self) -> None:
        """Run every instance to its end."""
        self.recorder.ask = self._ask_of_parameters if self.recorder.table.computed else self._ask
        try:
            self.recorder.heard.begin()
            self.start()
            while self.parked:
                self._phase()
            note_uses(self.recorder, asks=self.statistics.suspensions > 0)
            self.unseen = self._unseen_change()
            if self.unseen and not self.stays and not self.alone:
                raise self.changes.refusal(self.unseen)
        except BaseException as error:
            self.modes.restore()
            self._close()
            failed = self._before(error)
            self.abandon()
            if failed is error:
                raise
            raise failed from error
        finally:
            self.recorder.heard.close()
            self.recorder.ask = None

    def _before(self, error: BaseException) -> BaseException:
        """This error, or that of an argument check that fails before it."""
        checks = self.recorder.checks
        if checks is None or not isinstance(error, Exception) or checks.before(error) is error:
            return error
        try:
            with tracing(None), unheard(self.recorder):
                self._run_pending()
        except ArgumentCheckError as failed:
            return failed
        except Exception:  # noqa: BLE001 - of a call before the check, maybe of what it would have refused
            return checks.before(error)
        return error

    @runs_operations
    def _run_pending(self) -> None:
        """Run what is pending, and look at the argument checks."""
        self.execution.run(self.recorder.pending_program([]))
        if self.recorder.checks is not None and self.recorder.checks.pending:
            self.recorder.checks.verify(self.execution.numbers)

    def abandon(self) -> None:
        """The recording has failed: what it has written to is as it was."""
        for tensor, record in self.recorder.take_written():
            record.give_back(tensor, None)
        self.recorder.let_go()

    # In the main greenlet

    def start(self) -> None:
        """Start instances until all are done or parked."""
        while self._has_next() and self.failed is None:
            if self.alone:
                state.recorder = self.recorder
                self.context.run(self._work)
            else:
                worker = take_worker(self.main)
                worker.gr_context = self.context.copy()
                state.recorder = self.recorder
                worker.switch(self._work)
            self.modes.restore()
        self._raise()

    def _phase(self) -> None:
        """Run what is pending as one batch and let the parked instances go on, in order."""
        self.resuming = sorted(self.parked, key=_instance)
        self.parked = []
        calls = self.recorder.pending
        with unheard(self.recorder):
            self._answer()
            self.recorder.settled = self.execution.settled(self.recorder.base)
        self.statistics.phases.append(PhaseStatistics(calls, len(self.resuming)))
        self._go_on()
        self.start()

    def _answer(self) -> None:
        """Run what is pending; those that go on then have what they wait for."""
        self._run_pending()
        self._give(False, self.execution.read)
        self._give(True, self.execution.numbers)

    def _go_on(self) -> None:
        """Let those go on that were answered, in order."""
        now: ThreadModes | None = None  # the thread's, where an instance that was parked has left them
        for p in self.resuming:
            self._runs(p.instance)
            if p.modes is not now:
                p.modes.restore()
            before, p.waits = len(self.parked), False
            p.greenlet.switch()
            now = self.parked[-1].modes if len(self.parked) > before else None
            if self.failed is not None:
                break
        self.modes.restore()
        self._raise()
        self.resuming = []

    def _give(self, plain: bool, read: Callable[[Sequence[int]], Sequence[object]]) -> None:
        """Give those that go on what they wait for as numbers (plain) or as tensors, by one `read`."""
        base, waiting = self.recorder.base, [p for p in self.resuming if p.plain is plain]
        if waiting:
            answers = iter(read([v._value - base for p in waiting for v in p.values]))
            for p in waiting:
                p.answer = list(itertools.islice(answers, len(p.values)))

    def _runs(self, instance: int) -> None:
        """The code that runs from here on is this instance's."""
        self.running = self.recorder.running = instance
        self.recorder.begin(instance)

    def _raise(self) -> None:
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def _close(self) -> None:
        """Close all parked instances: their `finally` blocks run, nothing else."""
        self.closing, self.recorder.settled = True, None
        for p in sorted((*self.resuming, *self.parked), key=_instance):
            if p.waits:
                self._end(p)

    def _end(self, p: _Parked) -> None:
        """Close one that is parked."""
        p.waits = False
        p.modes.restore()
        p.greenlet.throw(greenlet.GreenletExit)
        self.modes.restore()

    def _has_next(self) -> bool:
        """Whether there are instances to start."""
        if self.may_begin is not None and self.to_begin and not self.may_begin(self.to_begin[0]):
            self.last = self.to_begin[0]
            self.to_begin.clear()
        return bool(self.to_begin)

    # In a worker greenlet

    @runs_forwards
    def _work(self) -> None:
        """Run instances one after another, until one was parked: then a fresh worker has taken over."""
        parks = self.statistics.suspensions
        while self._has_next():
            instance = self.to_begin.popleft()
            self._runs(instance)
            self.changes.begun, self.changes.open = self.changes.begun + 1, self.changes.open + 1
            args, kwargs = self.instances[instance]
            try:
                result = self.fn(*args, **kwargs)
                if self.recorder.refused is not None:  # and the forward, or torch, has caught it
                    raise self.recorder.refused
                self.results[instance] = result_with_values(result) if self.recorder.written else result
                self._refuse_settings_left()
                self._is_done(instance)
            except BaseException as error:  # noqa: BLE001 - raised or handed back elsewhere
                if self.closing and isinstance(error, greenlet.GreenletExit):
                    return
                error = self.recorder.refused or error  # which may come of it
                if isinstance(error, RecursionError):
                    error.add_note(_TOO_DEEP)
                if self.counted and isinstance(error, Exception):
                    error.add_note(f"fxbatch: in instance {self.first + instance} of the minibatch")
                if not isinstance(error, self.keeps) or isinstance(error, TraceError):  # which is ours
                    self.failed = error
                    return
                self.results[instance] = error
                self._is_done(instance)
            if self.statistics.suspensions != parks:
                return

    def _is_done(self, instance: int) -> None:
        """An instance has come to its end, and has a result."""
        self.changes.open -= 1

    def _ask(self, values: list[Value], plain: bool = False) -> list[object]:
        """Real tensors (plain: numbers) of the values: parks this instance until the batch has run."""
        if self.closing:
            if self.recorder.refusals >= MANY_REFUSALS and not self.alone:
                self.main.switch()  # for good: its code catches all that it is told
            raise TraceError("a value was asked for while its instance was being closed")
        alike = self.usual.are_those_now()
        if alike and len(values) == 1 and (shown := self._shown(values[0], plain)):
            return shown  # nothing to wait for
        me = greenlet.getcurrent()
        if me is not self.main if self.alone else me is self.main or me.parent is not self.main:
            raise TraceError("a value was asked for in a greenlet or thread that is not its instance's own")
        if (stays := self._why_stay()) or self.alone or state.bindings:
            if not (self.alone or state.bindings):
                self.statistics.stayed = self.statistics.stayed or stays
            return self._answer_here(values, plain)
        if not alike or self.usual.warnings != warning_handler():
            if torch.is_inference_mode_enabled() != self.modes.inference:
                raise self.modes.refusal()
            self.usual = ThreadModes()
        parked = _Parked(self.running, me, values, plain, self.usual)
        self.statistics.asked(_BETWEEN)
        self.parked.append(parked)
        self.main.switch()
        return parked.answer

    def _shown(self, v: Value, plain: bool) -> list[Any]:
        """What a value holds that has run, a view of such a one (`best[0][k]`, `scores.detach()`), or what compares
        some (`words[k] == end`); nothing for others."""
        views: list[View] = []
        while not self.recorder.has_run(v):
            view: View | None = getattr(v, "_view", None)
            if view is None and plain and not views:
                exact = self.recorder.exact(v, self._numbers)
                return [] if exact is None else [exact]
            if view is None or view.call is None or is_stale(v):
                return []
            _, args, kwargs = view.call
            plainly = not kwargs and all(type(x) is int for x in args[1:])  # asked of each number of a row
            others = () if plainly else tree_leaves((args[1:], kwargs))
            if args[0] is not view.source or any(isinstance(x, torch.Tensor) for x in others):
                return []
            views.append(view)
            v = view.source
        if views and is_stale(v):
            return []
        if plain and v.numel() <= SMALL:
            places = [x.place() for x in reversed(views)]
            if None not in places:
                path = itertools.chain.from_iterable(x for x in places if x)
                return [functools.reduce(operator.getitem, path, self._numbers(v._value))]
        with tracing(None), torch.no_grad():
            (shown,) = self.execution.read([v.id])
            for x in reversed(views):
                func, args, kwargs = cast(Any, x.call)
                shown = func(shown, *args[1:], **kwargs)
                shown = shown if isinstance(shown, torch.Tensor) else tree_leaves(shown)[x.output]
        return [shown.tolist() if plain else shown]

    def _numbers(self, number: int) -> Numbers:
        """What a value holds that has run, as numbers: those of the last one are kept."""
        if self.last_numbers[0] != number:
            self.last_numbers = number, self.execution.numbers([number - self.recorder.base])[0]
        return self.last_numbers[1]

    def _ask_of_parameters(self, values: list[Value], plain: bool = False) -> list[object]:
        """`_ask`, but for what calls of parameters alone gave: for such nobody waits."""
        with tracing(None), unheard(self.recorder):
            tensors = self.recorder.of_parameters(values)
            answer: list[object] = [x.tolist() if plain else x for x in tensors]
        return answer or self._ask(values, plain)

    def _why_stay(self) -> str:
        """Why the instance that asks now is not left: others would find what it has changed, or it would what they
        have. "" where it is."""
        if not self.stays:
            self.stays = self.changes.seen if self.changes.waited else self.changes.first()
        if not self.changes.waited:
            self.changes.waited = f"waits for a value{at_line()}"
        if self.stays:
            if self.refuses_changes:
                raise self.changes.refusal(self.stays)
            return self.stays
        return _CHANGED if self.recorder.seeded or self.settings != settings_now() else ""

    def _refuse_settings_left(self) -> None:
        """An instance is done: what it leaves of torch's and the process's settings is not what it found."""
        if torch.is_grad_enabled() is not self.modes.grad:
            raise TraceError(
                "the forward leaves torch.set_grad_enabled changed, which the instances after it would find: use "
                f"`with torch.no_grad():`{at_line()}"
            )
        if self.changes.open > 1 and self.settings != settings_now():
            self.changes.lasts = True
            raise TraceError(
                "the forward leaves a setting of the process changed (the default dtype, sys.stdout, sys.stderr, "
                "deterministic algorithms) while other instances wait for values, which have begun without"
            )

    def _unseen_change(self) -> str:
        """After the last instance: what was changed besides attributes that are seen as they are set, if some instance
        has waited; "" where nothing was."""
        changes, modules = self.changes, self.recorder.knowledge.modules
        if not changes.waited:
            return ""
        changed = changes.changed_container()
        if not changed and not changes.seen and first_changed(modules.places or []):
            changed, changes.lasts = "what a module holds is changed, not by setting an attribute", True
        return changed

    def _answer_here(self, values: list[Value], plain: bool) -> list[Any]:
        """The answer to `_ask` without leaving this instance: what is pending runs now."""
        calls, modes = self.recorder.pending, ThreadModes()
        self.statistics.asked()
        self.modes.restore()
        try:
            with tracing(None), unheard(self.recorder):
                self._run_pending()
                read = self.execution.numbers if plain else self.execution.read
                answer = read([v.id for v in values])
                self.recorder.settled = self.execution.settled(self.recorder.base)
        finally:
            modes.restore()
        self.statistics.phases.append(PhaseStatistics(calls, 1))
        self.recorder.begin(self.running)
        return answer


_TOO_DEEP = "fxbatch: the per-instance forward recursed too deeply; sys.setrecursionlimit raises the limit"
_instance = operator.attrgetter("instance")
_BETWEEN = 5  # `asked`, `_ask`, two functions of RecordedCalls through which a value asks, and the value's
_CHANGED = "a setting of the process is changed"


class LazyBatch:
    """The recorder part of `fxbatch.lazy`.

    Values stay readable after the block; used there, they are real tensors.
    """

    def __init__(
        self,
        table: SignatureTable,
        execution: Execution,
        materialise: Callable[[Sequence[int]], list[torch.Tensor]],
        roots: Sequence[torch.nn.Module] = (),
    ) -> None:
        """materialise: gives real tensors that carry gradients for values, again and again."""
        self.recorder = Recorder(table, roots, 1)
        self.execution, self.materialise = execution, materialise
        self.statistics = Statistics(1)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LazyBatch:
        self.recorder.ask = self._ask
        self.recorder.give = self._give
        self._stack.enter_context(patched())
        self._stack.enter_context(tracing(self.recorder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            with tracing(self.recorder):
                for v in self.recorder.values.stale():
                    refresh(v)
            self.run()
        self.recorder.finish()
        written = self.recorder.take_written()
        for tensor, record in written:
            record.give_back(tensor, None if error is not None else self._give([record.value])[0])
        self.recorder.let_go()
        if error is None:
            self.recorder.ask = self._ask

    def value(self, x: torch.Tensor) -> object:
        """A real tensor as a value of this batch, so that plain torch functions of it are recorded."""
        constant = self.recorder.constant(x)
        return x if constant is None else constant

    def run(self) -> None:
        """Run everything pending as one batch."""
        if self.recorder.pending:
            program = self.recorder.pending_program([])
            with tracing(None):
                self.execution.run(program)
            self.statistics.phases.append(PhaseStatistics(len(program), 1))

    def real(self, results: object) -> Any:
        """A pytree with its Values replaced by real, differentiable tensors."""
        values: list[Value] = []
        tree_map(lambda x: values.append(x) if type(x) is Value else None, results)
        real = iter(self._give(values))
        return tree_map(lambda x: next(real) if type(x) is Value else x, results)

    def _ask(self, values: list[Value], plain: bool = False) -> list[Any]:
        self.statistics.asked()
        self.run()
        with tracing(None):
            read = self.execution.numbers if plain else self.execution.read
            return read([v.id for v in values])

    def _give(self, values: list[Value]) -> list[torch.Tensor]:
        self.run()
        with tracing(None):
            return self.materialise([v.id for v in values])
