"""GFLOP/s of float32 matrix products on one thread, by library, layout and rows: which one native programs should use.

    python -m benchmarks.product_cost                       # 300 x 750 and 600 x 1500
    python -m benchmarks.product_cost --sizes 256x1024

Layouts: forward (weights as nn.Linear has them), input gradients (the same weights, not turned), weight gradients (out
of so many rows). Libraries: torch, our loops on each level of the processor, oneDNN as torch has it, numpy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fxbatch.codegen import products
from fxbatch.codegen.native import extension

LAYOUTS = {"forward": 1, "input gradients": 0, "weight gradients": 2}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
Work = Callable[[], object]


def work_of(layout: str, rows: int, k: int, n: int) -> dict[str, Work]:
    """One function per library: the product of a layer with k inputs and n outputs."""
    x, w, g = torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)
    a, b = {"forward": (x, w.t()), "input gradients": (g, w), "weight gradients": (g.t(), x)}[layout]
    out = torch.empty(a.shape[0], b.shape[1])
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    arrays = a.numpy(), b.numpy(), out.numpy()
    linear = torch.ops.mkldnn._linear_pointwise
    weight = b.t().contiguous()
    stored = (g if layout != "forward" else x, w if layout != "weight gradients" else x)

    def ours(level: str) -> Work:
        def run() -> None:
            before = extension.set_loops(level)
            products.multiply(*stored, out, sizes, LAYOUTS[layout], 0)
            extension.set_loops(before)

        return run

    found: dict[str, Work] = {
        "torch": lambda: products.multiply(*stored, out, sizes, LAYOUTS[layout], 1),
        "numpy": lambda: np.matmul(arrays[0], arrays[1], out=arrays[2]),
        "oneDNN": lambda: linear(a.contiguous(), weight, None, "none", [], ""),
    }
    for level in ("avx2", "avx512"):
        try:
            extension.set_loops(extension.set_loops(level))
        except ValueError:
            continue
        found[f"own, {level}"] = ours(level)
    return found


def speeds(works: dict[str, Work], flops: float, rounds: int = 9) -> dict[str, float]:
    """GFLOP/s of each at its best, in turns, in CPU time of this thread."""
    repeats = max(1, min(200, int(2e8 / flops)))
    least = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            work()
            start = time.thread_time()
            for _ in range(repeats):
                work()
            least[name] = min(least[name], (time.thread_time() - start) / repeats)
    return {name: flops / seconds / 1e9 for name, seconds in least.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per size, layout and number of rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.product_cost", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--sizes", nargs="+", default=["300x750", "600x1500"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for size in options.sizes:
        k, n = map(int, size.split("x"))
        for layout in LAYOUTS:
            for rows in options.rows:
                found = speeds(work_of(layout, rows, k, n), 2.0 * rows * k * n)
                shown = "  ".join(f"{name} {speed:4.0f}" for name, speed in found.items())
                print(f"{size:9} {layout:17} {rows:4d} rows  {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
