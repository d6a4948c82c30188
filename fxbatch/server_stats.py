"""Statistics of a server of live batches: counts, times and latencies, as numbers and as text for Prometheus.

stats = server.stats()
stats.latency(0.95)           # seconds that 95 % of the last requests took at most
print(stats.prometheus())     # what a page /metrics gives
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LATENCIES = 4096  # of the last requests, which percentiles are of
PHASES = 32  # that `explain` shows
_QUANTILES = (0.5, 0.95, 0.99)
_COUNTERS = {
    "requests": "Requests that were taken in.",
    "done": "Requests that have a result.",
    "failed": "Requests whose forward raised an exception.",
    "cancelled": "Requests that were cancelled.",
    "expired": "Requests whose time was up.",
    "refused": "Requests that found the queue full.",
    "looped": "Requests that the plain loop has served.",
    "phases": "Batches that were run.",
}
_SECONDS = {
    "python": "the forward's Python and the recording of its calls",
    "planning": "scheduling and planning of phases",
    "kernels": "batched operations",
    "results": "results and futures",
}


class PhaseTimes(NamedTuple):
    """One batch of a server. Times in seconds."""

    requests: int  # that took part
    joined: int  # of them, with this phase
    left: int  # whose results left with it
    calls: int  # that were recorded; 0 where a whole minibatch ran
    python: float
    planning: float
    kernels: float
    results: float


@dataclass(frozen=True)
class ServerStats:
    """Counts, times and latencies of a server since it was made, and how many requests wait and run now.

    Fields:
        requests: how many were taken in.
        done: how many have a result.
        failed: how many forwards raised an exception.
        cancelled: how many were cancelled.
        expired: how many ended because their time was up.
        refused: how many found the queue full.
        looped: how many the plain loop has served.
        phases: batches that were run.
        waiting: requests in the queue now.
        running: requests that run now.
        batch_sizes: how many batches had so many requests.
        seconds: of the thread that computes, by what it did: "python", "planning", "kernels", "results".
        latencies: seconds from arrival to result of the last 4,096 requests that are done, ascending.

    Example:
        >>> with fxbatch.live(model) as server:
        ...     shape = server.submit([1, 2]).result().shape
        >>> server.stats().requests
        1
    """

    requests: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    looped: int = 0
    phases: int = 0
    waiting: int = 0
    running: int = 0
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    latencies: tuple[float, ...] = field(default=(), repr=False)

    def latency(self, share: float) -> float:
        """Seconds that this share of the last requests took at most, such as 0.95; nan where none is done.

        `ServerStats(latencies=(0.01, 0.02, 0.04)).latency(0.5)` is 0.02.
        """
        if not self.latencies:
            return math.nan
        return self.latencies[
            min(len(self.latencies) - 1, max(0, math.ceil(share * len(self.latencies)) - 1))
        ]

    @property
    def mean_batch(self) -> float:
        """How many requests a batch had on average."""
        batches = sum(self.batch_sizes.values())
        return sum(size * n for size, n in self.batch_sizes.items()) / batches if batches else 0.0

    def prometheus(self) -> str:
        """All of it in the text format that Prometheus reads, named `fxbatch_...`: what a page /metrics gives."""
        lines: list[str] = []

        def metric(name: str, kind: str, text: str, samples: Mapping[str, float]) -> None:
            lines.extend((f"# HELP fxbatch_{name} {text}", f"# TYPE fxbatch_{name} {kind}"))
            lines.extend(f"fxbatch_{labels} {float(number)!r}" for labels, number in samples.items())

        for name, text in _COUNTERS.items():
            metric(f"{name}_total", "counter", text, {f"{name}_total": getattr(self, name)})
        metric("waiting", "gauge", "Requests in the queue.", {"waiting": self.waiting})
        metric("running", "gauge", "Requests that run.", {"running": self.running})
        spent = {
            f'seconds_total{{part="{part}"}}': seconds
            for part, seconds in self.seconds.items()
            if part in _SECONDS
        }
        metric("seconds_total", "counter", f"Seconds spent: {'; '.join(_SECONDS.values())}.", spent)
        metric("batch_size", "histogram", "Requests of each batch.", self._histogram())
        latencies = {f'latency_seconds{{quantile="{q}"}}': self.latency(q) for q in _QUANTILES}
        metric("latency_seconds", "gauge", "Seconds from arrival to result, of the last requests.", latencies)
        return "\n".join([*lines, ""])

    def _histogram(self) -> dict[str, float]:
        batches, requests, found = 0, 0, dict[str, float]()
        for size in sorted(self.batch_sizes):
            batches += self.batch_sizes[size]
            requests += size * self.batch_sizes[size]
            found[f'batch_size_bucket{{le="{size}"}}'] = batches
        return {
            **found, 'batch_size_bucket{le="+Inf"}': batches, "batch_size_count": batches, "batch_size_sum": requests,
        }  # fmt: skip


class Laps:
    """A stopwatch of the parts of a phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_SECONDS, 0.0)
        self.last = 0.0

    def begin(self) -> Laps:
        """A phase begins."""
        self.seconds, self.last = dict.fromkeys(_SECONDS, 0.0), time.perf_counter()
        return self

    def lap(self, part: str) -> None:
        """What was done since the last lap was this part."""
        last, self.last = self.last, time.perf_counter()
        self.seconds[part] += self.last - last

    def end(self, part: str) -> dict[str, float]:
        """The phase ends with this part. Seconds of each part."""
        self.lap(part)
        return self.seconds


class Counts:
    """The counts behind `ServerStats`, as they are made."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.seconds: dict[str, float] = dict.fromkeys(_SECONDS, 0.0)
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.recent: deque[PhaseTimes] = deque(maxlen=PHASES)

    def phase(self, times: PhaseTimes) -> None:
        """A batch was run."""
        self.of["phases"] += 1
        self.batch_sizes[times.requests] += 1
        for part in _SECONDS:
            self.seconds[part] += getattr(times, part)
        self.recent.append(times)

    def stats(self, *, waiting: int, running: int) -> ServerStats:
        """The counts so far, as an object that no longer changes. waiting, running: requests at this moment."""
        counts: dict[str, Any] = {name: self.of[name] for name in _COUNTERS}
        return ServerStats(
            **counts, waiting=waiting, running=running, batch_sizes=dict(self.batch_sizes), seconds=dict(self.seconds),
            latencies=tuple(sorted(self.latencies)),
        )  # fmt: skip

    def table(self) -> list[str]:
        """The last phases, one a line, times in milliseconds."""
        head = "requests  joined  left  calls  python  planning  kernels  results"
        rows = [
            f"{p.requests:8}  {p.joined:6}  {p.left:4}  {p.calls:5}  {1e3 * p.python:6.2f}  {1e3 * p.planning:8.2f}  "
            f"{1e3 * p.kernels:7.2f}  {1e3 * p.results:7.2f}"
            for p in list(self.recent)
        ]
        return [head, *rows] if rows else []
