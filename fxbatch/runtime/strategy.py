"""Which minibatches are batched, and which run the plain loop: by what either has taken.

    strategy = Strategy()
    choice = strategy.choose(64, grad=True)          # batched or not; how many instances run as scouts before
    results = [choice.timing.of(...) for ... in instances[:choice.scouts]]
    strategy.describe(64, grad=True)                 # "a batch: 2.3 ms a minibatch, 11 ms one by one"

Batching is what the decorator is for: it is done from the first minibatch on. A few instances, the scouts, run
undecorated, and are timed; so is the minibatch after them, which is batched whole. Such a pair is a round; each mode
(gradients or none) and each class of sizes (a power of two of instances) has its own. Until batching has been found
faster it is a trial: instances are begun as long as those before have not taken much longer than the loop takes for
them, and the loop runs the others. Where the loop is faster it runs, once a whole minibatch by the loop says so too, as
it does in all rounds where the two are close; the margin is the smaller the more rounds agree. Rounds come again, ever
more rarely: one costs a small part of the time until it, which a trial may take too: few can take as long as all.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fxbatch import stopwatch
from fxbatch.runtime.build_queue import FEW
from fxbatch.stopwatch import Timing

SCOUTS = 4  # instances of a minibatch that run in the loop to be timed, and at most half of it
CLOSE = 0.5  # of the loop's time, above which the loop is timed over whole minibatches
WINDOW = 5  # timings of either way that are looked at
COST_OF_A_ROUND = 1 / 16  # of the loop's time until it, where the loop is faster
RETIMED = 3  # minibatches of a round that are timed again, as something was built for the one before
TRIAL = 0.25  # of the loop's time, beyond its time for those begun, after which no instance of a trial is
MET = 0.75  # of the loop's time, beyond that as well, after which none is, what is built counted
FEWEST = 2  # instances of a trial
LEARNING = 1.5  # times as many instances as in the trial before it, so that the next says more
TOO_LONG = 1.25  # times the loop's time for all instances, above which a second trial of a few is the last
HOPELESS = 2.0  # times the loop's, once all is built, above which none is
PATIENCE = 3.0  # times the loop's time beyond its own: what all of that may have taken; twice with hope
REPAID = 15  # minibatches whose gain it may have taken as well, then
WARN = 10  # minibatches by the loop after which a warning says so


class AdaptiveSwitch:
    """Whether strategies choose at all in this process: FXBATCH_ADAPTIVE=0 and tests of batching turn it off."""

    on = os.environ.get("FXBATCH_ADAPTIVE", "1") != "0"


class Choice(NamedTuple):
    """How a minibatch runs: `scouts` instances by the loop, the others batched, or by the loop as well. timing: of the
    scouts, or of a whole minibatch where there are none; None where nothing is timed."""

    batches: bool
    scouts: int = 0
    timing: Timing | None = None


@dataclass
class Trial:
    """A minibatch that is batched before that is known to pay: no instance is begun once those before it have taken a
    part of the loop's seconds more than by the loop. begun: how many were, where it is to run the others."""

    loop: float  # seconds of it, or more where rounds have earned more
    each: float  # seconds that the loop takes forward for an instance
    begun: int | None = None
    _began: float = 0.0
    _built: float = 0.0

    def may_begin(self, instance: int) -> bool:
        """Whether this instance is begun."""
        now, built = stopwatch.now(), stopwatch.seconds_of_building()
        if not instance:
            self._began, self._built = now, built
        seconds, built = now - self._began - instance * self.each, built - self._built
        if instance < FEWEST or (seconds < MET * self.loop and seconds - built < TRIAL * self.loop):
            return True
        self.begun = instance
        return False


class _Case:
    """Minibatches of one mode and of about as many instances: how long they took by either way, and which way runs."""

    def __init__(self) -> None:
        self.minibatches, self.looped = 0, 0
        self.others = 0.0  # what batching had cost before, in others
        self.next_round = 1  # the minibatch that begins one
        self.rounds, self.decided = 0, 0  # that are over; the minibatch before which the last was
        self.retimed = 0  # minibatches of this round
        self.cost = 0.0  # of its trials beyond the loop's, in loops over a whole minibatch
        self.size, self.begun = 0, 0  # instances of the minibatch before; of the trial before it
        self.ready = False  # whether nothing had to be built for it
        self.timed: Literal["", "scouts", "batch", "loop"] = ""  # what of the minibatch before was
        self.loop: deque[Timing] = deque(maxlen=WINDOW)
        self.batch: deque[Timing] = deque(maxlen=WINDOW)
        self.seconds = 0.0, 0.0  # of one instance by the loop, and batched, as decided by last
        self.loops = False  # whether the loop runs between rounds
        self.whole = False  # whether it is timed over whole minibatches

    def next(self, instances: int, spent: float) -> Choice:
        """How the next minibatch runs."""
        self.others = self.others if self.minibatches else spent
        self.minibatches += 1
        before, self.timed = self.timed, ""
        if before == "batch" and (loop := self._medians()[0]):
            timing = self.batch[-1]
            extra = timing.forward + timing.backward - loop * timing.instances
            self.cost += max(0.0, extra) / (loop * self.size)
        if before == "batch" and self.retimed < RETIMED and self._is_learning(spent - self.others):
            self.batch.pop()
            self.retimed += 1
            return self._time_batch(instances)
        if before == "scouts":
            if self.loops:
                self.batch.clear()  # the data may be others by now
            return self._time_batch(instances)
        if before:
            self._decide(before)
            # The first of each minibatch may be its smallest.
            if self.loops and self.loop[-1].instances < instances // 2:
                return self._time_loop(instances, "loop")
        if self.minibatches >= self.next_round:
            if self.rounds == 1:  # in the first all was new, by either way
                self.loop.clear()
                self.batch.clear()
            self.retimed, self.cost = 0, 0.0
            return self._time_loop(instances, "scouts")
        return Choice(not self.loops)

    def _is_learning(self, spent: float) -> bool:
        """Whether the minibatch that was timed says less than the next will: something was built for it, or more was
        begun than of the one before, but not all; or it is the first for which nothing was, and the loop is faster."""
        timing, begun, ready = self.batch[-1], self.begun, self.ready
        self.begun = timing.instances
        loop, batch = self._medians()
        whole = loop * max(self.size, FEW)
        built = max(0.0, batch - timing.late / timing.instances)  # as once all is
        patience = 2 * PATIENCE + REPAID * (1.0 - built / loop) if built < loop else PATIENCE
        batch = built if spent <= patience * whole else batch
        if timing.instances < self.size:
            # A few that take longer than the loop for all of them, and not because all is new, are no hope for all.
            seconds = timing.forward + timing.backward * any(t.backward for t in self.loop)
            hopeless = begun and seconds > TOO_LONG * loop * self.size
            hopeless = hopeless or (3 * timing.instances >= self.size and built > HOPELESS * loop)
            return not (loop and hopeless) and timing.instances >= LEARNING * begun
        self.ready = not timing.building
        hopeful = batch * self.size <= HOPELESS * whole
        return hopeful and (bool(timing.building or timing.late) or (batch > loop > 0.0 and not ready))

    def _time_batch(self, instances: int) -> Choice:
        self.timed, self.size = "batch", instances
        self.batch.append(Timing(instances))
        return Choice(True, 0, self.batch[-1])

    def _time_loop(self, instances: int, timed: Literal["scouts", "loop"]) -> Choice:
        self.timed = timed
        scouts = instances if self.whole else min(SCOUTS, (instances + 1) // 2)
        if self.whole:  # which says more than a few instances
            self.loop = deque((t for t in self.loop if t.instances >= instances // 2), WINDOW)
        self.loop.append(Timing(scouts))
        return Choice(not self.loops, scouts, self.loop[-1])

    def _decide(self, timed: str) -> None:
        """Set which way runs from this minibatch on, and when the next round comes."""
        loop, batch = self._medians()
        if not loop or not batch:  # one of the two has failed
            self.next_round = self.minibatches
            return
        self.seconds = loop, batch
        self.rounds += timed == "batch"
        noise = 4.0 if stopwatch.is_alone() else 2.0
        ratio, margin, over = batch / loop, 1.0 + noise**-self.rounds, self.minibatches - 1
        self.loops, self.whole = ratio > margin, ratio > CLOSE
        is_close = 1.0 / margin < ratio <= margin
        wait = max(1, over // 4 if is_close else over)
        if self.loops:
            wait = max(wait, math.ceil(self.cost / COST_OF_A_ROUND))
        self.decided, self.next_round = over, self.minibatches + wait - 1

    def _medians(self) -> tuple[float, float]:
        """Median seconds per instance by the loop, and batched; 0 if that was not timed. Backward passes count if both
        ways have had some."""
        ways = [[t for t in way if t.forward] for way in (self.loop, self.batch)]
        if back := all(any(t.backward for t in way) for way in ways):
            ways = [[t for t in way if t.backward] for way in ways]
        loop, batch = [_median([(t.forward + back * t.backward) / t.instances for t in way]) for way in ways]
        return loop, batch


class Strategy:
    """The choices of one engine. One lock: two threads may call the same model."""

    def __init__(self) -> None:
        self._cases: defaultdict[tuple[bool, int], _Case] = defaultdict(_Case)
        self._lock = threading.Lock()
        self.warned = False
        self.reasons = ""  # why the last minibatch that was batched and timed took as long as it did

    # -- choices ------------------------------------------------------------------------------------

    def choose(self, instances: int, *, grad: bool, spent: float = 0.0) -> Choice:
        """How the next minibatch runs. spent: seconds that batching has taken beyond the loop."""
        with self._lock:
            if not instances:
                return Choice(True)
            case = self._cases[grad, instances.bit_length()]
            choice = case.next(instances, spent)
            case.looped += not choice.batches or choice.scouts == instances
            return choice

    def is_quiet(self, instances: int, *, grad: bool) -> bool:
        """Whether the next minibatch runs the loop and is not timed; it is counted then."""
        case = self._cases.get((grad, instances.bit_length()))
        if case is None or not case.loops or case.timed or case.minibatches + 1 >= case.next_round:
            return False
        case.minibatches += 1
        case.looped += 1
        return True

    def loop_seconds(self, instances: int, *, grad: bool, backward: bool = False) -> float:
        """About how long the loop takes forward, and backward where that is asked for (as long as forward, where it was
        not timed yet); 0 where nothing was timed yet."""
        with self._lock:
            case = self._cases.get((grad, instances.bit_length()))
            timed = [t for t in ([] if case is None else case.loop) if t.forward]
            forward = _median([t.forward / t.instances for t in timed])
            back = _median([t.backward / t.instances for t in timed if t.backward]) or forward
            return instances * (forward + (back if grad and backward else 0.0))

    def trial(self, instances: int, *, grad: bool) -> Trial | None:
        """How long instances of the next minibatch may be begun; None where batching is faster, or no time is known."""
        with self._lock:
            case = self._cases.get((grad, instances.bit_length()))
        if case is None or (case.rounds and not case.loops):
            return None
        seconds = self.loop_seconds(instances, grad=grad, backward=True)
        earned = COST_OF_A_ROUND * (case.minibatches - case.decided) - case.cost
        each = self.loop_seconds(instances, grad=grad) / instances
        return Trial(seconds * max(1.0, earned / TRIAL), each) if seconds else None

    def backward_seconds(self, instances: int, *, grad: bool) -> float | None:
        """About how long batched backward passes take; None where none was timed yet."""
        with self._lock:
            case = self._cases.get((grad, instances.bit_length()))
            timed = [] if case is None or not grad else [t for t in case.batch if t.backward]
        return instances * _median([t.backward / t.instances for t in timed]) if timed else None

    def look_again(self) -> None:
        """Begin rounds with the next minibatches: batching has become faster, as all is built."""
        with self._lock:
            for case in self._cases.values():
                if case.loops:
                    case.next_round = case.minibatches + 1

    def looped(self, *, grad: bool) -> int:
        """How many minibatches ran the plain loop."""
        return sum(x.looped for (mode, _), x in list(self._cases.items()) if mode is grad)

    # -- what is said -------------------------------------------------------------------------------

    def warning(self, instances: int, *, grad: bool) -> str:
        """The text of the LoopWarning, once, when minibatches of this size run the loop often enough; else ""."""
        with self._lock:
            case = self._cases.get((grad, instances.bit_length()))
            if self.warned or case is None or not case.loops or case.looped < WARN:
                return ""
            self.warned = True
            why = f"; {self.reasons}" if self.reasons else ""
            return (
                f"its minibatches run the plain loop, which is faster: {_figures(case, instances, grad)}{why}. "
                "fxbatch.explain(...) says more, adaptive=False batches all the same"
            )

    def describe(self, instances: int, *, grad: bool) -> str:
        """In words: whether minibatches of this size are batched or run the loop, with the times that decided it."""
        with self._lock:
            case = self._cases.get((grad, instances.bit_length()))
            if case is None or not case.rounds:
                return "a batch; the loop is timed beside the first of them, and runs where it is faster"
            figures = _figures(case, instances, grad)
            if not case.loops:
                return f"a batch: {figures}"
            wait = max(1, case.next_round + 1 - case.minibatches)
            return f"the plain loop: {figures}; batching is timed again {wait} minibatches from now"


def _median(numbers: Sequence[float]) -> float:
    """The lower one of two, 0 of none; the module `statistics` imports decimals and fractions."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def _figures(case: _Case, instances: int, grad: bool) -> str:
    loop, batch = [f"{1e3 * seconds * instances:.2g} ms" for seconds in case.seconds]
    return (
        f"{batch} batched, {loop} one by one ({instances} instances, with{'' if grad else 'out'} gradients)"
    )
