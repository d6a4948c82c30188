"""Program -> Program in which calls that always occur together are one call of a fused operation.

    v1 = s1 linear(v0)                      v1, v2 = s4 fused:linear+chunk+sigmoid(v0)
    v2, v3 = s2 chunk(v1)         ==>
    v4 = s3 sigmoid(v2)

    fuser = Fuser()                # one a decorated callable: it keeps what it has learned
    program = fuser(program)

Runs of calls are learned once for a family of programs (the set of signatures that occur) and are then
recognised in every program of the family. A run is cut where a recurrence enters and leaves it: work that
does not wait for the recurrence, and work that nothing of the recurrence waits for, are operations of
their own, so that they are still batched over all time steps. Unconnected work stays apart.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from fxbatch.ir import CONSTANT_KINDS, Program, Signature
from fxbatch.passes.find_blocks import Stream
from fxbatch.passes.fused_operation import Wiring, fused_signature
from fxbatch.passes.fusion_blocks import Block, Group, Match, find_matches, learn_blocks, owners


@dataclass(eq=False)
class _Family:
    signatures: tuple[Signature, ...]
    calls: int
    blocks: list[Block]


class Fuser:
    """Fuses programs; learns blocks once a family and keeps the fused Signatures for good (bounded)."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.hits = self.misses = 0
        self.families: OrderedDict[tuple[int, ...], _Family] = OrderedDict()
        self.made: OrderedDict[Hashable, Signature] = OrderedDict()

    def __call__(self, program: Program) -> Program:
        """The program with fused calls; the same object when nothing is fused."""
        if len(program) < 2:
            return program
        family = self._family(program)
        if not family.blocks:
            return program
        stream = Stream(program)
        if not stream.ordered:
            return program
        found = [m for m in find_matches(program, stream, family.blocks) if len(m.calls)]
        return _Rewriter(program, self, found).run() if found else program

    def refuse(self, signature: Signature) -> None:
        """Don't make this fused operation again: it turned out not to batch, while its members may."""
        for family in self.families.values():
            for block in family.blocks:
                for group in block.groups:
                    if any(made is signature for made in group.made):
                        group.refused = True

    def clear(self) -> None:
        """Forget what was learned; fused operations are made anew."""
        self.families.clear()
        self.made.clear()
        self.hits = self.misses = 0

    def signature(self, wiring: Wiring) -> Signature:
        """The Signature of a wiring: the same object for the same wiring."""
        key = (tuple(map(id, wiring.members)), wiring.reads, wiring.outputs)
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = fused_signature(wiring)
            if len(self.made) > 4 * self.capacity:
                self.made.popitem(last=False)
        return found

    def _family(self, program: Program) -> _Family:
        present = np.bincount(program.sig).nonzero()[0]  # a survey would be of calls that may still go
        members = tuple(
            program.signatures[s]
            for s in present.tolist()
            if program.signatures[s].operation.kind not in CONSTANT_KINDS
        )
        key = tuple(map(id, members))  # the entry holds the signatures, so their ids stay theirs
        found = self.families.get(key)
        if found is not None and len(program) < 4 * found.calls:
            self.hits += 1
            self.families.move_to_end(key)
            return found
        self.misses += 1
        stream = Stream(program)
        blocks = learn_blocks(program, stream) if stream.ordered else []
        self.families[key] = _Family(members, len(program), blocks)
        if len(self.families) > self.capacity:
            self.families.popitem(last=False)
        return self.families[key]


class _Rewriter:
    """Puts fused calls in the place of matched ones."""

    def __init__(self, program: Program, fuser: Fuser, matches: list[Match]) -> None:
        self.program, self.fuser, self.matches = program, fuser, matches
        self.signatures = list(program.signatures)
        self.gone = np.zeros(len(program), dtype=bool)
        # All calls of a block go to the place of its last one, in the order of the block's groups.
        self.ranks = 1 + max(len(m.block.groups) for m in matches)
        self.position = np.arange(len(program)) * self.ranks
        self.positions: list[np.ndarray] = []  # of fused calls, as all below
        self.sigs: list[np.ndarray] = []
        self.inputs: list[np.ndarray] = []
        self.instances: list[np.ndarray] = []
        self.call_of = np.full(program.values, -1, dtype=np.int64)
        self.call_of[program.known :] = program.call_of_value
        self.output_of = np.zeros(program.values, dtype=np.int64)
        self.output_of[program.known :] = (
            np.arange(program.known, program.values) - program.first_value[program.call_of_value]
        )
        self.added = len(program)

    def run(self) -> Program:
        self._fuse_all()
        return self._assemble()

    def _fuse_all(self) -> None:
        group_of = np.arange(len(self.program))  # of each call: itself, or a number a fused call
        jobs = []
        for match in self.matches:
            for rank, group in enumerate(match.block.groups):
                calls = match.calls[:, list(group.members)]
                place = match.calls[:, -1] * self.ranks + rank
                if len(group.members) == 1 or group.refused:
                    self.position[calls] = place[:, None]
                    continue
                self.gone[calls] = True
                self.positions.append(place)
                numbers = self.added + np.arange(len(calls))
                group_of[calls] = numbers[:, None]
                self.added += len(calls)
                jobs.append((match, group, numbers))
        outside = self._read_outside(group_of)
        for match, group, numbers in jobs:
            self._fuse(match, group, numbers, outside)

    def _read_outside(self, group_of: np.ndarray) -> np.ndarray:
        """bool [values]: whether a result needs it, or a call that is not fused with its maker."""
        program = self.program
        outside = np.zeros(program.values, dtype=bool)
        outside[program.outputs] = True
        maker = self.call_of[program.inputs]
        crossing = (maker < 0) | (group_of[maker] != group_of[program.reader])
        outside[program.inputs[crossing]] = True
        return outside

    def _fuse(self, match: Match, group: Group, numbers: np.ndarray, outside: np.ndarray) -> None:
        program, block = self.program, match.block
        for slot, other in list(group.alias.items()):
            if (match.values[:, slot] != match.values[:, other]).any():
                del group.alias[slot]  # from now on they are two inputs
        owner_in, owner_out = owners(block)
        first_out = _firsts([len(s.outputs) for s in block.signatures])
        made = [program.first_value[match.calls[:, k]] + (o - first_out[k]) for o, k in enumerate(owner_out)]
        for output, k in enumerate(owner_out):
            if k in group.members and output not in group.outputs and outside[made[output]].any():
                group.outputs.append(output)
        if not group.outputs:  # dead calls: any one output keeps the operation well formed
            group.outputs.append(next(o for o, k in enumerate(owner_out) if k in group.members))
        inputs = [slot for slot in group.slots if slot not in group.alias]
        signature = self.fuser.signature(_wiring(block, group, inputs, owner_in, owner_out, first_out))
        if not any(made is signature for made in group.made):
            group.made.append(signature)
        columns = [match.values[:, slot] for slot in inputs]
        self.sigs.append(np.full(len(numbers), self._number(signature)))
        self.inputs.append(np.stack(columns, axis=1).reshape(-1) if columns else np.zeros(0, np.int64))
        self.instances.append(program.instance[match.calls[:, 0]])
        for j, output in enumerate(group.outputs):
            self.call_of[made[output]] = numbers
            self.output_of[made[output]] = j

    def _number(self, signature: Signature) -> int:
        if signature not in self.signatures[len(self.program.signatures) :]:
            self.signatures.append(signature)
        return self.signatures.index(signature, len(self.program.signatures))

    def _assemble(self) -> Program:
        program = self.program
        kept = np.flatnonzero(~self.gone)
        number = np.concatenate([kept, np.arange(len(program), self.added)])
        position = np.concatenate([self.position[kept], *self.positions])
        sig = np.concatenate([program.sig[kept], *self.sigs]).astype(np.int32)
        entries = np.repeat(~self.gone, program.arity[program.sig])
        inputs = np.concatenate([program.inputs[entries], *self.inputs])
        instance = np.concatenate([program.instance[kept], *self.instances]).astype(np.int32)
        order = np.argsort(position, kind="stable")
        arity = np.array([len(s.inputs) for s in self.signatures], dtype=np.int64)
        width = np.array([len(s.outputs) for s in self.signatures], dtype=np.int64)
        first = np.full(self.added + 1, -1, dtype=np.int64)
        ordered = sig[order]
        first[number[order]] = program.known + np.cumsum(width[ordered]) - width[ordered]
        value = first[self.call_of] + self.output_of
        value[: program.known] = np.arange(program.known)
        count = arity[sig]
        start = (np.cumsum(count) - count)[order]
        count = count[order]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return dataclasses.replace(
            program,
            signatures=tuple(self.signatures),
            sig=ordered,
            inputs=value[inputs[np.repeat(start, count) + within]],
            instance=instance[order],
            outputs=value[program.outputs],
        )


def _firsts(counts: list[int]) -> list[int]:
    out, total = [], 0
    for n in counts:
        out.append(total)
        total += n
    return out


def _wiring(
    block: Block,
    group: Group,
    inputs: list[int],
    owner_in: list[int],
    owner_out: list[int],
    first_out: list[int],
) -> Wiring:
    """The group as members, reads and outputs in terms of itself."""
    first_in = _firsts([len(s.inputs) for s in block.signatures])
    place = {k: n for n, k in enumerate(group.members)}
    reads = []
    for k in group.members:
        row = []
        for i in range(len(block.signatures[k].inputs)):
            slot = first_in[k] + i
            if slot in group.slots:
                row.append((-1, inputs.index(group.alias.get(slot, slot))))
            else:
                output = block.wired[slot]
                row.append((place[owner_out[output]], output - first_out[owner_out[output]]))
        reads.append(tuple(row))
    outputs = tuple((place[owner_out[o]], o - first_out[owner_out[o]]) for o in group.outputs)
    return Wiring(tuple(block.signatures[k] for k in group.members), tuple(reads), outputs)
