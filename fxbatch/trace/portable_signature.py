"""Signatures as plain data, to be found or made again in another process, and what a trace depends on.

In: a signature of a table, names of a model's modules. Out: a Described, which pickles and holds no code.

    described = describe(signature, module_names(model), lifted=-1, sample=0)
    fingerprint(model)
    refer(torch.add)                 # Reference("torch", "add"), an import path
"""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

from fxbatch.errors import StaleTraceError, TraceError
from fxbatch.ir import Modes, Signature, Template, TensorType
from fxbatch.torch_private import tree_unflatten
from fxbatch.trace.operations import MARKED


@dataclass(frozen=True)
class Reference:
    """A function by import path; `pickled` for those that pickle knows how to find."""

    module: str
    name: str
    pickled: bytes = b""

    def resolve(self) -> Any:
        """The function, without the wrapper that @operation put around it."""
        if self.pickled:
            return pickle.loads(self.pickled)
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise StaleTraceError(
                f"the trace calls {self.module}.{self.name}, which is gone: {error}"
            ) from None
        return _unwrapped(found)


def _unwrapped(func: Any) -> Any:
    return func.__wrapped__ if getattr(func, "__fxbatch_operation__", False) is True else func


def refer(func: Any) -> Reference:
    """The reference of a function; TraceError when there is none (a lambda, a local function)."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "")
    if module and name and "<" not in name:
        reference = Reference(module, name)
        try:
            if reference.resolve() is func:
                return reference
        except StaleTraceError:
            pass
    try:
        data = pickle.dumps(func)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TraceError(f"a trace can't be kept: {name or func!r} has no import path ({error})") from None
    return Reference("", name, data)


def as_tree(template: Template | None) -> Any:
    """A template as a plain pytree: specs of pytrees don't pickle without warnings."""
    return None if template is None else (tree_unflatten(list(template.leaves), template.spec),)


def from_tree(tree: Any) -> Template | None:
    """The template of such a pytree."""
    return None if tree is None else Template.of(tree[0])


@dataclass(frozen=True)
class Described:
    """A signature as plain data: enough to find or make it in another process."""

    kind: str
    name: str
    target: Reference | str | None  # a function's reference, a module's dotted name
    method: str | None
    marked: bool
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    shared: tuple[str, ...]  # dotted names of the shared operands of `arguments`
    own: int  # how many shared operands are the module's own, before those
    arguments: Template | None
    modes: Modes
    lifted: int = -1  # the input that is a lifted number ...
    number: Any = 0  # ... and one such number
    key: str = field(default="", compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "arguments": as_tree(self.arguments)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, arguments=from_tree(state["arguments"]))

    def __str__(self) -> str:
        takes, gives = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"{self.name}({takes}) -> ({gives})"


def module_names(model: torch.nn.Module | None) -> dict[int, str]:
    """Dotted names of the modules of a model, by id."""
    return {} if model is None else {id(m): name for name, m in model.named_modules()}


def describe(s: Signature, names: dict[int, str], lifted: int, sample: Any) -> Described:
    """A signature as plain data; TraceError when it uses what is not part of the model."""
    op = s.operation
    target: Reference | str | None = None
    if op.kind == "module":
        if id(op.target) not in names:
            raise TraceError(f"{op.name} is no submodule of the model: its trace can't be kept")
        target = names[id(op.target)]
    elif op.kind == "function":
        target = refer(op.target)
    own = len(s.shared_names)
    shared = []
    for operand in s.shared[own:]:
        if operand.owner is None or id(operand.owner) not in names:
            raise TraceError(
                f"{op.name} uses a parameter that is not part of the model: its trace can't be kept"
            )
        prefix = names[id(operand.owner)]
        shared.append(f"{prefix}.{operand.name}" if prefix else operand.name)
    arguments = None
    if s.arguments is not None:
        packed = tuple(refer(x) if callable(x) and not isinstance(x, type) else x for x in s.arguments.leaves)
        arguments = Template(packed, s.arguments.spec)
    marked = op.rule == MARKED
    parts = (
        op.kind,
        op.name,
        target,
        op.method,
        marked,
        s.inputs,
        s.outputs,
        tuple(shared),
        own,
        s.modes,
        lifted,
    )
    text = repr(parts) + (repr((arguments.leaves, str(arguments.spec))) if arguments is not None else "")
    return Described(
        op.kind, op.name, target, op.method, marked, s.inputs, s.outputs, tuple(shared), own, arguments,
        s.modes,
        lifted, sample, text + (type(sample).__name__ if lifted >= 0 else ""),
    )  # fmt: skip


def fingerprint(model: torch.nn.Module | None) -> tuple[str, ...]:
    """What a trace depends on: the class and mode of each module, the type of each parameter and buffer."""
    if model is None:
        return ()
    lines = []
    for name, m in model.named_modules():
        lines.append(
            f"{name or 'the model'}: {type(m).__qualname__}, {'training' if m.training else 'eval'} mode"
        )
        for kind in (m._parameters, m._buffers):
            lines.extend(f"{name}.{k}: {TensorType.of(t)}" for k, t in kind.items() if t is not None)
    return tuple(lines)
