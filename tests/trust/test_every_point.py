"""A fault at every line that runs in a training step: recording, planning, forward, backward; cold and warm.

The lines are not a list that somebody keeps: a traced step says which ones run. At each one, an exception is
raised the first time that it is reached. The default run takes a spread of them, `--slow` all.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests.trust.programs import model, vectors
from tests.trust.test_faults import assert_clean

Point = tuple[str, int]  # file, line
ROOT = fxbatch.__path__[0]
ERRORS: tuple[type[BaseException], ...] = (
    KeyboardInterrupt,
    torch.OutOfMemoryError,
    RuntimeError,
    MemoryError,
)


def small_model() -> nn.Module:
    """Modules, functions, a number, and a branch on a value."""
    torch.manual_seed(0)

    def forward(self: Any, x: Any) -> Any:
        h = torch.tanh(self.a(x)) + 0.5
        if h.sum().item() > 0:
            h = self.b(h)
        return h * 2

    return model(forward, {k: nn.Linear(3, 3) for k in "ab"})


def step(made: nn.Module, xs: Any) -> list[torch.Tensor]:
    """The result and the gradients of a training step."""
    out = made(xs)
    out.pow(2).sum().backward()
    found = [out.detach(), *(p.grad for p in made.parameters())]
    made.zero_grad()
    return found


def traced(on_line: Callable[[types.FrameType], None], run: Callable[[], Any]) -> Any:
    """Run with `on_line` called before each line of the package; what it raises is raised there."""

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            on_line(frame)
        return local

    def start(frame: types.FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(ROOT) else None

    before = sys.gettrace()
    gc.disable()  # so that finalizers run where they always run
    sys.settrace(start)
    try:
        return run()
    finally:
        sys.settrace(before)
        gc.enable()


def lines_of(run: Callable[[], Any]) -> list[Point]:
    """The lines that a call runs, in order of their first time."""
    seen: dict[Point, None] = {}
    traced(lambda frame: seen.setdefault((frame.f_code.co_filename, frame.f_lineno)), run)
    return list(seen)


def check_point(
    point: Point, error: type[BaseException], made: nn.Module, expected: list[torch.Tensor]
) -> None:
    """A fault at this line is raised, or handled; nothing is left of it; the next step is right."""
    xs = instances()
    raised: list[BaseException] = []

    def on_line(frame: types.FrameType) -> None:
        if not raised and (frame.f_code.co_filename, frame.f_lineno) == point:
            raised.append(error("injected"))
            raise raised[0]

    where = f"{error.__name__} at {point[0].removeprefix(ROOT)}:{point[1]}"
    try:
        found = traced(on_line, lambda: step(made, xs))
    except error:
        assert all(p.grad is None for p in made.parameters()), f"{where}: half-written gradients"
    else:
        assert not raised or issubclass(error, Exception), f"{where} was swallowed"
        assert_same(found, expected, where)
    for fault in raised:
        fault.__traceback__ = None  # its frames would hold what they hold
    try:
        assert_clean()
    except AssertionError as left:
        raise AssertionError(f"{where}: {left}") from None
    made.zero_grad()
    assert_same(step(made, xs), expected, f"the step after {where}")


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], where: str) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m: f"{where}: {m}")


def instances() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return vectors(3, 3, 3, 3, grad=False)


def loop() -> list[torch.Tensor]:
    with fxbatch.disabled():
        return step(small_model(), instances())


def warm_model() -> nn.Module:
    made = small_model()
    for _ in range(3):
        step(made, instances())
    return made


def warm_faults(stride: int) -> None:
    expected, made = loop(), warm_model()
    points = lines_of(lambda: step(made, instances()))
    assert len(points) > 500
    for k, point in enumerate(points):
        if k % stride == 0:
            check_point(point, ERRORS[k // stride % len(ERRORS)], made, expected)
            made = made if k % (stride * 20) else warm_model()  # what was handled may have left it slower


def cold_faults(stride: int) -> None:
    expected, cold = loop(), small_model()
    points = lines_of(lambda: step(cold, instances()))
    warm = warm_model()
    known = set(lines_of(lambda: step(warm, instances())))
    points = [p for p in points if p not in known]
    assert len(points) > 1000
    for k, point in enumerate(points):
        if k % stride == 0:
            check_point(point, ERRORS[k // stride % len(ERRORS)], small_model(), expected)


# Python drops what is raised in a finalizer, or in the callback of a weak reference: then the step simply goes on.
dropped = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@dropped
def test_faults_in_a_warm_step() -> None:
    warm_faults(stride=151)


@dropped
def test_faults_in_a_cold_step() -> None:
    cold_faults(stride=801)


@pytest.mark.slow
@dropped
def test_ctrl_c_at_any_moment() -> None:
    """A timer interrupts the step, wherever it is: in Python, in C, in torch."""
    expected, made = loop(), warm_model()
    begin = time.perf_counter()
    step(made, instances())
    seconds = time.perf_counter() - begin
    hits = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for k in range(16):
            xs = instances()
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds * (k + 1) / 16)
                step(made, xs)
                signal.setitimer(signal.ITIMER_REAL, 0)
                seconds /= 2  # it was over before
            except KeyboardInterrupt:
                hits += 1
            assert_clean()
            made.zero_grad()
            assert_same(step(made, instances()), expected, f"the step after interrupt {k}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@dropped
def test_faults_at_every_line_of_a_warm_step() -> None:
    warm_faults(stride=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@dropped
def test_faults_at_every_tenth_line_of_a_cold_step() -> None:
    cold_faults(stride=10)
