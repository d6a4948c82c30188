"""Values that outlive their call: in tensors that the forward wrote to, in attributes, lists and logs.

In: a recording that is done, and the values of its results. Out: what else is held by somebody; with the results of
the run it becomes real tensors.

    left = LeftBehind.of(recorder, results)
    left.values                  # asked for together with the results
    left.give(tensors)           # one a value: the user's objects have their content
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fxbatch.trace.values import Value
from fxbatch.trace.written import Written

if TYPE_CHECKING:
    from fxbatch.trace.record import Recorder

Take = Callable[[list[np.ndarray]], list[torch.Tensor]]

# References to a tensor that was written to which are ours: its record's, and the argument of `getrefcount`.
_OURS = 2


class LeftBehind:
    """What outlives a call beside its results."""

    def __init__(self, recorder: Recorder, written: Sequence[Written]) -> None:
        self.recorder = recorder
        self.written = list(written)

    @staticmethod
    def of(recorder: Recorder) -> LeftBehind | None:
        """What the user still holds; None where there is nothing."""
        if not recorder.written:
            return None
        written = list(recorder.written.values())
        recorder.written = {}
        held = [x for x in written if sys.getrefcount(x.tensor) > _OURS]
        return LeftBehind(recorder, held) if held else None

    @property
    def values(self) -> list[Value]:
        """What has to be computed."""
        return [x.value for x in self.written]

    def together(self, take: Take, renumber: Callable[[np.ndarray], np.ndarray]) -> Take:
        """`take` that asks for these values as well, in the same request, and hands them over."""

        def both(requests: list[np.ndarray]) -> list[torch.Tensor]:
            by_type: dict[int, list[Value]] = {}
            for v in self.values:
                by_type.setdefault(v._type, []).append(v)
            own = [renumber(np.array([v.id for v in group], dtype=np.int64)) for group in by_type.values()]
            rows = take([*requests, *own])
            found: dict[int, torch.Tensor] = {}
            for group, tensor in zip(by_type.values(), rows[len(requests) :], strict=True):
                found.update(zip([v._value for v in group], tensor.unbind(0), strict=True))
            self.give([found[v._value] for v in self.values])
            return rows[: len(requests)]

        return both

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """The call is done: `tensors` are the contents of `values`."""
        for x, content in zip(self.written, tensors, strict=True):
            x.give_back(content)
        self.written = []

    def abandon(self) -> None:
        """The call has failed, or its results aren't wanted: everything is as it was before."""
        for x in self.written:
            x.give_back(None)
        self.written = []
