"""Which minibatches are batched, and which run the plain loop: chosen from counts, never from the clock.

    strategy = Strategy()
    choice = strategy.choose(64, grad=True)         # batched, or the loop; how many instances are watched first
    strategy.ran(counts)                            # what a batched minibatch was made of
    strategy.describe(64, grad=True)                # what is chosen, and what would change it

The first minibatch runs a few instances as undecorated, counting calls (runtime/scouting.py). Where batching is
estimated to pay, the rest is batched, and so is what follows, each judged by what the last ones were made of. Where it
does not, minibatches run the undecorated forward; a few instances are counted again in minibatches 2, 4, 8, 16 and so
on, so that sizes that come again, or that grow, are noticed. Graphs are built from a credit, a share of the loop's
estimated time, so that building never takes long beside the work that it is for.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxbatch.ir import CONSTANT_KINDS, Signature
from fxbatch.runtime.costs import BUILD, WORTH_IT, Counts, batched_cost, loop_cost
from fxbatch.runtime.scouting import Seen

SCOUTS = 4  # instances that are counted at a time, and at most half of a minibatch
FIRST_CREDIT = 40.0  # minibatches of the loop whose time may go into building at once
LATER_CREDIT = 0.25  # and of each later one
SETTLED = 10  # batched minibatches that are all judged; then one in SELDOM
SELDOM = 16
AGAIN = 50  # minibatches by the loop until one that was batched, and did not pay, may be tried anew
LONGEST = 128  # minibatches between two counts
MOST_SIZES = 256  # numbers of instances that a verdict is kept for
WARN = 10  # minibatches by the loop after which a warning says so


class Switch:
    """Whether strategies choose at all in this process: FXBATCH_ADAPTIVE=0 and tests of batching turn it off."""

    on = os.environ.get("FXBATCH_ADAPTIVE", "1") != "0"


@dataclass(frozen=True)
class Choice:
    """How a minibatch runs. scouts: how many instances run in the loop first, counted, before it is decided."""

    batched: bool
    scouts: int = 0


@dataclass(frozen=True)
class _Verdict:
    """What is estimated for minibatches of some size, in microseconds."""

    counts: Counts
    batched: float
    loop: float
    building: float  # the graphs that are not built yet

    @property
    def worth_it(self) -> bool:
        return self.batched <= WORTH_IT * self.loop


class _Mode:
    """What is known of the minibatches with gradients, or of those without."""

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.seen = Seen()
        self.minibatches = 0
        self.looped = 0
        self.next_scouts = 1
        self.measured: dict[int, Counts] = {}  # by size class: the last batched one
        self.batched: dict[int, int] = {}  # how many were
        self.again_at = 0
        self.again_after = AGAIN
        self.credit = 0.0  # microseconds
        self.largest = 0.0  # the loop's time for the largest minibatch so far
        self.verdicts: dict[int, _Verdict] = {}  # by number of instances, of what is known now


class Strategy:
    """The choices of one engine. One lock: two threads may call the same model."""

    def __init__(self) -> None:
        self._modes = {grad: _Mode(grad) for grad in (False, True)}
        self._built: OrderedDict[Signature, None] = OrderedDict()
        self._lock = threading.Lock()
        self.building: _Mode | None = None  # whose credit pays for graphs; None: nothing is put off
        self.warned = False

    # -- choices ------------------------------------------------------------------------------------

    def choose(self, instances: int, *, grad: bool) -> Choice:
        """How the next minibatch runs. With `scouts`, `decide` is asked once these have run."""
        with self._lock:
            mode = self._modes[grad]
            mode.minibatches += 1
            if mode.seen.instances:
                self._earn(mode, instances, LATER_CREDIT)
            if not instances:
                return Choice(True)
            if mode.seen.instances and self._pays(mode, instances):
                self.building = mode
                return Choice(True)
            if mode.minibatches < mode.next_scouts:
                return self._by_loop(mode)
            mode.next_scouts += min(mode.minibatches, LONGEST)
            return Choice(False, min(SCOUTS, (instances + 1) // 2))

    def watched(self, *, grad: bool) -> Seen:
        """Where scouts are counted."""
        return self._modes[grad].seen

    def decide(self, instances: int, *, grad: bool) -> bool:
        """Whether the rest of a minibatch is batched, now that its scouts were counted."""
        with self._lock:
            mode = self._modes[grad]
            mode.verdicts.clear()
            self._earn(mode, instances, 0.0)
            if mode.minibatches >= mode.again_at > 0:
                mode.measured.clear()  # tried anew, if what was counted says so
                mode.verdicts.clear()
                mode.again_at = 0
            if self._pays(mode, instances):
                self.building = mode
                return True
            return self._by_loop(mode).batched

    def _earn(self, mode: _Mode, instances: int, share: float) -> None:
        """Credit for a share of this minibatch, and for many where it is larger than all before."""
        loop = self._verdict(mode, instances).loop
        mode.credit += share * loop + FIRST_CREDIT * max(0.0, loop - mode.largest)
        mode.largest = max(mode.largest, loop)

    def _by_loop(self, mode: _Mode) -> Choice:
        mode.looped += 1
        return Choice(False)

    def _counts(self, mode: _Mode, instances: int) -> Counts:
        """What a minibatch of this size is made of: as the last one of about this size was, else as is expected."""
        found = mode.measured.get(instances.bit_length())
        if found is None:
            return mode.seen.expected(instances, grad=mode.grad)
        share = instances / max(1, found.instances)
        return replace(
            found, calls=round(found.calls * share), long_calls=round(found.long_calls * share),
            unbatched=round(found.unbatched * share), waits=round(found.waits * share),
        )  # fmt: skip

    def _verdict(self, mode: _Mode, instances: int) -> _Verdict:
        found = mode.verdicts.get(instances)
        if found is None:
            counts = self._counts(mode, instances)
            unbuilt = counts.late if mode.measured or self._built else mode.seen.operations
            loop = loop_cost(mode.seen.eager, instances, grad=mode.grad)
            if len(mode.verdicts) > MOST_SIZES:
                mode.verdicts.clear()
            found = _Verdict(counts, batched_cost(counts), loop, unbuilt * BUILD)
            mode.verdicts[instances] = found
        return found

    def _pays(self, mode: _Mode, instances: int) -> bool:
        verdict = self._verdict(mode, instances)
        return verdict.worth_it and verdict.building <= mode.credit

    # -- what was batched ---------------------------------------------------------------------------

    def judges(self, instances: int, *, grad: bool) -> bool:
        """Whether the counts of the batched minibatch that runs are wanted."""
        n = self._modes[grad].batched.get(instances.bit_length(), 0)
        return n < SETTLED or n % SELDOM == 0

    def ran(self, counts: Counts | None, instances: int, *, grad: bool) -> None:
        """A minibatch was batched; `counts` where they were wanted."""
        with self._lock:
            mode, size = self._modes[grad], instances.bit_length()
            n = mode.batched[size] = mode.batched.get(size, 0) + 1
            if counts is None:
                return
            if n == 1:
                counts = replace(counts, new=0, long_calls=0)  # the first one meets everything anew
            mode.measured[size] = counts
            mode.verdicts.clear()
            if not self._pays(mode, instances) and not mode.again_at:
                mode.again_at = mode.minibatches + mode.again_after
                mode.again_after *= 2

    # -- graphs -------------------------------------------------------------------------------------

    def note_built(self, signatures: Sequence[Signature], late: frozenset[int]) -> None:
        """These are built, without credit: somebody asked for the minibatch to be batched."""
        with self._lock:
            for s, signature in enumerate(signatures):
                if s not in late:
                    self._built[signature] = None

    def put_off(self, signatures: Sequence[Signature], counts: Sequence[int]) -> frozenset[int]:
        """Positions of the signatures whose graphs are not built now, for want of credit; those with the most calls
        are built first. `counts`: their calls in this program."""
        with self._lock:
            new = [
                s
                for s, signature in enumerate(signatures)
                if counts[s] and signature not in self._built
                and not signature.reason and signature.operation.kind not in CONSTANT_KINDS
            ]  # fmt: skip
            mode, late = self.building, set()
            for s in sorted(new, key=lambda s: (-counts[s], s)):
                if mode is None:
                    self._built[signatures[s]] = None
                elif mode.credit >= BUILD:
                    mode.credit -= BUILD
                    self._built[signatures[s]] = None
                else:
                    late.add(s)
            while len(self._built) > 4096:
                self._built.popitem(last=False)
            return frozenset(late)

    def looped(self, *, grad: bool) -> int:
        """How many minibatches ran the plain loop."""
        return self._modes[grad].looped

    # -- what is said -------------------------------------------------------------------------------

    def warning(self, *, grad: bool) -> str:
        """What to warn of once, else ""."""
        mode = self._modes[grad]
        if self.warned or mode.looped < WARN:
            return ""
        self.warned = True
        return (
            "its minibatches run the plain loop, which is estimated to be faster than batching them; "
            "fxbatch.explain(...).strategy says why, adaptive=False batches all the same"
        )

    def describe(self, instances: int, *, grad: bool) -> str:
        """What is chosen for minibatches of this size, and what would change it."""
        with self._lock:
            mode = self._modes[grad]
            if not mode.seen.instances:
                return "the first of them will choose, which counts the calls of a few instances"
            found = self._verdict(mode, instances)
            counts, loop = found.counts, found.loop
            both = f"{found.batched / 1e3:.2g} ms batched, {loop / 1e3:.2g} ms one by one, by counts"
            if self._pays(mode, instances):
                return f"a batch: {both}"
            if found.worth_it:
                need = (found.building - mode.credit) / max(1.0, LATER_CREDIT * loop)
                return (
                    f"the plain loop: {both}, but about {found.building / BUILD:.0f} operations have to be built "
                    f"first, which about {max(1, round(need))} more minibatches earn"
                )
            why = [f"{_steps(counts)} steps for {counts.calls} calls"]
            if counts.phases > 1:
                why.append(f"{counts.phases} phases")
            if counts.unbatched:
                why.append(f"{counts.unbatched} calls that can't be batched")
            return (
                f"the plain loop: {both} ({', '.join(why)}); more instances, sizes that come again or fewer waits "
                "for values would change it"
            )


def _steps(counts: Counts) -> int:
    return counts.steps + counts.python_steps + counts.late_steps
