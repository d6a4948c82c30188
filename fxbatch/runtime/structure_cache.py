"""One cache for everything that is made from the structure of programs (plans, families, templates), and its entries.

    cache = StructureCache()
    plan = cache.get("plan", key, make, size)  # the key has all that the thing was made from, compared whole
    cache.clear()

Kinds: "plan" (with its schedule) by a program's content; "operations" (an OperationSet) by a program's signatures and
their compiled operations; "met" (those that ran last, a signature) by a program's signatures; "family" by a signature
graph; "template" by a family, the types of its shared operands and who needs gradients; "backward" (BackwardNeeds) by
operations and reached results; "gradients" (a GradientTemplate) by the operations that run in backward; "unrolled" (a
module) by content. The least recently used go first. All of it is bounded in bytes, and by the signatures and
operations that are called in it, which it keeps alive although their own caches may have dropped them: each counts
8 kB. A plan is kept from the second time on that its structure is met: structures that don't come again would push one
another out, and each minibatch would write to memory that was last used hundreds of minibatches before and is in no
cache of the processor.

A Family is the programs with one signature graph in which the same signatures are called, with or without gradients.
While the shared operands are of the types that they were (shapes, strides, who requires gradients), all that a new
program of it needs is a Template; which tensors they are, and where, is asked anew each time.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from fxbatch.caches import Cache, guard
from fxbatch.ir import Program, SharedOperand, Signature
from fxbatch.passes.plan import Slots, is_constant
from fxbatch.passes.select import checksum
from fxbatch.passes.signature_graph import Needs
from fxbatch.runtime.memory import Arrays
from fxbatch.runtime.operands import resolve_all, types_of
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.pointer_table import PointerTable

T = TypeVar("T")
Operands = dict[tuple[int, str], torch.Tensor]  # by SharedOperand.key

HELD = 8 << 10  # bytes that a signature or an operation counts, since it is kept alive


class StructureCache:
    """Least recently used things made from the structure of programs, bounded in bytes."""

    def __init__(self, most: int | None = None) -> None:
        self.hits: Counter[str] = Counter()  # by kind
        self.misses: Counter[str] = Counter()
        self.entries: Cache[tuple[str, Hashable], Any] = Cache("structures", most)
        self._met: Cache[int, bool] = Cache("structures met once")  # hashes of what was not kept

    def get(
        self, kind: str, key: Hashable, make: Callable[[], T], size: int, *, may_be_rare: bool = False
    ) -> T:
        """The entry of this key; `make()` makes it if there is none. size: about how many bytes it takes, with its key.
        may_be_rare: it is put into the cache only when it is made for the second time."""
        whole = kind, key
        entry: T | None = self.entries.get(whole)
        if entry is not None:
            self.hits[kind] += 1
            return entry
        self.misses[kind] += 1
        thing = make()
        if may_be_rare and self._met.pop(hash(whole)) is None:
            self._met.put(hash(whole), True)
            return thing
        return self.entries.put(whole, thing, size)

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self._met.clear()

    def counts(self) -> dict[str, int]:
        """How many things of each kind it has."""
        return dict(Counter(kind for kind, _ in self.entries))

    @property
    def bytes(self) -> int:
        """About what it takes."""
        return self.entries.size

    def __len__(self) -> int:
        return len(self.entries)


class PlanKey:
    """Everything of a program that schedule and plan depend on, compared by content; Signatures by identity."""

    __slots__ = ("checksum", "columns", "known", "others", "signatures")

    def __init__(self, program: Program, *others: Hashable) -> None:
        """others: what else the thing depends on."""
        self.signatures, self.known, self.others = program.signatures, program.known, others
        self.columns = program.sig, program.inputs, program.outputs
        self.checksum = checksum(*self.columns)

    def __hash__(self) -> int:
        return self.checksum

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PlanKey)
            and (self.checksum, self.known, self.others) == (other.checksum, other.known, other.others)
            and len(self.signatures) == len(other.signatures)
            and all(map(operator.is_, self.signatures, other.signatures))
            and all(map(np.array_equal, self.columns, other.columns))
        )

    @property
    def bytes(self) -> int:
        """About what it takes."""
        sig, inputs, outputs = self.columns
        return HELD * len(self.signatures) + sig.nbytes + inputs.nbytes + outputs.nbytes


@dataclass(frozen=True, eq=False)
class OperationSet:
    """The compiled operations of a program's signatures, None where no program has called it; one object per set."""

    compiled: tuple[CompiledOperation | None, ...]
    slots: Slots  # how they take their inputs
    arrays: Arrays  # what a run of them reads and writes
    forward: PointerTable | None  # for steps in C; None where Python runs all
    backward: PointerTable | None

    @staticmethod
    def of(program: Program, compiled: tuple[CompiledOperation | None, ...]) -> OperationSet:
        """The set for a program's signatures."""
        slots = Slots(program, [None if c is None else c.layout for c in compiled])
        arrays = Arrays.of(program.types, compiled)
        forward, backward = [PointerTable.of(arrays, backward=b) for b in (False, True)]
        return OperationSet(compiled, slots, arrays, forward, backward)

    @functools.cached_property
    def read_back(self) -> list[tuple[Signature, int]]:
        """The shared operands without gradients of their own that backward reads: by signature, and which of its."""
        operands = []
        for c in self.compiled:
            if c is None or c.graphs is None or not c.signature.shared:
                continue
            for graph in filter(None, (c.graphs.backward, c.graphs.parameters)):
                places = [node for node in graph.graph.nodes if node.op == "placeholder"]
                pairs = zip(places[-len(c.signature.shared) :], c.needs[1], strict=True)
                operands += [(c.signature, i) for i, (x, need) in enumerate(pairs) if x.users and not need]
        return list(dict.fromkeys(operands))


@dataclass(frozen=True, eq=False)
class FamilyTemplate:
    """Everything that a run takes over from earlier runs of its family."""

    needs: Needs
    operations: OperationSet


@dataclass(frozen=True, eq=False)
class Types:
    """Types of shared operands, by identity."""

    each: Sequence[object]


class Family:
    """One family of programs.

    family = Family(program, counts, grad=True)
    tensors = family.resolve({})                      # as they are now
    types = family.types(tensors)                     # a part of the key of its templates
    """

    def __init__(self, program: Program, counts: Sequence[int], *, grad: bool) -> None:
        self.signatures = program.signatures
        self.present = [n > 0 for n in counts]
        self.grad = grad
        self.settled = False  # whether no signature is to be compiled later than now
        places: dict[tuple[int, str], int] = {}
        operands: list[SharedOperand] = []
        self.places: list[tuple[int, ...]] = []  # of each signature's shared operands
        for signature, called in zip(program.signatures, self.present, strict=True):
            mine = signature.shared if called else ()
            for operand in mine:
                if operand.key not in places:
                    places[operand.key] = len(operands)
                    operands.append(operand)
            self.places.append(tuple(places[operand.key] for operand in mine))
        self.keys = [operand.key for operand in operands]
        self.operands = operands
        places_of = zip(program.signatures, self.places, self.present, strict=True)
        self.called = [(s, mine) for s, mine, n in places_of if n]
        self._types: Types = Types(())

    def resolve(self, operands: Operands) -> list[torch.Tensor]:
        """The shared operands, each once: what a run has already, else as they are now; noted in `operands`."""
        if operands:
            pairs = zip([operands.get(key) for key in self.keys], self.operands, strict=True)
            tensors = [operand.resolve() if t is None else t for t, operand in pairs]
        else:
            tensors = resolve_all(self.operands)
        operands.update(zip(self.keys, tensors, strict=True))
        return tensors

    @guard("types")
    def types(self, tensors: Sequence[torch.Tensor]) -> Types:
        """The types of these operands: the object of last time, where they are the same."""
        types, before = types_of(tensors), self._types
        if before.each != types:
            before = self._types = Types(types)
        return before


@dataclass(frozen=True, eq=False)
class BackwardNeeds:
    """Per signature of a phase, the gradients that backward takes and gives; equal for all runs of these operations.

    The tuples are one a signature, as in `PhaseGradients`.
    """

    groups: tuple[tuple[int, ...], ...]  # groups whose gradients the operation's backward gives
    outputs: tuple[tuple[int, ...], ...]  # outputs whose gradients it takes
    running: tuple[CompiledOperation, ...]  # batched operations that run, the last signature first
    idle: np.ndarray  # int64 a signature, 1: backward has nothing to do for it, whatever other phases want
    selective: bool  # whether some operation has outputs of different shared operands

    @staticmethod
    def of(operations: Sequence[CompiledOperation | None], reached: np.ndarray) -> BackwardNeeds:
        """The needs of these operations. reached: per signature, whether the results depend on it (bool)."""
        chosen = [c if r else None for c, r in zip(operations, reached.tolist(), strict=True)]
        outputs = tuple(() if c is None else (0,) if is_constant(c.signature) else takes(c) for c in chosen)
        idle = [not o and (c is None or not c.extra_types) for o, c in zip(outputs, operations, strict=True)]
        batched = [c for c in chosen if c is not None and takes(c) and c.graphs is not None]
        groups = tuple(c.grad_groups if c is not None and takes(c) else () for c in chosen)
        selective = any(c.is_selective for c in batched)
        running = tuple(reversed(batched))
        return BackwardNeeds(groups, outputs, running, np.array(idle, dtype=np.int64), selective)


def takes(compiled: CompiledOperation) -> tuple[int, ...]:
    """The outputs whose gradients an operation's backward takes: none where no gradient reaches it (`angle` of reals,
    which then writes none either)."""
    return compiled.grad_outputs if compiled.needs_gradient else ()
