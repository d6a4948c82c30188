"""Program -> Program in which calls that always occur together are one call of a fused operation.

    v1 = s1 linear(v0)                      v1, v2 = s4 fused:linear+chunk+sigmoid(v0)
    v2, v3 = s2 chunk(v1)         ==>
    v4 = s3 sigmoid(v2)

    fuser = Fuser()                # one a decorated callable: it keeps what it has learned
    program = fuser(program)

Runs of calls are learned once, and are then recognised in every program; they are looked for again where many calls
of a program have signatures that were not looked at before. A run is cut where a recurrence enters and leaves it:
work that does not wait for the recurrence, and work that nothing of the recurrence waits for, are operations of
their own, so that they are still batched over all time steps. Unconnected work stays apart.

First runs of calls are found in the recorded order (`find_blocks`), then what they are wired like, how they are cut
into groups and where they occur (`learn_blocks`, `find_matches`), then each group becomes one Signature.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fxbatch.caches import Cache
from fxbatch.ir import CONSTANT_KINDS, Modes, Operation, Program, SharedOperand, Signature
from fxbatch.passes.components import components
from fxbatch.passes.fuse_runs import FOUND, OUT_OF_ORDER, RunTables, find_runs, put_runs

# Fewer occurrences than these are no evidence: a fused operation costs a trace and a compilation.
MUTUAL = 4
CHEAP = 8
# Longest run, in calls; and how much of a program is looked at.
LONGEST = 128
SAMPLE = 8000
RELEARNED = 4  # times as many calls as runs were learned from: they are looked for anew
EVER_NEW = 8  # times that runs were looked for, from which on they are more rarely
MOST_BLOCKS = 512  # the longest, of all that were learned
# The share of the calls that must go: runs are looked for in each minibatch (benchmarks/rewrite_gains.py). In few calls
# that pays less: a Tree-LSTM of submodules at batch 1, of which a fifth went, took 1.11 of the time.
LEAST_SHARE, LEAST_OF_FEW, FEW = 0.125, 0.25, 1000


class Stream:
    """The calls that are no constants, instance after instance, and where each input comes from."""

    def __init__(self, program: Program) -> None:
        constant = np.array([s.operation.kind in CONSTANT_KINDS for s in program.signatures], dtype=bool)
        calls = np.flatnonzero(~constant[program.sig]) if len(program) else np.zeros(0, np.int64)
        instance = program.instance[calls]
        if len(calls) and (np.diff(instance) < 0).any():
            order = np.argsort(instance, kind="stable")
            calls, instance = calls[order], instance[order]
        self.calls = calls
        self.sig = program.sig[calls].astype(np.int64)
        self.instance = instance
        self.position = np.full(len(program), -1, dtype=np.int64)  # of each call, -1 for constants
        self.position[calls] = np.arange(len(calls))
        source = program.makers(program.inputs)
        self.source = np.where(source >= 0, self.position[source], -1)  # position, of each input entry
        self.reader = self.position[program.reader]

    @property
    def ordered(self) -> bool:
        """Whether readers come after what they read, and read their own instance only."""
        edge = self.source >= 0
        source, reader = self.source[edge], self.reader[edge]
        return bool((source < reader).all() and (self.instance[source] == self.instance[reader]).all())


def find_blocks(program: Program, stream: Stream) -> list[tuple[int, ...]]:
    """The signature sequences of runs of two calls or more, in order of first occurrence.

        stream = Stream(program)                 # calls that are no constants, instance after instance
        find_blocks(program, stream)             # [(3, 4, 5, 5, 6), ...]: signatures in recorded order

    Straight-line code of a user records the same calls one after another each time it runs. Two neighbours
    become one run when each occurs only with the other; a cheap call (one without shared operands) also joins
    a neighbour that never occurs without it and that it reads or feeds, since pointwise work needs no large
    batches. A consecutive run of a topological order can never be left and entered again by a path, so every
    run may become one operation.
    """
    if len(stream.calls) < 2 * MUTUAL:
        return []
    return _RunMerger(program, stream).run()


def fusible(signature: Signature) -> bool:
    """Whether a call may become part of a larger operation.

    Not what runs unbatched, nor pass-throughs, nor embeddings: their gradients are sparse or accumulated
    apart, and a lookup gains nothing from company.
    """
    target = signature.operation.target
    embeds = isinstance(target, nn.Embedding | nn.EmbeddingBag) or target in (F.embedding, F.embedding_bag)
    return not (signature.reason or signature.operation.identity or embeds)


def _modes(signature: Signature) -> Modes:
    """The modes that members of one operation have in common. Whether a module trains is a matter of its own body,
    which is as it was recorded; functions have no such mode."""
    return dataclasses.replace(signature.modes, training=False)


class _RunMerger:
    """Neighbouring runs are merged, pair by pair, until no pair qualifies."""

    def __init__(self, program: Program, stream: Stream) -> None:
        n = min(len(stream.calls), SAMPLE)
        if n < len(stream.calls):  # whole instances only
            n = max(int(np.searchsorted(stream.instance, stream.instance[n])), MUTUAL)
        self.kinds: list[tuple[int, ...]] = [(s,) for s in range(len(program.signatures))]
        signatures = program.signatures
        self.cheap = [not s.shared for s in signatures]
        self.free = [fusible(s) for s in signatures]
        self.modes = [_modes(s) for s in signatures]
        self.token, self.instance = stream.sig[:n].copy(), stream.instance[:n]
        self.start = np.arange(n)
        edge = (stream.source >= 0) & (stream.reader < n)
        self.source, self.reader = stream.source[edge], stream.reader[edge]

    def run(self) -> list[tuple[int, ...]]:
        while (pair := self._best()) is not None:
            self._merge(*pair)
        tokens = dict.fromkeys(self.token.tolist())
        return [self.kinds[t] for t in tokens if len(self.kinds[t]) > 1]

    def _best(self) -> tuple[int, int] | None:
        """The pair of the best rank, then the most frequent; ties: the first by number."""
        count = np.bincount(self.token, minlength=len(self.kinds))
        here, after = self.token[:-1], self.token[1:]
        inside = self.instance[self.start[:-1]] == self.instance[self.start[1:]]
        key = here * len(self.kinds) + after
        pairs, inverse, number = np.unique(key[inside], return_inverse=True, return_counts=True)
        links = np.bincount(inverse[self._linked()[inside]], minlength=len(pairs))
        best: tuple[int, int, int, int] | None = None
        for at in np.flatnonzero(number >= MUTUAL).tolist():
            a, b = divmod(int(pairs[at]), len(self.kinds))
            rank = self._rank(a, b, int(number[at]), int(links[at]), count)
            if rank is not None and (best is None or (rank, -int(number[at])) < best[:2]):
                best = (rank, -int(number[at]), a, b)
        return None if best is None else best[2:]

    def _rank(self, a: int, b: int, number: int, links: int, count: np.ndarray) -> int | None:
        """0: cheap b always follows a; 1: neither occurs without the other; 2: cheap a always precedes b.

        Following goes first: what a run ends with belongs to it, not to what comes next.
        """
        if a == b or not (self.free[a] and self.free[b]) or self.modes[a] != self.modes[b]:
            return None
        if len(self.kinds[a]) + len(self.kinds[b]) > LONGEST:
            return None
        always_after, always_before = number == count[a], number == count[b]
        evidence = number >= CHEAP and links == number
        if always_after and self.cheap[b] and evidence:
            return 0
        if always_after and always_before:
            return 1
        return 2 if always_before and self.cheap[a] and evidence else None

    def _linked(self) -> np.ndarray:
        """bool [tokens - 1]: whether the next run reads a value of this one."""
        run = np.searchsorted(self.start, self.source, side="right") - 1
        reader = np.searchsorted(self.start, self.reader, side="right") - 1
        linked = np.zeros(len(self.start), dtype=bool)
        linked[run[reader == run + 1]] = True
        return linked[:-1]

    def _merge(self, a: int, b: int) -> None:
        at = np.flatnonzero((self.token[:-1] == a) & (self.token[1:] == b))
        at = at[self.instance[self.start[at]] == self.instance[self.start[at + 1]]]
        self.kinds.append(self.kinds[a] + self.kinds[b])
        self.cheap.append(self.cheap[a] and self.cheap[b])
        self.free.append(True)
        self.modes.append(self.modes[a])
        self.token[at] = len(self.kinds) - 1
        keep = np.ones(len(self.token), dtype=bool)
        keep[at + 1] = False
        self.token, self.start = self.token[keep], self.start[keep]


@dataclass(eq=False)
class Group:
    """Members of a block that become one call, if they are several; grows with what programs need."""

    members: tuple[int, ...]  # positions in the block
    slots: tuple[int, ...]  # flat input slots of the block that come from outside the group
    alias: dict[int, int]  # slot -> the first slot that reads the same value in every block so far
    outputs: list[int] = field(default_factory=list)  # flat output slots of the block that are read outside


@dataclass(eq=False)
class CallBlock:
    """A run of signatures, how its inputs are wired inside, and the groups it is cut into.

    Flat input slots number the inputs of all members, flat output slots the outputs. `wired[slot]` is the
    flat output slot that an input comes from, -1 from outside the block. Each member is in one group;
    groups are in topological order.
    """

    signatures: tuple[Signature, ...]
    wired: tuple[int, ...]
    groups: list[Group]

    def __post_init__(self) -> None:
        # The member of each flat slot, and where the slots of each member begin.
        self.owner_in = [k for k, s in enumerate(self.signatures) for _ in s.inputs]
        self.owner_out = [k for k, s in enumerate(self.signatures) for _ in s.outputs]
        self.first_in = list(accumulate((len(s.inputs) for s in self.signatures), initial=0))
        self.first_out = list(accumulate((len(s.outputs) for s in self.signatures), initial=0))


@dataclass(eq=False)
class Match:
    """Where a block occurs: calls [n, members], and the values of its flat input slots [n, slots]."""

    block: CallBlock
    calls: np.ndarray
    values: np.ndarray


def learn_blocks(program: Program, stream: Stream) -> list[CallBlock]:
    """The blocks of a program, longest first, each with the groups it is cut into.

        blocks = learn_blocks(program, Stream(program))             # once a family; none where few calls would go
        matches = find_matches(program, Stream(program), blocks)    # for every program of the family

    A block is cut where a recurrence enters and leaves it, and into connected pieces; each piece is a group.
    Legality is decided on the block's own graph: groups are in topological order, so no path leaves a group and enters
    it again.
    """
    blocks = []
    for sequence in sorted(find_blocks(program, stream), key=len, reverse=True):
        signatures = tuple(program.signatures[s] for s in sequence)
        calls = _occurrences(program, stream, signatures, np.zeros(len(stream.calls), bool))
        if not len(calls):
            continue
        wired = _wired(program, calls, _values(program, calls, signatures))
        rows, times = np.unique(wired, axis=0, return_counts=True)
        common = rows[int(np.argmax(times))]
        blocks.append(CallBlock(signatures, tuple(common.tolist()), []))
    matches = find_matches(program, stream, blocks)
    recurrent_in, recurrent_out = _recurrences(program, matches) if matches else ([], [])
    for number, match in enumerate(matches):
        if len(match.calls):
            match.block.groups = _cut(match, recurrent_in[number], recurrent_out[number])
    cut = [m for m in matches if m.block.groups]
    gone = sum(len(m.calls) * (len(m.block.signatures) - len(m.block.groups)) for m in cut)
    share = LEAST_SHARE if len(stream.calls) > FEW else LEAST_OF_FEW
    return [m.block for m in cut] if gone >= share * len(stream.calls) else []


def _recurrences(program: Program, matches: list[Match]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A block: which input slots come from, and which members feed, blocks that depend on it in turn."""
    kind = len(matches) + program.sig.astype(np.int64)  # of each call: its block, or its signature
    for number, match in enumerate(matches):
        kind[match.calls] = number
    occurrence = np.arange(len(program))
    for match in matches:
        occurrence[match.calls] = match.calls[:, :1]
    source = program.makers(program.inputs)
    source, reader = source[source >= 0], program.reader[source >= 0]
    outside = occurrence[source] != occurrence[reader]
    source, reader = source[outside], reader[outside]
    width = len(matches) + len(program.signatures)
    pairs = np.unique(kind[source] * width + kind[reader])
    component = np.zeros(width, dtype=np.int64)
    edges = zip((pairs // width).tolist(), (pairs % width).tolist(), strict=True)
    for index, part in enumerate(components(width, edges)):
        component[part] = index
    again = component[kind[source]] == component[kind[reader]]
    feeds = np.zeros(len(program), dtype=bool)
    feeds[source[again]] = True
    ins, outs = [], []
    for number, match in enumerate(matches):
        before = program.makers(match.values)
        external = (before >= 0) & (np.array(match.block.wired) < 0)
        ins.append(((component[kind[before]] == component[number]) & external).any(axis=0))
        outs.append(feeds[match.calls].any(axis=0))
    return ins, outs


def _cut(match: Match, recurrent_in: np.ndarray, recurrent_out: np.ndarray) -> list[Group]:
    """Members before, inside and after the recurrence; each part by its connected pieces."""
    block = match.block
    owner_in, count = block.owner_in, len(block.signatures)
    edges = [(block.owner_out[o], owner_in[slot]) for slot, o in enumerate(block.wired) if o >= 0]
    assert all(a < b for a, b in edges), "members read what was made before them"
    waits = {owner_in[slot] for slot in np.flatnonzero(recurrent_in).tolist()}
    needed = set(np.flatnonzero(recurrent_out).tolist())
    for a, b in sorted(edges):  # all that lead to a member come before those that leave it
        if a in waits:
            waits.add(b)
    for a, b in sorted(edges, reverse=True):
        if b in needed:
            needed.add(a)
    part = [0 if k not in waits else 1 if k in needed else 2 for k in range(count)]
    inner = [(a, b) for a, b in edges if part[a] == part[b]]
    pieces = components(count, [*inner, *((b, a) for a, b in inner)])
    if len(pieces) == count:
        return []
    piece_of = {k: n for n, piece in enumerate(pieces) for k in piece}
    order = components(len(pieces), [(piece_of[a], piece_of[b]) for a, b in edges if part[a] != part[b]])
    # Parts only feed later parts, and pieces of a part don't feed each other: no path leaves and re-enters.
    return [_group(match, tuple(pieces[n])) for (n,) in order]


def _group(match: Match, members: tuple[int, ...]) -> Group:
    block = match.block
    slots = [
        slot
        for slot, output in enumerate(block.wired)
        if block.owner_in[slot] in members and (output < 0 or block.owner_out[output] not in members)
    ]
    alias: dict[int, int] = {}
    for n, slot in enumerate(slots):
        for other in slots[:n]:
            if other not in alias and (match.values[:, slot] == match.values[:, other]).all():
                alias[slot] = other
                break
    return Group(members, tuple(slots), alias)


def find_matches(program: Program, stream: Stream, blocks: list[CallBlock]) -> list[Match]:
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
    apart, free = [], -1
    for at in start.tolist():
        if at >= free:
            apart.append(at)
            free = at + length
    return np.array(apart, dtype=np.int64)


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


_NEED_STRIDES = frozenset({torch.Tensor.view, torch.Tensor.view_as})


@dataclass(frozen=True)
class Wiring:
    """The body of a fused operation: members in order, where each of their inputs comes from, what it gives.

        wiring = Wiring(members, reads, outputs)
        wiring(*inputs, *shared)                     # the members one after another
        wiring.signature().operation.target          # wiring

    reads[k][i] is (member, output) for an input that a member before k makes, else (-1, input of the
    whole). outputs are (member, output) pairs. Shared operands that several members use are one.
    """

    members: tuple[Signature, ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    outputs: tuple[tuple[int, int], ...]

    @functools.cached_property
    def shared(self) -> dict[tuple[int, str], SharedOperand]:
        """The shared operands of all members."""
        return {operand.key: operand for member in self.members for operand in member.shared}

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Inputs of the whole and shared operands in, its outputs out."""
        operands = dict(zip(self.shared, tensors[len(tensors) - len(self.shared) :], strict=True))
        results: list[Sequence[torch.Tensor]] = []
        for member, reads in zip(self.members, self.reads, strict=True):
            inputs = [tensors[at] if source < 0 else results[source][at] for source, at in reads]
            if member.operation.target in _NEED_STRIDES:  # values have none: `h.transpose(0, 1).contiguous()`
                inputs = [x.contiguous() for x in inputs]
            results.append(member.run(inputs, [operands[operand.key] for operand in member.shared]))
        return [results[k][j] for k, j in self.outputs]

    def signature(self) -> Signature:
        """The Signature of the whole."""
        members = self.members
        inputs = {
            at: member.inputs[i]
            for member, reads in zip(members, self.reads, strict=True)
            for i, (source, at) in enumerate(reads)
            if source < 0
        }
        name = "+".join(dict.fromkeys(m.name.removeprefix("fused:") for m in members))
        operation = Operation(
            f"fused:{name}" if len(name) <= 60 else f"fused:{name[:57]}...",
            "graph",
            self,
            rule="calls that always occur together",
            random=any(m.operation.random for m in members),
        )
        return Signature(
            operation,
            tuple(inputs[i] for i in range(len(inputs))),
            tuple(members[k].outputs[j] for k, j in self.outputs),
            tuple(self.shared.values()),
            modes=dataclasses.replace(members[0].modes, training=any(m.modes.training for m in members)),
            location=next((m.location for m in members if m.location), ""),
        )


@dataclass(eq=False)
class _Learned:
    """The blocks that a program may have: its signatures, which of them it calls, and in how many calls."""

    signatures: tuple[Signature, ...]
    called: bytes
    calls: int
    blocks: list[CallBlock]
    tables: RunTables | None = None  # of the blocks
    pieces: _Pieces | None = None  # of the last program


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The calls that take the place of the runs of a program, as columns; `added`: their new signatures."""

    tables: RunTables  # of the runs
    occurring: bytes  # bool, of each run
    outside: bytes  # uint8, of each flat output of the runs
    added: tuple[Signature, ...]
    first: np.ndarray  # int64 [runs + 1]: of each run its first piece
    signature: np.ndarray  # int64 [pieces]
    read: tuple[np.ndarray, np.ndarray]  # flat slots that the pieces read, and where each piece's begin
    outputs: tuple[np.ndarray, np.ndarray]  # flat outputs, in the same way

    def fit(self, tables: RunTables, occurs: np.ndarray, outside: np.ndarray) -> bool:
        """Whether a program has the same runs, of which others read the same."""
        of_program = occurs.tobytes(), outside.tobytes()
        return self.tables is tables and (self.occurring, self.outside) == of_program


class Fuser:
    """Fuses programs; keeps the blocks and the fused Signatures that it has learned (bounded)."""

    def __init__(self) -> None:
        # By members: the Signature of each wiring of them; none where they stay calls.
        self.signatures: Cache[tuple[Signature, ...], dict[Wiring, Signature]] = Cache(
            "signatures of rewrites"
        )
        self.blocks: list[CallBlock] = []  # all that were learned, the longest first
        self.looked_at: Cache[Signature, int] = Cache("signatures in blocks")  # in how many calls
        self.learned = 0  # how often was cause to learn some
        self.last = _Learned((), b"", 0, [])

    def __call__(self, program: Program) -> Program:
        """The program with fused calls; the same object when nothing is fused."""
        if len(program.sig) < 2:
            return program
        family = self._learned(program)
        return self._put_runs(program, family) if family.blocks else program

    def _put_runs(self, program: Program, family: _Learned) -> Program:
        """The program with a call for each group of a block that occurs; itself where none does, or where its calls
        don't stand instance after instance."""
        c, signatures = program.columns, program.signatures
        tables = family.tables = family.tables or _tables(signatures, family.blocks)
        head, place = np.empty(len(program), dtype=np.int64), np.empty(len(program), dtype=np.int64)
        outside = np.zeros(int(tables.first_output[-1]), dtype=np.uint8)
        walked = find_runs(
            program.sig, program.instance, program.inputs, program.outputs, c.width, c.arity,
            c.constant.view(np.uint8), program.known, tables.begins, tables.member, tables.first_member,
            tables.wired, tables.first_slot, tables.alias, tables.first_output, head, place, outside,
        )  # fmt: skip
        if walked == OUT_OF_ORDER:
            return program
        if walked != FOUND:  # a slot reads something else than in all programs before: they are two then
            run = int(np.searchsorted(tables.first_slot, walked, side="right")) - 1
            for group in family.blocks[run].groups:
                group.alias.pop(walked - int(tables.first_slot[run]), None)
            family.tables = None
            return self._put_runs(program, family)
        occurring = np.bincount(program.sig[head[head >= 0]], minlength=len(signatures))
        occurs = occurring[tables.member[tables.first_member[:-1]]] > 0
        pieces = family.pieces  # another thread may put others there
        if pieces is None or not pieces.fit(tables, occurs, outside):
            pieces = family.pieces = self._pieces(family.blocks, tables, occurs, outside)
        if not pieces.added:
            return program
        sig, instance = np.empty_like(program.sig), np.empty_like(program.instance)
        inputs, outputs = np.empty_like(program.inputs), np.empty_like(program.outputs)
        calls, entries = put_runs(
            program.sig, program.instance, program.inputs, program.outputs, c.width, c.arity, program.known,
            tables.begins, tables.first_member, pieces.first, head, place, pieces.signature, *pieces.read,
            *pieces.outputs, sig, instance, inputs, outputs,
        )  # fmt: skip
        return dataclasses.replace(
            program,
            signatures=(*signatures, *pieces.added),
            sig=sig[:calls],
            instance=instance[:calls],
            inputs=inputs[:entries],
            outputs=outputs,
        )

    def _pieces(
        self, blocks: list[CallBlock], tables: RunTables, occurs: np.ndarray, outside: np.ndarray
    ) -> _Pieces:
        """What takes the place of the runs that occur, of whose outputs some are read outside."""
        added: list[Signature] = []
        rows: list[tuple[int, list[int], list[int]]] = []  # signature, slots that are read, outputs
        first = [0]
        for n, block in enumerate(blocks):
            if occurs[n]:
                asked = outside[tables.first_output[n] : tables.first_output[n + 1]].nonzero()[0].tolist()
                members = tables.member[tables.first_member[n] : tables.first_member[n + 1]].tolist()
                rows += self._pieces_of(block, members, asked, len(tables.begins), added)
            first.append(len(rows))
        return _Pieces(
            tables,
            occurs.tobytes(),
            outside.tobytes(),
            tuple(added),
            np.array(first, dtype=np.int64),
            np.array([row[0] for row in rows], dtype=np.int64),
            _flat([row[1] for row in rows]),
            _flat([row[2] for row in rows]),
        )

    def _pieces_of(
        self, block: CallBlock, members: list[int], asked: list[int], first: int, added: list[Signature]
    ) -> Iterator[tuple[int, list[int], list[int]]]:
        """The calls that take a run's place, in order: signature, flat slots that are read, flat outputs. members: the
        numbers of its signatures; asked: outputs that are read outside; new signatures are added, numbered from
        `first`."""
        for group in block.groups:
            alone = tuple(block.signatures[k] for k in group.members)
            if len(alone) == 1 or self.signatures.get(alone) == {}:
                for k in group.members:
                    slots, outputs = range(*block.first_in[k : k + 2]), range(*block.first_out[k : k + 2])
                    yield members[k], list(slots), list(outputs)
                continue
            mine = {o for o, k in enumerate(block.owner_out) if k in group.members}
            read_by_others = {
                o for o, k in zip(block.wired, block.owner_in, strict=True) if k not in group.members
            }
            needed = sorted(mine & {*asked, *read_by_others})
            group.outputs += [o for o in needed if o not in group.outputs]
            if not group.outputs:  # dead calls: any one output keeps the operation well formed
                group.outputs.append(min(mine))
            read = [slot for slot in group.slots if slot not in group.alias]
            signature = self.signature(_wiring(block, group, read))
            if signature not in added:
                added.append(signature)
            yield first + added.index(signature), read, list(group.outputs)

    def idle_below(self, program: Program) -> int:
        """Programs of these signatures with fewer calls are left as they are."""
        family = self._learned(program)
        return 0 if family.blocks else RELEARNED * family.calls

    def refuse(self, signature: Signature) -> None:
        """Don't make this fused operation again: it turned out not to batch, while its members may."""
        self.signatures.put(signature.operation.target.members, {})
        self.last.pieces = None

    def signature(self, wiring: Wiring) -> Signature:
        """The Signature of a wiring: the same object for the same wiring."""
        wirings = self.signatures.get(wiring.members) or self.signatures.put(wiring.members, {})
        if wiring not in wirings:
            wirings[wiring] = wiring.signature()
        return wirings[wiring]

    def _learned(self, program: Program) -> _Learned:
        counts = np.bincount(program.sig, minlength=len(program.signatures))
        marks, last = (counts > 0).tobytes(), self.last
        same = last.signatures is program.signatures and last.called == marks
        if same and len(program.sig) < RELEARNED * last.calls:
            return last
        pairs = zip(program.signatures, counts.tolist(), strict=True)
        here = {s: n for s, n in pairs if n and s.operation.kind not in CONSTANT_KINDS}
        if self._is_new(here):
            self._learn(program, here)
        blocks = [block for block in self.blocks if here.keys() >= set(block.signatures)]
        self.last = _Learned(program.signatures, marks, len(program), _told_apart(blocks))
        return self.last

    def _is_new(self, counts: dict[Signature, int]) -> bool:
        """Whether a good part of the calls has signatures that were looked at in fewer calls by far, or never. Where
        sizes of instances are part of signatures that is so again and again: then only ever more rarely."""
        seen = {s: self.looked_at.get(s) or 0 for s in counts}
        new = sum(n for s, n in counts.items() if n >= RELEARNED * seen[s] or seen[s] < min(n, CHEAP))
        if new < LEAST_SHARE * sum(counts.values()):
            return False
        self.learned += 1
        return self.learned <= EVER_NEW or self.learned.bit_count() == 1

    def _learn(self, program: Program, counts: dict[Signature, int]) -> None:
        """Look for blocks, which take the place of those of the same signatures."""
        stream = Stream(program)
        if stream.ordered:
            others = [b for b in self.blocks if not counts.keys() >= set(b.signatures)]
            blocks = sorted([*others, *learn_blocks(program, stream)], key=lambda b: -len(b.signatures))
            self.blocks = blocks[:MOST_BLOCKS]
        for signature, n in counts.items():
            self.looked_at.put(signature, max(n, self.looked_at.get(signature) or 0))


def _tables(signatures: Sequence[Signature], blocks: list[CallBlock]) -> RunTables:
    number = {id(s): n for n, s in enumerate(signatures)}
    return RunTables(
        [[number[id(s)] for s in block.signatures] for block in blocks],
        [block.wired for block in blocks],
        [{slot: o for group in block.groups for slot, o in group.alias.items()} for block in blocks],
        [len(block.owner_out) for block in blocks],
        len(signatures),
    )


def _told_apart(blocks: list[CallBlock]) -> list[CallBlock]:
    """Of blocks that begin with one signature the first, which is the longest: one walk finds where each begins."""
    first: dict[Signature, CallBlock] = {}
    for block in blocks:
        first.setdefault(block.signatures[0], block)
    return [block for block in blocks if first[block.signatures[0]] is block]


def _flat(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """int64: all of the rows, one after another; where each begins, and the end."""
    flat = np.array([x for row in rows for x in row], dtype=np.int64)
    return flat, np.array([0, *accumulate(map(len, rows))], dtype=np.int64)


def _wiring(block: CallBlock, group: Group, inputs: list[int]) -> Wiring:
    """The group as members, reads and outputs in terms of itself."""
    place = {k: n for n, k in enumerate(group.members)}

    def source(output: int) -> tuple[int, int]:
        k = block.owner_out[output]
        return place[k], output - block.first_out[k]

    def read(slot: int) -> tuple[int, int]:
        if slot in group.slots:
            return -1, inputs.index(group.alias.get(slot, slot))
        return source(block.wired[slot])

    reads = [tuple(map(read, range(block.first_in[k], block.first_in[k + 1]))) for k in group.members]
    members = tuple(block.signatures[k] for k in group.members)
    return Wiring(members, tuple(reads), tuple(map(source, group.outputs)))
