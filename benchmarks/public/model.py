"""A public model as a row of the table: whose code it is, how one instance is run, and made-up data.

In: what a file in models/ says. Out: modules with a plain forward of one instance, and minibatches of new data.

    MODEL = PublicModel("RNNG", SOURCE, build)
    with MODEL.source.imported() as load:
        driver = MODEL.build(load)
        driver.module(), driver.instances(number=0, count=32)
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.public.sources import Source

Load = Callable[[str], types.ModuleType]


@dataclass(frozen=True)
class Driver:
    """make: a new module, whose forward takes one instance and gives its loss in training mode, and in eval mode what
    it predicts; always equal parameters from equal seeds. instances: new arguments of `count` instances, by number."""

    make: Callable[[], nn.Module]
    instances: Callable[[int, int], Sequence[tuple[Any, ...]]]


@dataclass(frozen=True)
class PublicModel:
    """A row. options: those that the decorator needs (results of different shapes: out="list")."""

    name: str
    kind: str
    source: Source
    build: Callable[[Load], Driver]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def forced(self) -> int:
        """Edits that fxbatch itself forced."""
        return sum(edit.because == "fxbatch" for edit in self.source.edits)


def find_model(place: str) -> PublicModel:
    """The model of `package.module:NAME`."""
    module, _, name = place.partition(":")
    model = getattr(importlib.import_module(module), name)
    assert isinstance(model, PublicModel)
    return model
