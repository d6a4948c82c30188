"""Captured plans on a machine without a GPU."""

from __future__ import annotations

import pytest

from fxbatch.runtime import cuda_graphs
from fxbatch.runtime.cuda_graphs import GraphedPlans
from tests.compile.launches import record_launches


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> GraphedPlans:
    """The plans of a model on the CPU, captured as on CUDA: recorded launches in place of a graph."""
    original = cuda_graphs.reason_against
    monkeypatch.setattr(cuda_graphs, "reason_against", lambda run, phase: original(run, phase, "cpu"))
    return GraphedPlans(record_launches, size=2)
