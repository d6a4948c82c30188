"""Which library multiplies matrices in native programs: torch's BLAS or loops of ours, by layout and rows.

The same on all processors of one level, so that results can be reproduced: loops of ours where they were faster
(docs/experiments.md), with AVX-512 everywhere, with AVX2 for few rows. `FXBATCH_PRODUCTS=torch` or `=own` takes one
library for all. Which it is depends on the whole product, never on how threads share it.

    settle().describe()      # "own avx512 loops (faster on such processors)"
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxbatch.codegen.native import extension
from fxbatch.errors import OptionError

VARIABLE = "FXBATCH_PRODUCTS"
# The order of the C file's table: how the operands lie, as `multiply` is told, and the most rows of a class (of
# gradients: their depth).
LAYOUTS = {"both as they lie": 0, "weights of nn.Linear": 1, "gradients of weights": 2, "packed weights": 4}
CLASSES = ("1 to 4 rows", "5 to 24", "25 to 96", "more")
FASTER = {"avx512": (False, False, False, False), "avx2": (False, False, True, True)}  # BLAS, by class


@dataclass(frozen=True)
class ProductChoice:
    """Where BLAS multiplies (True), by layout and class; who decided; the level of our loops, "" for none."""

    blas: tuple[bool, ...]
    source: str
    level: str

    def describe(self) -> str:
        """In words: who multiplies what, and why."""
        ours = f"own {self.level} loops"
        if all(self.blas):
            text = "torch's BLAS"
        elif not any(self.blas):
            text = ours
        else:
            parts = [c for c, blas in zip(CLASSES, self.blas, strict=False) if blas]
            text = f"{ours}, torch's BLAS for {', '.join(parts)}"
        return f"{text} ({self.source})"


@functools.cache
def settle() -> ProductChoice | None:
    """Decide for this process, and tell the extension; None where there is no extension."""
    if extension is None:
        return None
    choice = decide(os.environ.get(VARIABLE, ""))
    extension.set_choice(bytes(choice.blas))
    return choice


def described() -> str:
    """In words: which library multiplies in this process, and why; "" without the extension."""
    choice = settle()
    return "" if choice is None else choice.describe()


def decide(wanted: str) -> ProductChoice:
    """The choice for this machine. wanted: "" for what was faster, "torch", "own"."""
    has_blas, level = extension.products()
    if wanted not in ("", "torch", "own"):
        raise OptionError(f"{VARIABLE}={wanted!r}: takes torch or own")
    if wanted:
        there = has_blas if wanted == "torch" else bool(level)
        by_class = ((wanted == "torch") == there,) * len(CLASSES)
        source = f"{VARIABLE}={wanted}" if there else f"{VARIABLE}={wanted}, which is not there"
    elif has_blas and level:
        by_class, source = FASTER[level], "faster on such processors"
    else:
        by_class, source = (bool(has_blas),) * len(CLASSES), "the only one here"
    return ProductChoice(by_class * len(LAYOUTS), source, level)


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    sizes: Sequence[int],
    layout: int,
    library: int,
    repeats: int = 1,
) -> None:
    """out = a b, dense float32: a [rows, depth], b [depth, width]; in layout 1 b is stored turned, in 2 a, in 3 both,
    and in 4 b is panels for our loops, as `_native.h` says.

    library: 0 for our loops, 1 for BLAS. ValueError where it is not there.
    """
    rows, width, depth = sizes
    extension.product(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), rows, width, depth, layout, library, repeats
    )
