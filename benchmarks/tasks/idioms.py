"""Any idiom: one Tree-LSTM written in many ways, each beside the one whose cells are modules.

In: Settings. Out: for training and inference the CPU time of each way over that of the module way, minibatch by
minibatch, all ways in turns on the same trees; losses and gradients are compared first.

    python -m benchmarks --task idioms --threads 1
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.idiom_models import WAYS, Sizes, Way, random_tree
from benchmarks.results import CaseResult, Table
from benchmarks.task import Case, Settings, Task

BATCH = 64
LEAVES = (8, 28)  # the fewest and the most of a tree
FIRST = next(iter(WAYS))
MODES = ("training", "inference")


def cases(settings: Settings) -> Iterator[Case]:
    for mode in MODES:
        yield Case(
            mode, {"mode": mode}, "tree", BATCH, [],
            numbers=lambda mode=mode: beside_the_first(settings, grad=mode == "training"),  # type: ignore[misc]
        )  # fmt: skip


def beside_the_first(settings: Settings, *, grad: bool) -> dict[str, float]:
    """Milliseconds a minibatch of the first way, and of each other its CPU time over that: medians."""
    rounds, untimed = settings.size((16, 6), (1, 1))
    sizes = settings.size(Sizes(), Sizes(words=20, embedding=6, hidden=4))
    models = {name: way_of(name, sizes, settings.seed) for name in WAYS}
    rng = random.Random(settings.seed)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    compare(models, minibatch(rng, settings, sizes))
    for number in range(untimed + rounds):
        trees = minibatch(rng, settings, sizes)
        first = number % len(models)
        with uncollected():
            for name in [*models, *models][first : first + len(models)]:
                took = timed(models[name], trees, grad=grad)
                if number >= untimed:
                    seconds[name].append(took)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, seconds[FIRST], strict=True))
        for name, times in seconds.items()
        if name != FIRST
    }
    return {FIRST: statistics.median(seconds[FIRST]) * 1e3, **ratios}


def way_of(name: str, sizes: Sizes, seed: int) -> Way:
    """The model, its parameters by the seed."""
    torch.manual_seed(seed)
    return WAYS[name](sizes)


def minibatch(rng: random.Random, settings: Settings, sizes: Sizes) -> list[Any]:
    """New trees."""
    count = settings.size(BATCH, 4)
    return [random_tree(rng, rng.randint(*LEAVES), sizes.words) for _ in range(count)]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection within: what one finds is of all that ran before it."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def timed(model: Way, trees: list[Any], *, grad: bool) -> float:
    """CPU seconds of a minibatch, its backward included."""
    model.zero_grad(set_to_none=True)
    started = time.process_time()
    with torch.set_grad_enabled(grad):
        losses = model(trees)
        if grad:
            losses.sum().backward()
    return time.process_time() - started


def compare(models: dict[str, Way], trees: list[Any]) -> None:
    """Losses, and gradients of the table of words and of the last layer, of all ways."""
    outcomes = []
    for model in models.values():
        model.zero_grad(set_to_none=True)
        losses = model(trees)
        losses.sum().backward()
        outcomes.append([losses.detach(), model.embed.weight.grad, model.out.weight.grad])
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome, outcomes[0], rtol=1e-3, atol=1e-4)


def tables(results: Sequence[CaseResult], settings: Settings) -> list[Table]:
    by_mode = {case.name: case.numbers for case in results if case.numbers}
    modes = [mode for mode in MODES if mode in by_mode]
    rows: list[list[str | int | float | None]] = [
        [name, (WAYS[name].__doc__ or "").rstrip("."), *[by_mode[mode][name] for mode in modes]]
        for name in WAYS
        if name != FIRST and modes
    ]
    usual = ", ".join(f"{by_mode[mode][FIRST]:.0f} ms in {mode}" for mode in modes)
    note = (
        f"CPU time over that of the way whose cells are modules ({usual} a minibatch of {settings.size(BATCH, 4)} "
        f"trees of {LEAVES[0]} to {LEAVES[1]} leaves), `adaptive=False`: medians of the ratios, minibatch by minibatch."
    )
    return [Table("One model, written in many ways", ["way", "how", *modes], rows, note)]


TASK = Task(
    name="idioms",
    title="Any idiom",
    explanation="One binary Tree-LSTM, the same mathematics and parameters, written in the ways that public code has.",
    cases=cases,
    tables=tables,
)
