"""The state of modules: how they are now, whether they still are, and what lasts as long as they are.

In: modules. Out: what one operation of a module depends on (`Examined`); whose parameters are (`ModulesMet`); what a
trace of a model depends on (`KnownModel`). Each lasts while the places where modules keep their state (`places`) hold
what they held, and what code reads besides (`plain_body`) too.

    found = Examined(module)
    found.key                    # equal for equal modes, types of tensors and contents of what is read
    if not unchanged(found.places): found = Examined(module, found.reads.again())
    known = known_model(table, model)
    known.fingerprint            # what a trace depends on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fxbatch.caches import Cache, guard
from fxbatch.ir import SharedOperand, TensorSpec
from fxbatch.torch_private import has_global_hooks
from fxbatch.trace.bare_parameters import bare_parameters
from fxbatch.trace.module_changes import containers_of
from fxbatch.trace.places import HOOKS, Item, first_changed, places_of_modules
from fxbatch.trace.plain_objects import is_library
from fxbatch.trace.reads import Reads
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.things import Roots
from fxbatch.trace.values import Value

Owners = dict[int, tuple[torch.nn.Module, str]]
MANY_STATES = 4  # what reads something that had more contents than this is traced through


def keeps_changing(what: str) -> str:
    """Why it is then, of the first place that changed last."""
    return f"{what or 'what it reads'} keeps changing: its parts are recorded with what it is each time"


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether forward or backward hooks are registered on the module itself, or on all modules."""
    return has_global_hooks() or any(map(module.__dict__.get, HOOKS))


def keeps_statistics(module: torch.nn.Module) -> bool:
    """Whether it is a layer that counts running statistics in training, as BatchNorm and InstanceNorm of torch and
    those that derive from them."""
    buffers = module._buffers
    return buffers.get("running_mean") is not None and "num_batches_tracked" in buffers


@guard("places")
def unchanged(places: list[Item] | None) -> bool:
    """Whether modules, and what code reads besides, are as they were; None: what can change isn't all in places."""
    return places is not None and first_changed(places) is None and not has_global_hooks()


class Examined:
    """A module as it is now: its tensors, or why it can't be one operation."""

    __slots__ = (
        "attributes", "coupled", "entries", "guards", "key", "lasts", "names", "places", "plain", "reads", "reason",
        "shared", "structure",
    )  # fmt: skip

    def __init__(self, module: torch.nn.Module, reads: Reads | None = None) -> None:
        self.reads = reads = Reads.of_module(module) if reads is None else reads
        self.guards = reads.guards()
        self.reason = ""
        self.coupled = ""
        self.names: list[str] = []
        self.shared: list[SharedOperand] = []
        self.plain: list[SharedOperand] = []  # of these, tensors that are no parameters or buffers
        self.places: list[Item] | None = None  # of all that it is known by; None: it is looked at again
        # By modes, then by what it was called with: an Entry or a reason.
        self.entries: dict[object, dict[object, Any]] = {}
        key: list[object] = []
        for prefix, m in module.named_modules():
            if has_hooks(m):
                self.reason = f"has hooks{' on ' + prefix if prefix else ''}"
            if m.training and keeps_statistics(m):
                self.coupled = f"{prefix + ': ' if prefix else ''}{type(m).__name__}"
            key.append(m.training)
            self._add_tensors(prefix, m, key)
        self.attributes = reads.names.union(s.name for s in self.shared)  # that it reads of modules
        self.structure = tuple(key)
        self.key = (self.structure, reads.key)
        places = places_of_modules(list(module.modules()))
        self.lasts = places is not None and not self.reason and not self.coupled
        if places is not None and self.lasts:
            self.places = [*places, *reads.items]
        self.reason = self.reason or reads.opaque

    def _add_tensors(self, prefix: str, m: torch.nn.Module, key: list[object]) -> None:
        every = self.reads.opaque or is_library(type(m).__module__)  # else its code reads those that it names
        plain = {
            k: x
            for k, x in m.__dict__.items()
            if isinstance(x, torch.Tensor) and (every or k in self.reads.names)
        }
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
                self.plain += self.shared[-1:] if tensors is plain else ()
                key.append((name, t.shape, t.dtype, t.device))


class ExaminedFunction:
    """A user's function or class that is one operation, and what its code reads now."""

    __slots__ = ("attributes", "custom", "guards", "lasts", "reads", "reason", "state", "target")

    def __init__(self, target: object, reads: Reads, state: int, reason: str) -> None:
        self.target = target
        self.reads = reads
        self.attributes = reads.names  # that it reads of modules
        self.guards = reads.guards()
        self.state = state  # a number for the content of what it reads
        self.reason = reason  # why it is no operation, "" where it is one
        self.custom: object = None  # the CustomFunction of a torch.autograd.Function with this content
        self.lasts = True


class ModulesMet(NamedTuple):
    """All modules that a recording may meet: whose each parameter and buffer is, and how the modules are now."""

    owners: Owners
    places: list[Item] | None  # None where what can change of them isn't all seen
    seen: frozenset[int]  # ids of the modules
    operands: list[tuple[str, torch.Tensor, int]]  # name, parameter or buffer, version at first sight
    classes: tuple[type, ...]
    bare: tuple[torch.nn.Parameter, ...]  # that users' code may read by itself
    containers: tuple[tuple[torch.nn.Module, str], ...]  # attributes that are lists, dictionaries, sets

    @staticmethod
    def of(roots: Iterable[torch.nn.Module], versions: Mapping[int, int]) -> ModulesMet:
        """Look at the trees of `roots`. versions: of tensors that were seen before, by id."""
        owners: Owners = {}
        operands = []
        modules = {id(module): module for root in roots for module in root.modules()}
        for module in modules.values():
            for name, t in (*module._parameters.items(), *module._buffers.items()):
                if t is not None and id(t) not in owners:
                    owners[id(t)] = module, name
                    if not is_lazy(t) and not t.is_inference():
                        version = versions.get(id(t), t._version)
                        operands.append((f"{type(module).__name__}.{name}", t, version))
        met = list(modules.values())
        classes = tuple(dict.fromkeys(map(type, met)))
        return ModulesMet(
            owners,
            places_of_modules(met),
            frozenset(modules),
            operands,
            classes,
            bare_parameters(met),
            containers_of(met),
        )


def fingerprint(model: torch.nn.Module | None) -> tuple[str, ...]:
    """Lines of text that a trace depends on: class and mode of each module, type of each parameter and buffer."""
    if model is None:
        return ()
    lines = []
    for name, m in model.named_modules():
        lines.append(
            f"{name or 'the model'}: {type(m).__qualname__}, {'training' if m.training else 'eval'} mode"
        )
        for kind in (m._parameters, m._buffers):
            lines.extend(f"{name}.{k}: {TensorSpec.of(t)}" for k, t in kind.items() if t is not None)
    return tuple(lines)


class KnownModel:
    """Facts of a model that last while its modules, and what their code reads, are as they were."""

    __slots__ = ("fingerprint", "ids", "model", "places", "reads")

    def __init__(self, forward: Callable[..., object] | None, model: torch.nn.Module | None) -> None:
        self.model = model
        places = None if model is None else places_of_modules(list(model.modules()))
        self.reads = Reads(Roots(model, "forward", forward, loose=True))  # what the code of all of it reads
        self.places = None if places is None else [*places, *self.reads.items]
        self.fingerprint = (*fingerprint(model), *self.reads.lines())
        self.ids: Cache[bytes, np.ndarray] = Cache("traces")


def known_model(table: SignatureTable, model: torch.nn.Module | None) -> KnownModel:
    """The KnownModel of a model: that of last time while it holds, else a new one."""
    state = table.known_model
    if state is None or state.model is not model or not unchanged(state.places):
        state = table.known_model = KnownModel(table.forward, model)
    return state
