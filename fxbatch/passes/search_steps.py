"""Steps for signatures that wait for each other in turn: a beam search over which signature runs next.

Comes in: a Component, the calls of one strongly connected component of the signature graph. Goes out: the step
of each of its calls, and how many steps there are.

    component = cut_component(program, members)
    step, steps = search_steps(component, width=8)

A state is which calls have run. An action runs all ready calls of one signature: running fewer never helps. Kept
are the `width` best states of each level, by the steps that must still follow (a signature, its longest remaining
chain), then by the weight of the calls that remain, where calls with a long path before them weigh most. Many
different chains of calls have no schedule at that bound: a shortest common supersequence is what they need, which
is hard to find (Maier 1978), so wider beams are better and never exact for sure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from fxbatch.ir import Program
from fxbatch.passes.frontier import Frontier, grouped, peaks
from fxbatch.passes.lower_bound import chain_below, longest_chain
from fxbatch.passes.native import Native
from fxbatch.passes.survey import survey

WIDEST = 32
# What a search may cost: nanoseconds a call of the whole program, by the estimate of `affordable_width`.
BUDGET = 400
_MOST_PATHS = 1 << 24  # numbers that C may keep to cut a component out
_MOST_INPUTS = 65534  # of one call, that C can count


@dataclass(frozen=True, eq=False)
class Component:
    """Calls in recorded order, signatures numbered within the component, as are calls.

    `base[s] : base[s + 1]` are the places of signature s, a length of chain each, shortest first; `place` is
    that of the chain a call heads. Call c is read by `readers[offsets[c] : offsets[c + 1]]`.
    """

    calls: np.ndarray  # int64 [calls]: which of the program's
    sig: np.ndarray  # int32 [calls]
    place: np.ndarray  # int32 [calls]
    base: np.ndarray  # int64 [signatures + 1]
    offsets: np.ndarray  # int64 [calls + 1]
    readers: np.ndarray  # int64
    weight: np.ndarray  # int64 [calls], above 0
    mark: np.ndarray  # int64 [calls]: pseudo-random bits, to tell states apart

    @property
    def bound(self) -> int:
        """Steps that any schedule has at least."""
        return int(self.base[-1])


def cut_component(program: Program, members: np.ndarray) -> Component:
    """The component of these signatures."""
    calls = int(survey(program).counts[members].sum())
    if Native.loops is None or calls * (len(members) + 1) > _MOST_PATHS:
        return _cut_by_arrays(Frontier(program), members)
    number = np.full(len(program.signatures), -1, dtype=np.int64)
    number[members] = np.arange(len(members))
    which, height = np.empty(calls, dtype=np.int64), np.empty(calls, dtype=np.int64)
    sig, chain = np.empty(calls, dtype=np.int32), np.empty(calls, dtype=np.int32)
    offsets, readers = np.empty(calls + 1, dtype=np.int64), np.empty(len(program.inputs), dtype=np.int64)
    edges = Native.loops.cut(
        program.sig, program.width, program.arity, program.inputs, number,
        which, sig, chain, height, offsets, readers, program.known, len(members),
    )  # fmt: skip
    return _component(len(members), which, sig, chain, height, offsets, readers[:edges])


def _component(
    members: int,
    calls: np.ndarray,
    sig: np.ndarray,
    chain: np.ndarray,
    height: np.ndarray,
    offsets: np.ndarray,
    readers: np.ndarray,
) -> Component:
    longest = peaks(sig, chain, members)
    base = np.zeros(members + 1, dtype=np.int64)
    np.cumsum(longest, out=base[1:])
    place = (base[sig] + chain - 1).astype(np.int32)
    return Component(calls, sig, place, base, offsets, readers, _weights(height), _marks(len(calls)))


def _cut_by_arrays(frontier: Frontier, members: np.ndarray) -> Component:
    """What C does, over arrays."""
    program = frontier.program
    number = np.full(len(program.signatures), -1, dtype=np.int32)
    number[members] = np.arange(len(members))
    inside = number[program.sig] >= 0
    calls = np.flatnonzero(inside)
    edges = np.flatnonzero(inside[frontier.source] & inside[frontier.target])
    height = longest_chain(frontier, edges, inside)[calls].astype(np.int64)
    local = np.cumsum(inside) - 1
    offsets, order = grouped(local[frontier.source[edges]], len(calls))
    readers = local[frontier.target[edges]][order]
    chain = chain_below(frontier)[calls]
    return _component(len(members), calls, number[program.sig[calls]], chain, height, offsets, readers)


def _weights(height: np.ndarray) -> np.ndarray:
    """The fourth power of the path before each call, scaled so that sums stay whole numbers of 64 bits."""
    most = int(height.max(initial=1))
    scaled = height if most <= 1024 else np.maximum(height * 1024 // most, 1)
    return scaled**4


@functools.lru_cache(maxsize=8)
def _all_marks(room: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = np.arange(1, room + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def _marks(calls: int) -> np.ndarray:
    """int64 [calls]: the first numbers of SplitMix64."""
    return _all_marks(1 << max(calls - 1, 1).bit_length())[:calls]


def affordable_width(component: Component, calls: int) -> int:
    """How wide a search may be in a program of so many calls: measured for each state, 4 ns a call and reader, and
    at each level 20 ns a signature and 1 ns for 16 bytes of the state. Without the extension in C always 1."""
    if Native.loops is None:
        return 1
    n, signatures = len(component.calls), len(component.base) - 1
    level = (2 * n + 8 * component.bound) / 16 + 20 * signatures
    one = 4 * (n + len(component.readers)) + 1.3 * component.bound * level
    return max(1, min(WIDEST, int(BUDGET * calls / one)))


def search_steps(component: Component, width: int) -> tuple[np.ndarray, int]:
    """int64 [calls of the component]: the step of each; and the number of steps."""
    indegree = np.bincount(component.readers, minlength=len(component.calls))
    if Native.loops is None or int(indegree.max(initial=0)) > _MOST_INPUTS:
        return _search_by_lists(component, indegree, width)
    step = np.empty(len(component.calls), dtype=np.int64)
    c = component
    columns = (c.sig, c.place, c.offsets, c.readers, c.weight, c.mark, c.base)
    return step, Native.loops.search(*columns, step, width)


class _State:
    """Which calls have run, and what follows from it."""

    __slots__ = (
        "before",
        "bound",
        "hash",
        "marks",
        "ready",
        "remaining",
        "top",
        "value",
        "waiting",
        "weights",
    )

    def __init__(self, component: Component, indegree: np.ndarray) -> None:
        self.before: list[int] = indegree.tolist()
        self.remaining: list[int] = np.bincount(component.place, minlength=component.bound).tolist()
        self.waiting = [0] * component.bound
        self.top: list[int] = component.base[1:].tolist()
        self.ready: list[list[int]] = [[] for _ in self.top]
        self.weights, self.marks = [0] * len(self.top), [0] * len(self.top)  # of the ready calls, together
        self.bound = component.bound
        self.value = int(component.weight.sum())
        self.hash = 0

    def copy(self) -> _State:
        made = _State.__new__(_State)
        made.before, made.remaining, made.waiting = (
            self.before.copy(),
            self.remaining.copy(),
            self.waiting.copy(),
        )
        made.top, made.ready = self.top.copy(), [calls.copy() for calls in self.ready]
        made.weights, made.marks = self.weights.copy(), self.marks.copy()
        made.bound, made.value, made.hash = self.bound, self.value, self.hash
        return made


def _search_by_lists(component: Component, indegree: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """What C does, over plain lists."""
    search = _Search(component)
    first = _State(component, indegree)
    for call in np.flatnonzero(indegree == 0).tolist():
        search.make_ready(first, call)
    states, trail = [first.copy()], []
    while states[0].bound:
        kept: dict[int, tuple[int, int, int, int, int]] = {}
        for choice in sorted(search.choices(states)):
            if len(kept) < width:
                kept.setdefault(choice[4], choice)
        chosen = [(choice[2], choice[3]) for choice in kept.values()]
        children = [sum(parent == k for parent, _ in chosen) for k in range(len(states))]
        after = []
        for parent, action in chosen:
            children[parent] -= 1
            after.append(states[parent].copy() if children[parent] else states[parent])
            search.run(after[-1], action)
        states = after
        trail.append(chosen)
    step, k, actions = np.empty(len(component.calls), dtype=np.int64), 0, []
    for chosen in reversed(trail):
        k, action = chosen[k]
        actions.append(action)
    for level, action in enumerate(reversed(actions)):
        step[search.run(first, action)] = level
    return step, len(actions)


class _Search:
    """The component as lists, and what can be done with a state."""

    def __init__(self, component: Component) -> None:
        self.sig, self.place = component.sig.tolist(), component.place.tolist()
        self.weight, self.mark = component.weight.tolist(), component.mark.tolist()
        self.offsets, self.readers = component.offsets.tolist(), component.readers.tolist()
        self.base = component.base.tolist()

    def make_ready(self, state: _State, call: int) -> None:
        kind = self.sig[call]
        state.ready[kind].append(call)
        state.weights[kind] += self.weight[call]
        state.marks[kind] ^= self.mark[call]
        state.waiting[self.place[call]] += 1

    def choices(self, states: list[_State]) -> list[tuple[int, int, int, int, int]]:
        """(steps that must follow at least, weight that remains, state, signature, hash) of all actions."""
        found = []
        for k, state in enumerate(states):
            for s, calls in enumerate(state.ready):
                if not calls:
                    continue
                top = state.top[s]
                while top > self.base[s] and state.remaining[top - 1] == state.waiting[top - 1]:
                    top -= 1
                value, mark = state.value - state.weights[s], state.hash ^ state.marks[s]
                found.append((state.bound - (state.top[s] - top), value, k, s, mark))
        return found

    def run(self, state: _State, action: int) -> list[int]:
        """Run all ready calls of a signature, in place; which ones those were."""
        calls, state.ready[action] = state.ready[action], []
        state.value -= state.weights[action]
        state.hash ^= state.marks[action]
        state.weights[action] = state.marks[action] = 0
        for call in calls:
            state.remaining[self.place[call]] -= 1
            state.waiting[self.place[call]] -= 1
            for reader in self.readers[self.offsets[call] : self.offsets[call + 1]]:
                state.before[reader] -= 1
                if not state.before[reader]:
                    self.make_ready(state, reader)
        while state.top[action] > self.base[action] and not state.remaining[state.top[action] - 1]:
            state.top[action] -= 1
            state.bound -= 1
        return calls
