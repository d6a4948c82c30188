"""The GPU tables in one call: Looks et al. 2017 table 1 at full size, and SST training.

    python -m benchmarks.gpu                               # trees of 128 leaves, state 1024, batch 1 to 1024
    python -m benchmarks.gpu --device cpu --leaves 5 --state 8 --batch 1 3 --sst-hidden 8 --sst-batch 4

A row a task, batch size and contender (fxbatch; with the instances traced before; the same compiled; level by level by
hand; one by one; the cells' matrix products alone): wall time, the time that the device is busy, kernels launched, the
host's share (1 - busy / wall), the most memory allocated, and the wall time over fxbatch's. On the CPU the same code
runs, and operators take the place of kernels. What does not fit into memory has no row. Targets and what was got come
before the table, which is printed last.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fxbatch
from benchmarks.competitors.level_trees import LevelTreeLSTM, find_levels
from benchmarks.contenders import scores_once, undecorated
from benchmarks.measure import synchronize
from benchmarks.models import TreeLSTM, losses_once
from benchmarks.task import Settings
from benchmarks.workloads import made_up_trees, sst_trees

Work = Callable[[], Any]
OURS, WARM, HAND, ONE = "fxbatch", "fxbatch, warm traces", "by hand", "one by one"
COMPILED, PRODUCTS = "fxbatch, warm traces, compiled", "products alone"
TARGETS = (  # a / b, at least or at most
    (ONE, OURS, "at least", 100.0), (HAND, OURS, "at least", 1.2), (WARM, PRODUCTS, "at most", 1.5),
)  # fmt: skip
WARM_UP = 2  # runs before the timed ones: code is made, memory is taken, clocks rise
LARGEST_ONE_BY_ONE = 8  # its time a tree does not depend on the batch size: larger ones are scaled up


@dataclass(frozen=True)
class Row:
    """One measurement; seconds are of a whole minibatch."""

    task: str
    batch: int
    name: str
    wall: float
    busy: float
    launches: float
    memory: int = 0  # bytes at most, on CUDA

    @property
    def host(self) -> float:
        """The share of the wall time in which the device had nothing to do."""
        return max(0.0, 1 - self.busy / self.wall) if self.wall else 0.0


def measure(
    task: str, batch: int, name: str, work: Work, device: torch.device, rounds: int, scale: float
) -> Row:
    """Median wall time of `rounds` runs after some to warm up, then one run under the profiler."""
    cuda = device.type == "cuda"
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    walls = []
    for _ in range(rounds):
        gc.collect()
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        walls.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated(device) if cuda else 0
    busy, launches = profiled(work, device)
    row = Row(task, batch, name, statistics.median(walls) * scale, busy * scale, launches * scale, memory)
    print(f"{task}, batch {batch}, {name}: {row.wall:.4f} s, {row.launches:.0f} launches", flush=True)
    return row


def profiled(work: Work, device: torch.device) -> tuple[float, float]:
    """(seconds that the device is busy, kernels launched) of one run; on the CPU operators and their time."""
    cuda = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU], acc_events=True
    ) as found:
        work()
        synchronize(device)
    if cuda:
        events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
        return sum(e.time_range.elapsed_us() for e in events) / 1e6, len(kernels)
    averages = [e for e in found.key_averages() if e.key.startswith("aten::")]
    return sum(e.self_cpu_time_total for e in averages) / 1e6, sum(e.count for e in averages)


def training(model: TreeLSTM, loss: Callable[[Any], torch.Tensor], batch: Any) -> Work:
    """Forward and backward of the summed loss."""

    def work() -> None:
        model.zero_grad(set_to_none=True)
        loss(batch).sum().backward()

    return work


def inference(scores: Callable[[Any], Any], batch: Any) -> Work:
    """Forward only."""

    def work() -> None:
        with torch.no_grad():
            scores(batch)

    return work


def traced(method: Callable[..., Any], trees: Sequence[Any]) -> list[Any]:
    """The trees with their traces, as a data loader keeps them from the second epoch on."""
    data = fxbatch.TracedDataset(method, trees)
    return [data[i] for i in range(len(data))]


def products(model: TreeLSTM, trees: Sequence[Any], mode: str, device: torch.device) -> Work:
    """The cells' matrix products of a minibatch, level by level, written to memory that is there already."""
    levels = find_levels(trees, device)
    leaf, cell = model.leaf.gates.weight.detach(), model.cell.gates.weight.detach()
    counts = [len(order) // 2 for _, order in levels.levels[:-1]]
    shapes = [(len(levels.words), leaf), *((rows, cell) for rows in counts if rows)]
    ends = [(torch.randn(n, w.shape[1], device=device), torch.empty(n, w.shape[0], device=device), w)
            for n, w in shapes]  # fmt: skip
    inner = sum(counts)
    inputs, gates = (
        torch.randn(inner, cell.shape[1], device=device),
        torch.randn(inner, cell.shape[0], device=device),
    )
    sums = torch.empty_like(leaf), torch.empty_like(cell)

    def work() -> None:
        for x, y, weight in ends:
            torch.mm(x, weight.t(), out=y)
        if mode == "training":
            for x, y, weight in ends:
                torch.mm(y, weight, out=x)
            torch.mm(ends[0][1].t(), ends[0][0], out=sums[0])
            torch.mm(gates.t(), inputs, out=sums[1])

    return work


def with_options(model: TreeLSTM, **options: Any) -> TreeLSTM:
    """A model that shares the given one's parameters, decorated with other options."""

    class Decorated(type(model)):  # type: ignore[misc]  # a class that is known when it runs
        forward = fxbatch.autobatch(**options)(undecorated(model, "forward"))
        loss = fxbatch.autobatch(**options)(undecorated(model, "loss"))

    made = copy.copy(model)
    made.__class__ = Decorated
    made.__dict__.pop("_fxbatch_engines", None)  # what it has compiled is its own
    return made


def rows_of(
    task: str,
    model: TreeLSTM,
    trees: Sequence[Any],
    mode: str,
    device: torch.device,
    rounds: int,
    backend: str,
) -> list[Row]:
    """The contenders on one minibatch."""
    hand, few = LevelTreeLSTM(model), trees[:LARGEST_ONE_BY_ONE]
    variants = {COMPILED: with_options(model, compile=backend)} if backend else {}
    if mode == "training":
        works = {
            OURS: training(model, model.loss, trees),
            WARM: training(model, model.loss, traced(model.loss, trees)),
            HAND: training(model, hand.loss, trees),
            ONE: training(model, lambda batch: losses_once(model, batch), few),
        }
    else:
        works = {
            OURS: inference(model, trees),
            WARM: inference(model, traced(model.forward, trees)),
            HAND: inference(hand, trees),
            ONE: inference(lambda batch: scores_once(model, batch), few),
        }
    for name, variant in variants.items():
        method = variant.loss if mode == "training" else variant.forward
        known = traced(method, trees)
        works[name] = training(variant, method, known) if mode == "training" else inference(method, known)
    works[PRODUCTS] = products(model, trees, mode, device)
    batch, found = len(trees), []
    scales = {ONE: batch / len(few)}
    for name, work in works.items():
        try:
            found.append(measure(f"{task}, {mode}", batch, name, work, device, rounds, scales.get(name, 1.0)))
        except torch.OutOfMemoryError:
            print(f"{task}, {mode}, batch {batch}, {name}: does not fit into memory", flush=True)
        model.zero_grad(set_to_none=True)
    return found


def show_targets(rows: Sequence[Row]) -> str:
    """Print the target and the outcome at the largest batch of each task."""
    lines = []
    for task in dict.fromkeys(r.task for r in rows):
        batch = max(r.batch for r in rows if r.task == task)
        walls = {r.name: r.wall for r in rows if r.task == task and r.batch == batch}
        for a, b, bound, wanted in TARGETS:
            got = f"{walls[a] / walls[b]:.2f}" if walls.get(a) and walls.get(b) else "not measured"
            lines.append(f"{task}, batch {batch}: {a} / {b}: {bound} {wanted:g}, got {got}")
    return "\n".join(lines)


def show(rows: Sequence[Row]) -> str:
    """The table, as Markdown."""
    columns = (
        "task",
        "batch",
        "contender",
        "wall ms",
        "device ms",
        "launches",
        "host's share",
        "peak GB",
        "over fxbatch",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    ours = {(r.task, r.batch): r.wall for r in rows if r.name == OURS}
    for r in rows:
        base = ours.get((r.task, r.batch))
        ratio = f"{r.wall / base:.2f}x" if base else ""
        cells = (
            r.task, str(r.batch), r.name, f"{r.wall * 1e3:.2f}", f"{r.busy * 1e3:.2f}", f"{r.launches:.0f}",
            f"{r.host:.0%}", f"{r.memory / 1e9:.2f}" if r.memory else "", ratio,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The sizes to measure, from the command line; the full ones by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--leaves", type=int, default=128)
    parser.add_argument("--state", type=int, default=1024)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--sst-hidden", type=int, default=300)
    parser.add_argument("--sst-batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compile", default=None, help="backend of the compiled one (CUDA: inductor, CPU: none)"
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    device = torch.device(options.device)
    backend = ("inductor" if device.type == "cuda" else "") if options.compile is None else options.compile
    settings = Settings(device=device, data=options.data, seed=options.seed)
    rows: list[Row] = []
    for batch in options.batch:
        model, batches = made_up_trees(
            settings, leaves=options.leaves, hidden=options.state, embedding=options.state, batch=batch,
            all_nodes=False,
        )  # fmt: skip
        for mode in ("inference", "training"):
            rows += rows_of("Looks table 1", model, batches[0], mode, device, options.rounds, backend)
    model, batches, source = sst_trees(settings, hidden=options.sst_hidden, batch=options.sst_batch)
    for mode in ("inference", "training"):
        rows += rows_of(f"SST ({source})", model, batches[0], mode, device, options.rounds, backend)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"\n{where}, torch {torch.__version__}; one by one at {LARGEST_ONE_BY_ONE} trees at most, scaled\n")
    print(show_targets(rows) + "\n")
    print(show(rows))


if __name__ == "__main__":
    main()
