"""Which minibatches may be packed, asked before anything that packing needs is imported.

In: a decorated call. Out: its results from the packed forward (`packed_forward.py`), or NOT_PACKED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.runtime.argument_objects import Instance, TensorColumns, holds_tensors, opened
from fxbatch.runtime.forward_code import ForwardCode
from fxbatch.runtime.options import Options
from fxbatch.stopwatch import building
from fxbatch.torch_private import tree_leaves

if TYPE_CHECKING:  # it imports sympy, which takes half a second that most programs need not spend
    from fxbatch.runtime.packed_forward import PackedForward

NOT_PACKED = object()
FIRST = 0.5  # seconds that the first function for all sizes of a process may take, with torch's imports for symbols
SECONDS = 0.05  # and those after it
AHEAD = 20.0  # minibatches that may pay for it, of a whole forward: it saves most of what the loop takes


class PackedRoute:
    """The packed forward of an engine, made when a minibatch has tensors of different sizes."""

    seconds_to_try = FIRST  # once torch's imports for symbols are made, less

    def __init__(
        self,
        options: Options,
        root: torch.nn.Module | None,
        may_build: Callable[[], bool] = lambda: True,
        may_try: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        self.code = ForwardCode(options, root)
        self.may_build = may_build
        self.may_try = may_try  # asked before anything is imported
        self.forward: PackedForward | None = None
        self._differ = False  # whether a minibatch had tensors of different sizes: not asked again
        self.off = root is None or not options.packs or options.return_exceptions

    def statement(self, fn: object, instances: Sequence[Instance]) -> str:
        """What the user may state where its code keeps a forward of tensors from being packed, else ""."""
        if self.off or not _tensors_first(instances):
            return ""
        if self.code.examined is None:
            self.code.look(fn)
        reason = self.code.reason
        stated = "plain=True states that it does the same for each instance"
        return reason and f"not packed as it {reason}: {stated}"

    def call(self, fn: Callable[..., Any], instances: Sequence[Instance], out: str) -> object:
        """The results of a minibatch, or NOT_PACKED."""
        if self.off or not instances or not _tensors_first(instances):
            return NOT_PACKED
        if self.forward is None:
            self._differ = self._differ or _sizes_differ(instances)
            if not self._differ or not self._may_try(fn, instances):
                return NOT_PACKED
            with building():
                from fxbatch.runtime.packed_forward import PackedForward

                PackedRoute.seconds_to_try = SECONDS
                self.forward = PackedForward(self.code, self.may_build)
        results = self.forward.call(fn, instances, out)
        return NOT_PACKED if results is None else results[0]

    def _may_try(self, fn: object, instances: Sequence[Instance]) -> bool:
        """Whether a function for all sizes may be tried, as far as is known before anything is imported."""
        if not (self.code.options.plain or self.may_try(self.seconds_to_try, ahead=AHEAD)):
            return False
        if type(instances) is not TensorColumns:
            self.code.meets(*instances[0])
        with building():
            return self.code.look(fn) is not None


def _tensors_first(instances: Sequence[Instance]) -> bool:
    """Whether an instance is a tensor, a container or an object that holds some: a look at one, which costs nothing for
    trees."""
    if type(instances) is TensorColumns:
        return True
    args = instances[0][0]
    return len(args) > 1 and holds_tensors(args[1])


def _sizes_differ(instances: Sequence[Instance]) -> bool:
    if isinstance(instances, TensorColumns):
        return any(len({x.shape for x in column}) > 1 for column in instances.columns)
    flat = [tree_leaves(opened(args[1:], None)) for args, _ in instances]
    shapes = [[x.shape for x in leaves if type(x) is torch.Tensor] for leaves in flat]
    return any(s != shapes[0] for s in shapes)
