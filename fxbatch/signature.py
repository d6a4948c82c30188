"""What may be batched together: tensor types, operations, signatures. Small, immutable, interned.

signature = Signature(operation, inputs=(f32_150,), outputs=(f32_150,), ...)
str(signature)                                  # "cell(f32[150]) -> (f32[150])"
signature.run([x], [weight])                    # the per-instance body
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch

from fxbatch.torch_private import TreeSpec, reparametrized, tree_flatten, tree_unflatten

T = TypeVar("T")
Body = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]  # of one instance: inputs to outputs
_PLAIN = re.compile(r"[^\s()\"=;@]+")
_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128", torch.complex32: "c32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (of one instance, no batch dimension), dtype and device of a value: `f32[150]`.

    -1 is a size that differs between instances, as packed forms show it: `f32[*,64]`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int = field(init=False, repr=False, compare=False)  # elements in one value
    nbytes: int = field(init=False, repr=False, compare=False)  # of one value

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.numel * self.dtype.itemsize)

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        return tensor_type(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        name = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        where = "" if self.device.type == "cpu" else f"@{self.device}"
        return f"{name}[{','.join('*' if d < 0 else str(d) for d in self.shape)}]{where}"

    @property
    def differentiable(self) -> bool:
        """Whether values of this type can carry gradients (floating point or complex)."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@functools.lru_cache(maxsize=65536)
def tensor_type(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorType:
    """The one interned TensorType of these fields."""
    return TensorType(shape, dtype, device)


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

    def fill(self, **tensors: Any) -> Any:
        """The pytree with each Slot replaced: `fill(input=[...], shared=[...])`."""
        leaves = [tensors[x.kind][x.index] if type(x) is Slot else x for x in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def filler(self, shared: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], Any]:
        """`fill` for many inputs, of a template of `(args, kwargs)`: without pytrees where these hold no containers."""
        args, kwargs = tree_unflatten(list(range(len(self.leaves))), self.spec)
        if type(args) is not tuple or type(kwargs) is not dict:
            return lambda inputs: self.fill(input=inputs, shared=shared)
        if any(type(x) is not int for x in (*args, *kwargs.values())):
            return lambda inputs: self.fill(input=inputs, shared=shared)
        flat: list[Any] = [shared[x.index] if _is_slot(x, "shared") else x for x in self.leaves]
        places = [(k, x.index) for k, x in enumerate(self.leaves) if _is_slot(x, "input")]

        def fill(inputs: Sequence[torch.Tensor]) -> Any:
            leaves = flat.copy()
            for k, i in places:
                leaves[k] = inputs[i]
            return tuple([leaves[k] for k in args]), {name: leaves[k] for name, k in kwargs.items()}

        return fill


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
    """Code that is batched as a unit. Compared by identity; one object a call site target.

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
    """What a body reads besides its tensors, as it was (`trace/body_reads.py`)."""

    def reinstated(self) -> AbstractContextManager[None]:
        """Everything outside the body's own modules as it was."""


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """What a signature's body is made of, as it was when it was recorded: its graphs may be built much later."""

    module: torch.nn.Module | None
    reads: Readings


@dataclass(frozen=True, eq=False)
class Signature:
    """Calls of EQUAL signatures may be batched. Interned by a SignatureTable; compared by identity here.

    The table compares whole keys (operation, types, shared identities, typed static arguments, modes).
    """

    operation: Operation
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
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
        return ", ".join(repr(x) for x in self.arguments.leaves if type(x) is not Slot)

    def run(self, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The per-instance body: tensors of `self.inputs` and `self.shared` to those of `self.outputs`."""
        with self.prepared(shared) as body:
            return body(inputs)

    @contextmanager
    def prepared(self, shared: Sequence[torch.Tensor]) -> Iterator[Body]:
        """The per-instance body with its shared operands, for many calls: `run` of the inputs alone."""
        op = self.operation
        if op.kind == "graph":
            yield lambda inputs: list(op.target(*inputs, *shared))
            return
        assert self.arguments is not None, f"{op.name} has no body"
        fill = self.arguments.filler(shared)
        bodies.running += 1
        try:
            with ExitStack() as stack:
                target = op.target
                if self.frozen is not None:
                    stack.enter_context(self.frozen.reads.reinstated())
                if op.kind == "module":
                    state = dict(zip(self.shared_names, shared, strict=False))
                    module = op.target if self.frozen is None else self.frozen.module or op.target
                    twin = structural_twin(module, {})
                    stack.enter_context(reparametrized(twin, state))
                    target = twin if op.method is None else getattr(twin, op.method)

                def body(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                    args, kwargs = fill(inputs)
                    result = target(*args, **kwargs)
                    if type(result) is torch.Tensor:
                        return [result]
                    return [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]

                yield body
        finally:
            bodies.running -= 1


def kept_by_signatures(size: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Like `functools.lru_cache`, for functions of a tuple of signatures (and of more, all hashable).

    What they gave is kept by the first of the signatures, `size` results each, and goes with it: a cache of the
    process would hold the operations of models that nobody has any more, with their parameters.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        lock, name = threading.Lock(), f"_{function.__name__}_kept"

        @functools.wraps(function)
        def kept(signatures: tuple[Signature, ...], *rest: Any) -> T:
            if not signatures:
                return function(signatures, *rest)
            table: dict[Any, T] = signatures[0].__dict__.setdefault(name, {})
            key = (signatures, *rest)
            with lock:
                found = table.pop(key, None)
                if found is not None:
                    table[key] = found  # to the end
                    return found
            made = function(signatures, *rest)
            with lock:
                table[key] = made
                while len(table) > size:
                    del table[next(iter(table))]
            return made

        return kept

    return decorate


class _Bodies(threading.local):
    """Whether this thread runs the body of an operation: decorated callables in it are plain code then."""

    running = 0


bodies = _Bodies()


def structural_twin(
    module: torch.nn.Module, twins: dict[int, tuple[torch.nn.Module, torch.nn.Module]]
) -> torch.nn.Module:
    """A copy of a module's structure that shares its tensors and attributes.

    Runs that swap tensors or set attributes do so in it, while other threads use the module itself.
    """
    found = twins.get(id(module))
    if found is not None:
        return found[1]
    twin = object.__new__(type(module))
    twins[id(module)] = (module, twin)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["_modules"] = {
        name: m if m is None else structural_twin(m, twins) for name, m in module._modules.items()
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
    return str(tensor_type((), dtype, torch.device("cpu"))).removesuffix("[]")
