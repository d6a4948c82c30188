"""The extension that runs native programs, if it was built and torch's library of products is found.

native.available()      # "" or why there is none
native.extension.Program(bases, instructions, sources)
"""

from __future__ import annotations

import importlib
from typing import Any

from fxbatch.torch_private import product_address, thread_addresses

extension: Any
try:
    extension = importlib.import_module("fxbatch.codegen._native")
except ImportError:  # no compiler when the project was installed
    extension = None
if extension is not None:
    extension.set_products(product_address())
    extension.set_threads(*thread_addresses())


def available() -> str:
    """Why nothing runs native, or "" where it does."""
    return "" if extension is not None else "the extension fxbatch.codegen._native was not built"
