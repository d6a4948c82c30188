"""Faults at any point of trace, plan, forward and backward: nothing is left behind, the next call works.

A fault is injected by a function that raises at its n-th call, put in the place of one inside the path.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import greenlet
import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.trace import state
from fxbatch.trace import torch_patches as patch
from fxbatch.trace.state import current_recorder
from tests import models as M
from tests.oracle import check_equal
from tests.trust.programs import model, vectors

FAULTS = (RuntimeError("injected"), KeyboardInterrupt(), torch.OutOfMemoryError("injected"), MemoryError())
OF_MEMORY = ("build_operation", "emit_kernel", "Pool.take", "run_on_fakes")  # treat those of memory otherwise

# module, what in it, and at which of its calls the fault comes
IN_PYTHON = ("StepViews._source", "Backward._one")  # on the path where steps don't run native
POINTS = (
    ("fxbatch.trace.arguments", "run_on_fakes", 0),
    ("fxbatch.trace.recorded_calls", "RecordedCalls.pending_program", 0),
    ("fxbatch.runtime.memory", "Memory.plan", 0),
    ("fxbatch.runtime.operation_cache", "build_operation", 0),
    ("fxbatch.runtime.operation_cache", "emit_kernel", 1),
    ("fxbatch.runtime.forward", "fill_constants", 0),
    ("fxbatch.runtime.autograd", "differentiable_inputs", 0),
    ("fxbatch.runtime.pool", "Pool.take", 1),
    ("fxbatch.runtime.backward", "plan_gradients", 0),
    ("fxbatch.runtime.forward", "native_steps_of", 0),
    ("fxbatch.runtime.backward", "native_steps_of", 0),
    ("fxbatch.runtime.forward", "StepViews._source", 0),
    ("fxbatch.runtime.memory", "GradientRows._clear", 0),
    ("fxbatch.runtime.backward", "Backward._one", 1),
    ("fxbatch.runtime.backward", "add_parameter_gradients", 0),
)


@contextmanager
def fault(module: str, name: str, after: int, error: BaseException) -> Iterator[list[int]]:
    """`module.name` raises at its call number `after`; yields the list of calls."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    old = owner.__dict__[last]
    calls: list[int] = []

    def raising(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == after + 1:
            raise error
        return old(*args, **kwargs)

    setattr(owner, last, raising)
    try:
        yield calls
    finally:
        setattr(owner, last, old)


def waiting_model(**options: Any) -> nn.Module:
    """A forward with modules, functions, numbers and a value branch."""

    def forward(self: Any, x: Any) -> Any:
        h = torch.tanh(self.a(x)) + 0.5
        if h.sum().item() > 0:
            h = self.b(h)
        return h * 2 + self.c(h)

    return model(forward, {k: nn.Linear(4, 4) for k in "abc"}, **options)


def assert_clean() -> None:
    """Nothing of a failed call is left: patches, recorder, modes, greenlets."""
    gc.collect()  # what a fault in the clean-up itself left is ended by the collector
    assert current_recorder() is None
    assert not patch.patched.uses and not patch.patched.saved
    assert "traced" not in nn.Module.__call__.__qualname__
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    idle = state.state.idle
    found = [g for g in gc.get_objects() if isinstance(g, greenlet.greenlet) and not g.dead and g.parent]
    stuck = [g for g in found if g not in idle]
    assert not stuck, f"{len(stuck)} greenlets wait for ever"


def train_step(made: nn.Module, xs: Any) -> None:
    made(xs).sum().backward()


@pytest.mark.parametrize(
    ("point", "error"),
    [(p, e) for p in POINTS for e in (FAULTS if p[1] in OF_MEMORY else FAULTS[:2])],
    ids=lambda x: f"{x[0].split('.')[-1]}.{x[1]}" if type(x) is tuple else type(x).__name__,
)
def test_a_fault_leaves_nothing_behind(point: tuple[str, str, int], error: BaseException) -> None:
    module, name, after = point
    made, xs = waiting_model(native=name not in IN_PYTHON), vectors(4, 4, 4, grad=False)
    with fault(module, name, after, error) as calls:
        # What a body raises on fake tensors means that it needs values: it runs again, on those.
        swallowed = name == "run_on_fakes" and type(error) is RuntimeError
        try:
            train_step(made, xs)
        except type(error) as caught:
            assert caught is error
        else:
            assert swallowed or len(calls) <= after, "the fault was swallowed"
    assert calls, f"{module}.{name} is not on the path any more: choose another point"
    assert_clean()
    before = [None if p.grad is None else p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    check_equal(made, xs)
    if module == "fxbatch.runtime.backward" or name == "GradientRows._clear":
        assert all(g is None for g in before), "a failed backward wrote gradients"


@pytest.mark.parametrize("n", (0, 3, 10, 21, 27))
def test_an_interrupt_at_the_nth_call_of_the_forward(n: int) -> None:
    """KeyboardInterrupt in the middle of instances, some of which wait."""
    count = [0]

    def forward(self: Any, x: Any) -> Any:
        for _ in range(4):
            count[0] += 1
            if count[0] == n + 1:
                raise KeyboardInterrupt
            x = torch.tanh(self.a(x))
            x = x if x.sum().item() > 0 else -x
        return x

    made = model(forward, {"a": nn.Linear(4, 4)})
    xs = vectors(4, 4, 4, 4, 4, 4, 4, 4, grad=False)
    with pytest.raises(KeyboardInterrupt):
        made(xs)
    assert_clean()
    count[0] = -1000
    check_equal(made, xs)


def test_finally_blocks_of_waiting_instances_run() -> None:
    closed: list[int] = []

    def forward(self: Any, sample: Any) -> Any:
        i, x, closed = sample  # its own: a variable of all would be changed in turn
        try:
            if self.a(x).sum().item() > -1e9 and i == 2:
                raise ValueError("third")
            return self.a(x)
        finally:
            closed.append(i)

    made = model(forward, {"a": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match="third"):
        made([(i, x, closed) for i, x in enumerate(vectors(4, 4, 4, 4))])
    assert sorted(closed) == [0, 1, 2, 3]
    assert_clean()


@pytest.mark.parametrize("native", [True, False])
def test_memory_comes_back_after_faults(native: bool) -> None:
    """Many failed calls hold no more memory than a few."""
    made, trees = M.with_options(M.TreeLSTM(), native=native), M.trees(0, [5, 9])
    train_step(made, trees)
    engine = type(made).forward.__fxbatch__.engine(made)
    sizes = []
    for k in range(12):
        with (
            fault("fxbatch.runtime.pool", "Pool.take", k % 2, RuntimeError("injected")),
            pytest.raises(RuntimeError, match="injected"),
        ):
            train_step(made, trees)
        gc.collect()  # a traceback holds its run
        sizes.append(engine.pool.bytes)
    train_step(made, trees)
    assert max(sizes[6:]) <= 2 * max(sizes[:6])
    assert_clean()
    check_equal(made, trees)


def test_torch_is_patched_only_while_tracing() -> None:
    seen: list[Any] = []
    before = nn.Module.__call__

    def forward(self: Any, x: Any) -> Any:
        seen.append(nn.Module.__call__ is before)
        return self.a(x)

    made = model(forward, {"a": nn.Linear(4, 4)})
    made(vectors(4, 4))
    assert seen == [False, False] and nn.Module.__call__ is before


def test_other_threads_compute_eagerly_while_one_traces() -> None:

    other = nn.Linear(4, 4)
    x = torch.randn(4)
    expected, found = other(x), []

    def forward(self: Any, y: Any) -> Any:
        thread = threading.Thread(target=lambda: found.append((other(x), torch.tensor([1.0]))))
        thread.start()
        thread.join()
        return self.a(y)

    model(forward, {"a": nn.Linear(4, 4)})(vectors(4, 4))
    assert len(found) == 2 and all(type(t) is torch.Tensor for pair in found for t in pair)
    torch.testing.assert_close(found[0][0], expected)


def test_a_thread_started_inside_the_forward_cannot_read_values() -> None:

    errors: list[BaseException] = []

    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)

        def read() -> None:
            try:
                y.sum().item()
            except fxbatch.FxbatchError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return y

    model(forward, {"a": nn.Linear(4, 4)})(vectors(4))
    assert errors
    assert_clean()
