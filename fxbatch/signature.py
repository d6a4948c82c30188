"""Which calls may be batched together: tensor types, operations, signatures. Small, immutable, interned.

signature = Signature(operation, inputs=(f32_150,), outputs=(f32_150,), ...)
str(signature)                                  # "cell(f32[150]) -> (f32[150])"
signature.run([x], [weight])                    # the per-instance body
"""

from __future__ import annotations

import functools
import itertools
import json
import keyword
import math
import operator
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch

from fxbatch.caches import cached
from fxbatch.torch_private import TreeSpec, tree_flatten, tree_unflatten

T = TypeVar("T")
Body = Callable[..., Any]  # of one instance: of its inputs, gives its result
Binder = Callable[[Any, Sequence[torch.Tensor]], Body]
_PLAIN = re.compile(r"[^\s()\"=;@]+")
_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128", torch.complex32: "c32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (of one instance, no batch dimension), dtype and device of a value: `f32[150]`.

    -1 is a size that differs between instances, as packed forms show it: `f32[*,64]`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int = field(init=False, repr=False, compare=False)  # elements in one value
    nbytes: int = field(init=False, repr=False, compare=False)  # of one value
    strides: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of contiguous ones

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.numel * self.dtype.itemsize)
        sizes = itertools.accumulate((max(d, 1) for d in reversed(self.shape)), operator.mul, initial=1)
        object.__setattr__(self, "strides", tuple(reversed([*sizes])))

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        return tensor_spec(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        name = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        where = "" if self.device.type == "cpu" else f"@{self.device}"
        return f"{name}[{','.join('*' if d < 0 else str(d) for d in self.shape)}]{where}"

    @property
    def differentiable(self) -> bool:
        """Whether values of this type can carry gradients (floating point or complex)."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@cached("tensor types")
def tensor_spec(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorSpec:
    """The one interned TensorSpec of these fields."""
    return TensorSpec(shape, dtype, device)


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes that are part of a signature, because an operation's result depends on them."""

    training: bool = False
    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # enabled (device type, dtype) pairs
    default_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = ["train" if self.training else "eval"] + ([] if self.grad else ["no_grad"])
        words += [f"autocast({d},{_SHORT.get(t, t)})" for d, t in self.autocast]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in an operation's arguments or result that a tensor fills."""

    kind: Literal["input", "shared", "output"]
    index: int


@dataclass(frozen=True, slots=True)
class Template:
    """A pytree whose tensor leaves are Slots and whose other leaves are static."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(tree: Any) -> Template:
        leaves, spec = tree_flatten(tree)
        return Template(tuple(leaves), spec)

    def __reduce__(self) -> Any:  # as a plain pytree: specs don't pickle without warnings
        return Template.of, (tree_unflatten(list(self.leaves), self.spec),)

    def fill(self, **tensors: Any) -> Any:
        """The pytree with each Slot replaced: `fill(input=[...], shared=[...])`."""
        leaves = [tensors[x.kind][x.index] if type(x) is Slot else x for x in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def rebuilt(self, leaves: Iterable[object]) -> Any:
        """The pytree of other leaves; None where a class in it looks at what it is made of, as PackedSequence does."""
        try:
            return tree_unflatten(list(leaves), self.spec)
        except Exception:  # noqa: BLE001 - its constructor is the user's
            return None

    def binder(self, inputs: int) -> Binder:
        """`binder(function, shared)(*inputs)` calls `function` with these arguments, of a template of `(args, kwargs)`.

        Emitted as one expression where these hold tuples, lists and dicts alone: 0.1 us a call, by pytrees 5.
        """
        try:
            if (whole := self.rebuilt(range(len(self.leaves)))) is None:
                raise _NotPlain
            args, kwargs = whole
            words = [_expression(x, self.leaves) for x in args]
            words += [f"{name}={_expression(x, self.leaves)}" for name, x in kwargs.items() if _named(name)]
        except _NotPlain:
            return lambda function, shared: (
                lambda *given: _called(function, self.fill(input=given, shared=shared))
            )
        fixed = [k for k, x in enumerate(self.leaves) if not _is_slot(x, "input")]
        places = [(x, x.index if _is_slot(x, "shared") else -1) for x in map(self.leaves.__getitem__, fixed)]
        outer = ", ".join(["function", *(f"k{k}" for k in fixed)])
        inner = ", ".join(f"i{i}" for i in range(inputs))
        emitted = _emitted(f"lambda {outer}: lambda {inner}: function({', '.join(words)})")
        return lambda function, shared: emitted(function, *[x if i < 0 else shared[i] for x, i in places])


class _NotPlain(Exception):
    """Arguments that hold more than tuples, lists and dicts."""


def _expression(tree: Any, leaves: Sequence[Any]) -> str:
    """Arguments, of numbers of leaves, as Python: `i0` for an input, `k3` for any other leaf."""
    if type(tree) is int:
        leaf = leaves[tree]
        return f"i{leaf.index}" if _is_slot(leaf, "input") else f"k{tree}"
    if type(tree) in (tuple, list):
        inner = "".join(f"{_expression(x, leaves)}, " for x in tree)
        return f"({inner})" if type(tree) is tuple else f"[{inner}]"
    if type(tree) is dict and all(type(k) is str for k in tree):
        return "{" + ", ".join(f"{k!r}: {_expression(x, leaves)}" for k, x in tree.items()) + "}"
    raise _NotPlain


def _named(name: str) -> bool:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise _NotPlain
    return True


def _called(function: Callable[..., Any], arguments: tuple[Any, Any]) -> Any:
    args, kwargs = arguments
    return function(*args, **kwargs)


@cached("argument functions")
def _emitted(text: str) -> Callable[..., Any]:
    return eval(text)  # names of leaves, and of arguments that are identifiers


def _is_slot(x: Any, kind: str) -> bool:
    return type(x) is Slot and x.kind == kind


@dataclass(frozen=True, slots=True, eq=False)
class SharedOperand:
    """A parameter or buffer, the same for all instances, by owner and name so that replacing it works.

    `owner` is None for a bare tensor, which is then `tensor` itself.
    """

    owner: torch.nn.Module | None
    name: str
    tensor: torch.Tensor | None = None

    def resolve(self) -> torch.Tensor:
        """The tensor as it is now."""
        if self.owner is None:
            assert self.tensor is not None
            return self.tensor
        found: torch.Tensor | None = self.owner._parameters.get(self.name)
        if found is None:
            found = self.owner._buffers.get(self.name)
        if found is None:
            found = getattr(self.owner, self.name)
        return found

    @property
    def key(self) -> tuple[int, str]:
        return (id(self.owner) if self.owner is not None else id(self.tensor), self.name)


OperationKind = Literal["constant", "number", "module", "function", "graph"]
CONSTANT_KINDS: tuple[OperationKind, ...] = ("constant", "number")  # kinds with a payload, without a body


@dataclass(frozen=True, eq=False)
class Operation:
    """Code that is batched as a unit. Compared by identity; one object per target of a call.

    kind: `constant` and `number` have no body (the runtime stacks tensors / Python numbers);
    `module` calls `target` with the shared operands substituted; `function` calls `target`;
    `graph` calls `target(*inputs, *shared)` and gets a tuple of tensors (fusion, splitting).
    rule: why it is an operation, shown by `explain`.
    """

    name: str
    kind: OperationKind
    target: Any = None
    rule: str = ""
    random: bool = False  # draws random numbers: never deduplicated, redrawn at each run
    identity: bool = False  # a pass-through
    method: str | None = None  # for `module`: the method that is called, None for forward


class Readings(Protocol):
    """The content of everything that a body reads besides its tensors (`trace/plain_body.py`)."""

    items: Any  # places, each with what it held; `own`: of the body's own modules
    key: object  # equal exactly where bodies do the same

    def reinstated(self) -> AbstractContextManager[None]:
        """Everything outside the body's own modules as it was."""


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """The body of a signature as it was recorded; its graphs may be built much later."""

    module: torch.nn.Module | None
    reads: Readings


SMALL = 256  # numbers of a value of which what is asked is told without a wait
Numbers = Any  # Python's, in nested lists as Tensor.tolist() gives them
# What compares numbers, and what takes some out of others: the same bits in a batch and alone, also of floats.
_EXACT = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "getitem", "unbind", "select", "squeeze", "unsqueeze", "view", "reshape",
    "flatten", "t", "transpose", "permute", "narrow", "split", "chunk", "detach", "contiguous", "clone",
})  # fmt: skip
_COMPARES = {
    f.__name__: f for f in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
}


@dataclass(frozen=True, eq=False)
class Signature:
    """Calls of EQUAL signatures may be batched. Interned by a SignatureTable; compared by identity here.

    The table compares whole keys (operation, types, shared identities, typed static arguments, modes).
    """

    operation: Operation
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    shared: tuple[SharedOperand, ...] = ()
    arguments: Template | None = None  # ((args), {kwargs}) with input and shared slots
    result: Template | None = None  # with output slots
    modes: Modes = Modes()
    shared_names: tuple[str, ...] = ()  # for kind `module`: names that shared[:k] are substituted for
    location: str = ""  # the user's line that first made it: "model.py:31"
    reason: str = ""  # why it can't be batched, "" if nothing is known against it
    frozen: Frozen | None = None  # of user code: its modules and what it reads, as they were
    sizes: Any = None  # its family of calls with sizes of their own (runtime/packed_calls.py)

    @property
    def name(self) -> str:
        return self.operation.name

    def __str__(self) -> str:
        ins = ", ".join(map(str, self.inputs))
        outs = ", ".join(map(str, self.outputs))
        static = self.static_text()
        return f"{self.name}({ins}{'; ' + static if static else ''}) -> ({outs})"

    def static_text(self) -> str:
        """The static arguments as text, for dumps."""
        if self.arguments is None:
            return ""
        return ", ".join(
            getattr(x, "__name__", repr(x)) for x in self.arguments.leaves if type(x) is not Slot
        )

    def run(
        self, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], *, reinstated: bool = False
    ) -> list[torch.Tensor]:
        """The per-instance body: tensors of `self.inputs` and `self.shared` to those of `self.outputs`. reinstated:
        whether `as_recorded` is entered already."""
        direct = self.direct(shared)
        if direct is not None:
            return tensors_of(direct(*inputs))
        with self.prepared(shared, reinstated=reinstated) as body:
            return tensors_of(body(*inputs))

    def as_recorded(self) -> AbstractContextManager[None]:
        """What the body reads outside its own modules is as it was when the signature was made."""
        return nullcontext() if self.frozen is None else self.frozen.reads.reinstated()

    @contextmanager
    def prepared(self, shared: Sequence[torch.Tensor], *, reinstated: bool = False) -> Iterator[Body]:
        """The per-instance body with its shared operands, for many calls: of the inputs alone, gives its result."""
        op = self.operation
        if op.kind == "graph":
            yield lambda *inputs: op.target(*inputs, *shared)
            return
        with bodies, nullcontext() if reinstated else self.as_recorded():
            target = op.target
            if op.kind == "module":
                frozen = None if self.frozen is None else self.frozen.module
                target = structural_twin(op.target if frozen is None else frozen, {})
                for (path, name), tensor in zip(self._places, shared, strict=False):
                    place_tensor(target, path, name, tensor)
                target = target if op.method is None else getattr(target, op.method)
            yield self._binder(target, shared)

    @functools.cached_property
    def _places(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Where a module has what `shared_names` names: the parts on the way, and the name there."""
        split = [name.split(".") for name in self.shared_names]
        return tuple((tuple(parts[:-1]), parts[-1]) for parts in split)

    @functools.cached_property
    def _binder(self) -> Binder:
        assert self.arguments is not None, f"{self.name} has no body"
        return self.arguments.binder(len(self.inputs))

    @functools.cached_property
    def only_reads(self) -> Any:
        """The function to call, if it is code of torch that only reads its arguments, from wherever in memory."""
        op = self.operation
        if op.kind == "function" and self.frozen is None and self.arguments is not None:
            return op.target if _only_reads(op.target, self.arguments) else None
        module = None if self.frozen is None or op.kind != "module" or op.method else self.frozen.module
        if module is None or not type(module).__module__.startswith("torch.nn.modules.") or module._modules:
            return None
        state = module.__dict__
        writes = state.get("inplace") or state.get("max_norm") is not None
        return None if writes or "_flat_weights" in state or len(self._places) < len(self.shared) else module

    @functools.cached_property
    def is_exact(self) -> bool:
        """Whether a call alone gives the very bits of one in a batch, at little cost: it gives integers or booleans of
        such, compares numbers, or takes some out of others."""
        op, specs = self.operation, (*self.inputs, *self.outputs)
        ours = op.kind == "function" and getattr(op.target, "__module__", "") == "fxbatch.trace.operations"
        if op.random or self.shared or self.frozen is not None or not (ours or self.only_reads):
            return False
        exact = op.name in _EXACT
        numbers = {t.dtype for t in specs} if not exact else set[torch.dtype]()
        return all(0 < t.numel <= SMALL and t.device.type == "cpu" for t in specs) and not any(
            t.is_floating_point or t.is_complex for t in numbers
        )

    def numbers(self, inputs: Sequence[Numbers]) -> Sequence[Numbers]:
        """`run` of an exact call, with Python's numbers in nested lists for tensors."""
        if self._in_python is not None:
            return self._in_python(*inputs)
        with torch.no_grad():
            real = [torch.tensor(x, dtype=t.dtype) for x, t in zip(inputs, self.inputs, strict=True)]
            return [t.tolist() for t in self.run(real, ())]

    @functools.cached_property
    def _in_python(self) -> Callable[..., Sequence[Numbers]] | None:
        """What gives the same of Python's numbers: comparisons of two integers, rows."""
        name, specs = self.operation.name, self.inputs
        assert self.arguments is not None
        static = [x for x in self.arguments.leaves if type(x) is not Slot]
        if len(specs) == 1:
            return {"unbind": list, "detach": lambda x: [x]}.get(name) if static in ([], [0]) else None
        if static or len(specs) > 2 or specs[1].shape:
            return None
        if name == "getitem":
            return (lambda x, i: [x[i]]) if specs[1].dtype is torch.int64 else None  # others may be masks
        of_integers = not any(t.dtype.is_floating_point or t.dtype.is_complex for t in specs)
        compares = _COMPARES.get(name) if of_integers and not specs[0].shape else None
        return None if compares is None else lambda x, y: [compares(x, y)]

    def direct(self, shared: Sequence[torch.Tensor]) -> Body | None:
        """The body that `prepared` gives, if nothing has to be made ready for it: it calls what was recorded, and a
        module's tensors are these."""
        target, frozen = self.only_reads, self.frozen
        if target is None:
            return None
        if frozen is not None:
            assert frozen.module is not None
            for x in frozen.reads.items:
                if not x.own and not x.holds():
                    return None
            held, buffers = frozen.module._parameters, frozen.module._buffers
            for name, tensor in zip(self.shared_names, shared, strict=False):
                if held.get(name) is not tensor and buffers.get(name) is not tensor:
                    return None
        return self._binder(target, shared)


class _Bodies(threading.local):
    """Whether this thread runs the body of an operation, `with bodies`: decorated callables in it are plain code."""

    running = 0

    def __enter__(self) -> None:
        self.running += 1

    def __exit__(self, *_: object) -> None:
        self.running -= 1


bodies = _Bodies()


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of what a body gave, in order."""
    if type(result) is torch.Tensor:
        return [result]
    return [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]


_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_IN_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor")


def _only_reads(function: Any, arguments: Template) -> bool:
    """Whether a function is torch's, and does not write to its arguments. `as_strided` of a value is refused."""
    name = getattr(function, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return False
    if type(function) in _IN_C:
        home = getattr(function, "__objclass__", None)
        return home is torch.Tensor.__base__ or str(getattr(function, "__module__", "")).startswith("torch")
    inplace = any(x is True for x in arguments.leaves)
    return type(function) is types.FunctionType and function.__module__ in _IN_PYTHON and not inplace


def place_tensor(module: torch.nn.Module, path: Sequence[str], name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where a twin of a module's structure has its parameter, buffer or attribute of that name."""
    for part in path:
        module = module._modules[part]  # type: ignore[assignment]  # a part with tensors is no None
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
    for held in places:
        if name in held:
            held[name] = tensor
            return


MOST_PARTS = 64  # of a list that is looked through for modules
Twins = dict[int, tuple[torch.nn.Module, torch.nn.Module]]  # by id of a module: it, and its twin


def structural_twin(module: torch.nn.Module, twins: Twins) -> torch.nn.Module:
    """A copy of a module's structure that shares its tensors and attributes; lists of its parts are of their twins.

    Runs that swap tensors or set attributes do so in it, while other threads use the module itself.
    """
    twin = _twin(module, twins)
    for _, copy in twins.values():
        for name, value in copy.__dict__.items():
            if (of_twins := in_twins(value, twins)) is not value:
                copy.__dict__[name] = of_twins
    return twin


def in_twins(x: Any, twins: Twins) -> Any:
    """A list, tuple or dictionary with twins for the modules in it; others as they are."""
    if type(x) not in (list, tuple, dict) or not 0 < len(x) <= MOST_PARTS:
        return x
    held = x.values() if type(x) is dict else x
    parts = [twins[id(m)][1] if id(m) in twins else m for m in held]
    if all(map(operator.is_, held, parts)):
        return x
    return dict(zip(x, parts, strict=True)) if type(x) is dict else type(x)(parts)


def _twin(module: torch.nn.Module, twins: Twins) -> torch.nn.Module:
    if id(module) in twins:
        return twins[id(module)][1]
    twin = object.__new__(type(module))
    twins[id(module)] = (module, twin)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["_modules"] = {
        name: m if m is None else _twin(m, twins) for name, m in module._modules.items()
    }
    return twin


def quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def signature_text(s: Signature) -> str:
    op = s.operation
    text = (
        f"{op.kind} {quoted(op.name)}({', '.join(map(str, s.inputs))}) -> ({', '.join(map(str, s.outputs))})"
    )
    if s.shared:
        text += f" shared={json.dumps([operand.name for operand in s.shared])}"
    if s.static_text():
        text += f" static={json.dumps(s.static_text())}"
    if s.modes != Modes():
        text += f" modes={json.dumps(_modes_text(s.modes))}"
    if op.random:
        text += " random"
    if op.identity:
        text += " identity"
    if s.reason:
        text += f" reason={json.dumps(s.reason)}"
    return text


def _modes_text(modes: Modes) -> str:
    dtype = dtype_name(modes.default_dtype)
    return str(modes) + ("" if modes.default_dtype == torch.float32 else f" default({dtype})")


def dtype_name(dtype: torch.dtype) -> str:
    return str(tensor_spec((), dtype, torch.device("cpu"))).removesuffix("[]")
