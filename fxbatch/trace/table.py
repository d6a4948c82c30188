"""The signature table: one id for each whole key, one object for each signature; and keys of static arguments.

In: what a call is (operation, input types, shared operands, static arguments, modes). Out: stable integer ids. A table
only grows: one that is `full` is left to the recordings that use it, and new ones get another.

    table = SignatureTable()
    entry = table.constant(f32_3)
    table.signatures[entry.sid]

Keys are equal exactly when arguments are the same to an operation: they keep the Python type (1, 1.0 and True differ),
the sign of zero, and make nan equal to itself.

    static_key(1) != static_key(True)

Lifted numbers that turn out to be one number in all calls that the table has seen are put back into the operation.

    mul(h, n) with n = 0.5 in all calls   =>   mul(h; 0.5)
    mul(h, n) with n = 0.5 and 0.7        =>   unchanged: one batch
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from fxbatch.caches import Cache
from fxbatch.ir import (
    CONSTANT_KINDS,
    Operation,
    SharedOperand,
    Signature,
    SignatureColumns,
    Slot,
    Template,
    TensorSpec,
    signature_columns,
    tensor_spec,
)
from fxbatch.signature import OperationKind
from fxbatch.torch_private import DisableTorchFunctionSubclass
from fxbatch.trace.constants import holds_integer
from fxbatch.trace.operations import BodyRun
from fxbatch.trace.user_line import user_line

_BY_VALUE = (
    type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout,
    type(Ellipsis), type(NotImplemented), torch.Size,
)  # fmt: skip


ATOMS = frozenset({*_BY_VALUE, float, complex})  # types of plain data without parts


class OpaqueArgumentError(Exception):
    """An argument that is neither a tensor nor plain data; `kind` is its type's name."""

    def __init__(self, argument: object) -> None:
        self.kind = type(argument).__name__
        super().__init__(f"takes a {self.kind}")


class ByIdentity:
    """A key that holds its object, compared by identity."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return type(other) is ByIdentity and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def static_key(x: Any) -> object:
    """The key of one static leaf; OpaqueArgumentError when it is no plain data."""
    kind = type(x)
    if kind in _BY_VALUE:
        return (kind, x)
    if kind is float:
        return (kind, _float_key(x))
    if kind is complex:
        return (kind, _float_key(x.real), _float_key(x.imag))
    if kind is slice:
        return (kind, static_key(x.start), static_key(x.stop), static_key(x.step))
    if isinstance(x, np.generic):
        return (kind, x.dtype.str, x.tobytes())
    if isinstance(x, enum.Enum) and not isinstance(x, (int, float, str)):  # those are numbers to torch
        return (kind, ByIdentity(x))
    if isinstance(x, (type, torch.Generator)) or (callable(x) and not isinstance(x, torch.nn.Module)):
        return (kind, ByIdentity(x))
    raise OpaqueArgumentError(x)


def _float_key(x: float) -> object:
    if x != x or x == 0:
        return struct.pack("<d", x) if x == 0 else "nan"
    return x


@dataclass(frozen=True)
class TracedThrough:
    """A module or function that is no operation: its parts are recorded instead."""

    name: str
    reason: str
    location: str  # the user's line


# What a call that writes in place gives, where all that it does is to give its first argument another content: C knows
# these by their order.
WRITES_NOTHING, GIVES_TARGET, GIVES_NONE, WRITES_OTHERWISE, GIVES_SAME, GIVES_ROW = range(6)
LIGHT = 4  # signatures without graphs of their own that count as one with: constants, and calls of a family


def operands_require(operands: Sequence[SharedOperand]) -> bool:
    """Whether one of these requires a gradient now."""
    with DisableTorchFunctionSubclass():  # parameters may be such that hear what is asked of them
        return any(o.resolve().requires_grad for o in operands)


class Entry:
    """A signature as the recorder needs it: ids, and how the result is built."""

    __slots__ = (
        "aliases", "asked_in", "carries", "guards", "is_tuple", "named", "nested", "once", "operands", "outcome",
        "requires", "sid", "signature", "single", "target", "types", "write", "written", "written_as",
    )  # fmt: skip

    def __init__(
        self, sid: int, signature: Signature, types: tuple[int, ...], outcome: BodyRun | None
    ) -> None:
        self.sid = sid
        self.signature = signature
        self.types = types  # type id of each output
        self.outcome = outcome
        leaf = outcome is None or outcome.result.spec.is_leaf()
        kind = None if outcome is None else _kind_of_row(outcome.result, len(types))
        # Whether the result is one tensor, or a plain tuple of all outputs; or what makes a named tuple of them.
        self.single = leaf and len(types) == 1
        self.is_tuple = kind is tuple
        self.named = None if kind is None else _maker(kind)
        self.nested: Callable[..., object] | None = None  # makes other results, once asked for
        linked = outcome is not None and any(a >= 0 for a in outcome.aliases)
        # Of each output the input that it is a view of, or -1; () where none is.
        self.aliases = outcome.aliases if linked and outcome is not None else ()
        self.target = signature.operation.target
        self.written: tuple[int, ...] = ()  # inputs that the call writes to: outputs are their new contents
        self.write: BodyRun | None = None  # of the call as the user made it
        self.written_as = WRITES_NOTHING
        self.guards: tuple[object, ...] | None = None  # dictionary, key, what it must hold; and again
        # For each output 3 where a gradient can go through the call to it, else 1; empty where none can.
        self.carries = b""
        self.operands = signature.shared
        self.asked_in = 0  # the recording in which it was asked whether one of these requires a gradient ...
        self.requires = 0  # ... and the answer
        self.once = 0  # 1: a call of parameters alone, which all of a recording's calls are one of

    @property
    def gives_first(self) -> bool:
        """Whether the result is the first tensor that it is given, the object itself."""
        return self.single and self.outcome is not None and self.outcome.same == (0,)

    def result(self, outputs: Sequence[object]) -> object:
        """The result of the call that gave these."""
        if self.single:
            return outputs[0]
        if self.is_tuple or self.named is not None:
            return (self.named or tuple)(outputs)
        if self.nested is None:
            result = self.signature.result
            assert result is not None
            inputs = [Slot("input", x.index) if type(x) is Slot else x for x in result.leaves]
            if (rebuilt := result.rebuilt(inputs)) is None:
                self.nested = lambda *outputs: result.fill(output=outputs)
            else:
                self.nested = Template.of(((rebuilt,), {})).binder(len(self.types))(lambda x: x, ())
        return self.nested(*outputs)


def _kind_of_row(result: Template, outputs: int) -> type[tuple[object, ...]] | None:
    """The class of a tuple of all outputs in order: a plain one, or a named one (of `max`, `topk`); else None."""
    if any(type(x) is not Slot or x.index != i for i, x in enumerate(result.leaves)):
        return None
    rebuilt = result.rebuilt(range(outputs))
    return type(rebuilt) if isinstance(rebuilt, tuple) and tuple(rebuilt) == tuple(range(outputs)) else None


def _maker(kind: type[tuple[object, ...]]) -> Callable[[Sequence[object]], object] | None:
    """What makes a named tuple of this class, torch's or a user's, of its items; None for others."""
    if kind.__module__ == "torch.return_types":
        return kind
    return kind._make if kind.__bases__ == (tuple,) and hasattr(kind, "_make") else None


@dataclass(frozen=True)
class Lifted:
    """A signature whose input `position` is a lifted number: `fixed(number)` is the entry without it."""

    position: int
    fixed: Callable[[object], Entry]


class CallArguments(Protocol):
    """The arguments of a call that was not met before."""

    @property
    def recorder(self) -> Any: ...
    @property
    def values(self) -> Sequence[torch.Tensor]: ...
    @property
    def shared(self) -> Sequence[SharedOperand]: ...
    def types(self) -> tuple[TensorSpec, ...]: ...
    def template(self) -> Template: ...


Entries = dict[object, Any]  # of a function or module: by key an Entry, why there is none, or a family


class SizedCalls(Protocol):
    """Makes entries of calls that differ from others in sizes alone; who has the table gives one, or none."""

    def entry(self, entries: Entries, arguments: CallArguments, *, of: object = None) -> Entry | None: ...

    def awaits(self, entries: Entries, arguments: CallArguments) -> bool: ...

    def met(
        self, entries: Entries, arguments: CallArguments, pair: tuple[object, Entry], *, of: object = None
    ) -> None: ...


class SignatureTable:
    """Interns signatures by their whole key; thread safe; ids are stable."""

    def __init__(self, limit: int = 4096, *, verify: bool = False) -> None:
        self.limit = limit
        self.verify = verify  # whether mistakes inside fxbatch are raised, see mistakes.py
        self.lock = threading.RLock()
        self.forward: Callable[..., object] | None = None  # the decorated callable, where there is one
        self.signatures: list[Signature] = []
        self.light = 0  # of these, those without graphs of their own
        self.types: list[TensorSpec] = []  # in the order of Program.types
        self.sizes: list[torch.Size] = []  # shape of each type
        self.type_ids: dict[TensorSpec, int] = {}
        self.integers: dict[int, int] = {}  # types of constants that are an integer each, by signature
        self.entries: dict[Hashable, Any] = {}  # whole key -> Entry, or a reason why there is none
        self.modules: dict[Hashable, Any] = {}  # module records of trace/modules.py
        self.functions: dict[int, list[Any]] = {}  # users' functions with each content met, last first
        self.operations: dict[Hashable, Operation] = {}
        self.lifted: dict[int, Lifted] = {}
        # By parameter and leading dimensions: the rows that were met (trace/arguments.py).
        self.parameter_rows: dict[object, set[int]] = {}
        # By id of a module: its attributes to which instances give plain tensors.
        self.tensors_set: dict[int, set[str]] = {}
        self.filled: set[object] = set()  # calls of factories that give values (trace/writes.py)
        # Of these, whose tensors are used as they were made; None where values are asked for.
        self.used: set[object] | None = set()
        self.computed: dict[object, int] = {}  # how often the same was computed of the same parameters
        self.uniform: dict[int, object] = {}  # lifted signature -> key of its one number, or VARIED
        self.views: Cache[Hashable, ByIdentity] = Cache("views of parameters", limit)
        self.traced_through: dict[tuple[str, str], TracedThrough] = {}
        self.owners: dict[int, torch.nn.Module] = {}  # modules met outside the roots, by id
        self.sized: SizedCalls | None = None
        self.knowledge: Any = None  # what the last minibatch leaves to the next (trace/recorded_calls.py)
        self.known_model: Any = None  # of the last minibatch of traces (trace/module_state.py)
        # Several threads record with one table: what belongs together is set at once, and given as it was found.
        self._snapshot: tuple[tuple[Signature, ...], SignatureColumns] = (), signature_columns(())

    @property
    def full(self) -> bool:
        """Whether new recordings are to use another table."""
        return len(self.signatures) - self.light + self.light // LIGHT > self.limit

    def __len__(self) -> int:
        return len(self.signatures)

    def snapshot_and_columns(self) -> tuple[tuple[Signature, ...], SignatureColumns]:
        """All signatures as a tuple, index = id, and their columns."""
        snapshot = self._snapshot
        if len(snapshot[0]) != len(self.signatures):
            signatures = tuple(self.signatures)
            snapshot = self._snapshot = signatures, signature_columns(signatures, snapshot[1])
        return snapshot

    def add(self, signature: Signature, outcome: BodyRun | None = None) -> Entry:
        """Give a new signature its id; outcome: of its call, None for constants. The caller holds the lock and has
        looked its key up."""
        sid = len(self.signatures)
        for t in signature.outputs:
            if t not in self.type_ids:
                self.type_ids[t] = len(self.types)
                self.types.append(t)
                self.sizes.append(torch.Size(t.shape))
        types = tuple(self.type_ids[t] for t in signature.outputs)
        self.signatures.append(signature)
        self.light += signature.sizes is not None or signature.operation.kind in CONSTANT_KINDS
        entry = Entry(sid, signature, types, outcome)
        if signature.modes.grad and outcome is not None and any(outcome.gradients):
            entry.carries = bytes([3 if passed else 1 for passed in outcome.gradients])
        return entry

    def operation(self, operation: Operation) -> Operation:
        """The one Operation of these: of one module, or of equal functions."""
        target = ByIdentity(operation.target) if operation.kind == "module" else operation.target
        key = operation.kind, target, operation.method, operation.name, operation.rule, operation.random
        with self.lock:
            return self.operations.setdefault(key, operation)

    def view_key(self, base: torch.Tensor, geometry: tuple[object, ...]) -> object:
        """The one object that stands for all views of a parameter with this geometry."""
        key = ByIdentity(base), geometry
        with self.lock:
            return self.views.get(key) or self.views.put(key, ByIdentity(key))

    def constant(self, t: TensorSpec, *, grad: bool = True) -> Entry:
        """The signature of constants of type t. grad: whether any may require gradients."""
        entry = self._given(("constant", t) if grad else ("constant", t, grad), "constant", lambda: t)
        if holds_integer(t):
            self.integers[entry.sid] = entry.types[0]
        return entry

    def number(self, dtype: torch.dtype, device: torch.device) -> Entry:
        """The signature of lifted Python numbers of a dtype: shape []."""
        return self._given(("number", dtype, device), "number", lambda: tensor_spec((), dtype, device))

    def _given(self, key: Hashable, kind: OperationKind, type_of: Callable[[], TensorSpec]) -> Entry:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                operation = self.operation(Operation(kind, kind))
                entry = self.entries[key] = self.add(Signature(operation, (), (type_of(),)))
            return entry

    def note_traced_through(self, name: str, reason: str) -> None:
        """Remember, for `explain`, why a module or function is no operation, and the user's line that met it first."""
        with self.lock:
            if (name, reason) not in self.traced_through and len(self.traced_through) < self.limit:
                self.traced_through[name, reason] = TracedThrough(name, reason, user_line())


VARIED = object()


def fix_uniform_numbers(
    table: SignatureTable,
    sig: np.ndarray,
    inputs: np.ndarray,
    lifted_here: Iterable[int],
    numbers: Mapping[int, object],
    base: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The signature and input columns with uniform numbers fixed; value ids stay.

    lifted_here: the lifted signatures of the phase; numbers: those of lifted values, which are counted from `base`.
    """
    may_be_fixed = [sid for sid in lifted_here if table.uniform.get(sid) is not VARIED]
    if not may_be_fixed:
        return sig, inputs
    arity = table.snapshot_and_columns()[1].arity[sig]
    first = arity.cumsum() - arity
    keep = np.ones(len(inputs), dtype=bool)
    changed = sig.copy()
    for sid in may_be_fixed:
        rows = (sig == sid).nonzero()[0]
        if not len(rows):
            continue  # its calls were taken back: rows of a buffer, once it is used as a whole
        lifted = table.lifted[sid]
        places = first[rows] + lifted.position
        used = inputs[places]
        number = numbers[int(used[0]) + base]
        if not _stays_uniform(table.uniform, sid, number, bool((used == used[0]).all())):
            continue
        changed[rows] = lifted.fixed(number).sid
        keep[places] = False
    if keep.all():
        return sig, inputs
    return changed, inputs[keep]


def _stays_uniform(uniform: dict[int, object], sid: int, number: object, same: bool) -> bool:
    key = static_key(number) if same else VARIED
    before = uniform.setdefault(sid, key)
    if before is not VARIED and before != key:
        uniform[sid] = VARIED
    return uniform[sid] is not VARIED
