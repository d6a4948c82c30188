"""A recording that goes on: instances are begun at any phase, and their results leave as soon as they are done.

In: the user's forward, the arguments of each instance as it comes, what makes an Execution. Out: results of instances,
by the number of the slot that each was begun in.

    recording = OngoingRecording(model.forward, table, (model,), execution, slots=64)
    recording.begin(0, (model, x), {})
    recording.start()                     # up to where each waits for a value, or is done
    while recording.parked:
        recording.advance(deliver)        # one phase; deliver() takes the results of `recording.done`
    last = recording.close()              # the rest as a Recording of a minibatch

Its memory is flat. Calls that have run are forgotten as soon as there are many: values that somebody still refers to
are constants of the calls to come (`RecordedCalls.begin_anew`), the others are gone. What that takes is in proportion
to the values that are left, and it is done when there are several times as many: the same share of each phase.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.trace.bare_parameters import unheard
from fxbatch.trace.held import Held
from fxbatch.trace.minibatch import Execution, Recording, Turns, refuse_foreign_values
from fxbatch.trace.module_changes import are_unchanged, states_of
from fxbatch.trace.objects import leaves_of
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import quicken
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.values import Value, Written, refresh

FEWEST = 8192  # values that are made before any is forgotten
TIMES = 4  # as many as were left the last time

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NOBODY: Arguments = (), {}


class OngoingRecording(Turns):
    """Instances that take turns, and of which others come while some wait."""

    def __init__(
        self,
        fn: Callable[..., object],
        table: SignatureTable,
        roots: Sequence[torch.nn.Module],
        new_execution: Callable[[Execution | None], Execution],
        slots: int,
    ) -> None:
        """new_execution: gives the state of a new run, after another one. slots: how many instances there may be at a
        time."""
        recorder = Recorder(table, roots, slots, recalls=True)
        recorder.copies, recorder.watches_operands = {}, True
        super().__init__(fn, [_NOBODY] * slots, recorder, new_execution(None), True, None)
        self.new_execution = new_execution
        self.alone = False
        self.to_begin: deque[int] = deque()
        self.begun: dict[int, list[tuple[object, int]]] = {}  # slots in use, with arguments as they were
        self.done: list[int] = []  # slots of instances that are done, in order
        self.written: dict[int, list[tuple[torch.Tensor, Written]]] = {}  # tensors that these have written to
        self.most = FEWEST
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(patched())
        quicken(recorder.knowledge.modules.classes)
        recorder.ask = self._ask
        recorder.heard.begin()

    # -- instances ------------------------------------------------------------------------------------

    def begin(self, slot: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """An instance is to be started in a slot that is free."""
        self.instances[slot], self.begun[slot] = (args, kwargs), states_of(args)
        self.to_begin.append(slot)

    def start(self) -> None:
        """Start those that are to be, each up to where it waits or is done. TraceError where one can't be recorded."""
        self._start()

    def end(self, slot: int) -> None:
        """Close an instance: where it waits, its `finally` blocks run, nothing else; the slot is free."""
        for p in [p for p in self.parked if p.instance == slot]:
            self.parked.remove(p)
            still_open, self.closing = self.changes.open - 1, True
            try:
                self._end(p)
            finally:
                self.closing, self.failed, self.changes.open = False, None, still_open
        for tensor, record in self.written.pop(slot, ()):
            record.give_back(tensor, None)
        self.free(slot)

    def free(self, slot: int) -> None:
        """The result of an instance was taken, for which all has run: another may have its slot. Tensors that it has
        written to are plain tensors again."""
        for tensor, record in self.written.pop(slot, ()):
            record.give_back(tensor, self.execution.read([record.value.id])[0])
        self.done = [done for done in self.done if done != slot]
        del self.begun[slot]
        self.instances[slot], self.results[slot] = _NOBODY, None

    def can_begin_anew(self, slot: int) -> bool:
        """Whether an instance has left its arguments as they were."""
        return are_unchanged(self.begun[slot])

    def _has_next(self) -> bool:
        return bool(self.to_begin)

    def _take_next(self) -> int:
        return self.to_begin.popleft()

    def _is_done(self, instance: int) -> None:
        super()._is_done(instance)
        self.done.append(instance)
        result, recorder = self.results[instance], self.recorder
        refuse_foreign_values(recorder, [result])
        for v in leaves_of(result):
            if type(v) is Value:
                refresh(v)
        if recorder.written:
            self._take_written(instance)

    def _note(self, error: BaseException, instance: int) -> None:
        if isinstance(error, RecursionError):
            super()._note(error, instance)

    def _take_written(self, instance: int) -> None:
        """Tensors that an instance has written to and that are still there get their content with its result."""
        for key, (ref, record) in list(self.recorder.written.items()):
            if record.instance == instance and (t := ref()) is not None:
                refresh(record.value)
                del self.recorder.written[key]
                self.written.setdefault(instance, []).append((t, record))

    # -- phases ---------------------------------------------------------------------------------------

    def advance(self, deliver: Callable[[], None]) -> None:
        """One phase: run what is pending, let `deliver` take the results of `done`, and let the instances go on that
        waited. TraceError, and what kernels raise, end the recording: `fail`."""
        self.resuming, self.parked = self.parked, []
        with unheard(self.recorder):
            self._answer()
            self.recorder.refuse_written_operands()
            deliver()
            if self.recorder.count - self.recorder.base > self.most:
                self._forget()
            self.recorder.settled = self.execution.settled(self.recorder.base)
        self._go_on()

    def _forget(self) -> None:
        left = self.recorder.begin_anew(self.execution.read)
        self.execution = self.new_execution(self.execution)
        self.statistics.phases.clear()
        self.most = max(FEWEST, TIMES * left)

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> Recording:
        """The end, where nobody waits: a Recording of the instances that are `done`, with what is pending."""
        assert not self.parked and not self.to_begin, "nobody waits"
        recorder, results = self.recorder, [self.results[slot] for slot in self.done]
        self.unseen = self._unseen_change()
        if self.unseen:
            raise self.changes.refusal(self.unseen)
        for written in self.written.values():
            for tensor, record in written:
                recorder.written[id(tensor)] = weakref.ref(tensor), record
        self.written.clear()
        held = Held.of(recorder)
        recorder.finish()
        self._leave()
        return Recording(recorder, results, self.statistics, held=held)

    def fail(self) -> bool:
        """The recording has failed: all instances are closed, modules become what they were. Whether they are."""
        self.modes.restore()
        self._close()
        for tensor, record in [pair for written in self.written.values() for pair in written]:
            record.give_back(tensor, None)
        self.abandon()
        self._leave()
        return self.changes.undo()

    def _leave(self) -> None:
        self.recorder.heard.close()
        self.recorder.ask = None
        self._patches.close()
