"""Traces, and minibatches planned ahead, belong to the modes that they were made in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxbatch
from fxbatch.errors import StaleTraceError
from tests.trace.made import instances, linear, model


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def cast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


MODES: dict[str, Any] = {
    "plain": contextlib.nullcontext,
    "autocast": cast,
    "float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no_grad": torch.no_grad,
    "double": double_by_default,
}
PAIRS = (
    ("plain", "autocast"), ("autocast", "plain"), ("autocast", "float16"), ("plain", "double"), ("double", "plain"),
    ("plain", "no_grad"), ("no_grad", "plain"),
)  # fmt: skip


def _made() -> Any:
    def forward(self: Any, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            inner = self.k(x)
        return self.l(x).relu() * torch.full((4,), 0.5) + inner  # the default dtype is that of full

    return model(forward, l=linear, k=linear)


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_traces_made_in_one_mode_and_run_in_another(first: str, then: str) -> None:
    made, xs = _made(), instances(3)
    data = fxbatch.TracedDataset(made, xs)
    with MODES[first]():
        items = [data[i] for i in range(3)]
        bare = [fxbatch.trace(made, x) for x in xs]
        _same(made(items), made(xs))
    with MODES[then]():
        expected = made(xs)
        with fxbatch.disabled():
            assert made(xs).dtype == expected.dtype
        _same(made(items), expected)
        _same(made([data[i] for i in range(3)]), expected)
        if (first, then) == ("plain", "no_grad"):  # what carries gradients is right without them too
            _same(made(bare), expected)
        else:
            with pytest.raises(StaleTraceError, match=r"was made with .*, now there is"):
                made(bare)
    with MODES[first]():
        _same(made(bare), made(xs))


@pytest.mark.parametrize("mode", ["autocast", "no_grad", "double"])
def test_prefetch_plans_in_the_modes_of_its_loop(mode: str) -> None:
    made, xs = _made(), instances(4)
    data = fxbatch.TracedDataset(made, xs)
    with MODES[mode]():
        batches = [[data[0], data[1]], [data[2], data[3]]]
        for batch, part in zip(fxbatch.prefetch(made, batches), (xs[:2], xs[2:]), strict=True):
            assert not batch.stale()
            _same(made(batch), made(part))


@pytest.mark.parametrize("mode", ["autocast", "double", "no_grad"])
def test_a_minibatch_planned_in_other_modes_is_planned_again(mode: str) -> None:
    made, xs = _made(), instances(2)
    data = fxbatch.TracedDataset(made, xs)
    for batch in fxbatch.prefetch(made, [[data[0], data[1]]]):
        with MODES[mode]():
            assert batch.stale()
            _same(made(batch), made(xs))
