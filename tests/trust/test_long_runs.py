"""Training with ever-new structures: memory flat, caches bounded, no slowdown (short; `make soak` is long)."""

from __future__ import annotations

import pytest

from tests.trust.long_runs import Report, Sample, train


def test_a_short_long_run() -> None:
    train(96, samples=8).assert_flat(slowdown=4.0)  # other processes may be using the machine


def test_growth_is_seen() -> None:
    samples = [Sample(k, 1 << 28, 0.01, 100 + 40 * k, 10, 0, 10, 10, 10) for k in range(16)]
    with pytest.raises(AssertionError, match="tensors: 380 early, 700 late"):
        Report(samples).assert_flat()
    samples = [Sample(k, 1 << 28, 0.01 * (1 + k), 100, 10, 0, 10, 10, 10) for k in range(16)]
    with pytest.raises(AssertionError, match="ms a step early"):
        Report(samples).assert_flat()
