"""The code of a decorated forward as one operation: whether it can be one, and a number for all that it reads.

In: a module, its forward, the arguments of an instance. Out: the module as it is (`Examined`), or the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

import torch

from fxbatch.caches import Cache
from fxbatch.runtime.argument_objects import classes_of, opened
from fxbatch.runtime.options import Options
from fxbatch.torch_private import tree_flatten
from fxbatch.trace.module_state import Examined, unchanged
from fxbatch.trace.reads import Reads
from fxbatch.trace.things import Roots


class ForwardCode:
    """A decorated forward, and what its code is known to read."""

    def __init__(self, options: Options, root: torch.nn.Module | None) -> None:
        self.options = options
        self.root = root
        self.examined: Examined | None = None
        self.content = 0
        self.reason = ""  # why it is no operation
        self._classes: tuple[type, ...] = ()  # of objects among the arguments
        self._contents: Cache[Hashable, int] = Cache("contents")
        self._numbers = itertools.count()

    def meets(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Whether there are objects among an instance's arguments, of classes that it is looked at with from now on."""
        met = dict.fromkeys(classes_of(tree_flatten(opened((args[1:], kwargs), None))[1]))
        if not met.keys() <= set(self._classes):
            self._classes, self.examined = (*dict.fromkeys((*self._classes, *met)),), None
        return bool(met)

    def look(self, fn: object) -> Examined | None:
        """The module as it is; None where its code or hooks can't be known."""
        assert self.root is not None
        examined = self.examined
        if examined is None:
            roots = Roots(self.root, "forward", fn, self._classes, loose=self.options.plain)
            examined = self._now(Examined(self.root, Reads(roots)))
        elif not unchanged(examined.places):
            examined = self._now(Examined(self.root, examined.reads.again()))
        mixes = examined.coupled and self.options.batch_norm != "minibatch"
        self.reason = examined.reason or (examined.coupled if mixes else "")
        return None if self.reason else examined

    def _now(self, examined: Examined) -> Examined:
        """Note how the module is."""
        number = self._contents.get(examined.key)
        self.content = self._contents.put(examined.key, next(self._numbers)) if number is None else number
        self.examined = examined
        return examined
