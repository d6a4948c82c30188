"""Serve a decoder that is written for ONE request, with a load generator: `python serve.py`.

In: requests, a state and a number of steps, at random times (Poisson). Out: requests a second and latencies of serving
them one at a time, in gathered batches that run to their end, live (`fxbatch.live`), and by hand, continuously.

    model, requests = minibatch()
    tokens = model(requests)             # [[17, 4, ...], ...]
    with fxbatch.live(model) as server:
        server.submit(requests[0]).result()
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import queue
import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fxbatch


@dataclass(frozen=True)
class Request:
    """A state to begin with, and how many steps there are."""

    state: Tensor
    steps: int


class Decoder(nn.Module):
    """Greedy decoding by a GRU."""

    def __init__(self, words: int = 500, hidden: int = 256) -> None:
        super().__init__()
        self.embed, self.cell, self.out = (
            nn.Embedding(words, hidden), nn.GRUCell(hidden, hidden), nn.Linear(hidden, words)
        )  # fmt: skip

    @fxbatch.autobatch(out="list")
    def forward(self, request: Request) -> list[int]:
        """The tokens of one request."""
        state, token, tokens = request.state, torch.tensor(1), list[int]()
        for _ in range(request.steps):
            state = self.cell(self.embed(token), state)
            token = self.out(state).argmax(-1)
            tokens.append(int(token))
        return tokens


def minibatch(*, requests: int = 6, hidden: int = 16, seed: int = 0) -> tuple[Decoder, list[Request]]:
    """A small decoder and some requests."""
    torch.manual_seed(seed)
    model = Decoder(50, hidden).eval()
    return model, make_requests(requests, hidden, seed)


def make_requests(n: int, hidden: int, seed: int = 0) -> list[Request]:
    """Requests of 5 to 80 steps, 23 on average."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [
        Request(torch.randn(hidden, generator=generator), min(80, 5 + int(drawn.expovariate(1 / 18.5))))
        for _ in range(n)
    ]


# Ways to serve: each is a thread that takes (arguments, future) from a queue, until it takes None.

Asked = tuple[Any, Future[Any]]
Way = Callable[["queue.Queue[Asked | None]"], None]


def one_at_a_time(model: Any) -> Way:
    """The plain loop."""

    def serve(asked: queue.Queue[Asked | None]) -> None:
        with torch.no_grad(), fxbatch.disabled():
            while (item := asked.get()) is not None:
                item[1].set_result(type(model).forward.__wrapped__(model, item[0]))

    return serve


def gathered(model: Any, max_batch: int = 64) -> Way:
    """Requests that have come by now run as one batch, to its end."""

    def serve(asked: queue.Queue[Asked | None]) -> None:
        batched = fxbatch.autobatch(out="list", adaptive=False)(type(model).forward)
        with torch.no_grad():
            while (item := asked.get()) is not None:
                items = [item]
                while len(items) < max_batch and not asked.empty() and asked.queue[0] is not None:
                    another = asked.get()
                    assert another is not None
                    items.append(another)
                for (_, future), result in zip(items, batched(model, [x for x, _ in items]), strict=True):
                    future.set_result(result)

    return serve


def live(server: fxbatch.Server) -> Way:
    """`fxbatch.live`, a server that runs."""

    def serve(asked: queue.Queue[Asked | None]) -> None:
        while (item := asked.get()) is not None:
            server.submit(item[0]).add_done_callback(lambda f, to=item[1]: to.set_result(f.result()))

    return serve


def by_hand(model: Decoder, max_batch: int = 64) -> Way:
    """The decoder's own continuous batching: the states of all that run are rows of one tensor."""

    def serve(asked: queue.Queue[Asked | None]) -> None:
        active: list[tuple[Request, Future[Any], list[int]]] = []
        states, tokens, open_ = torch.empty(0, model.cell.hidden_size), torch.empty(0, dtype=torch.long), True
        with torch.no_grad():
            while open_ or active:
                new: list[Asked] = []
                while (
                    open_
                    and len(active) + len(new) < max_batch
                    and (not asked.empty() or not (active or new))
                ):
                    item = asked.get()
                    if item is None:
                        open_ = False
                    else:
                        new.append(item)
                if new:
                    active += [(request, future, []) for request, future in new]
                    states = torch.cat([states, torch.stack([request.state for request, _ in new])])
                    tokens = torch.cat([tokens, torch.ones(len(new), dtype=torch.long)])
                if not active:
                    continue
                states = model.cell(model.embed(tokens), states)
                tokens = model.out(states).argmax(-1)
                for (_, _, made), token in zip(active, tokens.tolist(), strict=True):
                    made.append(token)
                kept = [i for i, (request, _, made) in enumerate(active) if len(made) < request.steps]
                if len(kept) < len(active):
                    for request, future, made in active:
                        if len(made) == request.steps:
                            future.set_result(made)
                    active, rows = [active[i] for i in kept], torch.tensor(kept, dtype=torch.long)
                    states, tokens = states[rows], tokens[rows]

    return serve


@dataclass
class Load:
    """The results of one way to serve under a load. Latencies in seconds, ascending."""

    throughput: float  # requests a second
    latencies: list[float] = field(default_factory=list)

    def latency(self, share: float) -> float:
        """Seconds that this share of the requests took at most."""
        return self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))]


def offer(way: Way, requests: Sequence[Any], rate: float, seed: int = 0) -> tuple[Load, list[Any]]:
    """Serve requests that come at random, so many a second on average (0: all at once); what came of each."""
    drawn, asked = random.Random(seed), queue.Queue[Asked | None]()
    thread = threading.Thread(target=way, args=(asked,))
    thread.start()
    latencies, futures, begun = [0.0] * len(requests), [], time.perf_counter()
    due = begun
    for i, request in enumerate(requests):
        future: Future[Any] = Future()
        if rate:
            due += drawn.expovariate(rate)
            if (ahead := due - time.perf_counter()) > 0:
                time.sleep(ahead)

        def note(_: object, i: int = i, arrived: float = due) -> None:
            latencies[i] = time.perf_counter() - arrived

        future.add_done_callback(note)
        futures.append(future)
        asked.put((request, future))
    results = [future.result() for future in futures]
    seconds = time.perf_counter() - begun
    asked.put(None)
    thread.join()
    return Load(len(requests) / seconds, sorted(latencies)), results


def saturate(ways: dict[str, Way], requests: Sequence[Any], rounds: int = 3) -> dict[str, float]:
    """Requests a second of each way where all come at once, the median of some rounds in turns, after some requests for
    what is built once."""
    for way in ways.values():
        for _ in range(2):
            offer(way, requests[: len(requests) // 4 + 1], 0)
    found: dict[str, list[float]] = {name: [] for name in ways}
    with frozen():
        for name, way in list(ways.items()) * rounds:
            found[name].append(offer(way, requests, 0)[0].throughput)
    return {name: statistics.median(rates) for name, rates in found.items()}


def within(way: Way, requests: Sequence[Any], saturated: float, p95: float, seed: int = 0) -> float:
    """The most requests a second of which 95 % are answered within so many seconds, in tenths of what a way takes where
    all come at once; 0 where none."""
    for tenths in range(10, 0, -1):
        if offer(way, requests, saturated * tenths / 10, seed)[0].latency(0.95) <= p95:
            return saturated * tenths / 10
    return 0.0


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Python's collector leaves alone what is there: all of torch, which takes it a tenth of a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def main(argv: Sequence[str] | None = None) -> float:
    """The table. Returns the throughput of the live server over that of one request at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400, help="of each measurement")
    parser.add_argument("--hidden", type=int, default=256, help="width of the GRU")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", fxbatch.LoopWarning)
    model = Decoder(500, options.hidden).eval()
    requests = make_requests(options.requests, options.hidden)
    with fxbatch.live(model, max_queue=len(requests)) as server:
        ways = {
            "one at a time": one_at_a_time(model), "gathered": gathered(model), "live": live(server),
            "by hand, continuous": by_hand(model),
        }  # fmt: skip
        saturated = saturate(ways, requests)
        rates = [400.0, *[share * saturated["live"] for share in (0.5, 0.8, 0.95)]]
        print(
            "way                  saturated/s   p50 / p95 / p99 in ms at 400/s, at 50 %, 80 %, 95 % of live's"
        )
        with frozen():
            for name, way in ways.items():
                loads = [offer(way, requests, rate)[0] for rate in rates]
                cells = [
                    " / ".join(f"{1e3 * load.latency(q):.0f}" for q in (0.5, 0.95, 0.99)) for load in loads
                ]
                print(f"{name:20} {saturated[name]:11.0f}   {'   '.join(cells)}", flush=True)
    return saturated["live"] / saturated["one at a time"]


if __name__ == "__main__":
    main()
