"""A training step and inference of the Tree-LSTM on SST: Python kernels, native programs, compiled, in CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled_steps --batch 64 --hidden 150

Ways: emitted Python kernels (`native=False`); native programs, the default; `compile=True`; and the cells' products
alone. Interleaved, minibatch by minibatch; medians of milliseconds and of ratios in pairs. The first step of a
process is shown apart: it has the cold start of the compiler.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import inference, products, training
from benchmarks.small_batches import model_of
from benchmarks.task import Settings
from benchmarks.workloads import sst_trees

PYTHON, NATIVE, COMPILED, PRODUCTS = "Python kernels", "native", "compile=True", "products alone"
OPTIONS: dict[str, dict[str, Any]] = {PYTHON: {"native": False}, NATIVE: {}, COMPILED: {"compile": True}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=12, help="minibatches timed, each with every way")
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, batches, source = sst_trees(
        Settings(data=options.data), hidden=options.hidden, batch=options.batch
    )
    words = plain.embed.num_embeddings
    models = {name: model_of(options.hidden, words, **given) for name, given in OPTIONS.items()}
    for mode in ("training", "inference"):
        times: dict[str, list[float]] = {name: [] for name in (*models, PRODUCTS)}
        for number in range(options.batches + 1):
            trees = batches[number]
            works: dict[str, Callable[[], Any]] = {
                PRODUCTS: products(plain, trees, mode, torch.device("cpu"))
            }
            for name, model in models.items():
                works[name] = (
                    training(model, model.loss, trees) if mode == "training" else inference(model, trees)
                )
            order = list(works) if number % 2 else list(works)[::-1]
            for name in order:
                gc.collect()
                start = time.thread_time()
                works[name]()
                times[name].append(time.thread_time() - start)
        print(f"{source}, {options.batch} trees, hidden {options.hidden}, {mode}")
        for name, (first, *found) in times.items():
            pairs = zip(found, times[PYTHON][1:], strict=True)
            ratio = statistics.median(b / a for a, b in pairs)
            print(
                f"  {name:16} {statistics.median(found) * 1e3:8.1f} ms  {ratio:5.2f}x  first {first:6.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
