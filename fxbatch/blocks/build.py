"""How a block becomes a function of one instance: closures over the handles of a Builder.

In: a typed block. Out: a function (a Run). A handle stands for a tensor: the tensor itself when a block is
evaluated (EAGER), the number of a recorded value when a minibatch is recorded (`record_builder.py`). A tuple
type is a tuple of handles, a sequence a list, a broadcast sequence `itertools.repeat`, void None, and a Python
object itself. So each block says once what it does.

    run = block.build(EAGER)
    run(x)                              # the block's output for x
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fxbatch.blocks.typed import Typed
from fxbatch.blocks.types import ResultType, TupleType

Run = Callable[[Any], Any]
ToArray = Callable[[Any], np.ndarray]


class Builder:
    """The values that blocks are built over. This one is eager: a handle is the tensor itself."""

    def tensor(
        self, block: Typed, convert: Callable[[Any], torch.Tensor], array: ToArray | None = None
    ) -> Run:
        """From a Python object to the handle of the tensor that `convert` makes of it.

        array: the same as an array, for objects that are no tensors; it costs no operation of PyTorch.
        """
        return convert

    def scalar(
        self,
        block: Typed,
        dtype: torch.dtype,
        convert: Callable[[Any], torch.Tensor],
        array: ToArray | None = None,
    ) -> Run:
        """From a Python number (or what else `convert` takes) to the handle of a tensor without dimensions."""
        return convert

    def shared(self, get: Callable[[], torch.Tensor]) -> Run:
        """From anything to the handle of a tensor that is the same for all instances; read at each run."""
        return lambda x: get()

    def call(
        self, block: Typed, fn: Callable[..., Any], input_type: ResultType, output_type: ResultType
    ) -> Run:
        """From the handles of a nest of tensors to those of `fn` of them; a tuple is splat into arguments."""
        nested = isinstance(output_type, TupleType)
        if isinstance(input_type, TupleType):
            if nested:
                return lambda x: as_tuples(fn(*x))
            return lambda x: fn(*x)
        return (lambda x: as_tuples(fn(x))) if nested else fn

    def recursive(self, declaration: Typed, build: Callable[[Builder], Run]) -> Run:
        """The function of a declared block, built when it first runs: it may hold itself."""
        made: list[Run] = []

        def run(x: Any) -> Any:
            if not made:
                made.append(build(self))
            return made[0](x)

        return run


EAGER = Builder()


def as_tuples(x: Any) -> Any:
    """A nest with its lists as tuples."""
    return tuple([as_tuples(y) for y in x]) if isinstance(x, (tuple, list)) else x


def walk(root: nn.Module) -> Iterator[nn.Module]:
    """All modules of an expression, each once, through forward declarations too."""
    seen: dict[int, nn.Module] = {}
    pending = [root]
    while pending:
        top = pending.pop()
        for module in top.modules():
            if id(module) in seen:
                continue
            seen[id(module)] = module
            yield module
            target = getattr(module, "resolved", None)
            if isinstance(target, nn.Module) and id(target) not in seen:
                pending.append(target)
