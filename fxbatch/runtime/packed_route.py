"""Which minibatches may be packed, asked before anything that packing needs is imported.

In: a decorated call. Out: its results from the packed forward (`packed_forward.py`), or NOT_PACKED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.runtime.argument_objects import TensorColumns, holds_tensors, opened
from fxbatch.runtime.options import Options
from fxbatch.stopwatch import building
from fxbatch.torch_private import tree_leaves
from fxbatch.trace.reads import Reads
from fxbatch.trace.things import Roots

if TYPE_CHECKING:  # it imports sympy, which takes half a second that most programs need not spend
    from fxbatch.runtime.packed_forward import PackedForward

NOT_PACKED = object()
FIRST = 0.5  # seconds that the first function for all sizes of a process may take, with torch's imports for symbols
SECONDS = 0.05  # and those after it


class PackedRoute:
    """The packed forward of an engine, made when a minibatch has tensors of different sizes."""

    seconds_to_try = FIRST  # once torch's imports for symbols are made, less

    def __init__(
        self,
        options: Options,
        root: torch.nn.Module | None,
        may_build: Callable[[], bool] = lambda: True,
        may_try: Callable[[float], bool] = lambda _: True,
    ) -> None:
        self.options = options
        self.root = root
        self.may_build = may_build
        self.may_try = may_try  # asked before anything is imported
        self.forward: PackedForward | None = None
        self._opaque: str | None = None  # why the code is not plain, once it was looked at without `forward`
        off = root is None or options.mode != "looped" or bool(options.compile) or options.return_exceptions
        self.off = off or options.schedule in ("none", "fold")

    def statement(self, fn: object, instances: Sequence[Any]) -> str:
        """What the user may state where its code keeps a forward of tensors from being packed, else ""."""
        if self.off or not _tensors_first(instances):
            return ""
        if self.forward is None and self._opaque is None:
            self._opaque = Reads(Roots(self.root, "forward", fn)).opaque
        reason = self.forward.reason if self.forward else self._opaque or ""
        stated = "plain=True states that it does the same for each instance"
        return reason and f"not packed as it {reason}: {stated}"

    def call(self, fn: Callable[..., Any], instances: Sequence[Any], out: str) -> object:
        """The results of a minibatch, or NOT_PACKED."""
        if self.off or not instances or not _tensors_first(instances):
            return NOT_PACKED
        if self.forward is None:
            if not _sizes_differ(instances) or not (self.options.plain or self.may_try(self.seconds_to_try)):
                return NOT_PACKED
            with building():
                from fxbatch.runtime.packed_forward import PackedForward

                PackedRoute.seconds_to_try = SECONDS
                self.forward = PackedForward(self.options, self.root, self.may_build)
        results = self.forward.call(fn, instances, out)
        return NOT_PACKED if results is None else results[0]


def _tensors_first(instances: Sequence[Any]) -> bool:
    """Whether an instance is a tensor, a container or an object that holds some: a look at one, which costs nothing for
    trees."""
    if type(instances) is TensorColumns:
        return True
    args = instances[0][0]
    return len(args) > 1 and holds_tensors(args[1])


def _sizes_differ(instances: Sequence[Any]) -> bool:
    if isinstance(instances, TensorColumns):
        return any(len({x.shape for x in column}) > 1 for column in instances.columns)
    flat = [tree_leaves(opened(args[1:], None)) for args, _ in instances]
    shapes = [[x.shape for x in leaves if type(x) is torch.Tensor] for leaves in flat]
    return any(s != shapes[0] for s in shapes)
