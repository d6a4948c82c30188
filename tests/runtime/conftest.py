"""What several tests of the runtime share: a clock for strategies, and a count of recordings."""

from __future__ import annotations

from typing import Any

import pytest

from fxbatch import stopwatch
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.strategy import AdaptiveSwitch
from tests.clock import Clock


@pytest.fixture
def clock(_always_batched: None, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that strategies read; they choose in tests that use it."""
    made = Clock()
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(stopwatch, "now", made)
    return made


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many instances each recording of the test had."""
    counts: list[int] = []
    record = Engine.record

    def counted(self: Engine, fn: Any, instances: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(instances))
        return record(self, fn, instances, *args, **kwargs)

    monkeypatch.setattr(Engine, "record", counted)
    return counts
