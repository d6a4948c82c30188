"""Instances that wait inside a binding of torch leave nothing of their C stack behind: warnings still arrive."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.torch_private import warning_handler


class Chosen(nn.Module):
    """Sums the rows that torch.nonzero finds: torch calls back from C++, and the instance waits in there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        for _ in range(3):
            h = h + h[torch.nonzero(h > 0)].sum()
        return h.sum()


def test_the_receiver_of_warnings_is_who_it_was() -> None:
    before = warning_handler()
    if before is None:
        pytest.skip("this build of torch does not tell who gets its warnings")
    Chosen()([torch.randn(3) for _ in range(5)]).sum().backward()
    assert warning_handler() == before


def test_a_warning_after_instances_that_waited() -> None:
    program = """
        import warnings
        import torch
        from tests.trace.test_warnings import Chosen

        Chosen()([torch.randn(3) for _ in range(5)]).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = torch.ones(()).expand(4).reshape(4, 1)
            torch.searchsorted(torch.arange(8.0).reshape(4, 2), values)
        assert any("non-contiguous" in str(w.message) for w in caught), caught
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
