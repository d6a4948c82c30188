"""Long runs: training with ever-new structures, and what is measured on the way.

In: a number of steps. Out: a Report of memory, cache sizes and objects, in samples along the run.

    report = train(300); report.assert_flat()
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass, field

import greenlet
import torch
from torch import fx

from tests import models as M


@dataclass
class Sample:
    """The state of the process after some steps."""

    step: int
    resident: int  # bytes
    seconds: float  # a step, since the sample before
    tensors: int
    graphs: int
    greenlets: int
    operations: int
    plans: int
    signatures: int


@dataclass
class Report:
    """Samples, and the check."""

    samples: list[Sample] = field(default_factory=list)

    def assert_flat(self, *, growth: float = 1.1, slowdown: float = 2.0) -> None:
        """The last quarter holds no more than the second did, and is not much slower."""
        n = len(self.samples)
        early, late = self.samples[n // 4 : n // 2], self.samples[3 * n // 4 :]
        for name in ("tensors", "graphs", "greenlets", "operations", "signatures"):
            before = max(getattr(s, name) for s in early)
            after = max(getattr(s, name) for s in late)
            assert after <= before * growth + 50, f"{name}: {before} early, {after} late"
        before, after = max(s.resident for s in early), max(s.resident for s in late)
        assert after <= before * growth + (24 << 20), (
            f"memory: {before >> 20} MB early, {after >> 20} MB late"
        )
        fast, slow = min(s.seconds for s in early), min(s.seconds for s in late)
        assert slow <= fast * slowdown, f"{fast * 1e3:.1f} ms a step early, {slow * 1e3:.1f} ms late"


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def train(steps: int, samples: int = 16, seed: int = 0) -> Report:
    """Train a Tree-LSTM and a model that branches on values, on trees that never come twice."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    models = [M.TreeLSTM(hidden=8), M.ChildSum(), M.RNN()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
    report, begin, every = Report(), time.perf_counter(), max(steps // samples, 1)
    for step in range(1, steps + 1):
        k = step % 3
        made, optimizer = models[k], optimizers[k]
        if k == 2:
            batch = [torch.randn(rng.randrange(1, 12), 4) for _ in range(4)]
        elif k == 1:
            batch = [M.wide_tree(rng, rng.randrange(1, 14)) for _ in range(4)]
        else:
            batch = [M.random_tree(rng, rng.randrange(1, 14)) for _ in range(4)]
        optimizer.zero_grad()
        made(batch).pow(2).sum().backward()
        optimizer.step()
        if step % every == 0:
            now = time.perf_counter()
            report.samples.append(_sample(step, models, (now - begin) / every))
            begin = time.perf_counter()
    return report


def _sample(step: int, models: list[torch.nn.Module], seconds: float) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    engines = [type(m).forward.__fxbatch__.engine(m) for m in models]
    return Sample(
        step,
        resident_bytes(),
        seconds,
        sum(issubclass(type(x), torch.Tensor) for x in objects),
        sum(issubclass(type(x), fx.Graph) for x in objects),
        sum(issubclass(type(x), greenlet.greenlet) for x in objects),
        sum(len(e.operations) for e in engines),
        sum(len(e.structures) for e in engines),
        sum(len(e.table.signatures) for e in engines),
    )
