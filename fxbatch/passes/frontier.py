"""The dependencies among the calls of a program, as columns, and how they become ready.

Comes in: a Program. Goes out: a Frontier, from which policies read depths and readers.

    frontier = Frontier(program)
    frontier.depth            # int32 [calls]: 0 for constants, else 1 + the deepest input
    frontier.narrow           # few calls a step: plain lists are faster than arrays

Constants (and lifted numbers) and values of earlier phases are always ready, so edges from them are
left out. Everything here is vectorised by frontier (all calls of one depth); programs whose frontiers
are narrow, and small ones, take loops over plain lists instead, which cost about 0.3 us a call there
where an array operation of a microsecond would serve only a few calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from fxbatch.ir import Program, Schedule, Signature
from fxbatch.passes.native import Native
from fxbatch.passes.survey import source_calls, survey

# Below this many calls, or this many calls a (depth, signature) group, lists are faster than arrays.
# Measured: about 0.5 us a call in lists, 25 us a step plus 0.1 us a call in arrays.
SMALL = 2000
NARROW = 48


class Frontier:
    """Readers, indegrees and depths of a program's calls; made once and shared by the policies."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.calls = len(program)
        self.constant = program.columns.constant[program.sig]
        source = source_calls(program)
        edge = source >= 0
        if self.calls:
            edge &= ~self.constant[source]
        self.source = source[edge]
        self.target = program.reader[edge]

    @functools.cached_property
    def indegree(self) -> np.ndarray:
        """int64 [calls]: edges from calls that are no constants (an operand used twice counts twice)."""
        return np.bincount(self.target, minlength=self.calls)

    @functools.cached_property
    def reader_offsets(self) -> np.ndarray:
        """int64 [calls + 1]: readers of call c are `readers[reader_offsets[c] : reader_offsets[c + 1]]`."""
        return self._by_source[0]

    @functools.cached_property
    def readers(self) -> np.ndarray:
        """int64: the calls that read each call, in recorded order, one entry an edge."""
        return self.target[self._by_source[1]]

    @functools.cached_property
    def _by_source(self) -> tuple[np.ndarray, np.ndarray]:
        return grouped(self.source, self.calls)

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """int32 [calls]: longest path from a constant; calls that read nothing else have depth 1."""
        if Native.loops is not None:
            depth = np.where(self.constant, 0, 1).astype(np.int32)
            Native.loops.longest_before(self.source, self.target, depth)
            return depth
        if self.calls < SMALL:
            return self._depth_by_call(None)
        return self._depth_by_frontier()

    @functools.cached_property
    def narrow(self) -> bool:
        """Whether loops over lists are faster here than arrays a step."""
        if self.calls < SMALL:
            return True
        signatures = len(self.program.signatures)
        key = self.depth.astype(np.int64) * signatures + self.program.sig
        groups = np.count_nonzero(np.bincount(key)) if key.max() < 8 * self.calls else len(np.unique(key))
        return bool(self.calls < NARROW * groups)

    def _depth_by_call(self, start: np.ndarray | None) -> np.ndarray:
        """One pass over the calls in recorded order, which is a topological order."""
        depth = [0 if c else 1 for c in self.constant.tolist()]
        if start is not None:
            depth = start.tolist()
        for source, target in zip(self.source.tolist(), self.target.tolist(), strict=True):
            below = depth[source]
            if below >= depth[target]:
                depth[target] = below + 1
        return np.array(depth, dtype=np.int32)

    def _depth_by_frontier(self) -> np.ndarray:
        depth = np.where(self.constant, 0, 1).astype(np.int32)
        indegree = self.indegree.copy()
        mark = np.empty(self.calls, dtype=np.int64)
        front = np.flatnonzero((indegree == 0) & ~self.constant)
        level, done = 1, 0
        while len(front):
            depth[front] = level
            done += len(front)
            if level % 32 == 0 and done < NARROW * level:
                return self._depth_by_call(None)  # narrow: every edge once is cheaper
            front = self.advance(front, indegree, mark)
            level += 1
        return depth

    def advance(self, calls: np.ndarray, indegree: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """The calls that become ready when `calls` have run; `indegree` is counted down in place.

        `mark` is scratch of one int64 a call, contents irrelevant.
        """
        if not len(self.readers):
            return self.readers
        if Native.loops is not None:
            ready = Native.loops.advance(calls, self.reader_offsets, self.readers, indegree, mark)
            return mark[:ready].copy()
        start = self.reader_offsets[calls]
        count = self.reader_offsets[calls + 1] - start
        end = np.cumsum(count)
        total = int(end[-1]) if len(end) else 0
        if total == len(calls) and int(count.max(initial=0)) == 1:
            reached = self.readers[start]
        else:
            reached = self.readers[np.repeat(start - (end - count), count) + np.arange(total)]
        np.subtract.at(indegree, reached, 1)
        ready = reached[indegree[reached] == 0]
        if len(ready) < 2:
            return ready
        position = np.arange(len(ready))
        mark[ready] = position  # a call that became ready by two edges is listed twice: keep one
        return ready[mark[ready] == position]


def count_signatures(program: Program) -> np.ndarray:
    """int64 [signatures]: how many calls of each signature there are."""
    return survey(program).counts


def stable_argsort(key: np.ndarray, bound: int) -> np.ndarray:
    """Stable argsort of small non-negative integers below `bound`; by radix where they fit 16 bits."""
    if bound <= 65536:
        return np.argsort(key.astype(np.uint16), kind="stable")
    low = np.argsort((key & 0xFFFF).astype(np.uint16), kind="stable")
    high = key >> 16
    if bound <= 1 << 32:
        return low[np.argsort(high[low].astype(np.uint16), kind="stable")]
    return np.argsort(key, kind="stable")


def grouped(key: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each of the keys 0 .. keys - 1 begins, and the positions in order of key, stable."""
    offsets = np.zeros(keys + 1, dtype=np.int64)
    if Native.loops is not None:
        order = np.empty(len(key), dtype=np.int64)
        Native.loops.group(key, offsets, order)
        return offsets, order
    np.cumsum(np.bincount(key, minlength=keys), out=offsets[1:])
    return offsets, stable_argsort(key, max(keys, 1))


def peaks(key: np.ndarray, number: np.ndarray, keys: int) -> np.ndarray:
    """int64 [keys]: the largest of the positive numbers of each key, 0 where it has none."""
    out = np.zeros(keys, dtype=np.int64)
    if Native.loops is not None:
        Native.loops.peak(key, number, out)
    else:
        np.maximum.at(out, key, number)
    return out


def schedule_from_steps(step_of_call: np.ndarray, steps: int, policy: str) -> Schedule:
    """The schedule in which call c runs in step `step_of_call[c]`; recorded order inside a step."""
    offsets, order = grouped(step_of_call, steps)
    return Schedule(order, offsets, policy)


def constant_steps(frontier: Frontier, step_of_call: np.ndarray) -> int:
    """Give the constants the first steps, one a signature; return how many there are."""
    program = frontier.program
    constants = np.flatnonzero(frontier.constant)
    if not len(constants):
        return 0
    sig = program.sig[constants]
    present = np.flatnonzero(np.bincount(sig, minlength=len(program.signatures)))
    rank = np.zeros(len(program.signatures), dtype=np.int64)
    rank[present] = np.arange(len(present))
    step_of_call[constants] = rank[sig]
    return len(present)


def cost_of(signature: Signature) -> int:
    """A rank of a call's work, for ties: elements of its shared operands and outputs."""
    shared = sum(_numel(operand.resolve().shape) for operand in signature.shared if _resolvable(operand))
    return shared + sum(t.numel for t in signature.outputs)


def _resolvable(operand: object) -> bool:
    return getattr(operand, "owner", None) is not None or getattr(operand, "tensor", None) is not None


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
