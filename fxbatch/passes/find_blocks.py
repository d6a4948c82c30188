"""Program -> the runs of calls that always occur together, found in the recorded order.

    stream = Stream(program)                 # calls that are no constants, instance after instance
    find_blocks(program, stream)             # [(3, 4, 5, 5, 6), ...]: signatures in recorded order

Straight-line code of a user records the same calls one after another each time it runs. Two neighbours
become one run when each occurs only with the other; a cheap call (one without shared operands) also joins
a neighbour that never occurs without it and that it reads or feeds, since pointwise work needs no large
batches. A consecutive run of a topological order can never be left and entered again by a path, so every
run may become one operation.
"""

from __future__ import annotations

import numpy as np
from torch import nn
from torch.nn import functional as F

from fxbatch.ir import CONSTANT_KINDS, Program, Signature
from fxbatch.passes.frontier import source_calls

# Fewer occurrences than these are no evidence: a fused operation costs a trace and a compilation.
MUTUAL = 4
CHEAP = 8
# Longest run, in calls; and how much of a program is looked at.
LONGEST = 128
SAMPLE = 30000


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
        source = source_calls(program)
        self.source = np.where(source >= 0, self.position[source], -1)  # position, of each input entry
        self.reader = self.position[program.reader]

    @property
    def ordered(self) -> bool:
        """Whether readers come after what they read, and read their own instance only."""
        edge = self.source >= 0
        source, reader = self.source[edge], self.reader[edge]
        return bool((source < reader).all() and (self.instance[source] == self.instance[reader]).all())


def find_blocks(program: Program, stream: Stream) -> list[tuple[int, ...]]:
    """The signature sequences of runs of two calls or more, in order of first occurrence."""
    if len(stream.calls) < 2 * MUTUAL:
        return []
    return _Merger(program, stream).run()


def fusible(signature: Signature) -> bool:
    """Whether a call may become part of a larger operation.

    Not what runs unbatched, nor pass-throughs, nor embeddings: their gradients are sparse or accumulated
    apart, and a lookup gains nothing from company.
    """
    target = signature.operation.target
    embeds = isinstance(target, nn.Embedding | nn.EmbeddingBag) or target in (F.embedding, F.embedding_bag)
    return not (signature.reason or signature.operation.identity or embeds)


class _Merger:
    """Neighbouring runs are merged, pair by pair, until no pair qualifies."""

    def __init__(self, program: Program, stream: Stream) -> None:
        n = min(len(stream.calls), SAMPLE)
        if n < len(stream.calls):  # whole instances only
            n = max(int(np.searchsorted(stream.instance, stream.instance[n])), MUTUAL)
        self.kinds: list[tuple[int, ...]] = [(s,) for s in range(len(program.signatures))]
        signatures = program.signatures
        self.cheap = [not s.shared for s in signatures]
        self.free = [fusible(s) for s in signatures]
        self.modes = [s.modes for s in signatures]
        self.token, self.instance = stream.sig[:n].copy(), stream.instance[:n]
        self.start = np.arange(n)
        edge = (stream.source >= 0) & (stream.reader < n)
        self.source, self.reader = stream.source[edge], stream.reader[edge]

    def run(self) -> list[tuple[int, ...]]:
        while (pair := self._best()) is not None:
            self._merge(*pair)
        found = dict.fromkeys(self.token.tolist())
        return [self.kinds[t] for t in found if len(self.kinds[t]) > 1]

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
