"""What a server of live batches counts: requests, batches, times, latencies, as numbers and as text for Prometheus.

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
from itertools import accumulate

LATENCIES, PHASES = 4096, 32  # the last that percentiles are of, and that `explain` shows
_COUNTERS = ("requests", "done", "failed", "cancelled", "expired", "refused", "looped", "phases")
PARTS = ("python", "planning", "kernels", "results", "whole")


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
        seconds: of the thread that computes, by what it did. "python": in forwards, so the user's Python, and calls
            that are recorded; "planning"; "kernels"; "results": them and futures; "whole": what has no such parts,
            served by the plain loop or as one packed graph.
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
        last = len(self.latencies) - 1
        return self.latencies[min(last, max(0, math.ceil(share * (last + 1)) - 1))] if last >= 0 else math.nan

    @property
    def mean_batch(self) -> float:
        """How many requests a batch had on average."""
        requests = sum(size * n for size, n in self.batch_sizes.items())
        return requests / max(1, sum(self.batch_sizes.values()))

    def prometheus(self) -> str:
        """All of it in the text format that Prometheus reads, named `fxbatch_...`: what a page /metrics gives."""
        sizes = sorted(self.batch_sizes)
        up_to = accumulate(self.batch_sizes[size] for size in sizes)
        batches, requests = sum(self.batch_sizes.values()), sum(k * n for k, n in self.batch_sizes.items())
        buckets = {f'_bucket{{le="{size}"}}': n for size, n in zip(sizes, up_to, strict=True)}
        metrics: dict[tuple[str, str], dict[str, float]] = {
            **{(f"{name}_total", "counter"): {"": getattr(self, name)} for name in _COUNTERS},
            ("waiting", "gauge"): {"": self.waiting},
            ("running", "gauge"): {"": self.running},
            ("seconds_total", "counter"): {f'{{part="{part}"}}': n for part, n in self.seconds.items()},
            ("batch_size", "histogram"): {
                **buckets, '_bucket{le="+Inf"}': batches, "_sum": requests, "_count": batches,
            },
            ("latency_seconds", "gauge"): {f'{{quantile="{q}"}}': self.latency(q) for q in (0.5, 0.95, 0.99)},
        }  # fmt: skip
        lines = []
        for (name, kind), samples in metrics.items():
            lines.append(f"# TYPE fxbatch_{name} {kind}")
            lines += [f"fxbatch_{name}{label} {float(number)!r}" for label, number in samples.items()]
        return "\n".join([*lines, ""])


class Counts:
    """The counts behind `ServerStats` as they are made, by a stopwatch for the parts of a batch."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.recent: deque[dict[str, float]] = deque(maxlen=PHASES)

    def begin(self) -> None:
        """A batch begins."""
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the last lap was this part."""
        now = time.perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def end(self, requests: int, *, joined: int, left: int, calls: int) -> None:
        """A batch of so many requests was run: how many came with it, how many left with it, calls that were recorded
        (0 where a whole minibatch ran)."""
        parts = self._parts
        self.of["phases"] += 1
        self.batch_sizes[requests] += 1
        self.recent.append({"requests": requests, "joined": joined, "left": left, "calls": calls, **parts})
        for part, seconds in parts.items():
            self.seconds[part] += seconds

    def stats(self, *, waiting: int, running: int) -> ServerStats:
        """The counts so far, as an object that no longer changes. waiting, running: requests at this moment."""
        return ServerStats(
            **self.of, waiting=waiting, running=running, batch_sizes=dict(self.batch_sizes),
            seconds=dict(self.seconds), latencies=tuple(sorted(self.latencies)),
        )  # fmt: skip

    def table(self) -> list[str]:
        """The last batches, one a line, times in milliseconds."""
        rows = [
            "".join(f"{1e3 * n if name in PARTS else n:11.{2 * (name in PARTS)}f}" for name, n in row.items())
            for row in list(self.recent)
        ]
        return ["".join(f"{name:>11}" for name in self.recent[-1]), *rows] if rows else []
