"""A recording that goes on: instances are begun at any phase, and their results leave as soon as they are done.

In: the user's forward; a ticket and the arguments of each instance as it comes. Out: tickets with results.

    recording = OngoingRecording(model.forward, table, (model,), execution, slots=64)
    recording.begin(ticket, (model, x), {})
    recording.start()             # up to where each waits for a value, or is done
    while recording.parked:
        recording.run()           # one phase: what is pending
        recording.take()          # [(ticket, result), ...] of those that are done
        recording.go_on()         # those that waited, up to where they wait again, or are done
    recording.close()             # the rest: tickets, and a Recording of a minibatch

Its memory is flat. Calls that have run are forgotten as soon as there are many: values that somebody still refers to
are constants of the calls to come (`RecordedCalls.begin_anew`), the others are gone. What that takes is in proportion
to the values that are left, and it is done when there are several times as many: the same share of each phase.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fxbatch.trace.bare_parameters import unheard
from fxbatch.trace.held import Held
from fxbatch.trace.minibatch import Execution, Recording, Statistics, Turns, refuse_foreign_values
from fxbatch.trace.module_changes import are_unchanged, states_of
from fxbatch.trace.objects import has_attributes, leaves_of
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import quicken, settings_now
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.values import Value, Written, is_flat, refresh

FEWEST = 8192  # values that are made before any is forgotten
TIMES = 4  # as many as were left the last time
_NOBODY: tuple[tuple[Any, ...], dict[str, Any]] = (), {}


class OngoingExecution(Execution, Protocol):
    """An Execution that gives results of instances that are done."""

    def real(self, results: list[object]) -> list[object]:
        """The results with real tensors in place of values, for which all has run."""


class OngoingRecording(Turns):
    """Instances that take turns, and of which others come while some wait."""

    execution: OngoingExecution

    def __init__(
        self,
        fn: Callable[..., object],
        table: SignatureTable,
        roots: Sequence[torch.nn.Module],
        new_execution: Callable[[Any], OngoingExecution],
        slots: int,
        statistics: Statistics,
    ) -> None:
        """new_execution: gives the state of a new run, after another one. slots: how many instances there may be at a
        time. statistics: where waits are counted."""
        recorder = Recorder(table, roots, slots, recalls=True)
        recorder.copies, recorder.watches_operands = {}, True
        super().__init__(fn, [_NOBODY] * slots, recorder, new_execution(None), True, None)
        self.alone, self.settings, self.statistics = False, settings_now(), statistics
        self.keeps = BaseException
        self.new_execution = new_execution
        self.tickets: dict[int, Any] = {}  # by slot
        self.free = [*reversed(range(slots))]  # the first one is taken first
        self.to_begin: list[int] = []  # slots, as all below
        self.begun: dict[int, list[tuple[object, int]]] = {}  # with arguments as they were
        self.done: list[int] = []  # what they give has not run yet
        self.ready: list[int] = []  # it has
        self.written: dict[int, list[tuple[torch.Tensor, Written]]] = {}  # tensors that those have written to
        self.most = FEWEST
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(patched())
        quicken(recorder.knowledge.modules.classes)
        recorder.ask = self._ask
        recorder.heard.begin()

    # -- instances ------------------------------------------------------------------------------------

    def begin(self, ticket: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """An instance is to be started."""
        slot = self.free.pop()
        self.tickets[slot], self.instances[slot], self.begun[slot] = ticket, (args, kwargs), states_of(args)
        self.to_begin.append(slot)

    def end(self, slot: int) -> Any:
        """Close an instance: where it waits, its `finally` blocks run, nothing else. Its ticket."""
        for p in [p for p in self.parked if p.instance == slot]:
            self.parked.remove(p)
            still_open, self.closing = self.changes.open - 1, True
            try:
                self._end(p)
            finally:
                self.closing, self.failed, self.changes.open = False, None, still_open
        self._follow_written(slot)
        return self._leave(slot, lambda _: None)

    def take(self) -> list[tuple[Any, object]]:
        """Those that are done and for which all has run leave: tickets and results."""
        slots, self.ready = self.ready, []
        if not slots:
            return []
        with unheard(self.recorder):
            results = self.execution.real([self.results[slot] for slot in slots])
            read = self.execution.read
            return [
                (self._leave(slot, lambda w: read([w.value.id])[0]), result)
                for slot, result in zip(slots, results, strict=True)
            ]

    def _leave(self, slot: int, content: Callable[[Written], torch.Tensor | None]) -> Any:
        """Another instance may have the slot. Tensors that this one has written to are plain again."""
        for tensor, record in self.written.pop(slot, ()):
            record.give_back(tensor, content(record))
        for slots in (self.done, self.ready):
            if slot in slots:
                slots.remove(slot)
        self.instances[slot], self.results[slot] = _NOBODY, None
        del self.begun[slot]
        self.free.append(slot)
        return self.tickets.pop(slot)

    def _has_next(self) -> bool:
        return bool(self.to_begin)

    def _take_next(self) -> int:
        return self.to_begin.pop(0)

    def _is_done(self, instance: int) -> None:
        super()._is_done(instance)
        result = self.results[instance]
        refuse_foreign_values(self.recorder, [result])
        leaves = leaves_of(result)
        values = [v for v in leaves if type(v) is Value]
        for v in values:
            refresh(v)
        self._follow_written(instance)
        runs = (
            values or instance in self.written or (not is_flat(leaves) and any(map(has_attributes, leaves)))
        )
        (self.done if runs else self.ready).append(instance)

    def _follow_written(self, instance: int) -> None:
        """Tensors that an instance has written to, and that are still there, get their content when it leaves."""
        for key, (ref, record) in list(self.recorder.written.items()):
            if record.instance == instance and (tensor := ref()) is not None:
                refresh(record.value)
                del self.recorder.written[key]
                self.written.setdefault(instance, []).append((tensor, record))

    def _note(self, error: BaseException, instance: int) -> None:
        if isinstance(error, RecursionError):
            super()._note(error, instance)

    # -- phases: TraceError, and what kernels raise, end the recording (`fail`) -------------------------

    def start(self) -> None:
        """Start the instances that are to be, each up to where it waits or is done."""
        self._start()

    def run(self) -> None:
        """Run what is pending: those that wait can go on, and those that are done leave."""
        self.resuming, self.parked = self.parked, []
        with unheard(self.recorder):
            self._answer()
            self.recorder.refuse_written_operands()
        self.ready, self.done = self.ready + self.done, []

    def go_on(self) -> None:
        """Let those that waited go on."""
        with unheard(self.recorder):
            if self.recorder.count - self.recorder.base > self.most:
                left = self.recorder.begin_anew(self.execution.read)
                self.execution, self.most = self.new_execution(self.execution), max(FEWEST, TIMES * left)
                self.statistics.phases.clear()
            self.recorder.settled = self.execution.settled(self.recorder.base)
        self._go_on()

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> tuple[list[Any], Recording]:
        """The end, where nobody waits: the tickets of those that are done, and a Recording of them, with what is
        pending."""
        slots, recorder = self.done + self.ready, self.recorder
        if unseen := self._unseen_change():
            raise self.changes.refusal(unseen)
        for tensor, record in [pair for written in self.written.values() for pair in written]:
            recorder.written[id(tensor)] = weakref.ref(tensor), record
        held = Held.of(recorder)
        recorder.finish()
        self._stop()
        return [self.tickets[slot] for slot in slots], Recording(
            recorder, [self.results[slot] for slot in slots], self.statistics, held=held
        )

    def fail(self) -> dict[Any, bool]:
        """The recording has failed: all instances are closed, modules become what they were. Tickets, with whether each
        can begin anew."""
        self.modes.restore()
        self._close()
        for tensor, record in [pair for written in self.written.values() for pair in written]:
            record.give_back(tensor, None)
        self.abandon()
        self._stop()
        undone = self.changes.undo()
        return {ticket: undone and are_unchanged(self.begun[slot]) for slot, ticket in self.tickets.items()}

    def _stop(self) -> None:
        self.recorder.heard.close()
        self.recorder.ask = None
        self._patches.close()
