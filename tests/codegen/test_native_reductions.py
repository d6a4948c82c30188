"""Native reductions of rows against ATen: the largest, its place, log of sum of exp, and what is put in places."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxbatch
from fxbatch.codegen.native import extension
from fxbatch.codegen.operation_graphs import add_call
from tests.codegen.test_native import NO_SOURCES, ROWS, check, graph_of, normal, program_of, run_native
from tests.oracle import check_equal

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built")


def odd_numbers(n: int, *dims: int) -> torch.Tensor:
    """Few different numbers, so that there are ties; zeros of both signs, infinities, and NaN in some rows."""
    x = torch.randint(-2, 3, (n, *dims)).float()
    x = torch.where(torch.rand(x.shape) < 0.1, -0.0, x)
    x = torch.where(torch.rand(x.shape) < 0.1, math.inf, x)
    x = torch.where(torch.rand(x.shape) < 0.1, -math.inf, x)
    return torch.where(torch.rand(x.shape) < 0.05, math.nan, x)


def reductions(dim: int) -> Any:
    def make(g: fx.Graph, x: fx.Node) -> list[fx.Node]:
        most, least = (add_call(g, f, (x, dim)) for f in (aten.max.dim, aten.min.dim))
        pairs = [add_call(g, operator.getitem, (pair, i)) for pair in (most, least) for i in (0, 1)]
        return [
            *pairs,
            *[add_call(g, f, (x, dim)) for f in (aten.argmax.default, aten.argmin.default)],
            *[add_call(g, f, (x, [dim], True)) for f in (aten.amax.default, aten.amin.default)],
            add_call(g, aten.argmax.default, (x, dim, True)),
        ]

    return make


@pytest.mark.parametrize(("dims", "dim"), (((7,), 1), ((3, 5), 1), ((3, 5), 2), ((2, 3, 70), 2), ((1,), -1)))
def test_extremes_and_their_places(dims: tuple[int, ...], dim: int) -> None:
    module = graph_of(reductions(dim), (*dims, torch.float32))
    for n in ROWS:
        x = odd_numbers(n, *dims)
        found = run_native(module, n, [x])
        assert found is not None
        wanted = [
            *x.max(dim), *x.min(dim), x.argmax(dim), x.argmin(dim),
            x.amax(dim, keepdim=True), x.amin(dim, keepdim=True), x.argmax(dim, keepdim=True),
        ]  # fmt: skip
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dims", "dim"), (((7,), 1), ((3, 5), 1), ((3, 5), -1), ((2, 70), 1), ((1,), 1)))
def test_log_sum_exp(dims: tuple[int, ...], dim: int) -> None:
    module = graph_of(lambda g, x: [add_call(g, aten.logsumexp.default, (x, [dim]))], (*dims, torch.float32))
    for n in ROWS:
        for x in (odd_numbers(n, *dims), torch.randn(n, *dims) * 50, torch.full((n, *dims), -math.inf)):
            found = run_native(module, n, [x])
            assert found is not None
            torch.testing.assert_close(found[0], x.logsumexp(dim), rtol=2e-6, atol=2e-6, equal_nan=True)
            torch.testing.assert_close(
                found[0], x.double().logsumexp(dim).float(), rtol=2e-6, atol=2e-6, equal_nan=True
            )


def test_what_is_put_in_places_of_columns() -> None:
    def make(g: fx.Graph, x: fx.Node, index: fx.Node, source: fx.Node) -> list[fx.Node]:
        return [add_call(g, f, (x, 1, index, source)) for f in (aten.scatter.src, aten.scatter_add.default)]

    module = graph_of(make, (4, 6, torch.float32), (1, 6, torch.int64), (1, 6, torch.float32))
    check(module, normal(4, 6), lambda n: torch.randint(4, (n, 1, 6)), normal(1, 6))
    x, source = torch.randn(2, 4, 6), torch.randn(2, 1, 6)
    for bad in (4, -1, 2**62):
        index = torch.zeros(2, 1, 6, dtype=torch.int64)
        index[1, 0, 5] = bad
        assert run_native(module, 2, [x, index, source]) is None


def test_stacks_errors_and_comparisons() -> None:
    def make(g: fx.Graph, x: fx.Node, y: fx.Node, i: fx.Node, d: fx.Node, z: fx.Node) -> list[fx.Node]:
        return [
            add_call(g, aten.stack.default, ([x, y, x], 1)),
            add_call(g, aten.stack.default, ([x, y], -1)),
            add_call(g, aten.rsub.Tensor, (x, y)),
            add_call(g, aten.lt.Scalar, (i, 2)),
            add_call(g, aten.add.Tensor, (i, 3)),
            *[add_call(g, f, (d, z)) for f in (aten.eq.Tensor, aten.ne.Tensor)],
            *[add_call(g, f, (z, 1.0)) for f in (aten.eq.Scalar, aten.ne.Scalar)],
            add_call(g, aten.sub.Tensor, (i, i)),
        ]

    forms = ((5, torch.float32), (5, torch.float32), (torch.int64,), (5, torch.float32), (5, torch.float32))
    whole = lambda n: torch.randint(-4, 5, (n,))  # noqa: E731
    odd = lambda n: odd_numbers(n, 5)  # noqa: E731
    check(graph_of(make, *forms), normal(5), normal(5), whole, odd, odd)


def test_a_reduction_that_would_leave_its_memory_is_refused() -> None:
    module = graph_of(lambda g, x: [add_call(g, aten.logsumexp.default, (x, [1]))], (3, 5, torch.float32))
    made, none = program_of(module), NO_SOURCES
    extension.Program(made.bases, made.instructions, none, made.views, made.functions)
    depth, step = (lambda x: x["depth_rest"]), (lambda x: x["a"]["inner"])
    for field, wrong in ((depth, 4), (depth, 0), (depth, -1), (depth, 1 << 40), (step, 6), (step, 1 << 33)):
        code = made.instructions.copy()
        assert depth(code)[0] == 3 and step(code)[0] == 5
        field(code)[0] = wrong
        with pytest.raises(ValueError):
            extension.Program(made.bases, code, none)


class Decoder(nn.Module):
    """A best path, its gradient, a choice by the largest, and an error."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.transitions = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 3))

    def step(self, xs: list[torch.Tensor]) -> torch.Tensor:
        a = v = self.emit(xs[0])
        for x in xs[1:]:
            v = (v[:, None] + self.transitions).max(0).values + self.emit(x)
            a = torch.logsumexp(a[:, None] + self.transitions, 0) + self.emit(x)
        error = ((a - v) * (a - v)).sum()
        return (
            v[int(v.argmax())]
            + torch.logsumexp(a, 0)
            + error
            + torch.stack([v, a]).view(-1).min(0).values
            + v.min()
        )


class BatchedDecoder(Decoder):
    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return self.step(xs)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_decoder_of_reductions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = BatchedDecoder().to(dtype)
    xs = [[torch.randn(4, dtype=dtype) for _ in range(1 + i % 4)] for i in range(7)]
    check_equal(model, xs)
    check_equal(model, [])
    operations = model.forward.__fxbatch__.engine(model).operations  # type: ignore[attr-defined]
    made = [x for x in operations._entries.values() if x.graphs is not None]
    assert made and (dtype is torch.float64 or not any(x.not_native for x in made))
