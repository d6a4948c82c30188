"""Two checkouts in one interleaved run: what this one costs over the other, and whether it may land.

    make guard BASE=../other                                  # or ARGS='--budget 60 --only Tree-LSTM'
    python -m benchmarks.guard ../other --budget 300          # seconds of measuring, starting up not counted

A process a checkout, each with its own code, environment and minibatches; they take turns, minibatch by minibatch, so
that a slow minute hits both. Compared is CPU time, minibatch by minibatch, as the median of the ratios. What is slower
by more than 3 % with 95 % confidence that it is slower at all is refused, and so is a workload that launches, copies
or holds more than before, and a loss that is another one. Exit status 1 then.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fxbatch
from benchmarks.task import Settings
from benchmarks.workloads import esol_molecules, ewt_parser, ewt_tagger, sst_trees

SLOWER = 1.03  # what is refused
WARMUP = 3
FEWEST = 7  # ratios without which nothing is refused for its time
COUNTS = ("launches", "steps", "copies", "bytes copied", "plans", "bytes held")

Made = tuple[Any, Any, str]  # the model, its minibatches, the decorated method

MODELS: dict[str, Callable[[Settings], Made]] = {
    "Tree-LSTM": lambda s: (*sst_trees(s, hidden=150, batch=64)[:2], "loss"),
    "tagger": lambda s: (*ewt_tagger(s, hidden=256, batch=64), "loss"),
    "parser": lambda s: (*ewt_parser(s, hidden=125, batch=64), "loss"),
    "ESOL": lambda s: (*esol_molecules(s, hidden=64, batch=64), "forward"),
}


@dataclass(frozen=True)
class Workload:
    """A model at a batch size, in training or in inference."""

    model: str
    batch: int
    training: bool

    def __str__(self) -> str:
        return f"{self.model}, {'training' if self.training else 'inference'}, batch {self.batch}"


WORKLOADS = [Workload(m, n, t) for m in MODELS for n in (1, 64) for t in (True, False)]


class Worker:
    """The process of a checkout: runs one minibatch per request."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.made: dict[str, Made] = {}

    def step(self, workload: Workload, number: int) -> dict[str, float]:
        """Run minibatch `number`; its seconds, its loss."""
        model, batches, method = self._made(workload)
        batch = batches[number][: workload.batch]
        model.zero_grad(set_to_none=True)
        if number % 16 == 0:
            gc.collect()
        start = time.process_time()
        with torch.set_grad_enabled(workload.training):
            total = getattr(model, method)(batch).sum()
        if workload.training:
            total.backward()
        return {"seconds": time.process_time() - start, "loss": float(total.detach())}

    def counts(self, workload: Workload) -> dict[str, float]:
        """Launches, copies and memory of the first minibatch; plans: one per phase."""
        model, batches, method = self._made(workload)
        with torch.set_grad_enabled(workload.training):
            found = fxbatch.explain(getattr(model, method), batches[0][: workload.batch])
        numbers = (
            found.launches_after,
            found.steps,
            found.gathers_indexed,
            found.bytes_gathered,
            found.phases,
        )
        return dict(zip(COUNTS, (*numbers, found.bytes_held), strict=True))

    def _made(self, workload: Workload) -> Made:
        if workload.model not in self.made:
            self.made[workload.model] = MODELS[workload.model](self.settings)
            gc.collect()
            gc.freeze()  # what was loaded need not be looked at before each step
        return self.made[workload.model]


def serve(settings: Settings) -> None:
    """Answer requests, a line of JSON each: [workload, minibatch], or [workload, null] for what is counted."""
    worker, answers = Worker(settings), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no answer
    torch.set_num_threads(1)
    gc.disable()  # it runs between steps
    for line in sys.stdin:
        given, number = json.loads(line)
        workload = Workload(**given)
        found = worker.counts(workload) if number is None else worker.step(workload, number)
        found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(found), file=answers, flush=True)


class Checkout:
    """The process of a checkout."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        own = folder / ".venv" / "bin" / "python"
        data = [] if settings.data is None else ["--data", str(settings.data)]
        self.process = subprocess.Popen(
            [str(own if own.exists() else sys.executable), str(Path(__file__).resolve()), "serve", *data],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, workload: Workload, number: int | None) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([dataclasses.asdict(workload), number]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.process.args!r} ended")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process; it ends by itself when its input does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Verdict:
    """The ratio of the times (new over old), its 95 % interval, and what was counted before and after."""

    workload: Workload
    ratio: float
    low: float
    high: float
    seconds: float
    rounds: int
    changed: tuple[str, ...]  # counts, as "launches 40 -> 41", the worse ones first with a "!"

    @property
    def refused(self) -> bool:
        slower = self.rounds >= FEWEST and self.ratio > SLOWER and self.low > 1.0
        return slower or any(text.startswith("!") for text in self.changed)

    def __str__(self) -> str:
        text = f"{self.workload!s:34} {self.ratio:6.3f} ({self.low:.3f} to {self.high:.3f}, {self.rounds:3})"
        text += (
            f" {self.seconds * 1e3:8.2f} ms  {'REFUSED ' if self.refused else ''}{'; '.join(self.changed)}"
        )
        return text.rstrip()


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of the median, with 95 % confidence: two of the sorted ratios, by the binomial distribution."""
    n, ordered, below = len(ratios), sorted(ratios), 0.0
    for k in range(n // 2 + 1):
        below += math.comb(n, k) / 2**n
        if below > 0.025:
            return ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)]
    return ordered[0], ordered[-1]


def judge(
    workload: Workload, steps: Sequence[tuple[dict[str, float], dict[str, float]]], counts: Sequence[Any]
) -> Verdict:
    """steps: (old, new) minibatch by minibatch; counts: (old, new)."""
    ratios = [new["seconds"] / old["seconds"] for old, new in steps]
    old, new = counts
    changed = [
        f"{'!' if new[name] > old[name] * 1.005 else ''}{name} {old[name]:g} -> {new[name]:g}"
        for name in COUNTS
        if new[name] != old[name]
    ]
    worst = max(abs(a["loss"] - b["loss"]) / max(abs(a["loss"]), 1e-6) for a, b in steps)
    if not worst <= 1e-3:  # what is not a number, too
        changed.append(f"!losses differ by {worst:.1e}")
    seconds = statistics.median(new["seconds"] for _, new in steps)
    return Verdict(
        workload, statistics.median(ratios), *interval(ratios), seconds, len(steps), tuple(sorted(changed))
    )


def compare(
    base: Checkout, ours: Checkout, workloads: Sequence[Workload], budget: float
) -> Iterator[Verdict]:
    """A verdict a workload, each measured for its share of the budget's seconds."""
    for workload in workloads:
        counts = [checkout.ask(workload, None) for checkout in (base, ours)]
        steps: list[tuple[dict[str, float], dict[str, float]]] = []
        end, number = math.inf, 0
        while number < WARMUP + 1 or time.monotonic() < end:
            turn = (base, ours) if number % 2 else (ours, base)
            found = [checkout.ask(workload, number) for checkout in turn]
            if number == WARMUP - 1:
                end = time.monotonic() + budget / len(workloads)
            if number >= WARMUP:
                steps.append((found[0], found[1]) if number % 2 else (found[1], found[0]))
            number += 1
        yield judge(workload, steps, counts)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a workload; 1 where any is refused."""
    os.environ["FXBATCH_ADAPTIVE"] = "0"  # batching itself is measured, in both checkouts
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("base", help="the checkout to compare with")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of measuring (default: 240)")
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--data", default=None, help="folder of the data")
    options = parser.parse_args(argv)
    settings = Settings(data=Path(options.data) if options.data else None)
    if options.base == "serve":
        serve(settings)
        return 0
    ours = Path(__file__).resolve().parents[1]
    workloads = [w for w in WORKLOADS if options.only in str(w)]
    if not workloads:
        parser.error(f"no workload is called {options.only!r}: {', '.join(map(str, WORKLOADS))}")
    pair = [Checkout(folder.resolve(), settings) for folder in (Path(options.base), ours)]
    print("new / old CPU time (95 % of the median, minibatches), of the new one; what is counted and differs")
    verdicts = []
    for verdict in compare(*pair, workloads, options.budget):
        print(verdict, flush=True)
        verdicts.append(verdict)
    for checkout in pair:
        checkout.close()
    logs = [math.log(v.ratio) for v in verdicts]
    refused = sum(v.refused for v in verdicts)
    print(f"in all {math.exp(statistics.fmean(logs)):.3f}; {refused} of {len(verdicts)} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
