"""A user's own model against its loop: the same minibatch batched and one by one, in turns.

found = measure(Runnable.of(model, {}), instances, rounds=7, backward=True)
found.gain                   # how many times as fast, the median of the rounds' ratios
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

import fxbatch

from .run_target import Runnable, tensors_of
from .terminal import counted

WARM = 2  # batched minibatches before the first that counts: the first of all builds the graphs


@dataclass(frozen=True)
class Timing:
    """Seconds a round of each way, and of the first batched minibatch."""

    instances: int
    backward: bool
    first: float
    batched: list[float]
    one_by_one: list[float]

    @property
    def ratios(self) -> list[float]:
        return [alone / batched for alone, batched in zip(self.one_by_one, self.batched, strict=True)]

    @property
    def gain(self) -> float:
        """How many times as fast batched is."""
        return statistics.median(self.ratios)

    def to_dict(self) -> dict[str, Any]:
        return {
            "instances": self.instances,
            "backward": self.backward,
            "first_seconds": self.first,
            "batched_seconds": self.batched,
            "one_by_one_seconds": self.one_by_one,
            "gain": self.gain,
        }

    def table(self) -> Table:
        what = "forward and backward" if self.backward else "forward"
        table = Table(title=f"{self.instances} instances, {what}, {len(self.batched)} rounds in turns")
        for name in ("", "median", "fastest", "slowest", "instances/s"):
            table.add_column(name, justify="right" if name else "left")
        for name, seconds in (("one by one", self.one_by_one), ("batched", self.batched)):
            middle = statistics.median(seconds)
            cells = (f"{s * 1e3:.2f} ms" for s in (middle, min(seconds), max(seconds)))
            table.add_row(name, *cells, f"{self.instances / middle:,.0f}")
        return table

    @property
    def line(self) -> str:
        return (
            f"batched is {self.gain:.2f} times as fast as one by one "
            f"({min(self.ratios):.2f} to {max(self.ratios):.2f}); its first minibatch took {self.first * 1e3:.0f} ms"
        )


def measure(target: Runnable, instances: Sequence[Any], *, rounds: int, backward: bool) -> Timing:
    """`rounds` times one by one and batched, one after the other, so that the machine's load meets both."""
    first = _seconds(target, instances, backward)
    for _ in range(WARM):
        _seconds(target, instances, backward)
    batched, alone = [], []
    for _ in counted(range(rounds), rounds, "rounds"):
        with fxbatch.disabled():
            alone.append(_seconds(target, instances, backward))
        batched.append(_seconds(target, instances, backward))
    return Timing(len(instances), backward, first, batched, alone)


def _seconds(target: Runnable, instances: Sequence[Any], backward: bool) -> float:
    started = _now()
    step(target, instances, backward=backward)
    return _now() - started


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _unnamed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def step(
    target: Runnable,
    instances: Sequence[Any],
    *,
    backward: bool,
    part: Callable[[str], AbstractContextManager[None]] = _unnamed,
) -> None:
    """One minibatch as a training would run it, or an inference. part: what its parts run in, by name."""
    if not backward:
        with torch.no_grad(), part("call"):
            target.batched(instances)
        return
    with part("call"):
        results = target.batched(instances)
    losses = [t for result in results for t in tensors_of(result) if t.requires_grad]
    if losses:
        with part("autograd"):
            torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
    if target.module is not None:
        with part("zero gradients"):
            target.module.zero_grad(set_to_none=True)
