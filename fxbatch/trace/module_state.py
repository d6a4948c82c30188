"""The state of modules: how they are now, whether they still are, and what lasts as long as they are.

In: modules. Out: a picture of their classes, attributes, modes, hooks, submodules and tensors, which `as_they_were`
compares with what is now; what one operation of a module depends on (`Examined`); whose parameters are (`ModulesMet`);
what a trace of a model depends on (`KnownModel`). What code reads besides is in `body_reads`.

    found = Examined(module)
    found.key                    # equal for equal modes, types of tensors and contents of what is read
    if not found.unchanged(): found = Examined(module, found.reads.again())
    known = known_model(table, model)
    known.fingerprint            # what a trace depends on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fxbatch.ir import SharedOperand, TensorType
from fxbatch.torch_private import NormBase, has_global_hooks
from fxbatch.trace.body_reads import Reads
from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.values import Value

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)  # of a module's state

Owners = dict[int, tuple[torch.nn.Module, str]]

# One module as it was. A tuple, which the C extension reads: module, class, names and types of its attributes,
# whether it trains, which kinds of hooks it has, (names, objects) of its submodules, parameters and buffers,
# its tensors, and their (shape, dtype, device).
Part = tuple[Any, ...]

_Module = torch.nn.Module
_TABLES = ("_modules", "_parameters", "_buffers")


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether forward or backward hooks are registered on the module itself, or on all modules."""
    return has_global_hooks() or any(map(module.__dict__.get, HOOKS))


def picture(root: torch.nn.Module) -> list[Part] | None:
    """All modules of a tree as they are, for `as_they_were`; None where what can change isn't all seen."""
    modules = list(root.modules())
    return list(map(_part, modules)) if all(map(_lists_its_own, modules)) else None


def _lists_its_own(module: torch.nn.Module) -> bool:
    """Whether all that can change is seen: modules that torch's own method lists, no parameters yet to be made."""
    cls, state = type(module), module.__dict__
    plain = cls.named_modules is _Module.named_modules and cls.modules is _Module.modules
    kept_here = all(isinstance(state.get(name), dict) for name in _TABLES)  # not so in TorchScript
    return plain and kept_here and not any(is_lazy(p) for p in state["_parameters"].values())


def _part(module: torch.nn.Module) -> Part:
    state = module.__dict__
    tables = [(tuple(state[name]), tuple(state[name].values())) for name in _TABLES]
    tensors = tuple(t for t in (*tables[1][1], *tables[2][1]) if t is not None)
    return (
        module, type(module), tuple(state), tuple(map(_kind, state.values())), module.training, _hooks(state), *tables,
        tensors, tuple(map(_type_of, tensors)),
    )  # fmt: skip


def _type_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device


def _kind(x: Any) -> Any:
    """The type of an attribute. Tensors among them are not held: they may be results, with all behind them."""
    plain = isinstance(x, torch.Tensor) and type(x) is not Value
    return (*_type_of(x), type(x)) if plain else type(x)


def _hooks(state: dict[str, Any]) -> tuple[bool, ...]:
    return tuple(bool(state.get(name)) for name in HOOKS)


def as_they_were(parts: list[Part]) -> bool:
    """Whether modules have the classes, attributes, hooks, submodules and tensors that they had."""
    return _fast.as_they_were(parts) if ExtensionSwitch.on else all(map(_as_it_was, parts))


def _as_it_was(part: Part) -> bool:
    module, cls, names, kinds, training, hooks, *tables, tensors, types = part
    state = module.__dict__
    return (
        type(module) is cls
        and tuple(state) == names
        and tuple(map(_kind, state.values())) == kinds
        and state.get("training") is training
        and _hooks(state) == hooks
        and all(_same(state[name], table) for name, table in zip(_TABLES, tables, strict=True))
        and tuple(map(_type_of, tensors)) == types
    )


def _same(now: dict[str, Any], table: tuple[tuple[str, ...], tuple[Any, ...]]) -> bool:
    names, objects = table
    return tuple(now) == names and all(a is b for a, b in zip(now.values(), objects, strict=True))


class Examined:
    """A module as it is now: its tensors, or why it can't be one operation."""

    __slots__ = (
        "coupled", "entries", "guards", "key", "lasts", "names", "parts", "reads", "reason", "shared", "structure",
        "training",
    )  # fmt: skip

    def __init__(self, module: torch.nn.Module, reads: Reads | None = None) -> None:
        self.reads = reads = Reads.of_module(module) if reads is None else reads
        self.guards = reads.guards()
        self.reason = ""
        self.coupled = ""
        self.names: list[str] = []
        self.shared: list[SharedOperand] = []
        self.training = module.training
        self.parts = picture(module)
        self.entries: dict[
            Any, dict[Any, Any]
        ] = {}  # modes -> what the module was called with -> Entry or reason
        key: list[Any] = []
        for prefix, m in module.named_modules(remove_duplicate=False):
            if has_hooks(m):
                self.reason = f"has hooks{' on ' + prefix if prefix else ''}"
            if isinstance(m, NormBase) and m.training and m.running_mean is not None:
                self.coupled = f"{prefix + ': ' if prefix else ''}{type(m).__name__}"
            key.append(m.training)
            self._add_tensors(prefix, m, key)
        self.structure = tuple(key)
        self.key = (self.structure, reads.key)
        self.lasts = self.parts is not None and not self.reason and not self.coupled
        self.reason = self.reason or reads.opaque

    def _add_tensors(self, prefix: str, m: torch.nn.Module, key: list[Any]) -> None:
        plain = {k: x for k, x in m.__dict__.items() if isinstance(x, torch.Tensor)}
        for tensors in (m._parameters, m._buffers, plain):
            for name, t in tensors.items():
                if t is None:
                    continue
                if type(t) is Value:
                    self.reason = f"keeps a value in its attribute {name!r}"
                    continue
                if is_lazy(t):  # it has no shape yet; its module makes it when it is called
                    self.reason = f"makes its parameter {name!r} at its first call"
                    continue
                self.names.append(f"{prefix}.{name}" if prefix else name)
                self.shared.append(SharedOperand(m, name))
                key.append((name, t.shape, t.dtype, t.device))

    def unchanged(self) -> bool:
        """Whether examining the module again would find the same."""
        return (
            self.lasts
            and self.parts is not None
            and as_they_were(self.parts)
            and not has_global_hooks()
            and self.reads.unchanged()
        )


class ExaminedFunction:
    """A user's function or class that is one operation, and what its code reads now."""

    __slots__ = ("custom", "guards", "lasts", "reads", "reason", "state", "target")

    def __init__(self, target: Any, reads: Reads, state: int, reason: str) -> None:
        self.target = target
        self.reads = reads
        self.guards = reads.guards()
        self.state = state  # a number for the content of what it reads
        self.reason = reason  # why it is no operation, "" where it is one
        self.custom: Any = None  # the CustomFunction of a torch.autograd.Function with this content
        self.lasts = True


class ModulesMet(NamedTuple):
    """All modules that a recording may meet: whose each parameter and buffer is, and how the modules are now."""

    owners: Owners
    parts: list[Part]
    seen: frozenset[int]  # ids of the modules
    operands: list[tuple[str, torch.Tensor, int]]  # name, parameter or buffer, version at first sight
    lasts: bool  # whether all that can change of them is seen

    @staticmethod
    def of(roots: Iterable[torch.nn.Module], versions: Mapping[int, int]) -> ModulesMet:
        """Look at the trees of `roots`. versions: of tensors that were seen before, by id."""
        owners: Owners = {}
        parts: list[Part] = []
        seen: set[int] = set()  # only looked up
        operands = []
        lasts = True
        for root in roots:
            for module in root.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, t in tensors.items():
                        if t is not None and id(t) not in owners:
                            owners[id(t)] = module, name
                            if not is_lazy(t) and not t.is_inference():
                                version = versions.get(id(t), t._version)
                                operands.append((f"{type(module).__name__}.{name}", t, version))
                if id(module) not in seen:
                    seen.add(id(module))
                    if _lists_its_own(module):
                        parts.append(_part(module))
                    else:
                        lasts = False
        return ModulesMet(owners, parts, frozenset(seen), operands, lasts)


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


class KnownModel:
    """What lasts while the modules are as `parts` says, and what their code reads is as it was."""

    __slots__ = ("fingerprint", "ids", "model", "parts", "reads")

    def __init__(self, forward: Callable[..., Any] | None, model: torch.nn.Module | None) -> None:
        self.model = model
        self.parts = None if model is None else picture(model)
        self.reads = Reads.of_forward(forward, model)  # what the code of the forward and of its modules reads
        self.fingerprint = (*fingerprint(model), *self.reads.lines())
        self.ids: dict[bytes, np.ndarray] = {}

    def is_true(self, model: torch.nn.Module | None) -> bool:
        """Whether it still holds."""
        return (
            self.model is model
            and self.parts is not None
            and as_they_were(self.parts)
            and self.reads.unchanged()
        )


def known_model(table: SignatureTable, model: torch.nn.Module | None) -> KnownModel:
    """What is known of a model."""
    found = table.known_model
    if found is None or not found.is_true(model):
        found = table.known_model = KnownModel(table.forward, model)
    return found
