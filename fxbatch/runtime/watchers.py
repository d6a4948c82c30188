"""Who watches the kernels: torch's profilers, and dispatch modes such as FlopCounterMode.

In: a decorated call under a dispatch mode. Out: the mode sees the kernels that run, and nothing of the recording.

    with hidden_modes():                 # around the whole call: recording runs no kernels
        with shown_modes():              # around the steps of a phase
            ...
    with named_step("cell", 37, "forward"):   # a range of the profiler, where one is on
        ...

Under a mode, steps run as calls of ATen, which it can see, and not as native programs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from fxbatch.torch_private import (
    dispatch_mode_count,
    pop_dispatch_modes,
    profiler_enabled,
    push_dispatch_modes,
    without_module_trackers,
)


class _Hidden(threading.local):
    modes: list[object] = []  # replaced, never changed; innermost first


_hidden = _Hidden()


def is_watched() -> bool:
    """Whether a dispatch mode is on, or would be if it were not hidden."""
    return bool(_hidden.modes) or dispatch_mode_count() > 0


def hidden_modes_now() -> list[object]:
    """This thread's dispatch modes that are hidden, innermost first."""
    return _hidden.modes


@contextlib.contextmanager
def hidden_modes() -> Iterator[None]:
    """Without this thread's dispatch modes."""
    before, modes = _hidden.modes, pop_dispatch_modes()
    _hidden.modes = modes
    try:
        with without_module_trackers():
            yield
    finally:
        _hidden.modes = before
        push_dispatch_modes(modes)


class shown_modes:
    """With the dispatch modes that are hidden."""

    def __enter__(self) -> None:
        self.modes = _hidden.modes
        if self.modes:
            push_dispatch_modes(self.modes)
            _hidden.modes = []

    def __exit__(self, *_: object) -> None:
        if self.modes:
            pop_dispatch_modes()
            _hidden.modes = self.modes


def named_step(name: str, rows: int, kind: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, `cell x37 forward`, where one is on."""
    return torch.profiler.record_function(f"{name} x{rows} {kind}") if profiler_enabled() else nullcontext()
