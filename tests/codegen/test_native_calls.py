"""Kernels of which C knows only some calls: the others are torch's, in the same walk."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.codegen.native import CALLS, extension
from fxbatch.codegen.native_lower import NativeProgram, make_program, records
from fxbatch.codegen.native_table import Source
from fxbatch.codegen.operation_graphs import add_call, rows_node
from tests.codegen.test_native import SAMPLES, graph_of, program_of, ran, run_native
from tests.oracle import check_equal

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not CALLS, reason="the extension was not built, or can't call torch")
F32 = torch.float32


def call(g: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    return add_call(g, target, args, kwargs)


def middle(g: Any, x: Any, y: Any) -> list[Any]:
    """Pointwise work, a product of matrices a row, a softmax, and pointwise work."""
    scaled = call(g, aten.mul.Tensor, x, 0.5)
    turned = call(g, aten.permute.default, y, [0, 2, 1])
    scores = call(g, aten.bmm.default, scaled, turned)
    return [call(g, aten.tanh.default, call(g, aten._softmax.default, scores, -1, False)), scores]


def two_results(g: Any, x: Any, y: Any) -> list[Any]:
    """A call of several results, of which one is used before it, and one is a result of the kernel."""
    both = call(g, aten.sort.default, call(g, aten.add.Tensor, x, y))
    first, place = (call(g, operator.getitem, both, i) for i in (0, 1))
    return [call(g, aten.exp.default, first), place]


def joined(g: Any, x: Any, y: Any) -> list[Any]:
    """What a call gives is a piece of a concatenation."""
    pieces = [call(g, aten.cumsum.default, x, 1), call(g, aten.neg.default, y)]
    return [call(g, aten.cat.default, pieces, 1)]


@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize(
    ("make", "forms", "calls"),
    [
        (middle, ((3, 4, F32), (5, 4, F32)), ("aten.bmm.default",)),
        (two_results, ((6, F32), (6, F32)), ("aten.sort.default",)),
        (joined, ((6, F32), (3, F32)), ("aten.cumsum.default",)),
    ],
    ids=["middle", "results", "piece"],
)
def test_the_results_are_the_graphs(
    make: Callable[..., Any], forms: Any, calls: tuple[str, ...], n: int
) -> None:
    module = graph_of(make, *forms)
    assert program_of(module).calls == calls
    ins = [torch.randn(n, *dims) for *dims, _ in forms]
    got = run_native(module, n, ins)
    assert got is not None
    for a, b in zip(got, module(n, *ins), strict=True):
        torch.testing.assert_close(a, b)


def mask_of_numbers(g: Any, x: Any) -> list[Any]:
    """What a body makes of numbers alone, as a mask: it reads no row."""
    ones = call(g, aten.full.default, [6, 6], 1.0)
    upper = call(g, aten.triu.default, ones, 1)
    sums = call(g, aten.mm.default, x, call(g, aten.permute.default, upper, [1, 0]))
    return [call(g, aten.relu.default, call(g, aten.sub.Tensor, x, sums))]


def filter_a_row(g: Any, x: Any, w: Any) -> list[Any]:
    """A convolution with a filter of its own for each row: as many groups as rows."""
    n = rows_node(g)
    rows, filters = call(g, aten.reshape.default, x, [1, n, 6]), call(g, aten.reshape.default, w, [n, 1, 3])
    both = call(g, aten.convolution.default, rows, filters, None, [1], [0], [1], False, [0], n)
    return [call(g, aten.tanh.default, call(g, aten.reshape.default, both, [n, 4]))]


@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_constants_and_numbers_of_rows(n: int) -> None:
    """Kernels that were Python's as a whole: what no row needs is made once, and sizes are told by the tensors."""
    for make, forms, name in (
        (mask_of_numbers, ((6, F32),), "aten.triu.default"),
        (filter_a_row, ((6, F32), (3, F32)), "aten.convolution.default"),
    ):
        module = graph_of(make, *forms)
        assert program_of(module).calls == (name,)
        ins = [torch.randn(n, *dims) for *dims, _ in forms]
        got = run_native(module, n, ins)
        assert got is not None
        torch.testing.assert_close(got[0], module(n, *ins)[0])


def test_what_is_made_of_parameters_alone_stays_pythons() -> None:
    """It is made once a run there; and a large constant is not copied at each launch."""
    shared, make = (
        torch.randn(6, 6),
        lambda g, x, w: [call(g, aten.mm.default, x, call(g, aten.triu.default, w))],
    )
    assert make_program(graph_of(make, (6, F32), shared=(shared,)), (shared,)) == "aten.triu.default"

    def large(g: Any, x: Any) -> list[Any]:
        return [
            call(g, aten.mm.default, x, call(g, aten.triu.default, call(g, aten.full.default, [80, 80], 1.0)))
        ]

    assert make_program(graph_of(large, (80, F32)), ()) == "aten.triu.default"


def test_random_numbers_stay_pythons() -> None:
    made = make_program(graph_of(lambda g, x: [call(g, aten.bernoulli.default, x)], (3, F32)), ())
    assert made == "aten.bernoulli.default"


@pytest.mark.parametrize("n", [1, 5, 300])
def test_a_call_of_torch_alone(n: int) -> None:
    """It is a step of C's walk, on all rows at once."""
    for make in (
        lambda g, x: [call(g, aten.erf.default, x)],
        lambda g, x: [call(g, aten.cumsum.default, x, 0)],
    ):
        module, x = graph_of(make, (3, F32)), torch.randn(n, 3)
        got = run_native(module, n, [x])
        assert got is not None
        torch.testing.assert_close(got[0], module(n, x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(h).transpose(-1, -2) * 0.4, -1)
        return torch.tanh(self.out(scores @ h)) * torch.sigmoid(x) + h


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Attention()

    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: list[Tensor]) -> Tensor:
        h = torch.zeros_like(xs[0])
        for x in xs:
            h = self.cell(x, h)
        return h


def data() -> list[list[Tensor]]:
    return [[torch.randn(4, 6) for _ in range(n)] for n in (3, 1, 5, 2)]


def test_values_and_gradients_are_the_loops() -> None:
    torch.manual_seed(0)
    model = Chain()
    check_equal(model, data())


def test_half_known_kernels_are_native() -> None:
    minibatch = fxbatch.compile_minibatch(Chain(), data())
    cells = [op for op in minibatch.operations if op.signature.name == "cell"]
    assert all(op.native_forward is not None and op.native_backward is not None for op in cells[1:])
    for cell in cells:
        assert cell.native_forward is not None and cell.native_forward.calls == ("aten.bmm.default",) * 2
        assert "forward: torch's aten.bmm.default" in cell.not_native


def calling(function: Callable[[Any], object]) -> tuple[Any, np.ndarray, list[Tensor]]:
    """A program that calls a function between two instructions, and its memory."""
    module = graph_of(joined, (6, F32), (3, F32))
    made = program_of(module)
    assert isinstance(made, NativeProgram)
    program = extension.Program(made.bases, made.instructions, records(Source, ()), made.views, (function,))
    tensors = [torch.randn(SAMPLES[0], 6), torch.randn(SAMPLES[0], 3), torch.zeros(SAMPLES[0], 9)]
    memory = np.array([(t.data_ptr(), t.nbytes) for t in tensors], dtype=np.int64)
    return program, memory, tensors


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_what_a_call_raises_is_raised(error: BaseException) -> None:
    def function(tensors: Any) -> None:
        raise error

    program, memory, _ = calling(function)
    with pytest.raises(type(error)):
        ran(program, extension.Room(), SAMPLES[0], memory)


def test_a_call_may_run_programs_and_threads() -> None:
    """Of the same room: they don't run, and Python runs their kernels."""
    room, seen = extension.Room(), []

    def function(tensors: Any) -> None:
        seen.append(ran(program, room, SAMPLES[0], memory))
        other = threading.Thread(target=lambda: seen.append(ran(known, extension.Room(), 2, given)))
        other.start()
        other.join()
        torch.cumsum(tensors[0], 1, out=tensors[1])

    made = program_of(graph_of(lambda g, x: [call(g, aten.exp.default, x)], (3, F32)))
    known = extension.Program(made.bases, made.instructions, records(Source, ()))
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    given = np.array([(t.data_ptr(), t.nbytes) for t in (x, y)], dtype=np.int64)
    program, memory, (a, b, out) = calling(function)
    assert ran(program, room, SAMPLES[0], memory) and seen == [False, True]
    torch.testing.assert_close(out, torch.cat([torch.cumsum(a, 1), -b], 1))
    torch.testing.assert_close(y, x.exp())


def test_views_outside_of_their_memory_are_refused() -> None:
    made = program_of(graph_of(middle, (3, 4, F32), (5, 4, F32)))
    refused = 0
    for name in ("base", "offset", "type", "rank"):
        for value in (-1, 1 << 20, 1 << 40):
            views = made.views.copy()
            views[name][0] = value
            with pytest.raises(ValueError, match="view"):
                extension.Program(made.bases, made.instructions, records(Source, ()), views, made.functions)
            refused += 1
    for name in ("per_row", "rest", "stride"):
        views = made.views.copy()
        views["dimensions"][name][0, 0] = 1 << 20
        with pytest.raises(ValueError):
            extension.Program(made.bases, made.instructions, records(Source, ()), views, made.functions)
    for functions, views in (((), made.views), (made.functions, made.views[:-1])):
        with pytest.raises(ValueError):
            extension.Program(made.bases, made.instructions, records(Source, ()), views, functions)
    assert refused == 12
