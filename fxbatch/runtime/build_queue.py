"""A queue of operations to build, the most expensive first, and the seconds that building may take.

    queue = BuildQueue()
    with queue.minibatch(64, loop=0.2):         # instances, and the seconds that the loop takes for them
        queue.may_build(calls=100)              # whether what is new is built now; else it runs call by call, and waits
        queue.may_try(seconds=0.5)              # whether a function for all sizes is
        queue.put(key, operation, build)
    queue.earn(seconds=0.05, loop=0.2)          # a minibatch took so long, where the loop takes so long
    queue.build()                               # what waits, as far as was earned

Building has an account: the loop's time of the first minibatch, a tenth of it of each one, all that batching saves
beside the loop, and ahead what AHEAD minibatches could save: what the loop takes beyond a minibatch without building,
and without the calls that have come again and ran one by one. So little is built where recording alone takes longer
than the loop. What is new is built at once, MOST seconds in a minibatch; the rest runs call by call, and is built after
minibatches that follow, batched or by the loop. What one minibatch alone has met, as where each instance has shapes of
its own, is not built, nor is what takes little beside what building takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from fxbatch import stopwatch
from fxbatch.caches import Cache

FEW = 32  # instances: of fewer, as many seconds may be spent as of so many
MOST = 1.0  # seconds in a minibatch, and after one; the last operation may go beyond
AHEAD = 10.0  # minibatches whose savings may be spent ahead
FIRST = 1.0  # of the loop's time: what may be spent before anything is known of savings
SELDOM = 4  # with fewer calls than a quarter of the instances, an operation waits until they have taken a quarter of
# what building one takes
SHARE, OF_LOOPS = 0.1, 0.025  # of the loop's time; and of that of minibatches that it runs
LONGEST = 2.0  # seconds that are never spent on one operation


class CallByCall(Protocol):
    """An operation that is not built yet."""

    seconds: float  # that its calls have taken beyond what batched ones would have
    expected: float  # seconds that building it takes, where it takes far more than others; else 0


@dataclass
class RunsOtherwise:
    """An operation whose calls are packed with those of other sizes, and may have a graph for theirs."""

    seconds = 0.0
    expected = 0.0
    otherwise: float = 0.0  # seconds that they have taken


@dataclass
class _Waiting:
    operation: CallByCall
    build: Callable[[float], object]
    minibatch: int  # that met it first
    comes_again: bool = False  # whether another has met it since


class BuildQueue:
    """The operations that one engine has still to build, and the seconds that this may take."""

    def __init__(self) -> None:
        self.earned = 0.0
        self._ahead = 0.0  # seconds that batching may save, at most, in AHEAD minibatches
        self._late = 0.0  # seconds that calls have taken, one by one, of what is not built
        self._instances = 0  # of the minibatch that runs; 0 where nothing is bounded
        self._loop = 0.0  # seconds that it takes by the loop, or that FEW instances would
        self._built_before = 0.0  # seconds of building before it
        self._minibatches = 0
        self._waiting: Cache[Hashable, _Waiting] = Cache("operations to build")
        self._looked = True  # whether nothing that waits is worth building
        self._builds: tuple[float, int] = 0.0, 0  # seconds of those that waited, and how many there were
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How much waits that has come again and may be worth building."""
        return 0 if self._looked or not self._ahead else sum(x.comes_again for x in self._waiting.values())

    @property
    def is_bounded(self) -> bool:
        """Whether the minibatch that runs has so many seconds for building."""
        return self._instances > 0

    @contextmanager
    def minibatch(self, instances: int, *, loop: float = 0.0) -> Iterator[None]:
        """Around a batched minibatch whose building is bounded. loop: seconds that it takes by the loop."""
        self._minibatches += 1
        self._instances, self._loop = instances, loop * max(1.0, FEW / max(instances, 1))
        if self._minibatches == 1:
            self.earned = FIRST * self._loop
        self._built_before = stopwatch.seconds_of_building()
        try:
            yield
        finally:
            self._instances = 0

    def may_build(self, calls: int | None = None) -> bool:
        """Whether what is new may be built now. calls: of the operation, in this minibatch."""
        if not self._instances:
            return True
        if calls is not None and SELDOM * calls < self._instances:
            return False
        built = stopwatch.seconds_of_building() - self._built_before
        return built < min(MOST, self._ahead + self.earned)

    def may_try(self, seconds: float, *, ahead: float = AHEAD) -> bool:
        """Whether what takes so long is tried now: a function for all sizes, which may save all of the loop's time, and
        in whose place an operation is built for each of them. ahead: minibatches that may pay for it."""
        built = stopwatch.seconds_of_building() - self._built_before
        return not self._instances or built + seconds < min(MOST, ahead * self._loop + self.earned)

    def put(self, key: Hashable, operation: CallByCall, build: Callable[[float], object]) -> None:
        """Let an operation wait that runs call by call now; `build` builds it, if that takes no more seconds than it is
        given."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting.put(key, _Waiting(operation, build, self._minibatches))
            elif waiting.comes_again or waiting.minibatch < self._minibatches:
                if waiting.comes_again:
                    waiting.operation = operation
                waiting.comes_again = True
                self._looked = False  # its calls have taken longer by now

    def runs_otherwise(self, key: Hashable, seconds: float, build: Callable[[float], object]) -> None:
        """Let an operation wait whose calls took so long another way."""
        waiting = self._waiting.get(key)
        operation = RunsOtherwise() if waiting is None else waiting.operation
        assert isinstance(operation, RunsOtherwise)
        operation.otherwise += seconds
        self.put(key, operation, build)

    def earn(self, *, seconds: float, loop: float, batched: bool = False, guessed: float = 0.0) -> None:
        """Time for building, after a minibatch that took so long, where the loop takes so long. batched: whether some
        of it was batched. guessed: of the seconds, what its backward pass may take, where none was batched yet."""
        self.earned += (1.0 + (SHARE if batched else OF_LOOPS)) * loop - seconds
        late = self._late
        with self._lock:
            self._late = sum(x.operation.seconds for x in self._waiting.values() if x.comes_again)
        if batched:
            built = stopwatch.seconds_of_building() - self._built_before
            saved = min(loop, max(0.0, loop - seconds + guessed + built + self._late - late))
            self._ahead = AHEAD * (saved * self._loop / loop if loop else 0.0)
        if self._minibatches == 1:  # much of what a first minibatch takes never comes again
            self.earned = max(self.earned, 0.0)

    def build(self) -> int:
        """Build what has come again, that whose calls have taken longest first, as long as there is time for it.
        How much was built."""
        least, count = max(0.0, self._ahead + self.earned - MOST), 0
        while self._ahead and self._ahead + self.earned > least and (waiting := self._dearest()) is not None:
            begun = stopwatch.seconds_of_building()
            self._late -= waiting.operation.seconds
            waiting.build(min(LONGEST, waiting.operation.seconds))
            seconds, count = stopwatch.seconds_of_building() - begun, count + 1
            self.earned -= seconds
            self._builds = self._builds[0] + seconds, self._builds[1] + 1
        return count

    def _dearest(self) -> _Waiting | None:
        """The next to be built, which waits no longer; None where nothing is worth it."""
        with self._lock:
            again = [x for x in self._waiting.items() if x[1].comes_again]
            worth = [x for x in again if self._is_worth_building(x[1])]
            if worth:
                return self._waiting.pop(max(worth, key=lambda x: x[1].operation.seconds)[0])
            self._looked = True
            return None

    def _is_worth_building(self, waiting: _Waiting) -> bool:
        """Whether its calls have taken a good part of what it takes to be built: as long as those before it, where
        nothing else is known. What runs otherwise is built of what was earned, for what it takes in AHEAD minibatches.
        """
        (seconds, count), operation = self._builds, waiting.operation
        if operation.expected:
            return operation.seconds >= operation.expected <= LONGEST
        taken = operation.seconds
        if isinstance(operation, RunsOtherwise):
            if self.earned <= 0.0:
                return False
            taken = AHEAD * operation.otherwise / max(1, self._minibatches - waiting.minibatch)
        return not count or SELDOM * taken * count >= seconds
