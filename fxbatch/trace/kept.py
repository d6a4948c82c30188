"""What a minibatch found out about the modules, handed on to the next: known calls, owners, examined modules.

In: a recorder that begins, or one that is done. Out: a recorder that knows what was known, if every module of its
trees is as it was; else one that begins anew. Taken out of the table while in use: another thread begins anew.

    recall(recorder)        # before the first instance
    keep(recorder)          # after the last
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from fxbatch.torch_private import has_global_hooks
from fxbatch.trace.columns import Switch, _fast
from fxbatch.trace.examined import HOOKS
from fxbatch.trace.values import Value

if TYPE_CHECKING:
    from fxbatch.trace.record import Recorder

Owners = dict[int, tuple[torch.nn.Module, str]]

# One module as it was. A tuple, which the C extension reads: module, class, names and types of its attributes,
# whether it trains, which kinds of hooks it has, (names, objects) of its submodules, parameters and buffers,
# its tensors, and their (shape, dtype, device).
Part = tuple[Any, ...]

_Module = torch.nn.Module
_TABLES = ("_modules", "_parameters", "_buffers")


class Kept:
    """What lasts while the modules are as `parts` says."""

    __slots__ = (
        "by_mode",
        "constant_entries",
        "examined",
        "met",
        "operands",
        "owners",
        "parts",
        "roots",
        "seen",
        "with_extension",
    )

    def __init__(self, recorder: Recorder, by_mode: Any) -> None:
        self.roots = recorder.roots
        self.parts = recorder.parts
        self.seen = recorder.seen
        self.owners = recorder.owners
        self.examined = recorder.examined
        self.operands = recorder.operands
        self.met = recorder.met
        self.by_mode = by_mode
        self.constant_entries = recorder.constant_entries
        self.with_extension = Switch.on


def recall(recorder: Recorder) -> None:
    """Give a new recorder what the last one of its table knew, where that is still true."""
    table, recorder.recalled = recorder.table, True
    with table.lock:
        kept, table.kept = table.kept, None
    if (
        kept is None
        or kept.with_extension is not Switch.on
        or len(kept.roots) != len(recorder.roots)
        or any(a is not b for a, b in zip(kept.roots, recorder.roots, strict=True))
        or not as_they_were(kept.parts)
        or has_global_hooks()
        or not all(x.reads.unchanged() for x in kept.examined.values())
    ):
        find_owners(recorder)
        return
    recorder.parts, recorder.seen, recorder.owners = kept.parts, kept.seen, kept.owners
    recorder.operands = [(name, t, t._version) for name, t, _ in kept.operands]
    recorder.examined = kept.examined
    recorder.met, recorder.constant_entries = kept.met, kept.constant_entries
    recorder.know_modes(kept.by_mode)


def keep(recorder: Recorder, by_mode: Any) -> None:
    """Leave what a recorder that is done knows in its table, if no module changed while it recorded."""
    if not recorder.lasts or recorder.owners is None or not recorder.met.lasts():
        return
    examined = recorder.examined
    if not all(x.lasts for x in examined.values()):  # those are to be looked at again
        recorder.examined = {key: x for key, x in examined.items() if x.lasts}
    with recorder.table.lock:
        recorder.table.kept = Kept(recorder, by_mode)


def find_owners(recorder: Recorder) -> Owners:
    """Look at all modules: whose each parameter and buffer is, and how the modules are now."""
    owners: Owners = {}
    parts: list[Part] = []
    seen: set[int] = set()  # only looked up
    known = {id(t): version for _, t, version in recorder.operands}
    operands = []
    for root in (*recorder.roots, *recorder.table.owners.values()):
        for module in root.modules():
            for tensors in (module._parameters, module._buffers):
                for name, t in tensors.items():
                    if t is not None and id(t) not in owners:
                        owners[id(t)] = module, name
                        if not is_lazy(t) and not t.is_inference():
                            version = known.get(id(t), t._version)
                            operands.append((f"{type(module).__name__}.{name}", t, version))
            if id(module) not in seen:
                seen.add(id(module))
                if _lists_its_own(module):
                    parts.append(_part(module))
                else:
                    recorder.lasts = False
    recorder.owners, recorder.parts, recorder.seen = owners, parts, seen
    recorder.operands = (
        operands if recorder.recalled else []
    )  # a lazy block may outlast a step of the optimizer
    return owners


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
    return _fast.as_they_were(parts) if Switch.on else all(map(_as_it_was, parts))


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
