"""The rewrites of a program as one literal tuple, and the manager that runs them.

pipeline = Pipeline({"eliminate_dead", "fuse"})      # one a decorated callable
program = pipeline(program)
pipeline.records                                     # name, calls before and after, seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

from fxbatch.caches import Cache
from fxbatch.errors import OptionError
from fxbatch.ir import Program
from fxbatch.passes.deduplicate import FEWEST_CALLS, deduplicate, deduplicate_large
from fxbatch.passes.fuse import Fuser
from fxbatch.passes.select import eliminate_dead
from fxbatch.passes.signature_graph import survey
from fxbatch.passes.unstack_rows import RowUnstacker
from fxbatch.passes.unstack_sums import Unstacker
from fxbatch.verify import verify_program

ProgramPass = Callable[[Program], Program]
# Calls: with more, the passes take less time than finding the family, and with fewer `deduplicate_large` does nothing.
_FEW = FEWEST_CALLS

# Name, what makes the pass (some remember from minibatch to minibatch), why it stands where it stands.
PASSES: tuple[tuple[str, Callable[[], ProgramPass], str], ...] = (
    ("eliminate_dead", lambda: eliminate_dead, "first: what nobody needs costs all others time"),
    ("unstack_rows", RowUnstacker, "before unstack_sums: stacks that are taken apart are no more there"),
    ("unstack_sums", Unstacker, "before fuse: what it makes batches, and may be part of what is fused"),
    ("fuse", Fuser, "before deduplicate: it recognises runs inside an instance, which sharing breaks up"),
    ("deduplicate", lambda: deduplicate, "last: fused calls are fewer, and equal where their members are"),
    ("deduplicate_large", lambda: deduplicate_large, "in its place, where nobody said whether to"),
)


_IDLE_BELOW_FEW = ("eliminate_dead", "deduplicate_large")


class PassRecord(NamedTuple):
    """Counts and seconds of a pass on the last program."""

    name: str
    before: int  # calls
    after: int
    seconds: float
    constants: int = 0  # of the calls that went


class Pipeline:
    """The enabled passes, in the order of PASSES; `verify` checks the result of each."""

    def __init__(self, enabled: Collection[str], *, verify: bool = False) -> None:
        names = [name for name, _, _ in PASSES]
        for name in sorted(enabled):
            if name not in names:
                raise OptionError(f"unknown pass {name!r}; known are {', '.join(names)}")
        self.passes = {name: make() for name, make, _ in PASSES if name in enabled}
        self.verify = verify
        self._did: list[PassRecord] = []
        # By columns and who is called: programs of fewer calls that the passes after the first leave as they are.
        self._idle: Cache[Hashable, int] = Cache("idle passes")

    @property
    def records(self) -> tuple[PassRecord, ...]:
        """The records of all passes on the last program."""
        left = self._did[-1].after if self._did else 0
        others = [PassRecord(name, left, left, 0.0) for name in [*self.passes][len(self._did) :]]
        return (*self._did, *others)

    def __call__(self, program: Program) -> Program:
        """The program after all passes; an exception gets a note that names the pass."""
        did: list[PassRecord] = []
        calls, clock = len(program.sig), time.perf_counter()
        first, family = program, None
        for name, rewrite in self.passes.items():
            if len(did) == 1 and calls < _FEW:
                first, family = program, (program.columns, survey(program).present)
                if calls < (self._idle.get(family) or 0) and not self.verify:
                    self._did = did
                    return program
            before, start = calls, clock
            try:
                rewritten = rewrite(program)
                if self.verify:
                    verify_program(rewritten)
            except Exception as error:
                error.add_note(f"in pass {name}, on a program of {before} calls")
                raise
            constants = 0
            if rewritten is not program:
                constants = _constants(program) - _constants(rewritten)
                program, calls = rewritten, len(rewritten.sig)
            clock = time.perf_counter()
            did.append(PassRecord(name, before, calls, clock - start, constants))
        self._did = did
        if program is first and family is not None:
            others = [rewrite for name, rewrite in self.passes.items() if name not in _IDLE_BELOW_FEW]
            least = min(
                (x.idle_below(program) if hasattr(x, "idle_below") else 0 for x in others), default=_FEW
            )
            self._idle.put(family, least, program.columns.bytes)
        return program


def _constants(program: Program) -> int:
    return sum(map(len, program.constants.values()))
