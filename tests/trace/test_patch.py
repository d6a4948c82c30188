"""What is changed in torch comes and goes in order, whoever else changes it at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns so often that each meets the others half way."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Chain(nn.Module):
    """A decorated module with operations that are new to every engine: torch.fx traces them at the first call."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(3))

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def test_torch_is_as_it_was_after_threads_that_record_and_trace_operations(quick_switches: None) -> None:
    before = nn.Module.__call__, nn.Module.__getattr__, torch.tensor
    found: dict[int, Any] = {}

    def work(size: int) -> None:
        model = Chain(size)
        found[size] = [model(torch.ones(2, size)).detach() for _ in range(5)], model

    threads = [threading.Thread(target=work, args=(size,)) for size in range(3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = nn.Module.__call__, nn.Module.__getattr__, torch.tensor
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert len(found) == len(threads)
    for size, (results, model) in found.items():
        with fxbatch.disabled():
            wanted = model(torch.ones(2, size))
        for result in results:
            torch.testing.assert_close(result, wanted.detach())
