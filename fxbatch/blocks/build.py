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
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.blocks.types import ResultType, TensorType, TupleType
from fxbatch.errors import BlockTypeError

if TYPE_CHECKING:
    from fxbatch.blocks.block import Block
    from fxbatch.blocks.control import ForwardDeclaration

Run = Callable[[Any], Any]


class Builder:
    """What blocks are built over. This one is eager: a handle is the tensor itself."""

    def tensor(self, block: Block, convert: Callable[[Any], torch.Tensor]) -> Run:
        """From a Python object to the handle of the tensor that `convert` makes of it."""
        return convert

    def scalar(self, block: Block, dtype: torch.dtype, convert: Callable[[Any], torch.Tensor]) -> Run:
        """From a Python number (or what else `convert` takes) to the handle of a tensor without dimensions."""
        return convert

    def shared(self, get: Callable[[], torch.Tensor]) -> Run:
        """From anything to the handle of a tensor that is the same for all instances; read at each run."""
        return lambda x: get()

    def call(
        self, block: Block, fn: Callable[..., Any], input_type: ResultType, output_type: ResultType
    ) -> Run:
        """From the handles of a nest of tensors to those of `fn` of them; a tuple is splat into arguments."""
        nested = isinstance(output_type, TupleType)
        if isinstance(input_type, TupleType):
            if nested:
                return lambda x: _tuples(fn(*x))
            return lambda x: fn(*x)
        return (lambda x: _tuples(fn(x))) if nested else fn

    def recursive(self, declaration: ForwardDeclaration) -> Run:
        """The function of a declared block, looked up when it first runs: it may hold itself."""
        made: list[Run] = []

        def run(x: Any) -> Any:
            if not made:
                made.append(declaration.target.runnable(self))
            return made[0](x)

        return run


EAGER = Builder()


def _tuples(x: Any) -> Any:
    return tuple(_tuples(y) for y in x) if isinstance(x, (tuple, list)) else x


def walk(root: Any) -> Iterator[Any]:
    """All modules of an expression, each once, through forward declarations too."""
    seen: dict[int, Any] = {}
    pending = [root]
    while pending:
        top = pending.pop()
        for module in top.modules():
            if id(module) in seen:
                continue
            seen[id(module)] = module
            yield module
            target = getattr(module, "resolved", None)
            if target is not None and id(target) not in seen:
                pending.append(target)


def metrics_of(root: Block) -> dict[str, TensorType]:
    """The metrics in an expression: name -> type of one value. BlockTypeError when two types share a name."""
    from fxbatch.blocks.control import Metric

    found: dict[str, TensorType] = {}
    for module in walk(root):
        if isinstance(module, Metric):
            t = module.value_type
            known = found.setdefault(module.metric_name, t)
            if known != t:
                raise BlockTypeError(f"metric {module.metric_name!r} has values of {known!r} and of {t!r}")
    return found
