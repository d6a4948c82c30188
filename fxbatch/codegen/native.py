"""The extension that runs native programs, if it was built and torch's library of products is found.

native.available()      # "" or why there is none
native.extension.Program(bases, instructions, sources)
native.address(weight, weight.nbytes)      # where C finds it, None where C must not look
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fxbatch.torch_private import product_address, thread_addresses
from fxbatch.trace.constants import PLAIN_TENSORS

extension: Any
try:
    extension = importlib.import_module("fxbatch.codegen._native")
except ImportError:  # no compiler when the project was installed
    extension = None
if extension is not None:
    extension.set_products(product_address())
    extension.set_threads(*thread_addresses())
    extension.set_plain(PLAIN_TENSORS)


def available() -> str:
    """Why nothing runs native, or "" where it does."""
    return "" if extension is not None else "the extension fxbatch.codegen._native was not built"


def _nowhere(tensor: torch.Tensor, size: int) -> int | None:
    return None


# Where the `size` bytes from a tensor's first element on are in this machine's memory; None where C must not look. All
# pointers that C is given come from here. Subclasses (fake tensors), what a transform or functionalization wraps,
# tensors on devices (meta), of a lazy sign, zero tensors without memory and storages that were given back have none.
address: Callable[[torch.Tensor, int], int | None] = _nowhere if extension is None else extension.address
