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
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from fxbatch.ir import Program, Signature
from fxbatch.passes.find_blocks import Stream, find_blocks
from fxbatch.passes.frontier import CONSTANT_KINDS
from fxbatch.passes.fused_operation import Wiring, fused_signature


@dataclass(eq=False)
class Group:
    """Members of a block that become one call, if they are several; grows with what programs need."""

    members: tuple[int, ...]  # positions in the block
    slots: tuple[int, ...]  # flat input slots of the block that come from outside the group
    alias: dict[int, int]  # slot -> the first slot that reads the same value in every block so far
    outputs: list[int] = field(default_factory=list)  # flat output slots of the block that are read outside


@dataclass(eq=False)
class Block:
    """A run of signatures, how its inputs are wired inside, and the groups it is cut into.

    Flat input slots number the inputs of all members, flat output slots the outputs. `wired[slot]` is the
    flat output slot that an input comes from, -1 from outside the block. Each member is in one group;
    groups are in topological order.
    """

    signatures: tuple[Signature, ...]
    wired: tuple[int, ...]
    groups: list[Group]


@dataclass(eq=False)
class _Family:
    signatures: tuple[Signature, ...]
    calls: int
    blocks: list[Block]


@dataclass(eq=False)
class _Match:
    """Where a block occurs: calls [n, members], and the values of its flat input slots [n, slots]."""

    block: Block
    calls: np.ndarray
    values: np.ndarray


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
        stream = Stream(program)
        family = self._family(program, stream)
        if not family.blocks or not stream.ordered:
            return program
        found = [m for m in find_matches(program, stream, family.blocks) if len(m.calls)]
        return _Rewriter(program, self, found).run() if found else program

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

    def _family(self, program: Program, stream: Stream) -> _Family:
        present = np.flatnonzero(np.bincount(program.sig, minlength=len(program.signatures)))
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
        blocks = learn_blocks(program, stream) if stream.ordered else []
        self.families[key] = _Family(members, len(program), blocks)
        if len(self.families) > self.capacity:
            self.families.popitem(last=False)
        return self.families[key]


# -- learning ---------------------------------------------------------------------------------------


def learn_blocks(program: Program, stream: Stream) -> list[Block]:
    """The blocks of a program, longest first, each with the groups it is cut into."""
    blocks = []
    for sequence in sorted(find_blocks(program, stream), key=len, reverse=True):
        signatures = tuple(program.signatures[s] for s in sequence)
        calls = _occurrences(program, stream, signatures, np.zeros(len(stream.calls), bool))
        if not len(calls):
            continue
        wired = _wired(program, calls, _values(program, calls, signatures))
        rows, number = np.unique(wired, axis=0, return_counts=True)
        common = rows[int(np.argmax(number))]
        blocks.append(Block(signatures, tuple(common.tolist()), []))
    matches = find_matches(program, stream, blocks)
    recurrent_in, recurrent_out = _recurrences(program, matches)
    for number, match in enumerate(matches):
        if len(match.calls):
            match.block.groups = _cut(match, recurrent_in[number], recurrent_out[number])
    return [m.block for m in matches if m.block.groups]


def _recurrences(program: Program, matches: list[_Match]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A block: which input slots come from, and which members feed, blocks that depend on it in turn."""
    kind = len(matches) + program.sig.astype(np.int64)  # of each call: its block, or its signature
    for number, match in enumerate(matches):
        kind[match.calls] = number
    occurrence = np.arange(len(program))
    for match in matches:
        occurrence[match.calls] = match.calls[:, :1]
    made = program.inputs >= program.known
    source = program.call_of_value[program.inputs[made] - program.known]
    reader = program.reader[made]
    outside = occurrence[source] != occurrence[reader]
    source, reader = source[outside], reader[outside]
    width = len(matches) + len(program.signatures)
    pairs = np.unique(kind[source] * width + kind[reader])
    graph = nx.DiGraph()
    graph.add_nodes_from(range(width))
    graph.add_edges_from(zip((pairs // width).tolist(), (pairs % width).tolist(), strict=True))
    component = np.zeros(width, dtype=np.int64)
    for c, part in enumerate(nx.strongly_connected_components(graph)):
        component[sorted(part)] = c
    again = component[kind[source]] == component[kind[reader]]
    feeds = np.zeros(len(program), dtype=bool)
    feeds[source[again]] = True
    ins, outs = [], []
    for number, match in enumerate(matches):
        made = match.values >= program.known
        before = kind[program.call_of_value[np.maximum(match.values - program.known, 0)]]
        external = np.array(match.block.wired) < 0
        ins.append(((component[before] == component[number]) & made & external).any(axis=0))
        outs.append(feeds[match.calls].any(axis=0))
    return ins, outs


def _cut(match: _Match, recurrent_in: np.ndarray, recurrent_out: np.ndarray) -> list[Group]:
    """Members before, inside and after the recurrence; each part by its connected pieces."""
    block = match.block
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(block.signatures)))
    owner_in, owner_out = _owners(block)
    for slot, output in enumerate(block.wired):
        if output >= 0:
            graph.add_edge(owner_out[output], owner_in[slot])
    assert nx.is_directed_acyclic_graph(graph)
    waits, needed = set(), set()
    for slot in np.flatnonzero(recurrent_in).tolist():
        waits |= {owner_in[slot]} | nx.descendants(graph, owner_in[slot])
    for member in np.flatnonzero(recurrent_out).tolist():
        needed |= {member} | nx.ancestors(graph, member)
    part = [0 if k not in waits else 1 if k in needed else 2 for k in range(len(block.signatures))]
    inner = graph.to_undirected()
    inner.remove_edges_from([(a, b) for a, b in graph.edges if part[a] != part[b]])
    pieces = sorted(nx.connected_components(inner), key=min)
    if all(len(piece) == 1 for piece in pieces):
        return []
    piece_of = {k: n for n, piece in enumerate(pieces) for k in piece}
    order = nx.DiGraph([(piece_of[a], piece_of[b]) for a, b in graph.edges if piece_of[a] != piece_of[b]])
    order.add_nodes_from(range(len(pieces)))
    # Parts only feed later parts, and pieces of a part don't feed each other: no path leaves and re-enters.
    return [_group(match, tuple(sorted(pieces[n]))) for n in nx.lexicographical_topological_sort(order)]


def _group(match: _Match, members: tuple[int, ...]) -> Group:
    block = match.block
    owner_in, owner_out = _owners(block)
    inside = frozenset(members)
    slots = [
        slot
        for slot, output in enumerate(block.wired)
        if owner_in[slot] in inside and (output < 0 or owner_out[output] not in inside)
    ]
    alias: dict[int, int] = {}
    for n, slot in enumerate(slots):
        for other in slots[:n]:
            if other not in alias and (match.values[:, slot] == match.values[:, other]).all():
                alias[slot] = other
                break
    return Group(members, tuple(slots), alias)


def _owners(block: Block) -> tuple[list[int], list[int]]:
    """The member of each flat input slot, and of each flat output slot."""
    ins = [k for k, s in enumerate(block.signatures) for _ in s.inputs]
    outs = [k for k, s in enumerate(block.signatures) for _ in s.outputs]
    return ins, outs


# -- recognising ------------------------------------------------------------------------------------


def find_matches(program: Program, stream: Stream, blocks: list[Block]) -> list[_Match]:
    """Where each block occurs with its own wiring; no call is in two matches, longer blocks first."""
    taken = np.zeros(len(stream.calls), dtype=bool)
    matches = []
    for block in blocks:
        calls = _occurrences(program, stream, block.signatures, taken)
        values = _values(program, calls, block.signatures)
        good = (_wired(program, calls, values) == np.array(block.wired, dtype=np.int64)).all(axis=1)
        calls, values = calls[good], values[good]
        taken[stream.position[calls]] = True
        matches.append(_Match(block, calls, values))
    return matches


def _occurrences(
    program: Program, stream: Stream, signatures: tuple[Signature, ...], taken: np.ndarray
) -> np.ndarray:
    """int64 [n, members]: calls of consecutive stream positions with these signatures, in one instance."""
    length = len(signatures)
    number = {id(s): i for i, s in enumerate(program.signatures)}
    wanted = [number.get(id(s), -1) for s in signatures]
    nothing = np.zeros((0, length), dtype=np.int64)
    if min(wanted) < 0 or len(stream.calls) < length:
        return nothing
    count = np.bincount(stream.sig, minlength=len(program.signatures))
    rarest = min(range(length), key=lambda k: count[wanted[k]])
    start = np.flatnonzero(stream.sig == wanted[rarest]) - rarest
    start = start[(start >= 0) & (start + length <= len(stream.calls))]
    for k in range(length):
        start = start[(stream.sig[start + k] == wanted[k]) & ~taken[start + k]]
    start = start[stream.instance[start] == stream.instance[start + length - 1]]
    if len(start) > 1 and int(np.diff(start).min()) < length:
        start = _without_overlap(start, length)
    return stream.calls[start[:, None] + np.arange(length)] if len(start) else nothing


def _without_overlap(start: np.ndarray, length: int) -> np.ndarray:
    kept, free = [], -1
    for at in start.tolist():
        if at >= free:
            kept.append(at)
            free = at + length
    return np.array(kept, dtype=np.int64)


def _values(program: Program, calls: np.ndarray, signatures: tuple[Signature, ...]) -> np.ndarray:
    """int64 [n, slots]: the value that each flat input slot reads."""
    columns = [
        program.inputs[program.input_offsets[calls[:, k]] + i]
        for k, s in enumerate(signatures)
        for i in range(len(s.inputs))
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((len(calls), 0), dtype=np.int64)


def _wired(program: Program, calls: np.ndarray, values: np.ndarray) -> np.ndarray:
    """int64 [n, slots]: the flat output slot of the same block that an input reads, -1 if none does."""
    out = np.full(values.shape, -1, dtype=np.int64)
    flat = 0
    for k in range(calls.shape[1]):
        first = program.first_value[calls[:, k]]
        width = int(program.width[program.sig[calls[0, k]]]) if len(calls) else 0
        relative = values - first[:, None]
        here = (relative >= 0) & (relative < width)
        out[here] = flat + relative[here]
        flat += width
    return out


# -- rewriting --------------------------------------------------------------------------------------


class _Rewriter:
    """Puts fused calls in the place of matched ones."""

    def __init__(self, program: Program, fuser: Fuser, matches: list[_Match]) -> None:
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
                if len(group.members) == 1:
                    self.position[calls[:, 0]] = place
                    continue
                self.positions.append(place)
                self.gone[calls] = True
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

    def _fuse(self, match: _Match, group: Group, numbers: np.ndarray, outside: np.ndarray) -> None:
        program, block = self.program, match.block
        for slot, other in list(group.alias.items()):
            if (match.values[:, slot] != match.values[:, other]).any():
                del group.alias[slot]  # from now on they are two inputs
        owner_in, owner_out = _owners(block)
        first_out = _firsts([len(s.outputs) for s in block.signatures])
        made = [program.first_value[match.calls[:, k]] + (o - first_out[k]) for o, k in enumerate(owner_out)]
        for output, k in enumerate(owner_out):
            if k in group.members and output not in group.outputs and outside[made[output]].any():
                group.outputs.append(output)
        if not group.outputs:  # dead calls: any one output keeps the operation well formed
            group.outputs.append(next(o for o, k in enumerate(owner_out) if k in group.members))
        inputs = [slot for slot in group.slots if slot not in group.alias]
        signature = self.fuser.signature(_wiring(block, group, inputs, owner_in, owner_out, first_out))
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
