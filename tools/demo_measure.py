"""The figures that the demo shows before it trains: launches and speed of one minibatch, and two loss curves.

In: a model and trees. Out: lines on a console, each figure measured here and now.

    first_minibatch(model, trees, console)
    compare_losses(build, trees, settings, steps=20, console=console)     # True when the curves agree
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fxbatch_examples.train_sentiment import Settings, Trainer
from fxbatch_examples.tree_lstm import TreeLSTM
from rich.console import Console
from rich.table import Table

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch

REPEATS = 5
# Two runs in float32 that differ in the order of their sums only. Their distance grows as errors feed back, so
# that later steps are judged by how far rounding takes one by one itself from the same run in float64.
TOLERANCE, SLACK = 1e-4, 10.0


def first_minibatch(model: TreeLSTM, trees: list[Any], console: Console) -> None:
    """Print launches before and after, and the time of forward and backward, batched and one by one."""
    nodes = sum(tree.nodes for tree in trees)
    first = seconds_of(model, trees)  # before anything has built the graphs
    explained = fxbatch.explain(model, trees)
    console.print(
        f"one minibatch: {len(trees)} trees, {nodes} nodes; "
        f"{explained.launches_before} launches one by one, {explained.launches_after} batched",
        soft_wrap=True,
    )
    batched = statistics.median(seconds_of(model, trees) for _ in range(REPEATS))
    with fxbatch.disabled():
        single = min(seconds_of(model, trees) for _ in range(2))
    console.print(
        f"forward and backward: {single * 1e3:.0f} ms one by one, {batched * 1e3:.1f} ms batched: "
        f"{single / batched:.1f} times as fast (the first call took {first * 1e3:.0f} ms)",
        soft_wrap=True,
    )
    model.zero_grad(set_to_none=True)


def seconds_of(model: TreeLSTM, trees: list[Any]) -> float:
    """Seconds of one forward and backward."""
    model.train()
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    started = _now(device)
    losses, _ = model(trees)
    losses.mean().backward()
    return _now(device) - started


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compare_losses(
    build: Callable[[], TreeLSTM], trees: list[Any], settings: Settings, steps: int, console: Console
) -> bool:
    """Train equal models for `steps` steps, batched and one by one, and print their loss curves.

    Without dropout: its random numbers are drawn in another order when trees are batched. A third run, one by
    one in float64, shows how much of a difference is rounding.
    """
    batched, batched_seconds = _curve(build(), trees, settings, steps, batch=True)
    single, single_seconds = _curve(build(), trees, settings, steps, batch=False)
    referee, _ = _curve(build().double(), trees, settings, steps, batch=False)
    table = Table(
        "step", "batched", "one by one", "in float64", "relative difference", box=None, pad_edge=False
    )
    worst, ours, rounding, agree = 0.0, 0.0, 0.0, True
    for number, (a, b, exact) in enumerate(zip(batched, single, referee, strict=True), 1):
        difference = _relative(a, b)
        worst, ours, rounding = (
            max(worst, difference),
            max(ours, _relative(a, exact)),
            max(rounding, _relative(b, exact)),
        )
        agree &= ours <= max(TOLERANCE, SLACK * rounding)
        table.add_row(str(number), f"{a:.6f}", f"{b:.6f}", f"{exact:.6f}", f"{difference:.1e}")
    console.print("loss of the first steps, without dropout, from the same seed")
    console.print(table)
    verdict = "agree to float32 rounding" if agree else "differ by more than float32 rounding"
    console.print(
        f"the curves {verdict}: batched and one by one by at most {worst:.1e}; from float64 batched {ours:.1e}, "
        f"one by one {rounding:.1e}; {batched_seconds:.1f} s batched, {single_seconds:.1f} s one by one",
        soft_wrap=True,
    )
    return agree


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30)


@contextmanager
def always_batched() -> Iterator[None]:
    """Batch, and read no clock to choose by: what is compared must not be the loop with itself, and a training that is
    taken up again repeats itself to the last digit."""
    before, AdaptiveSwitch.on = AdaptiveSwitch.on, False
    try:
        yield
    finally:
        AdaptiveSwitch.on = before


def _curve(
    model: TreeLSTM, trees: list[Any], settings: Settings, steps: int, *, batch: bool
) -> tuple[list[float], float]:
    trainer = Trainer(model, trees, settings)
    losses = []
    started = time.perf_counter()
    with always_batched() if batch else fxbatch.disabled():
        for _ in range(steps):
            if trainer.epoch_is_over:
                trainer.next_epoch((0.0, 0.0))
            losses.append(trainer.step())
    return losses, time.perf_counter() - started
