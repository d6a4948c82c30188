"""The state of a thread that traces: recorder, modes, columns that C and Python share, greenlets that run instances.

with tracing(recorder):        # this thread's current recorder
    fn(instance)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import greenlet
import numpy as np
import torch

from fxbatch.caches import guard
from fxbatch.errors import TraceError
from fxbatch.ir import Modes
from fxbatch.torch_private import (
    all_saved_tensor_hooks,
    any_autocast,
    are_deterministic,
    function_mode_count,
    function_modes,
    saved_tensors_are_packed,
    set_grad_enabled,
    set_warning_handler,
    swap_function_modes,
    swap_saved_tensor_hooks,
    warning_handler,
)
from fxbatch.trace.user_line import at_line

try:
    _fast: Any = importlib.import_module("fxbatch.trace._fast")
except ImportError:  # installed without a C compiler
    _fast = None


# An empty int64 column with append and the buffer protocol.
new_column: Callable[[], object] = functools.partial(array, "q") if _fast is None else _fast.Column
# An empty table of calls that were met before, see _fast_columns.h; without C it stays empty.
new_call_table: Callable[[], Any] = dict if _fast is None else _fast.CallTable
set_current: Callable[[object], None] = (lambda _: None) if _fast is None else _fast.set_current
# Torch's own function, where something stands for it while a thread records (torch_functions.py).
plain_function: Callable[[object], object] = (lambda x: x) if _fast is None else _fast.plain_function
quicken: Callable[[tuple[type, ...]], None] = (lambda _: None) if _fast is None else _fast.quicken

Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # the smallest and the largest size of each dimension


def sizes_of(tensors: list[torch.Tensor]) -> tuple[np.ndarray, Bounds] | None:
    """int64 [tensors, dimensions]: the sizes of plain tensors that may differ in their sizes alone, and their bounds;
    None for others."""
    first = tensors[0]
    rank = first.dim()
    sizes = np.empty((len(tensors), rank), dtype=np.int64)
    kind = (torch.Tensor, first.dtype, first.requires_grad, rank)
    if any((type(t), t.dtype, t.requires_grad, t.dim()) != kind for t in tensors):
        return None
    sizes[:] = [t.shape for t in tensors]
    return sizes, (tuple(sizes.min(0).tolist()), tuple(sizes.max(0).tolist()))


# -- a thread that traces, and the modes that a parked instance must get back


class _State(threading.local):
    bindings = 0  # calls of torch.ops that it is inside of (trace/calls.py)
    # What it raises where a torch.autograd.Function meets fake tensors; None: nothing (trace/torch_patches.py).
    refuse_functions: Callable[[str], Exception] | None = None
    _recorder: Any = None  # a trace.record.Recorder, which stands above this

    def __init__(self) -> None:
        self.idle: list[Worker] = []  # greenlets that have run instances

    @property
    def recorder(self) -> Any:
        """The recorder of this thread; the C extension is told when it changes."""
        return self._recorder

    @recorder.setter
    def recorder(self, new: object) -> None:
        self._recorder = new
        set_current(new)


state = _State()


MANY_REFUSALS = 1000  # in one recording, after which the forward that catches them is left


def _note_refusal(error: TraceError) -> None:
    """A refusal is about to be raised. A forward that catches it goes on otherwise than the loop does: what it gives
    counts for nothing then (trace/minibatch.py). Those that are errors of Python's as well the loop raises too."""
    recorder = state.recorder
    if recorder is None or isinstance(error, (TypeError, ValueError)):
        return
    recorder.refused = recorder.refused or error
    recorder.refusals += 1
    if recorder.refusals > MANY_REFUSALS:
        raise greenlet.GreenletExit


TraceError.told = _note_refusal


def current_recorder() -> Any:
    """The recorder of this thread, None when it is not tracing."""
    return state.recorder


@contextlib.contextmanager
def tracing(recorder: object) -> Iterator[None]:
    """Make `recorder` this thread's current one (None: pause tracing)."""
    before = state.recorder
    state.recorder = recorder
    try:
        yield
    except TraceError as error:
        state.recorder = before
        if recorder is None:
            _note_refusal(error)
        raise
    finally:
        state.recorder = before


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors that are made within it are plain ones, also under inference_mode: torch counts writes to such."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def settings_now() -> tuple[object, ...]:
    """Settings that a process has once, and a forward may change: default dtype, output, deterministic algorithms,
    warnings, anomaly mode, kernels of attention, the seed of torch's generator."""
    output = id(sys.stdout), id(sys.stderr), id(warnings.filters)
    attention, seed = (_flash(), _math()), _generator.initial_seed()
    return output, attention, seed, torch.get_default_dtype(), are_deterministic(), torch.is_anomaly_enabled()


_generator = torch.default_generator
_AUTOCAST_KINDS = ("cpu", "cuda")


# One of these is switched by each choice of kernels for attention.
_flash, _math = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled


class ThreadModes:
    """Torch's modes of this thread: grad, autocast, torch function modes, hooks on saved tensors, receiver of warnings,
    tracing."""

    __slots__ = ("autocast", "functions", "grad", "hooks", "inference", "recorder", "warnings")

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = autocast_state() if any_autocast() else None
        self.functions = function_modes() if function_mode_count() else []
        # As inside torch.utils.checkpoint.
        self.hooks = all_saved_tensor_hooks() if saved_tensors_are_packed() else []
        self.warnings = warning_handler()
        self.recorder = state.recorder

    def refusal(self) -> TraceError:
        """Of an instance that would be left in another inference mode, which its manager alone can switch."""
        return TraceError(
            "a value was asked for inside torch.inference_mode() in the per-instance forward: "
            "use torch.no_grad() there, or put the whole call into inference_mode" + at_line()
        )

    def restore(self) -> None:
        """Make these the thread's modes again."""
        if torch.is_inference_mode_enabled() != self.inference:
            raise self.refusal()
        set_grad_enabled(self.grad)
        if self.autocast is not None or any_autocast():
            set_autocast(self.autocast)
        swap_function_modes(self.functions)
        if self.hooks or saved_tensors_are_packed():
            swap_saved_tensor_hooks(self.hooks)
        set_warning_handler(self.warnings)
        state.recorder = self.recorder

    def are_those_now(self) -> bool:
        """Whether these are the thread's modes, but for who receives warnings: inside a call of torch's bindings that
        is another. Autocast, function modes and hooks are taken to differ where there are any."""
        if _fast is not None:
            usual = _fast.usual_modes(self.recorder, self.grad)
        else:
            recorder = state.recorder
            usual = recorder is self.recorder and torch.is_grad_enabled() is self.grad and not any_autocast()
        return (
            usual
            and torch.is_inference_mode_enabled() is self.inference
            and self.autocast is None
            and not self.functions
            and not function_mode_count()
            and not (self.hooks or saved_tensors_are_packed())
        )


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """(device type, enabled, dtype) for each device type that autocast knows here."""
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _AUTOCAST_KINDS)


def set_autocast(wanted: tuple[tuple[str, bool, torch.dtype], ...] | None) -> None:
    """Make autocast what `autocast_state` was; None: off."""
    by_kind = {kind: (enabled, dtype) for kind, enabled, dtype in wanted or ()}
    for kind in _AUTOCAST_KINDS:
        enabled, dtype = by_kind.get(kind, (False, None))
        torch.set_autocast_enabled(kind, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)


def modes_now() -> Modes:
    """This thread's modes that a recording, as a whole, depends on."""
    casts: tuple[tuple[str, torch.dtype], ...] = ()
    if any_autocast():
        casts = tuple((kind, dtype) for kind, enabled, dtype in autocast_state() if enabled)
    return Modes(False, torch.is_grad_enabled(), casts, torch.get_default_dtype())


@guard("modes")
def still_hold(under: Modes, now: Modes) -> bool:
    """Whether what was recorded under these is what would be recorded now. Gradients that are not asked for do no
    harm."""
    return under == now or (under.grad and under == replace(now, grad=True))


@contextlib.contextmanager
def entered_modes(modes: Modes, devices: Sequence[str], grad: bool | None = None) -> Iterator[None]:
    """Grad (or what is given for it), autocast and default dtype as they were when something was recorded, which uses
    these types of devices."""
    before = torch.get_default_dtype()
    with torch.set_grad_enabled(modes.grad if grad is None else grad), contextlib.ExitStack() as stack:
        wanted = dict(modes.autocast)
        for device in dict.fromkeys([*devices, *wanted]) if wanted or any_autocast() else ():
            if device in wanted:
                cast = torch.autocast(device, dtype=wanted[device], cache_enabled=False)
                stack.enter_context(cast)
            elif device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if before is not modes.default_dtype:  # which is all threads'
            torch.set_default_dtype(modes.default_dtype)
            stack.callback(torch.set_default_dtype, before)
        yield


# -- greenlets that run instances, kept from minibatch to minibatch

_KEPT = 64  # a thread
_APART = 1 << 16  # bytes of stack at most between a worker and who uses it again


class Worker(greenlet.greenlet):
    """A greenlet that does one piece of work after another, each for the one who is its parent then."""

    stack = 0  # where the C stack was when it was made


def take_worker(main: greenlet.greenlet) -> Worker:
    """A worker of this thread whose work comes back to `main`."""
    stack, idle = 0 if _fast is None else _fast.stack_here(), state.idle
    while idle and stack:
        worker = idle.pop()
        if not worker.dead and 0 <= stack - worker.stack < _APART:
            worker.parent = main
            return worker
    worker = Worker(_serve, main)
    worker.stack = stack
    worker.switch()  # what a greenlet is started with it holds for good
    return worker


def _serve() -> None:
    work: Callable[[], None] | None = greenlet.getcurrent().parent.switch()
    while work is not None:
        if _fast is None:
            work()
        else:
            _fast.at_bottom(work)
        work = None  # it holds a minibatch
        me, idle = greenlet.getcurrent(), state.idle
        if not me.stack or len(idle) >= _KEPT:
            return
        me.gr_context = None
        idle.append(me)
        main = me.parent
        del me, idle  # they would hold themselves
        work = main.switch()
