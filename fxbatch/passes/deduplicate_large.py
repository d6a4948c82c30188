"""Program -> Program: `deduplicate` where it pays, the program as it is elsewhere. What `deduplicate="auto"` runs.

    rewrite = LargeDeduplicator()
    rewrite(program) is program     # few calls, few equal ones, or a structure that is planned once for all

What it costs is the pass, reads by index where rows stood in order, and a plan a minibatch: which calls are equal
is a matter of the data, so that two minibatches of one structure no longer have one plan.
"""

from __future__ import annotations

from collections import OrderedDict

from fxbatch.ir import Program
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.native import checksum

# Below this many calls the steps' own cost dominates, and fewer rows don't change that (benchmarks/rewrite_gains.py).
FEWEST_CALLS = 1000
# The share of the calls that must go: with 7 % (EWT) nothing was won, with 22 % (SST) 6 % of the step.
LEAST_SHARE = 0.125
REMEMBERED = 256

Structure = tuple[int, int]


def deduplicate_large(program: Program) -> Program:
    """The program with each computation once where it has many calls and enough of them are equal."""
    return program if len(program) < FEWEST_CALLS else deduplicate(program, least=LEAST_SHARE)


class LargeDeduplicator:
    """`deduplicate_large`, but a structure that comes with other data is left as it is from then on.

    Its plan is then made once, not once a minibatch. A minibatch that comes again, an epoch later, is no
    other data. Bounded; a structure is known by checksums: at worst one is left alone that could have shrunk.
    """

    def __init__(self) -> None:
        # The structure of the result; None where it came with other data.
        self._result: OrderedDict[Structure, Structure | None] = OrderedDict()

    def __call__(self, program: Program) -> Program:
        """The program itself, or a smaller one with its results."""
        if len(program) < FEWEST_CALLS:
            return program
        structure = _structure(program)
        missing: Structure = (-1, 0)
        before = self._result.pop(structure, missing)
        smaller = program if before is None else deduplicate_large(program)
        after = structure if smaller is program else _structure(smaller)
        changed = before is not missing and before != after
        self._result[structure] = None if changed else after
        if len(self._result) > REMEMBERED:
            self._result.popitem(last=False)
        return program if changed else smaller


def _structure(program: Program) -> Structure:
    return program.known, checksum(program.sig, program.inputs, program.outputs)
