"""Program -> Blocks: what runs of calls are wired like, how they are cut into groups, where they occur.

    blocks = learn_blocks(program, Stream(program))             # once a family of programs
    matches = find_matches(program, Stream(program), blocks)    # for every program of the family

A block is cut where a recurrence enters and leaves it, and into connected pieces; each piece is a group.
Legality is decided on the block's own graph (networkx): groups are in topological order, so no path
leaves a group and enters it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from fxbatch.ir import Program, Signature
from fxbatch.passes.find_blocks import Stream, find_blocks


@dataclass(eq=False)
class Group:
    """Members of a block that become one call, if they are several; grows with what programs need."""

    members: tuple[int, ...]  # positions in the block
    slots: tuple[int, ...]  # flat input slots of the block that come from outside the group
    alias: dict[int, int]  # slot -> the first slot that reads the same value in every block so far
    outputs: list[int] = field(default_factory=list)  # flat output slots of the block that are read outside
    made: list[Signature] = field(default_factory=list)  # the fused signatures it has become
    refused: bool = False  # its members stay calls of their own


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
class Match:
    """Where a block occurs: calls [n, members], and the values of its flat input slots [n, slots]."""

    block: Block
    calls: np.ndarray
    values: np.ndarray


def learn_blocks(program: Program, stream: Stream) -> list[Block]:
    """The blocks of a program, longest first, each with the groups it is cut into."""
    blocks = []
    for sequence in sorted(find_blocks(program, stream), key=len, reverse=True):
        signatures = tuple(program.signatures[s] for s in sequence)
        calls = _occurrences(program, stream, signatures, np.zeros(len(stream.calls), bool))
        if not len(calls):
            continue
        wired = _wired(program, calls, _values(program, calls, signatures))
        rows, times = np.unique(wired, axis=0, return_counts=True)
        common = rows[int(np.argmax(times))]
        blocks.append(Block(signatures, tuple(common.tolist()), []))
    matches = find_matches(program, stream, blocks)
    recurrent_in, recurrent_out = _recurrences(program, matches)
    for number, match in enumerate(matches):
        if len(match.calls):
            match.block.groups = _cut(match, recurrent_in[number], recurrent_out[number])
    return [m.block for m in matches if m.block.groups]


def _recurrences(program: Program, matches: list[Match]) -> tuple[list[np.ndarray], list[np.ndarray]]:
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
    for index, part in enumerate(nx.strongly_connected_components(graph)):
        component[sorted(part)] = index
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


def _cut(match: Match, recurrent_in: np.ndarray, recurrent_out: np.ndarray) -> list[Group]:
    """Members before, inside and after the recurrence; each part by its connected pieces."""
    block = match.block
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(block.signatures)))
    owner_in, owner_out = owners(block)
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


def _group(match: Match, members: tuple[int, ...]) -> Group:
    block = match.block
    owner_in, owner_out = owners(block)
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


def owners(block: Block) -> tuple[list[int], list[int]]:
    """The member of each flat input slot, and of each flat output slot."""
    ins = [k for k, s in enumerate(block.signatures) for _ in s.inputs]
    outs = [k for k, s in enumerate(block.signatures) for _ in s.outputs]
    return ins, outs


def find_matches(program: Program, stream: Stream, blocks: list[Block]) -> list[Match]:
    """Where each block occurs with its own wiring; no call is in two matches, longer blocks first."""
    taken = np.zeros(len(stream.calls), dtype=bool)
    matches = []
    for block in blocks:
        calls = _occurrences(program, stream, block.signatures, taken)
        values = _values(program, calls, block.signatures)
        good = (_wired(program, calls, values) == np.array(block.wired, dtype=np.int64)).all(axis=1)
        calls, values = calls[good], values[good]
        taken[stream.position[calls]] = True
        matches.append(Match(block, calls, values))
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
