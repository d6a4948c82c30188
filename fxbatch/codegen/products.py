"""Which library multiplies matrices in native programs: torch's BLAS or loops of ours, by layout and rows.

Measured once a machine (about 50 ms), kept in the user's cache folder, and the same for all of a process, so that its
results can be reproduced. `FXBATCH_PRODUCTS=torch` or `=own` takes one library for all; `=measure` asks the machine
again, and keeps nothing. Which it is depends on the whole product, never on how threads share it.

    settle().describe()      # "own avx512 loops (measured before, kept in ~/.cache/fxbatch/products-1f0c.json)"
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxbatch.codegen.native import extension
from fxbatch.errors import OptionError
from fxbatch.user_cache import cache_folder

VARIABLE = "FXBATCH_PRODUCTS"
# The order of the C file's table: how the operands lie, as `multiply` is told, and the most rows of a class (of
# gradients: their depth).
LAYOUTS = {"both as they lie": 0, "weights of nn.Linear": 1, "gradients of weights": 2, "packed weights": 4}
CLASSES = ("1 to 4 rows", "5 to 24", "25 to 96", "more")
TRIED = (1, 8, 64, 256)  # rows that stand for a class
WIDTH, DEPTH = 450, 300
PANEL = 64  # columns: packed weights are whole panels
ROUNDS = 7
LOOPS = 2  # the version of `_native_tiles.h`: another one is measured anew
CLEARLY = 0.95  # BLAS is taken where it needs less than this of the time of our loops


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
            names = [f"{layout}: {c}" for layout in LAYOUTS for c in CLASSES]
            parts = [name for name, blas in zip(names, self.blas, strict=True) if blas]
            text = f"{ours}, torch's BLAS for {'; '.join(parts)}"
        return f"{text} ({self.source})"


@functools.cache
def settle() -> ProductChoice | None:
    """Decide for this process, and tell the extension; None where there is no extension."""
    if extension is None:
        return None
    choice = decide(os.environ.get(VARIABLE, ""), cache_folder())
    extension.set_choice(bytes(choice.blas))
    return choice


def described() -> str:
    """In words: which library multiplies in this process, and why; "" without the extension."""
    choice = settle()
    return "" if choice is None else choice.describe()


def decide(wanted: str, folder: Path) -> ProductChoice:
    """The choice for this machine. wanted: "" for what is kept or measured, "torch", "own", "measure"."""
    has_blas, level = extension.products()
    count = len(LAYOUTS) * len(CLASSES)
    if wanted not in ("", "torch", "own", "measure"):
        raise OptionError(f"{VARIABLE}={wanted!r}: takes torch, own or measure")
    if wanted in ("torch", "own"):
        there = has_blas if wanted == "torch" else bool(level)
        blas = (wanted == "torch") == there
        said = f"{VARIABLE}={wanted}" if there else f"{VARIABLE}={wanted}, which is not there"
        return ProductChoice((blas,) * count, said, level)
    if not (has_blas and level):
        return ProductChoice((bool(has_blas),) * count, "the only one here", level)
    if wanted == "measure":
        return ProductChoice(measured(), f"measured now, {VARIABLE}=measure", level)
    return kept(folder, level)


def kept(folder: Path, level: str) -> ProductChoice:
    """The choice that a file in this folder has for this machine; if there is none it is measured now, and written."""
    key = machine_key(level)
    path = folder / f"products-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    blas = read(path, key)
    if blas is not None:
        return ProductChoice(blas, f"measured before, kept in {path}", level)
    new = measured()
    with contextlib.suppress(OSError):
        write(path, {"machine": key, "blas": list(new)})
        blas = read(path, key)  # the first of several processes decides for all
        if blas is not None:
            return ProductChoice(blas, f"measured now, kept in {path}", level)
    return ProductChoice(new, f"measured now; {folder} can't be written to", level)


def machine_key(level: str) -> str:
    """A text of everything that the measurement depends on: processor, torch, own loops, settings of MKL."""
    settings = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("MKL_")]
    return "; ".join([processor(), level, f"torch {torch.__version__}", f"loops {LOOPS}", *settings])


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()} {line.partition(':')[2].strip()}"
    return f"{platform.machine()} {platform.processor()}"


def read(path: Path, key: str) -> tuple[bool, ...] | None:
    """The choice in a file, if it was measured with this key; None if there is no file, or none of this form."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    blas = data.get("blas") if isinstance(data, dict) and data.get("machine") == key else None
    good = isinstance(blas, list) and len(blas) == len(LAYOUTS) * len(CLASSES)
    return tuple(blas) if good and all(type(x) is bool for x in blas) else None


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file whole, unless another process was first with one that can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        if path.exists() and read(path, data["machine"]) is None:
            os.replace(name, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def measured() -> tuple[bool, ...]:
    """Time both libraries on each layout and class, in turns, in CPU time of this thread."""
    return tuple(blas_wins(*(best_of(layout, rows))) for layout in LAYOUTS.values() for rows in TRIED)


def blas_wins(ours: float, blas: float) -> bool:
    """Whether BLAS is clearly faster."""
    return blas < CLEARLY * ours


def best_of(layout: int, size: int) -> tuple[float, float]:
    """The least seconds of our loops and of BLAS, in turns."""
    rows, depth = (WIDTH, size) if layout == LAYOUTS["gradients of weights"] else (size, DEPTH)
    width = DEPTH if rows == WIDTH else WIDTH
    a, b, out = (torch.rand(n, device="cpu") for n in (rows * depth, depth * (width + PANEL), rows * width))
    repeats = max(1, 64 // size)
    least = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for library in (0, 1):
            start = time.thread_time_ns()
            multiply(a, b, out, (rows, width, depth), layout, library, repeats)
            least[library] = min(least[library], (time.thread_time_ns() - start) / 1e9 / repeats)
    return least[0], least[1]


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
