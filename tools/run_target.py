"""Run a target's model as users do, on the batched path and one instance at a time.

target = Runnable.of(model, {"schedule": "depth"})
results = target.batched(instances)         # a list, one item per instance
results = target.one_by_one(instances)      # the same from the undecorated forward
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fxbatch
from fxbatch.decorator import Autobatched, find_autobatched
from fxbatch.runtime.options import Options
from fxbatch.torch_private import tree_flatten

from .terminal import counted


@dataclass(frozen=True, eq=False)
class Runnable:
    """A decorated callable with its owner; results come as a list with one item per instance."""

    decorated: Autobatched
    owner: Any

    @staticmethod
    def of(model: Any, overrides: dict[str, Any]) -> Runnable:
        """OptionError for unknown options."""
        found, owner = find_autobatched(model)
        given = {
            **dataclasses.asdict(found.options),
            **overrides,
            "out": "list",
            "check": 0,
            "adaptive": False,
            "check_gradients": False,
        }
        return Runnable(Autobatched(found.fn, Options.of(**given)), owner)

    @property
    def module(self) -> torch.nn.Module | None:
        return self.owner if isinstance(self.owner, torch.nn.Module) else None

    def batched(self, instances: Sequence[Any]) -> list[Any]:
        return list(self.decorated(self.owner, arguments(self.decorated, self.owner, instances), {}))

    def one_by_one(self, instances: Sequence[Any]) -> list[Any]:
        with fxbatch.disabled():
            found = []
            for instance in counted(instances, len(instances), "one by one"):
                found += self.batched([instance])
            return found


def arguments(decorated: Autobatched, owner: Any, instances: Sequence[Any]) -> tuple[list[Any], ...]:
    """The arguments of a decorated call: the instances, or a list for each of their parts.

    The latter where the forward takes several arguments an instance, and instances are tuples.
    """
    if not instances:
        return ([],)
    rows = [decorated.arguments_of(owner, instance) for instance in instances]
    return tuple(map(list, zip(*rows, strict=True)))


def model_arguments(model: Any, instances: Sequence[Any]) -> tuple[list[Any], ...]:
    """`arguments` of a target's model."""
    return arguments(*find_autobatched(model), instances)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of one instance's result, in order."""
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
