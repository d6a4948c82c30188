"""Which minibatches are batched, and which run the plain loop: chosen from counts, never from the clock.

    strategy = Strategy()
    choice = strategy.choose(64, grad=True)         # batched, packed, or the loop; how many instances are watched first
    strategy.ran(counts)                            # what a batched minibatch was made of
    strategy.describe(64, grad=True)                # what is chosen, and what would change it

The first minibatch runs a few instances as undecorated, counting calls (runtime/costs.py). Where batching is
estimated to pay, the rest is batched, and so is what follows, each judged by what the last ones were made of. Where it
does not, minibatches run the undecorated forward; a few instances are counted again in minibatches 2, 4, 8, 16 and so
on, so that sizes that come again, or that grow, are noticed. What scouts say of a recording is a guess: where it leaves
room for doubt, one of the first ten minibatches is batched as a trial, with nothing built, and its counts decide.
Graphs are built from a credit, a share of the loop's estimated time, so that building never takes long beside the work
that it is for.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fxbatch.ir import CONSTANT_KINDS, Signature
from fxbatch.runtime.costs import (
    BUILD,
    IMPORTING,
    IMPORTING_DYNAMO,
    PACKING,
    PACKING_CALL,
    WORTH_IT,
    Counts,
    Seen,
    batched_cost,
    loop_cost,
    one_by_one_cost,
    packed_cost,
    packing_cost,
    trial_cost,
    work_cost,
)

SCOUTS = 4  # instances that are counted at a time, and at most half of a minibatch; later on, one in SPARSE
SPARSE, COUNTING, SHARE = (
    16,
    10.0,
    0.03,
)  # one that is counted takes so many times its loop: a small share of the time
FIRST_CREDIT = 50.0  # minibatches of the loop whose time may go into building at once
LENT = 80.0  # minibatches whose estimated savings may be spent ahead, once
LENT_TO_IMPORTS = 100.0  # and on what is imported once a process
LATER_CREDIT = 0.25  # and of each later one
SETTLED = 10  # batched minibatches that are all judged; then one in SELDOM
SELDOM = 16
# One of the first minibatches is recorded on trial where scouts estimate batching at up to DOUBT times the loop, and
# the trial costs at most so many minibatches of the loop.
DOUBT, TRIALS_UNTIL, TRIAL = 2.2, 10, 12.0
DERIVATIVES = (
    "its forward takes derivatives by torch.autograd.grad; torch.func.grad in a submodule, or in a function with "
    "@fxbatch.operation, would be batched"
)
AGAIN = 50  # minibatches by the loop until one that was batched, and did not pay, may be tried anew
LONGEST = 128  # minibatches between two counts
MOST_SIZES = 256  # numbers of instances that a verdict is kept for
WARN = 10  # minibatches by the loop after which a warning says so


class AdaptiveSwitch:
    """Whether strategies choose at all in this process: FXBATCH_ADAPTIVE=0 and tests of batching turn it off."""

    on = os.environ.get("FXBATCH_ADAPTIVE", "1") != "0"


How = Literal["batched", "packed", "loop"]


def importing() -> float:
    """What importing costs that packing needs, 0 where it was imported."""
    symbols = 0.0 if "torch.fx.experimental.symbolic_shapes" in sys.modules else IMPORTING
    return symbols + (0.0 if "torch._dynamo" in sys.modules else IMPORTING_DYNAMO)


def _import_cost(how: How, saved: float) -> float:
    """The same, 0 where that is what many minibatches, which save so much each, repay: a process pays it once."""
    cost = importing() if how == "packed" else 0.0
    return 0.0 if cost <= LENT_TO_IMPORTS * saved else cost


@dataclass(frozen=True)
class Choice:
    """How a minibatch runs. scouts: how many instances run in the loop first, counted, before it is decided."""

    how: How
    scouts: int = 0


@dataclass(frozen=True)
class _Verdict:
    """What is estimated for minibatches of some size, in microseconds."""

    counts: Counts
    batched: float
    packed: float
    loop: float
    building: float  # the graphs that are not built yet
    packing: float  # the packed form that is not built yet


_LOOP = Choice("loop")


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
        self.tried = False  # whether a minibatch was batched on trial
        self.again_at = 0
        self.again_after = AGAIN
        self.credit = 0.0  # microseconds
        self.lent = False  # whether savings were spent ahead
        self.lent_to_packing = 0.0  # so much, and nothing was saved yet
        self.import_paid = 0.0  # when packing was first tried
        self.largest = 0.0  # the loop's time for the largest minibatch so far
        self.verdicts: dict[int, _Verdict] = {}  # by number of instances, of what is known now
        self.quiet: tuple[int, bool] = (-1, False)  # minibatches like these run the loop, until a minibatch
        self.quiet_until = 0
        self.quiet_earns = 0.0
        self.packs = False  # whether there is a packed form
        self.packed = 0  # minibatches that were packed
        self.unpacked = 0  # times that there was none to be had
        self.alone = 0  # operators in the packed form that run instance by instance
        self.apart = 0  # instances for which the packed form was not theirs
        self.packs_again = 0  # the minibatch from which on it may be tried again


class Strategy:
    """The choices of one engine. One lock: two threads may call the same model."""

    def __init__(self) -> None:
        self._modes = {grad: _Mode(grad) for grad in (False, True)}
        self._built: OrderedDict[Signature, None] = OrderedDict()
        self._lock = threading.Lock()
        self.building: _Mode | None = None  # whose credit pays for graphs; None: nothing is put off
        self.trial = False  # whether the minibatch that runs is one: all graphs are put off
        self.warned = False

    # -- choices ------------------------------------------------------------------------------------

    def choose(self, instances: int, *, grad: bool, packs: bool = False) -> Choice:
        """How the next minibatch runs. With `scouts`, `decide` is asked once these have run. packs: whether the
        minibatch may have a packed form."""
        if self.is_quiet(instances, packs, grad=grad):
            return _LOOP
        mode = self._modes[grad]
        with self._lock:
            mode.minibatches += 1
            if not instances:
                return Choice("batched")
            if mode.seen.instances:
                self._earn(mode, instances, LATER_CREDIT)
                how = self._best(mode, instances, packs)
                if how != "loop":
                    return Choice(self._take(mode, instances, how))
            if mode.minibatches < mode.next_scouts:
                if self._is_in_doubt(mode, instances):
                    mode.tried = self.trial = True
                    self.building = mode
                    return Choice("batched")
                self._be_quiet(mode, instances, packs)
                return Choice(self._take(mode, instances, "loop"))
            scouts = min(SCOUTS, (instances + 1) // 2)
            if mode.minibatches > SPARSE:
                scouts = min(scouts, 1 + (instances - 1) // SPARSE)
            apart = (
                math.ceil(COUNTING * scouts / (SHARE * instances)) if mode.minibatches >= SPARSE / 2 else 0
            )
            mode.next_scouts += max(apart, min(mode.minibatches, LONGEST))
            return Choice("loop", scouts)

    def is_quiet(self, instances: int, packs: bool, *, grad: bool) -> bool:
        """Whether the next minibatch runs the loop and nothing can change that; it is counted then."""
        mode = self._modes[grad]
        if mode.minibatches >= mode.quiet_until or mode.quiet != (instances, packs):
            return False
        mode.minibatches += 1
        mode.looped += 1
        mode.credit += mode.quiet_earns
        return True

    def _is_in_doubt(self, mode: _Mode, instances: int) -> bool:
        """Whether to batch this minibatch on trial; it is paid for then."""
        if mode.tried or mode.measured or not mode.grad or not 1 < mode.minibatches <= TRIALS_UNTIL:
            return False  # without gradients the guess is a good one, and a trial is dear
        found = self._verdict(mode, instances)
        has_own_sizes = 10 * found.counts.unbatched > found.counts.calls
        # What is estimated to pay, and can't be paid yet, is counted as well.
        if found.batched > DOUBT * found.loop or has_own_sizes or mode.seen.derivatives:
            return False
        cost = trial_cost(found.counts, mode.seen.operations)
        if cost > min(TRIAL * found.loop, mode.credit):
            return False
        mode.credit -= cost
        return True

    def _be_quiet(self, mode: _Mode, instances: int, packs: bool) -> None:
        """Note until when nothing but credit can change: the next count of scouts, or when graphs are earned."""
        found = self._verdict(mode, instances)
        mode.quiet, mode.quiet_earns = (instances, packs), LATER_CREDIT * found.loop
        until, most = mode.next_scouts - 1, WORTH_IT * found.loop
        if packs and found.packed <= most:
            missing = found.packing - self._means(mode, "packed", found.loop - found.packed)
            until = min(until, max(mode.packs_again - 1, self._earned(mode, missing)))
        if found.batched <= most:
            missing = found.building - self._means(mode, "batched", found.loop - found.batched)
            until = min(until, self._earned(mode, missing))
        mode.quiet_until = until

    def _earned(self, mode: _Mode, missing: float) -> int:
        """The minibatch before the one by which this will have been earned."""
        return mode.minibatches + max(0, int(missing / max(1.0, mode.quiet_earns)) - 1)

    def watched(self, *, grad: bool) -> Seen:
        """Where scouts are counted."""
        return self._modes[grad].seen

    def decide(self, instances: int, *, grad: bool, packs: bool = False) -> How:
        """How the rest of a minibatch runs, now that its scouts were counted."""
        with self._lock:
            mode = self._modes[grad]
            mode.verdicts.clear()
            self._earn(mode, instances, 0.0)
            if mode.minibatches >= mode.again_at > 0:
                if self._would_pay_built(mode, instances):
                    mode.measured.clear()  # tried anew, if what was counted says so
                    mode.verdicts.clear()
                    mode.again_at = 0
                else:
                    mode.again_at = mode.minibatches + mode.again_after
                    mode.again_after *= 2
            return self._take(mode, instances, self._best(mode, instances, packs))

    def _would_pay_built(self, mode: _Mode, instances: int) -> bool:
        """Whether what was measured leaves it open that batching pays: graphs were missing, and with them it would; or
        none were, and the minibatches may be others by now."""
        counts = self._counts(mode, instances)
        if not counts.late:
            return True
        built = replace(counts, steps=_steps(counts), python_steps=0, late_steps=0, new=0, long_calls=0)
        found = self._verdict(mode, instances)
        return found.batched - batched_cost(counts) + batched_cost(built) <= WORTH_IT * found.loop

    def not_packed(self, instances: int, *, grad: bool, tried: bool) -> How:
        """How a minibatch runs that was to be packed, and has no packed form after all. tried: it took time."""
        with self._lock:
            mode = self._modes[grad]
            mode.packed -= 1
            if mode.lent_to_packing and not mode.packed:  # what was to be saved is not: batching may still
                mode.credit -= mode.lent_to_packing
                mode.lent, mode.lent_to_packing = False, 0.0
            if not mode.packed:  # what was not spent is paid back
                mode.credit += min(mode.import_paid, importing())
                mode.import_paid = 0.0
                if not tried:
                    mode.packs = False
                    mode.verdicts.clear()
                    mode.credit += self._verdict(mode, instances).packing
            self._pack_later(mode)
            return self._take(mode, instances, self._best(mode, instances, False))

    def was_packed(self, instances: int, alone: int, apart: int, *, grad: bool) -> None:
        """A minibatch was packed. alone: operators that run instance by instance; apart: instances, so far, that ran by
        themselves, as their sizes don't fit the packed form."""
        with self._lock:
            mode = self._modes[grad]
            if alone != mode.alone:
                mode.alone = alone
                mode.verdicts.clear()
            if 4 * (apart - mode.apart) > instances:
                self._pack_later(mode)
            mode.apart = apart

    def _pack_later(self, mode: _Mode) -> None:
        mode.unpacked += 1
        mode.packs_again = mode.minibatches + min(2**mode.unpacked, LONGEST)

    def _take(self, mode: _Mode, instances: int, how: How) -> How:
        found = self._verdict(mode, instances)
        if how == "loop":
            mode.looped += 1
            return how
        saved = found.loop - (found.packed if how == "packed" else found.batched)
        imports = _import_cost(how, saved)
        cost = imports + (found.packing if how == "packed" else found.building)
        if cost > mode.credit and not mode.lent:
            mode.credit += LENT * saved
            mode.lent, mode.lent_to_packing = True, LENT * saved if how == "packed" else 0.0
        if how == "packed":
            if not mode.packs:
                mode.credit -= cost
                mode.import_paid = imports
                mode.packs = True
                mode.verdicts.clear()
            mode.packed += 1
        self.building, self.trial = mode, False
        return how

    def _earn(self, mode: _Mode, instances: int, share: float) -> None:
        """Credit for a share of this minibatch, and for many where it is larger than all before."""
        loop = self._verdict(mode, instances).loop
        mode.credit += share * loop + FIRST_CREDIT * max(0.0, loop - mode.largest)
        mode.largest = max(mode.largest, loop)

    def _counts(self, mode: _Mode, instances: int) -> Counts:
        """What a minibatch of this size is made of: as the last one of about this size was, else as is expected."""
        found = mode.measured.get(instances.bit_length())
        if found is None:
            return mode.seen.expected(instances, grad=mode.grad)
        share = instances / max(1, found.instances)
        return replace(
            found, calls=round(found.calls * share), long_calls=round(found.long_calls * share),
            unbatched=round(found.unbatched * share), waits=round(found.waits * share),
            late_calls=round(found.late_calls * share),
        )  # fmt: skip

    def _verdict(self, mode: _Mode, instances: int) -> _Verdict:
        found = mode.verdicts.get(instances)
        if found is None:
            counts, eager = self._counts(mode, instances), mode.seen.eager
            unbuilt = counts.late if mode.measured or self._built else mode.seen.operations
            work = work_cost(eager, instances, grad=mode.grad)
            shared = work_cost(eager, instances, grad=mode.grad, together=True)
            loop = loop_cost(eager, instances, grad=mode.grad) + work
            as_it_is = mode.seen.as_it_is if counts.calls else 1.0  # where nothing is recorded
            batched = batched_cost(counts) + shared + as_it_is * loop
            if len(mode.verdicts) > MOST_SIZES:
                mode.verdicts.clear()
            found = mode.verdicts[instances] = _Verdict(
                counts,
                batched=batched,
                packed=packed_cost(eager, instances, mode.alone, grad=mode.grad) + shared,
                loop=loop,
                building=unbuilt * BUILD,
                packing=0.0 if mode.packs else packing_cost(eager),
            )
        return found

    def _means(self, mode: _Mode, how: How, saved: float) -> float:
        """What may be spent on building that saves so much each minibatch."""
        return mode.credit - _import_cost(how, saved) + (0.0 if mode.lent else LENT * max(0.0, saved))

    def _best(self, mode: _Mode, instances: int, packs: bool) -> How:
        """The fastest of what is worth it and paid for; packing in doubt, whose estimate is the better one."""
        found = self._verdict(mode, instances)
        most = WORTH_IT * found.loop
        packs = packs and mode.minibatches >= mode.packs_again
        packs = packs and found.packing <= self._means(mode, "packed", found.loop - found.packed)
        if packs and found.packed <= most and found.packed <= found.batched:
            return "packed"
        if found.batched <= most and (
            found.building <= self._means(mode, "batched", found.loop - found.batched)
            or (
                mode.measured
                and found.batched + one_by_one_cost(found.counts, found.counts.late_calls) <= most
            )
        ):  # what is not built yet runs one by one, and may pay all the same
            return "batched"
        return "packed" if packs and found.packed <= most else "loop"

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
            if self.trial:  # once built
                self.trial = False
                counts = replace(counts, steps=counts.steps + counts.late_steps, late_steps=0)
            mode.measured[size] = counts
            mode.verdicts.clear()
            if self._best(mode, instances, False) == "loop" and not mode.again_at:
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
                elif mode.credit >= BUILD and not self.trial:
                    mode.credit -= BUILD
                    self._built[signatures[s]] = None
                else:
                    late.add(s)
            while len(self._built) > 4096:
                self._built.popitem(last=False)
            return frozenset(late)

    def pays_for_packing(self, *, whole: bool) -> bool:
        """Whether a function of packed rows may be built now: of one call in the middle of a recording, or another one
        of the whole forward, for sizes that the first is not for."""
        with self._lock:
            mode = self.building
            if mode is None:
                return True
            cost = packing_cost(mode.seen.eager) if whole else importing() + PACKING + PACKING_CALL
            if self.trial or mode.credit < cost:
                return False
            mode.credit -= cost
            return True

    def looped(self, *, grad: bool) -> int:
        """How many minibatches ran the plain loop."""
        return self._modes[grad].looped

    def packed(self, *, grad: bool) -> int:
        """How many minibatches were packed."""
        return self._modes[grad].packed

    # -- what is said -------------------------------------------------------------------------------

    def warning(self, *, grad: bool) -> str:
        """What to warn of once, else ""."""
        mode = self._modes[grad]
        if self.warned or mode.looped < WARN:
            return ""
        self.warned = True
        if mode.seen.derivatives:
            return f"its minibatches run the plain loop: {DERIVATIVES}"
        return (
            "its minibatches run the plain loop, which is estimated to be faster than batching them; "
            "fxbatch.explain(...).strategy says why, adaptive=False batches all the same"
        )

    def describe(self, instances: int, *, grad: bool) -> str:
        """What is chosen for minibatches of this size, and what would change it."""
        with self._lock:
            mode = self._modes[grad]
            if not mode.seen.instances:
                return "the first of them will choose: batched, or one by one where counts say that this is faster"
            found = self._verdict(mode, instances)
            counts, loop = found.counts, found.loop
            both = f"{found.batched / 1e3:.2g} ms batched, {loop / 1e3:.2g} ms one by one, by counts"
            how = self._best(mode, instances, mode.packs)
            if how == "packed":
                return f"packed rows: {found.packed / 1e3:.2g} ms, {loop / 1e3:.2g} ms one by one, by counts"
            if how == "batched":
                return f"a batch: {both}"
            if found.batched <= WORTH_IT * loop:
                need = (found.building - self._means(mode, "batched", found.loop - found.batched)) / max(
                    1.0, LATER_CREDIT * loop
                )
                missing = round(found.building / BUILD)
                what = f"about {missing} operation{'s have' if missing > 1 else ' has'} to be built first"
                return f"the plain loop: {both}, but {what}, which about {max(1, round(need))} more minibatches earn"
            if mode.seen.derivatives:
                return f"the plain loop: {DERIVATIVES}"
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
