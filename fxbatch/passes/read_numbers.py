"""Tensors without dimensions -> their numbers, all at once.

read_numbers([torch.tensor(17), torch.tensor(4)], torch.int64)      # array([17, 4]), or None
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fxbatch.passes.native import Native

# Types whose tensors have no lazy sign: what is in memory is the number.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # others (fake tensors, say) may have no numbers


def read_numbers(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> np.ndarray | None:
    """The numbers of tensors of one integer type (or bool) and no dimensions, 0.1 us each, without a launch.

    None where that can't be done: other types, another device, subclasses of Tensor, no extension.
    """
    if dtype not in _INTEGERS or Native.loops is None:
        return None
    out = torch.empty(len(tensors), dtype=dtype).numpy()
    read = Native.loops.read_numbers(list(tensors), out, PLAIN_TENSORS, torch.Tensor.data_ptr)
    return out if read else None
