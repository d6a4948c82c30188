"""Requests that come one at a time: throughput, and latency under Poisson arrivals, of several ways to serve a model.

In: Settings. Out: one row per model and way: requests a second where all come at once, and latencies where they come at
random, at 50, 80 and 95 % of what the live server takes.

    python -m benchmarks --task live
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fxbatch_examples import parser, serve, tree_lstm

import fxbatch
from benchmarks.results import CaseResult, Table
from benchmarks.task import Case, Settings, Task

SHARES = (0.5, 0.8, 0.95)
WAYS = ("one at a time", "gathered", "live", "by hand, continuous")


def decoder(settings: Settings) -> tuple[Any, Sequence[Any]]:
    """A GRU decoder, 5 to 80 steps, 23 on average."""
    hidden = settings.size(256, 16)
    return serve.Decoder(500, hidden).eval(), serve.make_requests(settings.size(400, 12), hidden)


def dependency_parser(settings: Settings) -> tuple[Any, Sequence[Any]]:
    """The transition parser of the examples, on sentences without data: words and tags at random."""
    model, sentences = parser.minibatch(sentences=settings.size(200, 6), hidden=settings.size(64, 8))
    return model.eval(), sentences


def sentiment(settings: Settings) -> tuple[Any, Sequence[Any]]:
    """The Tree-LSTM of the examples."""
    model, *trees = tree_lstm.minibatch()
    many = list(trees[0]) * settings.size(20, 1)
    return model.eval(), many


MODELS: dict[str, Callable[[Settings], tuple[Any, Sequence[Any]]]] = {
    "GRU decoder": decoder, "transition parser": dependency_parser, "Tree-LSTM": sentiment,
}  # fmt: skip


def cases(settings: Settings) -> Iterator[Case]:
    for name in MODELS:
        yield Case(
            name, {}, "request", 1, [], numbers=lambda name=name: measured(name, settings),  # type: ignore[misc]
        )  # fmt: skip


def measured(name: str, settings: Settings) -> dict[str, float]:
    """The figures of a model: throughput and latencies in ms, by "way, what"."""
    torch.manual_seed(settings.seed)
    model, requests = MODELS[name](settings)
    found: dict[str, float] = {}
    with (
        fxbatch.live(model, max_queue=len(requests)) as server,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        ways: dict[str, serve.Way] = {
            "one at a time": serve.one_at_a_time(model), "gathered": serve.gathered(model), "live": serve.live(server),
        }  # fmt: skip
        if isinstance(model, serve.Decoder):
            ways["by hand, continuous"] = serve.by_hand(model)
        for way, run in ways.items():
            found[f"{way}, requests/s"] = serve.saturate(run, requests)
        for share in SHARES:
            for way, run in ways.items():
                load, _ = serve.offer(run, requests, share * found["live, requests/s"], settings.seed)
                for q in (0.5, 0.95, 0.99):
                    found[f"{way}, p{100 * q:.0f} at {100 * share:.0f} %"] = 1e3 * load.latency(q)
    return found


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    for case in found:
        for way in WAYS:
            if f"{way}, requests/s" in case.numbers:
                cells = [
                    " / ".join(f"{case.numbers[f'{way}, p{q} at {100 * s:.0f} %']:.0f}" for q in (50, 95, 99))
                    for s in SHARES
                ]
                rows.append([case.name, way, case.numbers[f"{way}, requests/s"], *cells])
    loads = [f"p50 / p95 / p99, ms, at {100 * share:.0f} %" for share in SHARES]
    note = "Loads are shares of what the live server takes where all requests come at once. Gradients off."
    return [Table("Live batches", ["model", "way", "requests/s", *loads], rows, note)]


TASK = Task(
    name="live",
    title="Live batches",
    explanation=(
        "Requests come one at a time, at random; each server is one thread: one at a time, batches of what has come "
        "that run to their end, `fxbatch.live`, and a decoder's continuous batching by hand."
    ),
    cases=cases,
    tables=tables,
)
