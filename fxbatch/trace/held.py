"""Values that outlive their call: in tensors that the forward wrote to, in attributes, lists and logs.

In: a recording that is done. Out: the values that the user still refers to. With the results of the run they become
real tensors, in time proportional to what is asked of them afterwards.

    held = Held.of(recorder)
    take = held.together(take, renumber, apart=False)     # their rows are taken in the same request as the results
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import tracing
from fxbatch.trace.values import REQUIRES_GRAD, Value, Written, facts_of, refresh

Take = Callable[[list[np.ndarray]], list[torch.Tensor]]
Renumber = Callable[[np.ndarray], np.ndarray]  # ids as recorded -> ids in the program that ran


class Held:
    """Values, and tensors that the forward wrote to, that outlive a call."""

    def __init__(
        self, recorder: RecordedCalls, values: list[Value], written: list[tuple[torch.Tensor, Written]]
    ) -> None:
        self.recorder = recorder
        self.written = written  # the user's objects, and what they stand for
        self._facts = facts_of(values)  # int64 [values, 3]: number, type, flags; the results' are among them
        self._facts[:, 0] -= recorder.base
        self._besides = self._facts  # of those that are no results

    @staticmethod
    def of(recorder: RecordedCalls) -> Held:
        """Those of a recording that has ended which somebody besides it refers to."""
        stale = recorder.values.stale()
        if stale:
            with tracing(recorder):
                for v in stale:
                    refresh(v)
        return Held(recorder, recorder.let_go(), recorder.take_written())

    def besides(self, results: np.ndarray) -> np.ndarray:
        """Ids of what is held and no result, each once; results: the ids of those."""
        if len(self._facts) == len(results):  # these alone: each has a value of its own
            self._besides = self._facts[:0]
            return results[:0]
        among = np.zeros(max(self._facts[:, 0].max(initial=0), results.max(initial=0)) + 1, dtype=bool)
        among[results] = True
        self._besides = self._facts[~among[self._facts[:, 0]]]
        return np.flatnonzero(np.bincount(self._besides[:, 0]))

    def together(self, take: Take, renumber: Renumber, *, apart: bool) -> Take:
        """`take` that asks for these values as well, in the same request, and after which they are real tensors.

        apart: whether of rows that are taken together some require a gradient and others don't.
        """

        def both(requests: list[np.ndarray]) -> list[torch.Tensor]:
            every = [*requests, *map(renumber, self._alike())] if len(self._besides) else requests
            blocks = take(every)
            if apart and any(t.requires_grad for t in blocks):
                asking = renumber(self._facts[self._facts[:, 2] & REQUIRES_GRAD != 0, 0])
                blocks = [
                    t if np.isin(rows, asking).any() else t.detach()
                    for t, rows in zip(blocks, every, strict=True)
                ]
            if len(self._facts):
                self.recorder.is_real(_Rows(self._facts[:, 0], renumber, every, blocks))
            written, self.written = self.written, []
            for tensor, record in written:
                record.give_back(tensor, self.recorder.tensor(record.value))
            return blocks[: len(requests)]

        return both

    def _alike(self) -> list[np.ndarray]:
        """The ids of what is no result, apart by type and by whether it requires a gradient."""
        kinds = 2 * self._besides[:, 1] + (self._besides[:, 2] & REQUIRES_GRAD)
        return [self._besides[kinds == kind, 0] for kind in np.unique(kinds).tolist()]

    def abandon(self) -> None:
        """The call has failed, or its results aren't wanted: everything is as it was before."""
        written, self.written = self.written, []
        for tensor, record in written:
            record.give_back(tensor, None)


@dataclass(eq=False)
class _Rows:
    """Which row of which block a value is, looked up when the first is asked for."""

    ids: np.ndarray
    renumber: Renumber
    requests: Sequence[np.ndarray]
    blocks: Sequence[torch.Tensor]
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """By id as recorded: the block, and the row of it."""
        rows = {
            n: (block, i) for block, taken in enumerate(self.requests) for i, n in enumerate(taken.tolist())
        }
        numbers = zip(self.ids.tolist(), self.renumber(self.ids).tolist(), strict=True)
        return {n: rows[m] for n, m in numbers if m in rows}

    def __call__(self, v: Value) -> torch.Tensor | None:
        t = self.tensors.get(v.id)
        if t is None and v.id in self.places:
            block, row = self.places[v.id]
            t = self.blocks[block][row]
            t = self.tensors[v.id] = t if v._flags & REQUIRES_GRAD or not t.requires_grad else t.detach()
        return t
