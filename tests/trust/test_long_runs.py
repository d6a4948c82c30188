"""Training with ever-new structures: memory flat, caches bounded, no slowdown (short; `make soak` is long)."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxbatch
from fxbatch.decorator import find_autobatched
from fxbatch.ir import Operation, Signature
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.structure_cache import HELD, StructureCache
from tests.trust.long_runs import Report, Sample, resident_bytes, train
from tests.trust.programs import model


def test_a_short_long_run() -> None:
    train(48, samples=8).assert_flat(slowdown=4.0)  # other processes may be using the machine


def test_growth_is_seen() -> None:
    samples = [Sample(k, 1 << 28, 0.01, 100 + 40 * k, 10, 0, 10, 10, 10) for k in range(16)]
    with pytest.raises(AssertionError, match="tensors: 380 early, 700 late"):
        Report(samples).assert_flat()
    samples = [Sample(k, 1 << 28, 0.01 * (1 + k), 100, 10, 0, 10, 10, 10) for k in range(16)]
    with pytest.raises(AssertionError, match="ms a step early"):
        Report(samples).assert_flat()


def engine_of(made: nn.Module) -> Engine:
    auto, owner = find_autobatched(made)
    return auto.engine(owner)


def assert_bounded(engine: Engine, signatures: int, operations: int, a_call: int) -> None:
    """What is kept about signatures is no more than the limits and one minibatch."""
    assert len(engine.table) <= signatures + a_call
    assert len(engine.table.entries) <= signatures + a_call
    assert len(engine.operations) <= operations
    assert len(engine.met) <= operations
    assert engine.structures.bytes <= engine.structures.entries.most


def many_signatures(
    count: int, a_call: int, signatures: int, operations: int, *, compiled: bool, gradients: bool = True
) -> None:
    """So many distinct signatures, each right, in minibatches of `a_call`."""

    def forward(self: Any, sample: Any) -> Any:
        x, k = sample
        y = self.a(x)
        if compiled:
            return torch.roll(y, k, 0).sum()
        return F.gaussian_nll_loss(y, x, x * x + 1, eps=1e-6 * (1 + k))  # checks values: runs call by call

    made = model(forward, {"a": nn.Linear(4, 4)}, fuse=False, schedule="depth")
    engine = engine_of(made)
    engine.table.limit = signatures
    engine.operations._entries.most = engine.met._met.most = operations
    x, sizes = torch.randn(2, 4), []
    for start in range(0, count, a_call):
        batch = [(x, k) for k in range(start, start + a_call)]
        with torch.set_grad_enabled(gradients):
            found = made(batch)
        with torch.no_grad(), fxbatch.disabled():
            torch.testing.assert_close(found.detach(), made(batch), rtol=1e-5, atol=1e-5)
        if gradients:
            found.sum().backward()
        assert_bounded(engine, signatures, operations, a_call + 1)
        sizes.append(resident_bytes())
    assert engine.operations.misses >= count, "signatures were not distinct"
    half = len(sizes) // 2
    assert max(sizes[half:]) <= 1.1 * max(sizes[:half]) + (24 << 20), "memory grows"


def test_many_distinct_signatures() -> None:
    """They come and go: right, and tables and caches stay bounded."""
    many_signatures(300, 20, 66, 33, compiled=False)
    many_signatures(32, 4, 12, 8, compiled=True)


def test_plans_are_kept_of_structures_that_come_again() -> None:
    cache = StructureCache()
    made: list[int] = []

    def ask(key: int) -> None:
        cache.get("plan", key, lambda: made.append(key) or "plan", 1, may_be_rare=True)

    for key in range(1000):
        ask(key)
    assert len(cache) == 0 and len(cache._met) == 256, "met once"
    for key in (999, 998, 999, 998, 0):
        ask(key)
    assert cache.hits["plan"] == 2 and made[1000:] == [999, 998, 0], "kept from the second time on"
    assert cache.counts() == {"plan": 2}, "the first was forgotten meanwhile"


def test_plans_keep_few_signatures_alive() -> None:
    """A plan's key has its compiled operations: the caches of plans are bounded by those as well."""
    signatures = [Signature(Operation(f"f{k}", "function"), (), ()) for k in range(3000)]

    def programs(width: int) -> Iterator[tuple[Signature, ...]]:
        return (tuple(signatures[k : k + width]) for k in range(0, len(signatures), width))

    cache = StructureCache(most=500 * HELD)
    for columns in programs(100):
        cache.get("plan", (columns, None), lambda: 0, HELD * len(columns))
        assert len(cache) <= 5
    assert (
        cache.get("plan", (columns, None), lambda: 1, HELD * len(columns)) == 0 and cache.hits["plan"] == 1
    ), "the last ones are kept"
    assert cache.get("schedule", (columns, None), lambda: 1, HELD * len(columns)) == 1, "of each kind its own"
    for columns in programs(3):
        cache.get("plan", (columns, None), lambda: 0, HELD * len(columns))
    assert len(cache) == 166 and cache.bytes <= cache.entries.most, "more of the narrow ones"
    cache.get("plan", (tuple(signatures), None), lambda: 0, HELD * 3000)
    assert len(cache) == 1, "one that is larger than all is kept alone"
    cache.clear()
    assert len(cache) == cache.bytes == 0


def traced_sources() -> list[str]:
    return [name for name in linecache.cache if name.startswith("<eval_with_key>")]


def test_torch_keeps_nothing_of_what_was_traced() -> None:
    made = model(lambda self, x: torch.tanh(self.a(x)), {"a": nn.Linear(5, 5)})
    before = traced_sources()
    made([torch.randn(5), torch.randn(5)]).sum().backward()
    assert engine_of(made).operations.misses >= 1
    assert traced_sources() == before


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_distinct_signatures() -> None:
    """Compiled ones, under the limits that everybody has."""
    engine = engine_of(model(lambda self, x: x))
    limits = engine.table.limit, engine.operations.size
    assert sum(limits) < 10_000
    many_signatures(10_000, 50, *limits, compiled=True, gradients=False)
