"""Program -> Schedule: the batching policies, and the number of steps that no schedule goes below.

    schedule = make_policy("lookahead")(program)
    len(schedule) >= lower_bound(program)
    depths(program)                       # int32 [calls]: 0 for constants, else 1 + the deepest input

depth (Looks et al. 2017, section 2): all calls of one signature and depth are one step, depths ascending.

agenda (Neubig, Goldberg & Dyer 2017, section 3.2): of the signatures with ready calls, the one whose remaining calls
have the lowest average depth goes first, with all of its ready calls; ties: cheap before heavy.

lookahead: component by component of the signature graph, which says whose calls read whose. Its strongly connected
components can run one after another, and no schedule does better than the best of each: what a component needs of
others has then been made, and nobody waits for its calls meanwhile. A component of one signature runs in as many
steps as its longest chain, which is the lower bound. In one of several, which wait for each other in turn, the next is
chosen greedily, in the spirit of ED-Batch (Chen et al. 2023, section 4): first a signature of which all calls are
ready that head its longest remaining chain, which shortens what any schedule of the rest needs by one, of these the one
of the step before, whose weights are in the cache; then the one whose ready calls have the longest paths before them.
Where that misses the lower bound, the agenda is tried as well and the better one taken. Nothing has to be trained.

none: every call is its own step, for comparisons.

The lower bound: calls of one signature on one path can't share a step, so a signature needs as many steps as its
longest chain; steps of different signatures are different steps. Constants need one step per signature.

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fxbatch.errors import OptionError
from fxbatch.ir import NOT_THERE, Program, Schedule, Signature
from fxbatch.passes.signature_graph import survey

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Shorts = cython.typedef(cython.const[cython.int][::1])
Flags = cython.typedef(cython.const[cython.uchar][::1])
Written = cython.typedef(cython.longlong[::1])
WrittenShorts = cython.typedef(cython.int[::1])


Policy = Callable[[Program], Schedule]


def make_policy(name: str) -> Policy:
    """The policy of that name. OptionError for an unknown one."""
    if name not in POLICIES:
        raise OptionError(f"schedule: unknown {name!r}; known are {', '.join(map(repr, SCHEDULES))}")
    return POLICIES[name]


def lower_bound(program: Program) -> int:
    """Steps that any schedule of the program has at least, constants included."""
    return int(longest_chains(program).sum())


def longest_chains(program: Program) -> np.ndarray:
    """int64 [signatures]: the most calls of each signature on one path; 1 where it only occurs."""
    facts = survey(program)
    chains = facts.longest.copy()
    for part in facts.graph.several:
        chains[part] = Component(program, part).chains
    return chains


# -- by depth ---------------------------------------------------------------------------------------


def depths(program: Program) -> np.ndarray:
    """int32 [calls]: the longest path from a constant to each call.

    Constants have depth 0; values of earlier phases count as constants; a call that reads only those,
    or nothing, has depth 1.
    """
    c = program.columns
    depth = np.empty(len(program), dtype=np.int32)
    _find_depths(program.sig, c.arity, c.constant, program.makers(program.inputs), depth)
    return depth


def _find_depths(sig: Shorts, arity: Ints, constant: Flags, source: Ints, depth: WrittenShorts) -> None:
    at = 0
    for c in range(sig.shape[0]):
        deepest = 0
        for i in range(at, at + arity[sig[c]]):
            if source[i] >= c:
                raise IndexError(NOT_THERE)
            if source[i] >= 0 and depth[source[i]] > deepest:
                deepest = depth[source[i]]
        at += arity[sig[c]]
        depth[c] = 0 if constant[sig[c]] else deepest + 1


def batch_by_depth(program: Program) -> Schedule:
    """One step a (depth, signature) pair that occurs, in that order."""
    return depth_schedule(program, depths(program), "depth")


def depth_schedule(program: Program, depth: np.ndarray, policy: str) -> Schedule:
    """The schedule of one step a (depth, signature) pair, for depths that are known already."""
    key = depth.astype(np.int64) * len(program.signatures) + program.sig
    count = np.bincount(key)
    present = np.flatnonzero(count)
    step = np.empty(len(count), dtype=np.int64)
    step[present] = np.arange(len(present))
    return schedule_from_steps(step[key], len(present), policy)


def schedule_from_steps(step_of_call: np.ndarray, steps: int, policy: str) -> Schedule:
    """The schedule in which call c runs in step `step_of_call[c]`; recorded order inside a step."""
    offsets, order = np.zeros(steps + 1, dtype=np.int64), np.empty(len(step_of_call), dtype=np.int64)
    _group(step_of_call, offsets, order)
    return Schedule(order, offsets, policy)


def _group(key: Ints, offsets: Written, order: Written) -> None:
    """Where each key begins, and the positions in order of key, stable: a count sort. `offsets` are zeros."""
    keys = offsets.shape[0] - 1
    for i in range(key.shape[0]):
        if not 0 <= key[i] < keys:
            raise IndexError(NOT_THERE)
        offsets[key[i] + 1] += 1
    for i in range(keys):
        offsets[i + 1] += offsets[i]
    for i in range(key.shape[0]):
        order[offsets[key[i]]] = i
        offsets[key[i]] += 1
    for i in range(keys, 0, -1):
        offsets[i] = offsets[i - 1]
    if keys > 0:
        offsets[0] = 0


# -- one call after another -------------------------------------------------------------------------


def steps_in_order(program: Program) -> Schedule:
    """One step a call; only constants, which are no launches of an operation, are put together."""
    constant = program.columns.constant[program.sig]
    present = np.flatnonzero(np.bincount(program.sig[constant], minlength=len(program.signatures)))
    rank = np.zeros(len(program.signatures), dtype=np.int64)
    rank[present] = np.arange(len(present))
    step = rank[program.sig]
    step[~constant] = len(present) + np.arange(len(program) - int(constant.sum()))
    return schedule_from_steps(step, len(present) + len(program) - int(constant.sum()), "none")


# -- by agenda --------------------------------------------------------------------------------------


def batch_by_agenda(program: Program) -> Schedule:
    """The agenda schedule; about 0.1 us a call."""
    c = program.columns
    step = np.zeros(len(program), dtype=np.int64)
    depth = depths(program)
    counts = survey(program).counts
    pairs = zip(program.signatures, counts.tolist(), strict=True)  # what is not called may read what is gone
    cost = np.array([cost_of(s) if called else 0 for s, called in pairs], dtype=np.int64)
    readers = Readers(program.sig, c.arity, c.constant, program.makers(program.inputs))
    steps = _run_agenda(program.sig, c.constant, depth, cost, counts, readers, step)
    return schedule_from_steps(step, steps, "agenda")


@cython.cclass
class Readers:
    """Who reads each call: calls reader[first[c] : first[c + 1]]. Reads of constants are left out."""

    first: Written
    reader: Written
    waits: Written  # of each call, how many of its inputs are made by calls that are no constants

    def __init__(self, sig: Shorts, arity: Ints, constant: Flags, source: Ints) -> None:
        at = 0
        calls = sig.shape[0]
        scratch: Written = np.zeros(2 * calls + 1 + source.shape[0], dtype=np.int64)
        self.first, self.waits = scratch[: calls + 1], scratch[calls + 1 : 2 * calls + 1]
        self.reader = scratch[2 * calls + 1 :]
        for i in range(source.shape[0]):
            if source[i] >= 0 and not constant[sig[source[i]]]:
                self.first[source[i] + 1] += 1
        for c in range(calls):
            self.first[c + 1] += self.first[c]
        for c in range(calls):
            for i in range(at, at + arity[sig[c]]):
                if source[i] >= 0 and not constant[sig[source[i]]]:
                    self.reader[self.first[source[i]]] = c
                    self.first[source[i]] += 1
                    self.waits[c] += 1
            at += arity[sig[c]]
        for c in range(calls, 0, -1):
            self.first[c] = self.first[c - 1]
        self.first[0] = 0


def _run_agenda(
    sig: Shorts, constant: Flags, depth: Shorts, cost: Ints, count: Ints, readers: Readers, step: Written
) -> Int:
    """The step of each call; -> steps. The ready calls of a signature are a list through `following`."""
    steps = 0
    signatures = count.shape[0]
    scratch: Written = np.zeros(3 * signatures + sig.shape[0], dtype=np.int64)
    ready: Written = scratch[:signatures]  # one more than a ready call of each
    left: Written = scratch[signatures : 2 * signatures]
    total: Written = scratch[2 * signatures : 3 * signatures]  # of the depths of the calls that are left
    following: Written = scratch[3 * signatures :]
    for s in range(signatures):
        left[s] = count[s]
        if constant[s] and count[s]:
            ready[s] = -1 - steps  # their steps come first
            steps += 1
    for c in range(sig.shape[0]):
        if constant[sig[c]]:
            step[c] = -1 - ready[sig[c]]
            continue
        total[sig[c]] += depth[c]
        if not readers.waits[c]:
            following[c] = ready[sig[c]]
            ready[sig[c]] = c + 1
    while True:
        chosen, lowest = -1, 0.0
        for s in range(signatures):
            if ready[s] > 0:
                mean = cython.cast(cython.double, total[s]) / cython.cast(cython.double, left[s])
                if chosen < 0 or mean < lowest or (mean == lowest and cost[s] < cost[chosen]):
                    chosen, lowest = s, mean
        if chosen < 0:
            return steps
        c = ready[chosen] - 1
        ready[chosen] = 0
        while c >= 0:
            step[c] = steps
            left[chosen] -= 1
            total[chosen] -= depth[c]
            for e in range(readers.first[c], readers.first[c + 1]):
                r = readers.reader[e]
                readers.waits[r] -= 1
                if not readers.waits[r]:
                    following[r] = ready[sig[r]]
                    ready[sig[r]] = r + 1
            c = following[c] - 1
        steps += 1


def cost_of(signature: Signature) -> int:
    """A rank of a call's work, for ties: elements of its shared operands and outputs."""
    lasting = [o for o in signature.shared if o.owner is not None or o.tensor is not None]
    return sum(math.prod(o.resolve().shape) for o in lasting) + sum(t.numel for t in signature.outputs)


# -- by lookahead -----------------------------------------------------------------------------------


def batch_by_lookahead(program: Program) -> Schedule:
    """The lookahead schedule, never of more steps than the agenda's; 0.02 us a call where no signatures wait for
    each other in turn, else up to 0.3."""
    facts = survey(program)
    if not facts.graph.several:
        return _in_turn(program, facts.before, facts.longest)
    before, length = facts.before.copy(), facts.longest.copy()
    bound = int(length.sum())
    for part in facts.graph.several:
        component = Component(program, part)
        bound += int(component.chains.sum()) - int(length[part].sum())
        length[part] = 0
        length[part[0]] = component.run(before)
    if int(length.sum()) > bound:
        other = batch_by_agenda(program)
        if len(other) < int(length.sum()):
            return Schedule(other.order, other.offsets, "lookahead")
    return _in_turn(program, before, length)


def _in_turn(program: Program, before: np.ndarray, length: np.ndarray) -> Schedule:
    """One component after another: `before` is a call's step in its own, `length` the steps, summed over its
    signatures."""
    members, first = survey(program).graph.turns
    order = np.empty(len(program.sig), dtype=np.int64)
    return Schedule(order, _take_turns(program.sig, before, length, members, first, order), "lookahead")


def _take_turns(
    sig: Shorts, before: Shorts, length: Ints, members: Ints, first: Ints, order: Written
) -> np.ndarray:
    """Write the calls step by step, parts of the signatures one after another; -> where each step begins."""
    steps = 0
    calls = sig.shape[0]
    scratch: Written = np.zeros(length.shape[0] + calls, dtype=np.int64)
    begin: Written = scratch[: length.shape[0]]
    step: Written = scratch[length.shape[0] :]
    for p in range(first.shape[0] - 1):
        of_part = steps
        for i in range(first[p], first[p + 1]):
            begin[members[i]] = of_part
            steps += length[members[i]]
    for c in range(calls):
        step[c] = begin[sig[c]] + before[c]
    offsets = np.zeros(steps + 1, dtype=np.int64)
    _group(step, offsets, order)
    return offsets


@cython.cclass
class Component:
    """The calls of some signatures that wait for each other in turn, numbered among themselves.

    A place is a signature and a length of chain: that of a call is how many calls of its own signature are on the
    longest path from it on. Each place takes a step of its own in any schedule, so their number is the lower bound.
    """

    calls: Written  # which of the program's
    kind: Written  # of each call its signature among the members
    place: Written
    weight: Written  # of each call, by the longest path from it on
    first: Written  # of each member where its places begin
    chains: np.ndarray  # int64 [members]: places of each
    members: Int
    n: Int
    readers: Readers

    def __init__(self, program: Program, part: list[int]) -> None:
        number = np.full(len(program.signatures), -1, dtype=np.int64)
        number[part] = np.arange(len(part))
        kinds = number[program.sig]
        calls = np.flatnonzero(kinds >= 0)
        local = np.cumsum(kinds >= 0) - 1
        source = program.makers(program.inputs)
        inside = (source >= 0) & (kinds[source] >= 0) if len(source) else source >= 0
        source = np.where(inside, local[source], -1)[np.repeat(kinds >= 0, program.arity[program.sig])]
        kind = kinds[calls]
        self.calls, self.kind, self.n, self.members = calls, kind, len(calls), len(part)
        arity, nobody = program.arity[np.array(part)], np.zeros(len(part), dtype=bool)
        self.readers = Readers(kind.astype(np.int32), arity, nobody, source)
        self.chains = np.zeros(self.members, dtype=np.int64)
        self.place, self.weight = np.empty(self.n, dtype=np.int64), np.empty(self.n, dtype=np.int64)
        self.first = np.zeros(self.members + 1, dtype=np.int64)
        self.find_places()

    @cython.cfunc
    def find_places(self) -> cython.void:
        """Each call's place and weight: the fourth power of its path, scaled so that sums stay below 2 ** 63."""
        most = 1
        path: Written = np.empty(self.n, dtype=np.int64)
        chains: Written = self.chains
        for k in range(self.members + 1):  # the last round counts calls of all members
            for c in range(self.n - 1, -1, -1):
                longest = 0
                for e in range(self.readers.first[c], self.readers.first[c + 1]):
                    longest = max(longest, path[self.readers.reader[e]])
                path[c] = longest + (self.kind[c] == k or k == self.members)
                if self.kind[c] == k:
                    self.place[c] = self.first[k] + path[c] - 1
                    chains[k] = max(chains[k], path[c])
                if k == self.members:
                    most = max(most, path[c])
            if k < self.members:
                self.first[k + 1] = self.first[k] + chains[k]
        for c in range(self.n):
            longest = path[c] if most <= 1024 else max(path[c] * 1024 // most, 1)
            self.weight[c] = longest * longest * longest * longest

    @cython.ccall
    def run(self, step: WrittenShorts) -> Int:
        """Write the step of each call among those of the component; -> steps."""
        steps = done = 0
        last = -1
        places = self.first[self.members]
        scratch: Written = np.zeros(3 * self.members + 2 * places + self.n, dtype=np.int64)
        tops: Written = scratch[: self.members]  # of each member, above its longest chain that remains
        weight: Written = scratch[self.members : 2 * self.members]  # of its ready calls
        ready: Written = scratch[2 * self.members : 3 * self.members]  # one more than a ready call of each
        scratch = scratch[3 * self.members :]
        remaining: Written = scratch[:places]  # calls that have not run, and of those the ready ones
        waiting: Written = scratch[places : 2 * places]
        following: Written = scratch[2 * places :]
        for k in range(self.members):
            tops[k] = self.first[k + 1]
        for c in range(self.n):
            remaining[self.place[c]] += 1
            if not self.readers.waits[c]:
                k = self.kind[c]
                waiting[self.place[c]] += 1
                weight[k] += self.weight[c]
                following[c] = ready[k]
                ready[k] = c + 1
        while done < self.n:
            chosen, best = -1, -1
            for k in range(self.members):
                if ready[k]:
                    top = tops[k]
                    while top > self.first[k] and remaining[top - 1] == waiting[top - 1]:
                        top -= 1
                    shorter = tops[k] - top
                    if shorter > 0 and k == last:
                        chosen = k
                        break
                    if chosen < 0 or shorter > best or (shorter == best and weight[k] > weight[chosen]):
                        chosen, best = k, shorter
            if chosen < 0:
                raise IndexError(NOT_THERE)
            last = chosen
            c = ready[chosen] - 1
            ready[chosen] = weight[chosen] = 0
            while c >= 0:
                remaining[self.place[c]] -= 1
                waiting[self.place[c]] -= 1
                step[self.calls[c]] = steps
                done += 1
                for e in range(self.readers.first[c], self.readers.first[c + 1]):
                    r = self.readers.reader[e]
                    self.readers.waits[r] -= 1
                    if not self.readers.waits[r]:
                        k = self.kind[r]
                        waiting[self.place[r]] += 1
                        weight[k] += self.weight[r]
                        following[r] = ready[k]
                        ready[k] = r + 1
                c = following[c] - 1
            while tops[chosen] > self.first[chosen] and not remaining[tops[chosen] - 1]:
                tops[chosen] -= 1
            steps += 1
        return steps


# `fold` batches by depth too, but a program that `add_pass_through_calls` has rewritten before.
POLICIES: dict[str, Policy] = {
    "depth": batch_by_depth,
    "agenda": batch_by_agenda,
    "lookahead": batch_by_lookahead,
    "none": steps_in_order,
}
SCHEDULES = (*POLICIES, "fold")
