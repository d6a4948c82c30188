"""Block-likes to blocks: dicts, tuples and lists are Records, layers and modules Functions, arrays FromTensors.

In: anything that a block argument takes. Out: a block, or a BlockTypeError that says what is taken.

    convert_to_block({"a": fb.Scalar()})        # Record({'a': Scalar()})
    convert_to_block(nn.Linear(3, 4))           # Function(Linear(...))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fxbatch.blocks.block import Block
from fxbatch.blocks.function import Function
from fxbatch.blocks.leaves import FromTensor, InputTransform
from fxbatch.blocks.types import PyObjectType, ResultType
from fxbatch.errors import BlockTypeError


def convert_to_block(block_like: Any, input_type: ResultType | None = None) -> Block:
    """A block from a block-like.

    Block: itself. Layer, nn.Module, torch function: Function. Tensor or array: FromTensor. dict, list of
    (key, block) pairs, tuple or list of blocks: Record. Any other callable: InputTransform when its input is
    known to be a Python object, Function when it is known to be tensors, else a BlockTypeError.
    """
    from fxbatch.blocks.records import Record

    if isinstance(block_like, Block):
        return block_like
    if isinstance(block_like, nn.Module) or is_torch_function(block_like):
        return Function(block_like)
    if isinstance(block_like, (torch.Tensor, np.ndarray)):
        return FromTensor(block_like)
    if isinstance(block_like, (dict, list, tuple)):
        return Record(block_like)
    if callable(block_like):
        return _convert_callable(block_like, input_type)
    raise BlockTypeError(
        f"{block_like!r} is no block: a block is a Block, a layer or nn.Module, a tensor or array, a dict, "
        "tuple or list of blocks, or a function"
    )


def is_torch_function(fn: Any) -> bool:
    """Whether fn is a function of PyTorch: `torch.add`, `torch.tanh`, `F.relu`."""
    if not callable(fn) or isinstance(fn, type):
        return False
    module = getattr(fn, "__module__", None) or ""
    owner = getattr(fn, "__objclass__", None) or getattr(fn, "__self__", None)
    return module.split(".")[0] == "torch" or owner in (torch.Tensor, torch._C) or _is_builtin(fn)


def _is_builtin(fn: Any) -> bool:
    return getattr(torch, getattr(fn, "__name__", ""), None) is fn


def _convert_callable(fn: Callable[..., Any], input_type: ResultType | None) -> Block:
    if isinstance(input_type, PyObjectType):
        return InputTransform(fn)
    if input_type is not None:
        return Function(fn)
    name = getattr(fn, "__qualname__", repr(fn))
    raise BlockTypeError(
        f"{name} is a Python function whose input type is not known here: say InputTransform({name}) "
        f"for Python objects or Function({name}) for tensors"
    )
