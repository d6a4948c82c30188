"""Requests that come one at a time: throughput, and latency under Poisson arrivals, of several ways to serve a model.

In: Settings. Out: one row per model and way: requests a second where all come at once, and of which 95 % are answered
within 50 ms; latencies where they come at random, 400 a second, and at 50, 80 and 95 % of what the live server takes.

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
LOADS = ("400/s", *[f"{100 * share:.0f} %" for share in SHARES])
WITHIN = 50  # ms
WAYS = ("one at a time", "gathered", "live", "by hand, continuous")


def decoder(settings: Settings) -> tuple[Any, Sequence[Any]]:
    """A GRU decoder, 5 to 80 steps, 23 on average."""
    hidden = settings.size(256, 16)
    return serve.Decoder(500, hidden).eval(), serve.make_requests(settings.size(400, 6), hidden)


def dependency_parser(settings: Settings) -> tuple[Any, Sequence[Any]]:
    """The transition parser of the examples, on sentences without data: words and tags at random."""
    model, sentences = parser.minibatch(sentences=settings.size(200, 3), hidden=settings.size(64, 8))
    return model.eval(), sentences


def sentiment(settings: Settings) -> tuple[Any, Sequence[Any]]:
    """The Tree-LSTM of the examples."""
    model, *trees = tree_lstm.minibatch()
    many = (list(trees[0]) * 20)[: settings.size(10_000, 6)]
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
        saturated = serve.saturate(ways, requests, rounds=settings.size(3, 1))
        rates = {f"{100 * share:.0f} %": share * saturated["live"] for share in SHARES}
        with serve.frozen():
            for way, run in ways.items():
                found[f"{way}, requests/s"] = saturated[way]
                found[f"{way}, within"] = serve.within(
                    run, requests, saturated[way], 1e-3 * WITHIN, settings.seed
                )
                for load, rate in {"400/s": 400.0, **rates}.items():
                    latencies, _ = serve.offer(run, requests, rate, settings.seed)
                    for q in (0.5, 0.95, 0.99):
                        found[f"{way}, p{100 * q:.0f} at {load}"] = 1e3 * latencies.latency(q)
    return found


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    for case in found:
        for way in WAYS:
            if f"{way}, requests/s" in case.numbers:
                cells = [
                    " / ".join(f"{case.numbers[f'{way}, p{q} at {load}']:.0f}" for q in (50, 95, 99))
                    for load in LOADS
                ]
                numbers = [case.numbers[f"{way}, {what}"] for what in ("requests/s", "within")]
                rows.append([case.name, way, *numbers, *cells])
    loads = [f"with a p95 of {WITHIN} ms", *[f"p50 / p95 / p99, ms, at {load}" for load in LOADS]]
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
