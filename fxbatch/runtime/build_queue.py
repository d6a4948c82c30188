"""What waits to be built, dearest first, so that building takes little beside the work that it is for.

    queue = BuildQueue()
    with queue.minibatch(grad=True):
        queue.may_build()                       # whether what is new is built now; else it runs call by call, and waits
        queue.put(key, operation, build)
    queue.earn(seconds=0.05, loop=0.2)          # a minibatch took so long, where the loop takes so long
    queue.build()                               # what waits, as far as was earned

What is new is built at once until that has taken FIRST seconds, for each mode. After that it runs call by call, and is
built after minibatches that follow, batched or by the loop: MOST seconds after each, until all of it has taken as long
as AHEAD minibatches of the loop; then within a tenth of the loop's time and all that batching saves. What one minibatch
alone has met, as where each instance has shapes of its own, is not built.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from fxbatch.stopwatch import seconds_of_building

FIRST = 1.0  # seconds; the last operation may go beyond
MOST = 1.0  # after one minibatch
AHEAD = 10.0  # minibatches of the loop whose time may be spent ahead, of the largest so far
SHARE = 0.1  # of the loop's time
CAPACITY = 4096


class CallByCall(Protocol):
    """An operation that is not built yet."""

    seconds: float  # that its calls have taken


@dataclass
class _Waiting:
    operation: CallByCall
    build: Callable[[], object]
    minibatch: int  # that met it first


class BuildQueue:
    """What one engine has to build, and the seconds that this may take."""

    def __init__(self) -> None:
        self.earned = 0.0
        self._largest = 0.0  # the loop's time of a minibatch
        self._left = {True: FIRST, False: FIRST}  # by mode: seconds for what is new
        self._first: set[bool] = {True, False}  # modes that have had no minibatch
        self._mode: bool | None = None  # of the minibatch that runs, None where nothing is bounded
        self._begun = 0.0  # the seconds of building before it
        self._minibatches = 0
        self._once: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._again: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How much waits that has come again."""
        return len(self._again)

    @contextmanager
    def minibatch(self, *, grad: bool) -> Iterator[None]:
        """Around a batched minibatch whose building is bounded."""
        self._minibatches += 1
        self._mode, self._begun = grad, seconds_of_building()
        try:
            yield
        finally:
            self._left[grad] = self._seconds_left(grad)
            self._first.discard(grad)
            self._mode = None

    def _seconds_left(self, mode: bool) -> float:
        return max(0.0, self._left[mode] - max(0.0, seconds_of_building() - self._begun))

    def may_build(self) -> bool:
        """Whether an operation that is new may be built now."""
        return self._mode is None or self._seconds_left(self._mode) > 0.0

    def may_pack(self) -> bool:
        """Whether a packed function may be: there are few, which are not put off but from a mode's first minibatch."""
        return self.may_build() or self._mode not in self._first

    def put(self, key: Hashable, operation: CallByCall, build: Callable[[], object]) -> None:
        """Let an operation wait that runs call by call now; `build` builds it."""
        with self._lock:
            if key in self._again:
                return
            waiting = self._once.setdefault(key, _Waiting(operation, build, self._minibatches))
            if waiting.minibatch < self._minibatches:
                self._again[key] = self._once.pop(key)
            for table in (self._once, self._again):
                while len(table) > CAPACITY:
                    table.popitem(last=False)

    def earn(self, *, seconds: float, loop: float) -> None:
        """Time for building, after a minibatch that took so long, where the loop takes so long."""
        self.earned += AHEAD * max(0.0, loop - self._largest) + max(0.0, (1.0 + SHARE) * loop - seconds)
        self._largest = max(self._largest, loop)

    def build(self) -> None:
        """Build what has come again, that whose calls have taken longest first, as long as was earned."""
        before = self.earned
        while self.earned > max(0.0, before - MOST) and self._again:
            with self._lock:
                dearest = max(self._again, key=lambda key: self._again[key].operation.seconds)
                waiting = self._again.pop(dearest)
            begun = seconds_of_building()
            waiting.build()
            self.earned -= seconds_of_building() - begun
