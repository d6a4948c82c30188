"""Modules as they are now: their tensors, modes, what their code reads, and why one can't be one operation.

In: a module. Out: its shared operands and a key of all that its operation depends on. What was found stays true
while `unchanged()`, which looks at names, types, modes, hooks, shapes, dtypes, devices and at what is read
(`body_reads`), and is much cheaper.

    found = Examined(module)
    found.key                    # equal for equal modes, types of tensors and contents of what is read
    if not found.unchanged(): found = Examined(module, found.reads.again())
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fxbatch.ir import SharedOperand
from fxbatch.torch_private import NormBase, has_global_hooks
from fxbatch.trace.body_reads import Reads
from fxbatch.trace.values import Value

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)  # of a module's state


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
        self.parts: list[_Part] = []
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
        listed = type(module).named_modules is torch.nn.Module.named_modules  # else others may join unseen
        self.lasts = listed and not self.reason and not self.coupled
        self.reason = self.reason or reads.opaque

    def _add_tensors(self, prefix: str, m: torch.nn.Module, key: list[Any]) -> None:
        part = _Part(m)
        self.parts.append(part)
        plain = {k: x for k, x in m.__dict__.items() if isinstance(x, torch.Tensor)}
        for tensors, watched in ((m._parameters, True), (m._buffers, True), (plain, False)):
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
                if not watched:
                    part.plain.append(name)
                part.tensors.append((t.shape, t.dtype, t.device))

    def unchanged(self) -> bool:
        """Whether examining the module again would find the same."""
        return self.lasts and all(part.unchanged() for part in self.parts) and self.reads.unchanged()


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


class _Part:
    """One module of a module's tree as it was: all but the numbers in its tensors."""

    __slots__ = (
        "attributes", "buffers", "children", "cls", "kinds", "module", "parameters", "plain", "tensors", "training",
    )  # fmt: skip

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.cls = type(module)
        self.training = module.training
        self.attributes = list(module.__dict__)
        self.kinds = list(map(type, module.__dict__.values()))
        self.children = _names_and_ids(module._modules)
        self.parameters = _names_and_types(module._parameters)
        self.buffers = _names_and_types(module._buffers)
        self.plain: list[str] = []
        self.tensors: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def unchanged(self) -> bool:
        m = self.module
        state = m.__dict__
        if (
            m.training is not self.training
            or type(m) is not self.cls
            or has_hooks(m)
            or list(state) != self.attributes
            or list(map(type, state.values())) != self.kinds
            or _names_and_ids(m._modules) != self.children
            or _names_and_types(m._parameters) != self.parameters
            or _names_and_types(m._buffers) != self.buffers
        ):
            return False
        tensors = [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        tensors += [state[name] for name in self.plain]
        return [(t.shape, t.dtype, t.device) for t in tensors] == self.tensors


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether forward or backward hooks are registered on the module itself, or on all modules."""
    return has_global_hooks() or any(map(module.__dict__.get, HOOKS))


def _names_and_types(tensors: dict[str, Any]) -> tuple[list[str], list[type]]:
    return list(tensors), list(map(type, tensors.values()))


def _names_and_ids(modules: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Ids stay those of the modules, which the parts hold."""
    return list(modules), list(map(id, modules.values()))
