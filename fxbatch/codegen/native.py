"""The extension that runs native programs, if it was built and torch's library of products is found.

native.available()      # "" or why there is none
native.extension.Program(bases, instructions, sources)
native.address(weight, weight.nbytes)      # where C finds it, None where C must not look
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from fxbatch.torch_private import product_address, thread_addresses
from fxbatch.trace.constants import PLAIN_TENSORS

_LEVELS = ("plain", "avx2", "avx512")
extension: Any
try:
    extension = importlib.import_module("fxbatch.codegen._native")
except ImportError:  # no compiler when the project was installed
    extension = None
if extension is not None:
    extension.set_products(product_address())
    extension.set_threads(*thread_addresses())
    extension.set_plain(PLAIN_TENSORS)
# Whether native programs can call torch: by DLPack's C exchange interface.
_interface = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
CALLS: bool = extension is not None and extension.set_exchange(_interface)


def use_loops(level: str) -> str:
    """Run the best loops that this processor has up to `level` ("plain", "avx2" or "avx512"); which these are."""
    if level not in _LEVELS:
        raise ValueError(f"FXBATCH_LOOPS is one of {', '.join(_LEVELS)}, not {level}")
    for lower in reversed(_LEVELS[: _LEVELS.index(level) + 1]):
        try:
            extension.set_loops(lower)
        except ValueError:  # not on this processor
            continue
        return lower
    raise AssertionError("plain loops run everywhere")


if extension is not None and "FXBATCH_LOOPS" in os.environ:
    use_loops(os.environ["FXBATCH_LOOPS"])


def available() -> str:
    """Why nothing runs native, or "" where it does."""
    return "" if extension is not None else "the extension fxbatch.codegen._native was not built"


# Where the `size` bytes from a tensor's first element on are in this machine's memory; None where C must not look. All
# pointers that C is given come from here. Subclasses (fake tensors), what a transform or functionalization wraps,
# tensors on devices (meta), of a lazy sign, zero tensors without memory and storages that were given back have none.
address: Callable[[torch.Tensor, int], int | None] = getattr(extension, "address", lambda *_: None)
