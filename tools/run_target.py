"""Run a target's model as users do, on the batched path and one instance at a time.

target = Runnable.of(model, {"schedule": "depth"})
results = target.batched(instances)         # a list, an item an instance
results = target.one_by_one(instances)      # the same from the undecorated forward
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fxbatch
from fxbatch.decorator import Autobatched, find_autobatched
from fxbatch.runtime.options import Options
from fxbatch.torch_private import tree_flatten


@dataclass(frozen=True, eq=False)
class Runnable:
    """A decorated callable with its owner; results come as a list with an item an instance."""

    decorated: Autobatched
    owner: Any

    @staticmethod
    def of(model: Any, overrides: dict[str, Any]) -> Runnable:
        """OptionError for unknown options."""
        found, owner = find_autobatched(model)
        given = {**dataclasses.asdict(found.options), **overrides, "out": "list"}
        return Runnable(Autobatched(found.fn, Options.of(**given)), owner)

    @property
    def module(self) -> torch.nn.Module | None:
        return self.owner if isinstance(self.owner, torch.nn.Module) else None

    def _arguments(self, instances: Sequence[Any]) -> tuple[Any, ...]:
        return (self.owner, list(instances)) if self.decorated.is_method else (list(instances),)

    def batched(self, instances: Sequence[Any]) -> list[Any]:
        return list(self.decorated(self._arguments(instances), {}))

    def one_by_one(self, instances: Sequence[Any]) -> list[Any]:
        with fxbatch.disabled():
            return list(self.decorated(self._arguments(instances), {}))


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of one instance's result, in order."""
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]


def convert(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of any picklable object with each tensor changed; shared tensors stay shared.

    Raises what pickle raises where the object can't be copied so (lambdas, open files).
    """
    kept: dict[int, torch.Tensor] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                kept[id(obj)] = obj
                return id(obj)
            return None

    changed: dict[int, torch.Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid not in changed:
                changed[pid] = change(kept[pid])
            return changed[pid]

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    buffer.seek(0)
    return Unpickler(buffer).load()
