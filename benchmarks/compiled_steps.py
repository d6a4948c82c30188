"""A training step and inference of the Tree-LSTM on SST: Python kernels, native programs, compiled, in CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled_steps --batch 64 --hidden 150

Ways: emitted Python kernels (`native=False`); native programs, the default; `compile=True`; and the cells' products
alone. Interleaved, minibatch by minibatch; medians of milliseconds and of ratios in pairs. The first step of a
process is shown apart: it has the cold start of the compiler. Then where a native training step spends its time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import Work, inference, products, training
from benchmarks.models import TreeLSTM
from benchmarks.small_batches import model_of
from benchmarks.stages import stage_times
from benchmarks.task import Settings
from benchmarks.workloads import sst_trees
from fxbatch.runtime import backward, run
from fxbatch.runtime.backward import Backward
from fxbatch.runtime.engine import Engine

PYTHON, NATIVE, COMPILED, PRODUCTS = "Python kernels", "native", "compile=True", "products alone"
OPTIONS: dict[str, dict[str, Any]] = {PYTHON: {"native": False}, NATIVE: {}, COMPILED: {"compile": True}}


# Each counts without those inside it; what is in none is autograd, the results and the optimiser's zeros.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("recording", Engine, "record"),
    ("rewriting, schedule, plan", Engine, "prepare"),
    ("rewriting, schedule, plan", Engine, "plan"),
    ("steps of forward", run, "execute_forward"),
    ("plan of gradients", Backward, "__init__"),
    ("steps of backward", Backward, "walk"),
    ("gradients of parameters", backward, "add_parameter_gradients"),
)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=12, help="minibatches timed, each with every way")
    parser.add_argument("--ways", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    plain, batches, source = sst_trees(
        Settings(data=options.data), hidden=options.hidden, batch=options.batch
    )
    words = plain.embed.num_embeddings
    models = {name: model_of(options.hidden, words, **OPTIONS[name]) for name in options.ways}
    first = options.ways[0]
    for mode in ("training", "inference"):
        times: dict[str, list[float]] = {name: [] for name in (*models, PRODUCTS)}
        for number in range(options.batches + 1):
            trees = batches[number]
            works: dict[str, Work] = {PRODUCTS: products(plain, trees, mode, torch.device("cpu"))}
            for name, model in models.items():
                works[name] = work_of(model, mode, trees)
            for name in list(works) if number % 2 else list(works)[::-1]:
                times[name].append(timed(works[name]))
        print(f"{source}, {options.batch} trees, hidden {options.hidden}, {mode}")
        for name, (cold, *found) in times.items():
            ratio = statistics.median(b / a for a, b in zip(found, times[first][1:], strict=True))
            print(
                f"  {name:16} {statistics.median(found) * 1e3:8.1f} ms  {ratio:5.2f}x  first {cold:6.1f} s",
                flush=True,
            )
    if NATIVE in models:
        print_parts(models[NATIVE], [batches[k] for k in range(options.batches)])


def work_of(model: TreeLSTM, mode: str, trees: Sequence[Any]) -> Work:
    return training(model, model.loss, trees) if mode == "training" else inference(model, trees)


def timed(work: Work) -> float:
    """Seconds of this thread."""
    gc.collect()
    start = time.thread_time()
    work()
    return time.thread_time() - start


def print_parts(model: TreeLSTM, batches: Sequence[Sequence[Any]]) -> None:
    """Where a training step goes: medians of milliseconds a part."""
    found: list[dict[str, float]] = []
    for trees in batches:
        with stage_times(PARTS, time.thread_time) as seconds:
            took = timed(work_of(model, "training", trees))
        found.append({**seconds, "the rest": took - sum(seconds.values())})
    print("parts of a native training step")
    for name in found[0]:
        print(f"  {name:26} {statistics.median(x[name] for x in found) * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
