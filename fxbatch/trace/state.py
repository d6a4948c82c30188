"""What this thread is tracing, and the modes that a parked instance must get back.

with tracing(recorder):        # this thread's current recorder
    fn(instance)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from fxbatch.errors import TraceError
from fxbatch.torch_private import (
    any_autocast,
    function_mode_count,
    function_modes,
    set_grad_enabled,
    set_warning_handler,
    swap_function_modes,
    warning_handler,
)
from fxbatch.trace.columns import Switch, _fast, set_current
from fxbatch.trace.location import at_line

if TYPE_CHECKING:
    from fxbatch.trace.record import Recorder


class _State(threading.local):
    _recorder: Recorder | None = None

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this thread; the C extension is told when it changes."""
        return self._recorder

    @recorder.setter
    def recorder(self, new: Recorder | None) -> None:
        self._recorder = new
        set_current(new)


state = _State()


def current_recorder() -> Recorder | None:
    """The recorder of this thread, None when it is not tracing."""
    return state.recorder


@contextlib.contextmanager
def tracing(recorder: Recorder | None) -> Iterator[None]:
    """Make `recorder` this thread's current one (None: pause tracing)."""
    before = state.recorder
    state.recorder = recorder
    try:
        yield
    finally:
        state.recorder = before


_AUTOCAST_KINDS = ("cpu", "cuda")


class ThreadModes:
    """Torch's modes of this thread: grad, autocast, torch function modes, receiver of warnings, tracing."""

    __slots__ = ("autocast", "functions", "grad", "inference", "recorder", "warnings")

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = autocast_state() if any_autocast() else None
        self.functions = function_modes()
        self.warnings = warning_handler()
        self.recorder = state.recorder

    def restore(self) -> None:
        """Make these the thread's modes again."""
        if torch.is_inference_mode_enabled() != self.inference:
            raise TraceError(
                "a value was asked for inside torch.inference_mode() in the per-instance forward: "
                "use torch.no_grad() there, or put the whole call into inference_mode" + at_line()
            )
        set_grad_enabled(self.grad)
        if self.autocast is not None or any_autocast():
            _set_autocast(self.autocast)
        swap_function_modes(self.functions)
        set_warning_handler(self.warnings)
        state.recorder = self.recorder

    def are_those_now(self) -> bool:
        """Whether these are the thread's modes; autocast and function modes are taken to differ where there are any."""
        if Switch.on:
            return _fast.modes_are(self)
        return (
            torch.is_grad_enabled() is self.grad
            and torch.is_inference_mode_enabled() is self.inference
            and self.autocast is None
            and not any_autocast()
            and not self.functions
            and not function_mode_count()
            and warning_handler() == self.warnings
            and state.recorder is self.recorder
        )

    def restore_if_other(self) -> None:
        """`restore`, where others are set."""
        if not self.are_those_now():
            self.restore()


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """(device type, enabled, dtype) for each device type that autocast knows here."""
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _AUTOCAST_KINDS)


def _set_autocast(wanted: tuple[tuple[str, bool, torch.dtype], ...] | None) -> None:
    for kind in _AUTOCAST_KINDS:
        enabled, dtype = False, None
        for k, e, d in wanted or ():
            if k == kind:
                enabled, dtype = e, d
        torch.set_autocast_enabled(kind, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)
