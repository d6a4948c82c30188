"""The forms: the program, the schedule and the plan (and, from `signature.py`, what a call is of).

What there are many of (calls, values) lives in numpy columns; what there are few of (operations,
signatures, steps) are objects. All forms are immutable.

    program = Program(signatures, sig, inputs, instance)   # one row per call
    schedule = batch_by_agenda(program)                    # calls in order, cut into steps
    plan = plan_arenas(program, schedule, layouts)         # where each value lives, what each step reads
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from fxbatch.caches import Cache
from fxbatch.signature import (
    CONSTANT_KINDS,
    Modes,
    Operation,
    OperationKind,
    SharedOperand,
    Signature,
    Slot,
    Template,
    TensorSpec,
    quoted,
    signature_text,
    tensor_spec,
)

__all__ = [
    "BROADCAST",
    "CONSTANT_KINDS",
    "GATHER_KINDS",
    "INDEX",
    "VIEW",
    "Gather",
    "Layout",
    "Modes",
    "Operation",
    "OperationKind",
    "Plan",
    "Program",
    "Schedule",
    "SharedOperand",
    "Signature",
    "SignatureColumns",
    "Slot",
    "Step",
    "Template",
    "TensorSpec",
    "offsets",
    "signature_columns",
    "tensor_spec",
]


T = TypeVar("T")
NOT_THERE = "a column names a call or a value that is not there"


@dataclass(frozen=True, eq=False)
class SignatureColumns:
    """Columns over a tuple of signatures, made once."""

    types: tuple[TensorSpec, ...]
    type_ids: dict[TensorSpec, int]
    arity: np.ndarray  # int64 [signatures]
    width: np.ndarray  # int64 [signatures]
    first_slot: np.ndarray  # int64 [signatures + 1]: where the inputs of a signature begin among all
    first_output: np.ndarray  # int64 [signatures + 1]
    output_types: np.ndarray  # int32 [all outputs]: index into `types`
    constant: np.ndarray  # bool [signatures]: constants and lifted numbers, which have no body
    random: np.ndarray  # bool [signatures]
    numbers: np.ndarray  # int64 [types]: 0, 1, ...
    signatures: tuple[Signature, ...]
    _each: dict[object, tuple[object, ...]] = field(repr=False)
    _facts: Cache[Hashable, Any] = field(default_factory=lambda: Cache("facts of signatures"), repr=False)

    @property
    def bytes(self) -> int:
        """About what each thing takes that is made over them, beside its operations; they themselves serve many."""
        return 128 * len(self.signatures)

    def fact(self, find: Callable[..., T], *key: Hashable) -> T:
        """`find(self, *key)`, made once: what a pass has to know of these signatures."""
        fact: T | None = self._facts.get((find, key))
        return self._facts.put((find, key), find(self, *key)) if fact is None else fact

    def each(self, find: Callable[[Signature], T]) -> tuple[T, ...]:
        """`find` of each signature, made once, also where the columns were made of those of fewer."""
        facts: tuple[T, ...] = self._each.get(find, ())  # type: ignore[assignment]  # what `find` gave
        if len(facts) < len(self.signatures):
            facts = (*facts, *map(find, self.signatures[len(facts) :]))
            self._each[find] = facts
        return facts

    @functools.cached_property
    def modes(self) -> np.ndarray:
        """int64 [signatures]: the number of each one's modes."""
        numbers: dict[Modes, int] = {}
        of_objects: dict[int, int] = {}  # many have the very same
        every = [s.modes for s in self.signatures]
        for m in every:
            if id(m) not in of_objects:
                of_objects[id(m)] = numbers.setdefault(m, len(numbers))
        return np.array([of_objects[id(m)] for m in every], dtype=np.int64)


def signature_columns(
    signatures: tuple[Signature, ...], before: SignatureColumns | None = None
) -> SignatureColumns:
    """The columns of these signatures, made once: the first of them keeps them, and they go with it. A cache of the
    process would hold the operations of models that nobody has any more, with their parameters. before: the columns of
    the first of these signatures, where there are such; else those that were used last, where they are."""
    if not signatures:
        return _signature_columns(signatures, None)
    cache: Cache[tuple[Signature, ...], SignatureColumns] | None = signatures[0].__dict__.get("_columns")
    if cache is None:
        cache = signatures[0].__dict__.setdefault("_columns", Cache("columns"))
    if (columns := cache.get(signatures)) is None:
        last = before or next(reversed(cache.values()), None)
        grows = last is not None and last.signatures == signatures[: len(last.signatures)]
        columns = cache.put(signatures, _signature_columns(signatures, last if grows else None))
    return columns


def _signature_columns(
    signatures: tuple[Signature, ...], before: SignatureColumns | None
) -> SignatureColumns:
    new = signatures if before is None else signatures[len(before.signatures) :]
    ids = {} if before is None else dict(before.type_ids)
    flat = [ids.setdefault(t, len(ids)) for s in new for t in s.outputs]
    added: list[np.ndarray] = [
        np.array([len(s.inputs) for s in new], dtype=np.int64),
        np.array([len(s.outputs) for s in new], dtype=np.int64),
        np.array(flat, dtype=np.int32),
        np.array([s.operation.kind in CONSTANT_KINDS for s in new], dtype=bool),
        np.array([s.operation.random for s in new], dtype=bool),
    ]
    if before is not None:
        earlier = before.arity, before.width, before.output_types, before.constant, before.random
        added = [np.concatenate(columns) for columns in zip(earlier, added, strict=True)]
    arity, width, output_types, constant, random = added
    return SignatureColumns(
        tuple(ids),
        ids,
        arity,
        width,
        offsets(arity),
        offsets(width),
        output_types,
        constant,
        random,
        np.arange(len(ids)),
        signatures,
        {} if before is None else dict(before._each),
    )


@dataclass(frozen=True, eq=False)
class Program:
    """The calls of a minibatch (or of one phase of it): columns, one row per call, in recorded order.

    Values are numbered from 0; the first `known` were computed by earlier phases, with types
    `known_types`; call c makes the values `first_value[c] : first_value[c + 1]`. Inputs come before
    their readers, so the recorded order is a topological order. `constants[s]` has, for a `constant`
    or `number` signature s, its payload a call in the order of its calls: tensors or Python numbers.
    """

    signatures: tuple[Signature, ...]
    sig: np.ndarray  # int32 [calls]
    inputs: np.ndarray  # int64 [sum of arities], value ids
    instance: np.ndarray  # int32 [calls]
    outputs: np.ndarray  # int64, value ids that results need (each once)
    constants: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    known: int = 0
    # Of the known, or what gives them.
    early_types: np.ndarray | Callable[[], np.ndarray | None] | None = None
    instances: int = 0  # how many instances the minibatch has
    # What passes find of it, once: a program is immutable.
    notes: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(columns: SignatureColumns, **fields: Any) -> Program:
        """The program of all these fields, set at once. columns: of its signatures."""
        made = object.__new__(Program)
        made.__dict__.update(fields, columns=columns, notes={})
        return made

    def __len__(self) -> int:
        return len(self.sig)

    @functools.cached_property
    def columns(self) -> SignatureColumns:
        """The columns that are equal for all programs with these signatures."""
        return signature_columns(self.signatures)

    @functools.cached_property
    def known_types(self) -> np.ndarray | None:
        """int32 [known]: indices into `types`."""
        return self.early_types() if callable(self.early_types) else self.early_types

    @property
    def types(self) -> tuple[TensorSpec, ...]:
        """All tensor types of the signatures' outputs, in order of first appearance."""
        return self.columns.types

    @property
    def type_ids(self) -> dict[TensorSpec, int]:
        return self.columns.type_ids

    @property
    def arity(self) -> np.ndarray:
        """int64 [signatures]: inputs a call."""
        return self.columns.arity

    @property
    def width(self) -> np.ndarray:
        """int64 [signatures]: outputs a call."""
        return self.columns.width

    @functools.cached_property
    def input_offsets(self) -> np.ndarray:
        """int64 [calls + 1]: inputs of call c are `inputs[input_offsets[c] : input_offsets[c + 1]]`."""
        return offsets(self.arity[self.sig], 0)

    @functools.cached_property
    def first_value(self) -> np.ndarray:
        """int64 [calls + 1]: the values of call c are numbered from here."""
        return offsets(self.width[self.sig], self.known)

    @property
    def values(self) -> int:
        """How many values there are, the known ones included."""
        return int(self.first_value[-1])

    @functools.cached_property
    def call_of_value(self) -> np.ndarray:
        """int64 [values - known]: the call that makes value `known + i`."""
        if self.sig.min(initial=0) < 0:
            raise IndexError(NOT_THERE)
        return np.repeat(np.arange(len(self.sig)), self.width[self.sig])

    def makers(self, values: np.ndarray) -> np.ndarray:
        """int64 [values]: the call that makes each of these, -1 for those of earlier phases. IndexError for others."""
        if values.min(initial=0) < 0 or values.max(initial=-1) >= self.known + len(self.call_of_value):
            raise IndexError(NOT_THERE)
        makers: np.ndarray = self.call_of_value[np.maximum(values - self.known, 0)]
        return makers if not self.known else np.where(values < self.known, -1, makers)

    @functools.cached_property
    def output_of_value(self) -> np.ndarray:
        """int64 [values - known]: each value's number among the outputs of all signatures."""
        width = self.width[self.sig]
        first = offsets(width)
        return np.arange(first[-1]) + (self.columns.first_output[self.sig] - first[:-1]).repeat(width)

    @functools.cached_property
    def type_of_value(self) -> np.ndarray:
        """int32 [values]: index into `types`."""
        made = self.columns.output_types[self.output_of_value]
        if self.known_types is None:
            return made
        return np.concatenate([self.known_types, made])

    @functools.cached_property
    def reader(self) -> np.ndarray:
        """int64 [len(inputs)]: the call that each input entry belongs to."""
        return np.repeat(np.arange(len(self.sig)), self.arity[self.sig])

    def __str__(self) -> str:
        return print_program(self)

    def _repr_html_(self) -> str:
        return as_html(str(self))


def print_program(program: Program) -> str:
    """The program as text that `parse_program` reads back."""
    return "\n".join(program_lines(program))


def program_lines(program: Program) -> list[str]:
    """The lines of `print_program`: head, known values, signatures, calls, results."""
    lines = [f"program instances={program.instances}"]
    if program.known:
        known = program.known_types if program.known_types is not None else np.zeros(0, np.int32)
        names = (str(program.types[t]) if 0 <= t < len(program.types) else "?" for t in known.tolist())
        lines.append("  known " + ", ".join(f"v{i}: {name}" for i, name in enumerate(names)))
    lines += [f"  s{i} {signature_text(s)}" for i, s in enumerate(program.signatures)]
    lines += call_lines(program, range(len(program)))
    lines.append("  return " + ", ".join(f"v{v}" for v in program.outputs.tolist()))
    return [line.rstrip() for line in lines]


def call_lines(program: Program, calls: Sequence[int] | range) -> list[str]:
    """The line of each call: `v4, v5 = s2 cell(v0, v1) @0`."""
    nth = _payload_positions(program)
    lines = []
    for c in calls:
        s = int(program.sig[c])
        made = ", ".join(f"v{v}" for v in range(program.first_value[c], program.first_value[c + 1]))
        read = program.inputs[program.input_offsets[c] : program.input_offsets[c + 1]]
        payload = program.constants.get(s)
        tail = _payload_text(payload[nth[c]]) if payload is not None and nth[c] < len(payload) else ""
        name = quoted(program.signatures[s].name)
        head = f"{made} = " if made else ""
        lines.append(
            f"  {head}s{s} {name}({', '.join(f'v{v}' for v in read.tolist())}){tail} @{program.instance[c]}"
        )
    return lines


def _payload_positions(program: Program) -> np.ndarray:
    """int64 [calls]: how many earlier calls have the same signature."""
    order = np.argsort(program.sig, kind="stable")
    ordered = program.sig[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    out = np.empty(len(order), dtype=np.int64)
    out[order] = np.arange(len(order)) - starts
    return out


def _payload_text(payload: Any) -> str:
    if isinstance(payload, torch.Tensor):
        if payload.dim() or payload.device.type == "meta":
            return ""
        payload = payload.detach().item()
    return f" = {payload!r}"


def offsets(counts: np.ndarray, start: int = 0) -> np.ndarray:
    """Cumulative sums with `start` in front: where each of `counts` consecutive pieces begins."""
    out = np.empty(len(counts) + 1, dtype=np.int64)
    out[0] = start
    counts.cumsum(out=out[1:])
    if start:
        out[1:] += start
    return out


@dataclass(frozen=True, eq=False)
class Schedule:
    """Steps in execution order, each call exactly once: step k runs `order[offsets[k] : offsets[k + 1]]`."""

    order: np.ndarray  # int64 [calls]
    offsets: np.ndarray  # int64 [steps + 1]
    policy: str = ""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def steps(self) -> list[np.ndarray]:
        """The calls of each step."""
        return np.split(self.order, self.offsets[1:-1])


@dataclass(frozen=True, slots=True)
class Layout:
    """How the runtime wants an operation's inputs gathered: `groups=((0, 2), (1,), (3,))`.

    The members of a group have one tensor type and are read interleaved, as one wide row
    `[members, *shape]` a call, so that a concatenation inside the operation costs nothing.
    """

    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Where a step finds one input group: rows of one arena.

    view: rows `start : start + rows`; broadcast: row `start` for all; index: rows
    `indices[start : start + rows]` of the plan. rows = calls of the step x members of the group.
    """

    arena: int
    kind: Literal["view", "broadcast", "index"]
    start: int
    rows: int


GATHER_KINDS: tuple[Literal["view", "broadcast", "index"], ...] = ("view", "broadcast", "index")
VIEW, BROADCAST, INDEX = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Step:
    """One batched launch. `outputs[j]` is (arena, first row) of the step's contiguous block."""

    signature: int
    rows: int
    offset: int  # rows of this signature that earlier steps have run
    inputs: tuple[Gather, ...]
    outputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """All that the looped module needs, as data: columns over steps, their input groups and output blocks.

    Arena a holds the values of type `arenas[a]`; a value is one row. The gathers of step k are
    `first_gather[k] : first_gather[k + 1]`, its output blocks `first_block[k] : first_block[k + 1]`.
    `entries` has the value that each gathered row is, for all gathers (also views), in gather order:
    gather g covers `entry_offsets[g] : entry_offsets[g + 1]`.
    """

    arenas: tuple[TensorSpec, ...]
    capacity: np.ndarray  # int64 [arenas]: rows an arena needs, those of earlier phases included
    step_signature: np.ndarray  # int64 [steps]
    step_rows: np.ndarray  # int64 [steps]
    step_offset: np.ndarray  # int64 [steps]: rows of the signature run by earlier steps (and phases)
    first_gather: np.ndarray  # int64 [steps + 1]
    gather_arena: np.ndarray  # int64 [gathers]
    gather_kind: np.ndarray  # int64 [gathers]: VIEW, BROADCAST, INDEX
    gather_start: np.ndarray  # int64 [gathers]
    gather_rows: np.ndarray  # int64 [gathers]
    first_block: np.ndarray  # int64 [steps + 1]
    block_arena: np.ndarray  # int64 [blocks]
    block_start: np.ndarray  # int64 [blocks]
    indices: np.ndarray  # int64: row indices of all gathers of kind INDEX, one buffer
    entries: np.ndarray  # int64: value ids read, see above
    entry_offsets: np.ndarray  # int64 [gathers + 1]
    row_of_value: np.ndarray  # int64 [values]: row in the arena of the value's type
    constant_order: dict[int, np.ndarray | None]  # signature -> permutation of its payload, None: as recorded

    @staticmethod
    def of(*columns: Any) -> Plan:
        """The plan of these columns, in their order: each phase makes one, and a frozen class sets them one by one."""
        made = object.__new__(Plan)
        made.__dict__.update(zip(Plan.__dataclass_fields__, columns, strict=True))
        return made

    def __len__(self) -> int:
        return len(self.step_signature)

    def __str__(self) -> str:
        return print_plan(self)

    def _repr_html_(self) -> str:
        return as_html(str(self))

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps as objects: a view for dumps and checks."""
        gathers = [
            Gather(a, GATHER_KINDS[k], s, r)
            for a, k, s, r in zip(
                self.gather_arena.tolist(), self.gather_kind.tolist(), self.gather_start.tolist(),
                self.gather_rows.tolist(), strict=True,
            )
        ]  # fmt: skip
        blocks = list(zip(self.block_arena.tolist(), self.block_start.tolist(), strict=True))
        g, b = self.first_gather.tolist(), self.first_block.tolist()
        columns = zip(
            self.step_signature.tolist(), self.step_rows.tolist(), self.step_offset.tolist(), strict=True
        )
        return tuple(
            Step(s, n, o, tuple(gathers[g[k] : g[k + 1]]), tuple(blocks[b[k] : b[k + 1]]))
            for k, (s, n, o) in enumerate(columns)
        )


def print_plan(plan: Plan, signatures: Sequence[Signature] = ()) -> str:
    """One line an arena and a step: rows, where each input is read, where each output is written."""
    lines = [f"plan arenas={len(plan.arenas)} steps={len(plan.steps)} indices={len(plan.indices)}"]
    for i, (type_, rows) in enumerate(zip(plan.arenas, plan.capacity, strict=True)):
        lines.append(f"  a{i} {type_} rows={rows}")
    for k, step in enumerate(plan.steps):
        lines.append(f"  {step_text(plan, k, step, signatures)}")
    return "\n".join(lines)


def step_text(plan: Plan, k: int, step: Step, signatures: Sequence[Signature] = ()) -> str:
    """The line of one step of a plan: `step 3: s2 cell x4 (a0 view 0:8) -> a0[8:12]`."""
    name = f" {quoted(signatures[step.signature].name)}" if step.signature < len(signatures) else ""
    reads = []
    for gather in step.inputs:
        where: object = f"{gather.start}:{gather.start + gather.rows}"
        if gather.kind == "broadcast":
            where = gather.start
        elif gather.kind == "index":
            rows = plan.indices[gather.start : gather.start + gather.rows].tolist()
            where = "[" + ",".join(map(str, rows[:8])) + (",..." if len(rows) > 8 else "") + "]"
        reads.append(f"a{gather.arena} {gather.kind} {where}")
    writes = ", ".join(f"a{arena}[{row}:{row + step.rows}]" for arena, row in step.outputs)
    return f"step {k}: s{step.signature}{name} x{step.rows} ({', '.join(reads)}) -> {writes}"


_SHOWN = 200  # lines of a form in a notebook


def as_html(text: str) -> str:
    """The text of a form as a notebook shows it, without the lines that nobody would scroll to."""
    lines = text.splitlines()
    more = [f"... {len(lines) - _SHOWN:,} more lines: print(...)"] if len(lines) > _SHOWN else []
    return f"<pre>{html.escape(chr(10).join([*lines[:_SHOWN], *more]))}</pre>"
