"""A recording that goes on: instances are begun at any phase, and their results leave as soon as they are done.

In: the user's forward; a ticket and the arguments of each instance as it comes. Out: tickets with results.

    recording = OngoingRecording(model.forward, table, (model,), execution, 64, statistics)
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

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from fxbatch.errors import InPlaceError
from fxbatch.torch_private import has_global_hooks
from fxbatch.trace.bare_parameters import unheard
from fxbatch.trace.held import Held
from fxbatch.trace.minibatch import Execution, Recording, Statistics, Turns, refuse_foreign_values
from fxbatch.trace.module_changes import are_unchanged, states_of
from fxbatch.trace.module_state import known_model
from fxbatch.trace.objects import has_attributes, leaves_of
from fxbatch.trace.places import first_changed, written_to
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import quicken, settings_now
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.values import Value, is_flat, refresh

FEWEST = 8192  # values that are made before any is forgotten; four times what was left the last time
_NOBODY: tuple[tuple[object, ...], dict[str, object]] = (), {}
WEIGHTS = "parameters of the model"
SETTINGS = "settings of the process (the default dtype, sys.stdout, sys.stderr, deterministic algorithms)"
Ticket = TypeVar("Ticket")


class ChangedError(InPlaceError):
    """The model is another than when the recording began: those that run begin anew in another one. what: of it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} were changed while requests ran that may have read them")
        self.what = what


def _has_no_tensors(result: object) -> bool:
    leaves = leaves_of(result)
    return is_flat(leaves) and not any(isinstance(x, torch.Tensor) for x in leaves)


class OngoingRecording(Turns, Generic[Ticket]):
    """Instances that take turns, and of which others come while some wait."""

    def __init__(
        self,
        fn: Callable[..., object],
        table: SignatureTable,
        roots: Sequence[torch.nn.Module],
        new_execution: Callable[[], Execution],
        slots: int,
        statistics: Statistics,
    ) -> None:
        """new_execution: gives the state of a new run, which has `real(results)`: results with real tensors in place of
        values. slots: how many instances there may be at a time. statistics: where waits are counted."""
        model = known_model(table, roots[0] if roots else None)
        self.reads = model.places or model.reads.items
        recorder = Recorder(table, roots, slots, recalls=True)
        recorder.watches_operands = True
        self.execution: Any
        super().__init__(fn, [_NOBODY] * slots, recorder, new_execution(), True, None)
        self.alone, self.settings, self.statistics = False, settings_now(), statistics
        self.keeps, self.counted = BaseException, False
        self.new_execution = new_execution
        self.tickets: dict[int, Ticket] = {}  # by slot
        self.free, self.to_begin = self.to_begin, deque()  # slots, as all below
        self.begun: dict[int, list[tuple[object, int]]] = {}  # with arguments as they were
        self.done, self.ready = list[int](), list[int]()  # what they give has not run yet, or it has
        self.most = FEWEST
        strided = [t for _, t, _ in recorder.operands if t.layout is torch.strided]
        self.tensors, self.places = strided, [t.data_ptr() for t in strided]
        self.weights = [x for x in recorder.operands if isinstance(x[1], torch.nn.Parameter)]
        self.patches = patched()
        self.patches.__enter__()
        quicken(recorder.knowledge.modules.classes)
        recorder.ask = self._ask
        recorder.heard.begin()

    # -- instances ------------------------------------------------------------------------------------

    def begin(self, ticket: Ticket, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """An instance is to be started."""
        slot = self.free.popleft()
        self.tickets[slot], self.instances[slot], self.begun[slot] = ticket, (args, kwargs), states_of(args)
        self.to_begin.append(slot)

    def end(self, slot: int) -> Ticket:
        """Close an instance: where it waits, its `finally` blocks run, nothing else. Its ticket."""
        for p in [p for p in self.parked if p.instance == slot]:
            self.parked.remove(p)
            still_open, self.closing = self.changes.open - 1, True
            try:
                self._end(p)
            finally:
                self.closing, self.failed, self.changes.open = False, None, still_open
        return self._leave(slot, ended=True)

    def take(self) -> list[tuple[Ticket, object]]:
        """Those that are done and for which all has run leave: tickets and results."""
        slots, self.ready = self.ready, []
        if not slots:
            return []
        self.check()
        with unheard(self.recorder):
            results = [self.results[slot] for slot in slots]
            if not all(map(_has_no_tensors, results)):
                results = self.execution.real(results)
            return [(self._leave(slot), result) for slot, result in zip(slots, results, strict=True)]

    def _leave(self, slot: int, *, ended: bool = False) -> Ticket:
        """Another one may have the slot. Tensors that this one has written to are plain again (ended: as before)."""
        written = self.recorder.written
        keys = [key for key, (_, record) in written.items() if record.instance == slot]
        for tensor, record in [(ref(), record) for ref, record in map(written.pop, keys)]:
            if tensor is not None:
                record.give_back(tensor, None if ended else self.execution.read([record.value.id])[0])
        for slots in (self.done, self.ready):
            if slot in slots:
                slots.remove(slot)
        self.instances[slot], self.results[slot] = _NOBODY, None
        del self.begun[slot]
        self.free.appendleft(slot)
        return self.tickets.pop(slot)

    def _is_done(self, instance: int) -> None:
        super()._is_done(instance)
        refuse_foreign_values(self.recorder, [self.results[instance]])
        leaves = leaves_of(self.results[instance])
        values = [v for v in leaves if type(v) is Value]
        values += [w.value for _, w in self.recorder.written.values() if w.instance == instance]
        for v in values:
            refresh(v)
        runs = values or (not is_flat(leaves) and any(map(has_attributes, leaves)))
        (self.done if runs else self.ready).append(instance)

    # -- the model ------------------------------------------------------------------------------------

    def check(self) -> None:
        """ChangedError where the model is not what it was: asked before results leave, so that each is of one model."""
        if change := self.change():
            raise ChangedError(change)

    def change(self) -> str:
        """What of the model is not as it was when the recording began: "" for nothing."""
        if written_to(self.weights) is not None or [t.data_ptr() for t in self.tensors] != self.places:
            return WEIGHTS
        changed = None if self.changes.seen else first_changed(self.reads, far=False)
        if changed is not None:
            return WEIGHTS if changed.name == "_parameters" else "attributes, hooks or modules of the model"
        written = written_to(self.recorder.operands) is not None
        return "buffers of the model" if written else "hooks on all modules" if has_global_hooks() else ""

    def _why_stay(self) -> str:
        if super()._why_stay():  # then others could neither run nor end this one
            raise ChangedError(SETTINGS)
        return ""

    def _refuse_settings_left(self) -> None:
        if self.changes.open > 1 and self.settings != settings_now():
            raise ChangedError(SETTINGS)
        super()._refuse_settings_left()

    # -- phases: TraceError, and what kernels raise, end the recording (`fail`) -------------------------

    def run(self) -> None:
        """Run what is pending: those that wait can go on, and those that are done leave."""
        self.resuming, self.parked = self.parked, []
        with unheard(self.recorder):
            self._answer()
        self.ready, self.done = self.ready + self.done, []

    def go_on(self) -> None:
        """Let those that waited go on."""
        self.settings = settings_now()  # which others may have changed meanwhile
        with unheard(self.recorder):
            if self.recorder.count - self.recorder.base > self.most:
                left = self.recorder.begin_anew(self.execution.read)
                self.execution, self.most = self.new_execution(), max(FEWEST, 4 * left)
                self.statistics.phases.clear()
            self.recorder.settled = self.execution.settled(self.recorder.base)
        self._go_on()

    def close(self) -> tuple[list[Ticket], Recording]:
        """The end, where nobody waits: the tickets of those that are done, and a Recording of them, with what is
        pending."""
        if unseen := self._unseen_change():
            raise self.changes.refusal(unseen)
        slots, held = self.done + self.ready, Held.of(self.recorder)
        self.recorder.finish()
        self._stop()
        results = [self.results[slot] for slot in slots]
        return [self.tickets[slot] for slot in slots], Recording(
            self.recorder, results, self.statistics, held=held
        )

    def fail(self) -> dict[Ticket, bool]:
        """The recording has failed: all instances are closed, modules become what they were. Tickets, with whether each
        can begin anew."""
        self.modes.restore()
        self._close()
        self.abandon()
        self._stop()
        undone = self.changes.undo()
        return {ticket: undone and are_unchanged(self.begun[slot]) for slot, ticket in self.tickets.items()}

    def _stop(self) -> None:
        self.recorder.heard.close()
        self.recorder.ask = None
        self.patches.end()
