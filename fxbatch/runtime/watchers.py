"""Who watches the kernels: torch's profilers.

with named_step("cell", 37, "forward"):   # a range of the profiler, where one is on
    ...
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fxbatch.torch_private import profiler_enabled


def named_step(name: str, rows: int, kind: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, `cell x37 forward`, where one is on."""
    return torch.profiler.record_function(f"{name} x{rows} {kind}") if profiler_enabled() else nullcontext()
