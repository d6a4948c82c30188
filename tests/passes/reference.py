"""Brute force: what schedules must satisfy and how programs run, sharing no code with the passes.

sources(program)                     # for each call, the calls whose values it reads
run_by_hand(program, known)          # {value id: tensor}
check_schedule(program, schedule)    # AssertionError unless it is one
"""

from __future__ import annotations

import heapq
from typing import Any

import torch

from fxbatch.ir import Program, Schedule


def layout(program: Program) -> tuple[list[list[int]], list[list[int]]]:
    """Values read and values made by each call, from the columns alone."""
    reads, makes, at, value = [], [], 0, program.known
    for s in program.sig.tolist():
        signature = program.signatures[s]
        reads.append(program.inputs[at : at + len(signature.inputs)].tolist())
        at += len(signature.inputs)
        makes.append(list(range(value, value + len(signature.outputs))))
        value += len(signature.outputs)
    return reads, makes


def sources(program: Program) -> list[list[int]]:
    """For each call, the calls whose values it reads."""
    reads, makes = layout(program)
    maker = {v: c for c, values in enumerate(makes) for v in values}
    return [[maker[v] for v in values if v in maker] for values in reads]


def is_constant(program: Program, call: int) -> bool:
    return program.signatures[program.sig[call]].operation.kind in ("constant", "number")


def depths_by_hand(program: Program) -> list[int]:
    """0 for constants, else one more than the deepest source, at least 1."""
    out: list[int] = []
    for call, before in enumerate(sources(program)):
        out.append(0 if is_constant(program, call) else 1 + max((out[p] for p in before), default=0))
    return out


def run_by_hand(program: Program, known: list[torch.Tensor]) -> dict[int, Any]:
    """Every value, call after call."""
    values: dict[int, Any] = dict(enumerate(known))
    nth: dict[int, int] = {}
    reads, makes = layout(program)
    for call, s in enumerate(program.sig.tolist()):
        signature = program.signatures[s]
        if is_constant(program, call):
            payload = program.constants[s][nth.get(s, 0)]
            nth[s] = nth.get(s, 0) + 1
            type_ = signature.outputs[0]
            made = [
                payload if isinstance(payload, torch.Tensor) else torch.tensor(payload, dtype=type_.dtype)
            ]
        else:
            made = signature.run([values[v] for v in reads[call]], [o.resolve() for o in signature.shared])
        values.update(zip(makes[call], made, strict=True))
    return values


def results_by_hand(program: Program, known: list[torch.Tensor]) -> list[torch.Tensor]:
    values = run_by_hand(program, known)
    return [values[v] for v in program.outputs.tolist()]


def check_schedule(program: Program, schedule: Schedule) -> None:
    """Each call once; one signature a step; sources in earlier steps; constants first, one step each."""
    step_of: dict[int, int] = {}
    offsets = schedule.offsets.tolist()
    for k in range(len(schedule)):
        calls = schedule.order[offsets[k] : offsets[k + 1]].tolist()
        assert calls, f"step {k} is empty"
        assert len({int(program.sig[c]) for c in calls}) == 1, f"step {k} mixes signatures"
        for c in calls:
            assert c not in step_of, f"call {c} runs twice"
            step_of[c] = k
    assert len(step_of) == len(program), "calls are missing"
    for call, before in enumerate(sources(program)):
        assert all(step_of[p] < step_of[call] for p in before), f"call {call} runs before its sources"
    first = sorted({step_of[c] for c in range(len(program)) if is_constant(program, c)})
    assert first == list(
        range(len({int(program.sig[c]) for c in range(len(program)) if is_constant(program, c)}))
    )


def lower_bound_by_hand(program: Program) -> int:
    """A signature, the most calls of it on one path, found path by path."""
    total = 0
    before = sources(program)
    for s in sorted(set(program.sig.tolist())):
        longest: list[int] = []
        for call, parents in enumerate(before):
            here = max((longest[p] for p in parents), default=0)
            longest.append(here + (int(program.sig[call]) == s))
        total += max(longest)
    return total


def fewest_steps(program: Program) -> int:
    """Steps of the best schedule of all, constants included."""
    constants = [is_constant(program, c) for c in range(len(program))]
    number = {c: n for n, c in enumerate(c for c, constant in enumerate(constants) if not constant)}
    parents = [[number[p] for p in before if p in number] for before in sources(program)]
    kept = [parents[c] for c in number]
    steps, exact = best_steps([int(program.sig[c]) for c in number], kept, 200_000)
    assert exact, "too many states"
    return steps + len({int(s) for s, constant in zip(program.sig, constants, strict=True) if constant})


def best_steps(sig: list[int], parents: list[list[int]], states: int) -> tuple[int, bool]:
    """Steps of the best schedule of calls with these signatures and sources, by A* over which calls have run; and
    whether that is so: after so many states it is what any schedule has at least.

    Only steps of all ready calls of a signature are tried: running a call earlier never makes others wait.
    """
    before = [sum(1 << p for p in set(found)) for found in parents]
    chains = _chains_by_hand(sig, parents)
    everything = (1 << len(sig)) - 1

    def bound(state: int) -> int:
        return sum(bool(calls & ~state) for calls in chains)

    best = {0: 0}
    queue = [(bound(0), 0, 0)]
    while True:
        least, steps, state = heapq.heappop(queue)
        if state == everything or len(best) > states:
            return least, state == everything
        if best[state] < -steps:
            continue
        ready: dict[int, int] = {}
        for c, s in enumerate(sig):
            if not state >> c & 1 and before[c] & ~state == 0:
                ready[s] = ready.get(s, 0) | 1 << c
        for calls in ready.values():
            after = state | calls
            if best.get(after, len(sig) + 1) > 1 - steps:
                best[after] = 1 - steps
                heapq.heappush(queue, (1 - steps + bound(after), steps - 1, after))


def _chains_by_hand(sig: list[int], parents: list[list[int]]) -> list[int]:
    """A signature and number n up to its longest chain: bits of the calls that head n calls of it on a path."""
    readers: list[list[int]] = [[] for _ in sig]
    for c, before in enumerate(parents):
        for p in before:
            readers[p].append(c)
    found = []
    for s in sorted(set(sig)):
        chain = [0] * len(sig)
        for c in reversed(range(len(sig))):
            chain[c] = max((chain[r] for r in readers[c]), default=0) + (sig[c] == s)
        mine = [c for c in range(len(sig)) if sig[c] == s]
        longest = max(chain[c] for c in mine)
        found += [sum(1 << c for c in mine if chain[c] > n) for n in range(longest)]
    return found
