"""Native programs against the Python kernels, which are the reference, and against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

import fxbatch
from fxbatch.codegen.kernel import Workspace, emit_kernel
from fxbatch.codegen.native import extension
from fxbatch.codegen.native_lower import NativeProgram, make_program, records
from fxbatch.codegen.native_table import Memory, Source
from fxbatch.codegen.operation_graphs import add_call, shape
from fxbatch.judge import differences, draws
from tests.oracle import check_equal

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built")
SAMPLES = (5, 7)
ROWS = (1, 2, 3, 7, 40, 1000)
NO_SOURCES = records(Source, ())
Maker = Callable[..., Any]


def graph_of(make: Maker, *forms: tuple[Any, ...], shared: Sequence[torch.Tensor] = ()) -> fx.GraphModule:
    """The graph `make(graph, *nodes) -> results`; forms: (*dims after n, dtype) of each input."""
    graph = fx.Graph()
    graph.placeholder("n").meta["values"] = SAMPLES
    nodes = []
    for i, (*dims, dtype) in enumerate(forms):
        node = graph.placeholder(f"x{i}")
        node.meta["values"] = tuple(torch.zeros(n, *dims, dtype=dtype) for n in SAMPLES)
        nodes.append(node)
    for i, tensor in enumerate(shared):
        node = graph.placeholder(f"w{i}")
        node.meta["values"] = (tensor, tensor)
        nodes.append(node)
    graph.output(tuple(make(graph, *nodes)))
    return fx.GraphModule(nn.Module(), graph)


def program_of(module: fx.GraphModule, shared: Sequence[torch.Tensor] = ()) -> NativeProgram:
    made = make_program(module, shared)
    assert isinstance(made, NativeProgram), made
    return made


def results(module: fx.GraphModule, n: int) -> list[torch.Tensor]:
    """Memory for the results, with numbers in it that no test expects."""
    nodes = list(module.graph.output_node().args[0])
    return [torch.full([a * n + b for a, b in shape(x)], 77, dtype=x.meta["values"][0].dtype) for x in nodes]


def run_native(
    module: fx.GraphModule, n: int, ins: Sequence[torch.Tensor], shared: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor] | None:
    """The results of the native program; None where it refused to run."""
    made = program_of(module, shared)
    program = extension.Program(made.bases, made.instructions, NO_SOURCES, made.views, made.functions)
    outs = results(module, n)
    memory = np.array(
        [(t.data_ptr(), t.untyped_storage().nbytes()) for t in (*ins, *shared, *outs)], dtype=np.int64
    )
    return outs if ran(program, extension.Room(), n, memory) else None


def ran(program: Any, room: Any, n: int, memory: Any) -> bool:
    """Whether one program ran on this memory."""
    return extension.run_all((program,), room, np.array([n]), memory, 0, 1) == 1


def check(module: fx.GraphModule, *makers: Callable[[int], torch.Tensor], shared: Any = ()) -> None:
    """Native program and Python kernel give what the graph gives in eager, at several numbers of rows."""
    kernel = emit_kernel(module)
    for n in ROWS:
        ins = [*(make(n) for make in makers), *shared]
        by_kernel = results(module, n)
        with torch.no_grad():
            kernel(n, ins, by_kernel, Workspace())
        native = run_native(module, n, ins[: len(makers)], shared)
        assert native is not None
        for given in (native, by_kernel):
            compare_with_eager(module, n, ins, given)


def compare_with_eager(
    module: fx.GraphModule, n: int, ins: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> None:
    """Raise AssertionError where these results of a graph are not those of eager, by float64."""

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(module(n, *tensors))

    for i, judged in differences(given, run(ins), draws(run, ins)).items():
        raise AssertionError(f"result {i}: {judged.message}")


def normal(*dims: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n, *dims)


def every_float() -> torch.Tensor:
    """Numbers from all over float32: zeros, subnormals, infinities and NaN among them."""
    bits = torch.arange(-(2**31), 2**31, 30011, dtype=torch.int64).to(torch.int32)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 88.7228, -87.3366, 104.0]
    )
    around = torch.linspace(-110, 110, 40001)
    return torch.cat([bits.view(torch.float32), special, around, around / 100, around / 1e6])


# ATen call, its function in float64, and how many units in the last place may be between.
FUNCTIONS: tuple[tuple[Any, Callable[[torch.Tensor], torch.Tensor], float], ...] = (
    (aten.exp.default, torch.exp, 2.0),
    (aten.sigmoid.default, torch.sigmoid, 3.0),
    (aten.tanh.default, torch.tanh, 3.0),
    (aten.log.default, torch.log, 1.0),
    (aten.sqrt.default, torch.sqrt, 0.51),
    (aten.rsqrt.default, torch.rsqrt, 1.5),
    (aten.reciprocal.default, torch.reciprocal, 0.51),
    (aten.neg.default, torch.neg, 0.0),
    (aten.abs.default, torch.abs, 0.0),
    (aten.relu.default, torch.relu, 0.0),
    (aten.elu.default, nn.functional.elu, 4.0),
    (aten.leaky_relu.default, nn.functional.leaky_relu, 1.51),  # the slope, too, is rounded
)


@pytest.mark.parametrize(("target", "function", "ulps"), FUNCTIONS, ids=[str(x[0]) for x in FUNCTIONS])
def test_functions_over_the_range_of_float32(target: Any, function: Any, ulps: float) -> None:
    x = every_float()
    module = graph_of(lambda g, x: [add_call(g, target, (x,))], (torch.float32,))
    found = run_native(module, len(x), [x])
    assert found is not None
    exact = function(x.double())
    wanted = exact.float()
    odd = ~wanted.isfinite()
    # exp(88.8) overflows before 1 / (1 + exp) is subnormal: below the least normal number sigmoid may be 0
    normal_numbers = ~odd & (wanted.abs() >= torch.finfo(torch.float32).tiny)
    assert torch.equal(found[0][odd].isnan(), wanted[odd].isnan())
    infinite = wanted.isinf()
    assert torch.equal(found[0][infinite], wanted[infinite])
    unit = torch.nextafter(wanted.abs(), torch.tensor(math.inf)).double() - wanted.abs().double()
    error = ((found[0].double() - exact).abs() / unit)[normal_numbers]
    assert float(error.max()) <= ulps, f"{float(error.max())} at {x[normal_numbers][error.argmax()]}"
    small = ~odd & ~normal_numbers
    assert (
        float((found[0].double() - exact).abs()[small].amax() if small.any() else 0)
        <= torch.finfo(torch.float32).tiny
    )


@pytest.mark.parametrize(
    "target", (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.sigmoid_backward.default,
               aten.tanh_backward.default), ids=str,
)  # fmt: skip
def test_binary_functions(target: Any) -> None:
    form = (3, torch.float32)
    check(graph_of(lambda g, x, y: [add_call(g, target, (x, y))], form, form), normal(3), normal(3))


def test_numbers_columns_and_rows_are_spread() -> None:
    def make(g: fx.Graph, x: fx.Node, column: fx.Node, row: fx.Node) -> list[fx.Node]:
        a = add_call(g, aten.mul.Tensor, (x, 2.5))
        b = add_call(g, aten.add.Tensor, (a, column), {"alpha": 3})
        c = add_call(g, aten.div.Tensor, (b, row))
        d = add_call(g, aten.rsub.Scalar, (c, 1))
        return [d, add_call(g, aten.addcmul.default, (x, c, d), {"value": -2.0}), a]

    row = torch.rand(2500) + 1
    module = graph_of(make, (2500, torch.float32), (1, torch.float32), shared=(row,))
    check(module, normal(2500), normal(1), shared=(row,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("target", [aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.gt.Tensor])
@pytest.mark.parametrize("dims", [[], [1]])
@pytest.mark.parametrize("integers", [False, True])
def test_what_is_compared_with_a_filled_tensor_is_compared_in_torch_s_type(
    target: torch._ops.OpOverload, dtype: torch.dtype, dims: list[int], integers: bool
) -> None:
    """Integers with 2.5, float32 with a float64 of more digits."""
    number = 2.5 if dtype is torch.float32 else 0.1 if dtype is torch.float64 else 2

    def make(g: fx.Graph, x: fx.Node, i: fx.Node) -> list[fx.Node]:
        full = add_call(g, aten.full.default, (dims, number), {"dtype": dtype})
        y = i if integers else x
        return [
            add_call(g, aten._to_copy.default, (add_call(g, target, (y, full)),), {"dtype": torch.float32})
        ]

    module = graph_of(make, (1, torch.float32), (1, torch.int64))
    ins = [torch.tensor([[0.1], [2.5], [2.0], [3.0]]), torch.tensor([[0], [2], [3], [1]])]
    if isinstance(make_program(module, ()), NativeProgram):
        got, wanted = run_native(module, 4, ins), module(4, *ins)
        assert got is not None and all(map(torch.equal, got, wanted))


def gates(g: fx.Graph, x: fx.Node, c: fx.Node) -> list[fx.Node]:
    """Slices, a concatenation, and a chain that runs fused."""
    parts = [add_call(g, aten.slice.Tensor, (x, 1, 30 * i, 30 * i + 30)) for i in range(3)]
    i, f = (add_call(g, aten.sigmoid.default, (p,)) for p in parts[:2])
    u = add_call(g, aten.tanh.default, (parts[2],))
    new = add_call(g, aten.addcmul.default, (add_call(g, aten.mul.Tensor, (i, u)), f, c))
    joined = add_call(g, aten.cat.default, ([add_call(g, aten.mul.Tensor, (new, i)), f, new], 1))
    return [new, add_call(g, aten.sigmoid_backward.default, (joined, x)), joined]


def test_pieces_and_slices() -> None:
    check(graph_of(gates, (90, torch.float32), (30, torch.float32)), normal(90), normal(30))


def gates_of_lines(g: fx.Graph, x: fx.Node, c: fx.Node) -> list[fx.Node]:
    """Of a state of 40 lines: slices of the last of three dimensions."""
    i, f, u = (add_call(g, aten.slice.Tensor, (x, 2, 30 * k, 30 * k + 30)) for k in range(3))
    i, f = (add_call(g, aten.sigmoid.default, (p,)) for p in (i, f))
    new = add_call(g, aten.mul.Tensor, (i, add_call(g, aten.tanh.default, (u,))))
    return [add_call(g, aten.addcmul.default, (new, f, c))]


def test_slices_of_states_of_many_lines() -> None:
    """40 lines of an instance and its rows walk as one dimension: nothing is left to torch."""
    module = graph_of(gates_of_lines, (40, 90, torch.float32), (40, 30, torch.float32))
    assert program_of(module).calls == ()
    check(module, normal(40, 90), normal(40, 30))


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("added", (False, True))
@pytest.mark.parametrize(
    ("inner", "outer"), ((300, 90), (1, 5), (7, 1), (17, 33), (16, 16), (40, 300), (64, 2))
)
def test_products(transposed: bool, added: bool, inner: int, outer: int) -> None:
    weight = torch.randn(outer, inner) if transposed else torch.randn(inner, outer)
    bias = torch.randn(outer)

    def make(g: fx.Graph, x: fx.Node, w: fx.Node, b: fx.Node) -> list[fx.Node]:
        w = add_call(g, aten.permute.default, (w, [1, 0])) if transposed else w
        if added:
            return [add_call(g, aten.addmm.default, (b, x, w))]
        return [add_call(g, aten.mm.default, (x, w))]

    module = graph_of(make, (inner, torch.float32), shared=(weight, bias))
    for n in (*range(1, 12), 33):
        x = torch.randn(n, inner)
        found = run_native(module, n, [x], (weight, bias))
        assert found is not None
        exact = x.double() @ (weight.t() if transposed else weight).double() + (bias.double() if added else 0)
        scale = x.abs().double() @ (weight.t() if transposed else weight).abs().double() + 1
        assert float(((found[0] - exact).abs() / scale).max()) < 1e-6


@pytest.mark.parametrize("start", ("bias", "row", "slice", "column", "number"))
@pytest.mark.parametrize("transposed", (False, True))
def test_products_begin_from_what_they_are_added_to(start: str, transposed: bool) -> None:
    """Lines of neighbours are read where they are; anything else is copied to the result first."""
    weight = torch.randn(33, 20) if transposed else torch.randn(20, 33)
    shared = {"bias": (33,), "column": (1,)}.get(start)

    def make(g: fx.Graph, x: fx.Node, y: fx.Node, w: fx.Node, *b: fx.Node) -> list[fx.Node]:
        w = add_call(g, aten.permute.default, (w, [1, 0])) if transposed else w
        if start == "slice":
            b = (add_call(g, aten.slice.Tensor, (y, 1, 3, 36)),)
        if start == "number":
            b = (add_call(g, aten.full.default, ([33], 2.5)),)
        return [add_call(g, aten.addmm.default, ((*b, y)[0], x, w)), add_call(g, aten.neg.default, (y,))]

    tensors = (weight,) if shared is None else (weight, torch.randn(shared))
    wide = 40 if start == "slice" else 33
    module = graph_of(make, (20, torch.float32), (wide, torch.float32), shared=tensors)
    check(module, normal(20), normal(wide), shared=tensors)
    copies = start in ("column", "number")
    assert len(program_of(module, tensors).instructions) == 2 + copies


def test_products_of_operands_that_are_not_contiguous() -> None:
    whole = torch.randn(40, 60)
    weight = whole[3:20, 5:47]  # 17 rows, 60 apart
    module = graph_of(
        lambda g, x, w: [add_call(g, aten.mm.default, (x, w))], (17, torch.float32), shared=(weight,)
    )
    check(module, normal(17), shared=(weight,))


def test_gradients_of_parameters_sum_over_rows() -> None:
    def make(g: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        turned = add_call(g, aten.permute.default, (x, [1, 0]))
        return [
            add_call(g, aten.mm.default, (turned, y)),
            add_call(g, aten.sum.dim_IntList, (x, [0])),
            add_call(g, aten.sum.dim_IntList, (y, [1])),
        ]

    module = graph_of(make, (300, torch.float32), (20, torch.float32))
    for n in ROWS:
        x, y = torch.randn(n, 300), torch.randn(n, 20)
        found = run_native(module, n, [x, y])
        assert found is not None
        exact = (x.double().t() @ y.double(), x.double().sum(0), y.double().sum(1))
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


def test_sums_and_means_over_some_dimensions() -> None:
    def make(g: fx.Graph, x: fx.Node) -> list[fx.Node]:
        first = add_call(g, aten.slice.Tensor, (x, 2, 1, 5))
        return [
            add_call(g, aten.sum.dim_IntList, (x, [0, 1])),
            add_call(g, aten.sum.dim_IntList, (x, [1])),
            add_call(g, aten.sum.dim_IntList, (first, [1])),
            add_call(g, aten.sum.dim_IntList, (x, [2])),
            add_call(g, aten.mean.dim, (x, [1])),
            add_call(g, aten.mean.dim, (x, [-1], True)),
        ]

    module = graph_of(make, (3, 20, torch.float32))
    for n in ROWS:
        x = torch.randn(n, 3, 20)
        found = run_native(module, n, [x])
        assert found is not None
        y = x.double()
        exact = (y.sum((0, 1)), y.sum(1), y[..., 1:5].sum(1), y.sum(2), y.mean(1), y.mean(-1, keepdim=True))
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_losses() -> None:
    def make(g: fx.Graph, x: fx.Node, label: fx.Node) -> list[fx.Node]:
        logs = add_call(g, aten._log_softmax.default, (x, 1, False))
        there = add_call(g, aten.ne.Scalar, (label, -100))
        zero = add_call(g, aten.scalar_tensor.default, (0,), {"dtype": torch.int64})
        chosen = add_call(g, aten.where.self, (there, label, zero))
        column = add_call(g, aten.reshape.default, (chosen, [next(iter(g.nodes)), 1]))
        picked = add_call(g, aten.gather.default, (logs, 1, column))
        number = add_call(g, aten._to_copy.default, (there,), {"dtype": torch.float32})
        zeros = add_call(g, aten.zeros_like.default, (x,))
        spread = add_call(g, aten.scatter_add.default, (zeros, 1, column, picked))
        back = add_call(g, aten._log_softmax_backward_data.default, (spread, logs, 1, torch.float32))
        soft = add_call(g, aten._softmax.default, (x, 1, False))
        return [logs, there, column, picked, number, back, soft]

    module = graph_of(make, (9, torch.float32), (torch.int64,))
    labels = lambda n: torch.where(torch.rand(n) < 0.3, -100, torch.randint(9, (n,)))  # noqa: E731
    check(module, lambda n: torch.randn(n, 9) * 30, labels)


def test_the_gradient_of_a_table_and_its_padding() -> None:
    for padding in (-1, 2):
        module = graph_of(
            lambda g, x, i: [add_call(g, aten.embedding_dense_backward.default, (x, i, 6, padding, False))],  # noqa: B023
            (4, torch.float32), (torch.int64,),
        )  # fmt: skip
        check(module, normal(4), lambda n: torch.randint(6, (n,)))


@pytest.mark.parametrize("rows", (5003, 3))  # more than a cache keeps, and less
@pytest.mark.parametrize("first", (0, 1, 15))
def test_a_large_gradient_of_a_table_is_cleared_wherever_it_begins(rows: int, first: int) -> None:
    graph = lambda g, x, i: [add_call(g, aten.embedding_dense_backward.default, (x, i, rows, -1, False))]  # noqa: E731
    made = program_of(graph_of(graph, (211, torch.float32), (torch.int64,)))
    program = extension.Program(made.bases, made.instructions, NO_SOURCES, made.views, made.functions)
    x, index = torch.randn(3, 211), torch.tensor([1, 0, 1])
    memory = torch.full([rows * 211 + 32], 77.0)
    out = memory[first : first + rows * 211]
    given = [(t.data_ptr(), t.numel() * t.element_size()) for t in (x, index, out)]
    assert ran(program, extension.Room(), 3, np.array(given, dtype=np.int64))
    wanted = torch.zeros(rows, 211)
    wanted[:2] = torch.stack([x[1], x[0] + x[2]])
    assert torch.equal(out.view(rows, 211), wanted)
    assert torch.cat((memory[:first], memory[first + rows * 211 :])).eq(77).all()  # and nothing beside it


def test_a_result_that_is_a_constant_is_written() -> None:
    module = graph_of(
        lambda g, x: [add_call(g, aten.zeros.default, ([4, 3],)), add_call(g, aten.neg.default, (x,))],
        (3, torch.float32),
    )
    check(module, normal(3))


def test_the_gradient_of_a_table_is_written_once() -> None:
    graph = lambda g, x, i: [add_call(g, aten.embedding_dense_backward.default, (x, i, 6, -1, False))]  # noqa: E731
    made = program_of(graph_of(graph, (3, torch.float32), (torch.int64,)))
    assert len(made.instructions) == 1
    assert made.bases["kind"].tolist() == [Memory.INPUT, Memory.INPUT, Memory.OUTPUT]


def test_an_index_out_of_range_is_refused() -> None:
    table = torch.randn(5, 3)
    module = graph_of(
        lambda g, i, w: [add_call(g, aten.index_select.default, (w, 0, i))], (torch.int64,), shared=(table,)
    )
    good = torch.tensor([4, 0, 3])
    found = run_native(module, 3, [good], (table,))
    assert found is not None and torch.equal(found[0], table[good])
    for bad in (5, -1, 2**62):
        assert run_native(module, 2, [torch.tensor([0, bad])], (table,)) is None


def test_no_rows_are_left_to_python() -> None:
    module = graph_of(lambda g, x: [add_call(g, aten.tanh.default, (x,))], (3, torch.float32))
    assert run_native(module, 0, [torch.randn(0, 3)]) is None


def gradients_of_a_cell(graph: fx.Graph, gates: fx.Node, x: fx.Node) -> list[fx.Node]:
    """Of weights, of weights that a state of zeros is multiplied by, and twice of a bias."""
    turned = add_call(graph, aten.permute.default, (gates, [1, 0]))
    bias = add_call(graph, aten.sum.dim_IntList, (gates, [0]))
    column = add_call(graph, aten.reshape.default, (bias, [4, 1]))
    zeros = add_call(graph, aten.full.default, ([1, 5], 0.0), {"dtype": torch.float32})
    return [
        add_call(graph, aten.mm.default, (turned, x)),
        add_call(graph, aten.mm.default, (column, zeros)),
        bias,
        bias,
    ]


def test_gradients_are_added_to_what_is_there() -> None:
    """A program that adds gives what was there and what the other writes, also where a result comes twice."""
    module = graph_of(gradients_of_a_cell, (4, torch.float32), (3, torch.float32))
    made = make_program(module, (), adding=True)
    assert isinstance(made, NativeProgram)
    adding = extension.Program(made.bases, made.instructions, NO_SOURCES, made.views, made.functions)
    for n in ROWS:
        ins = [torch.randn(n, 4), torch.randn(n, 3)]
        fresh = run_native(module, n, ins)
        assert fresh is not None and not fresh[1].any()
        torch.testing.assert_close(
            fresh[0].double(), ins[0].double().t() @ ins[1].double(), rtol=1e-5, atol=1e-4
        )
        before = [torch.randn_like(t) for t in fresh]
        outs = [t.clone() for t in before]
        spans = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in (*ins, *outs)]
        assert ran(adding, extension.Room(), n, np.array(spans, dtype=np.int64))
        for out, old, new in zip(outs, before, fresh, strict=True):
            torch.testing.assert_close(out, old + new, rtol=2e-6, atol=2e-5)


def test_what_may_fail_adds_to_nothing() -> None:
    module = graph_of(
        lambda g, x, i: [add_call(g, aten.embedding_dense_backward.default, (x, i, 6, -1, False))],
        (3, torch.float32),
        (torch.int64,),
    )
    assert make_program(module, (), adding=True) == "a result that can't be added to"


@pytest.mark.parametrize(
    ("make", "reason"),
    (
        (lambda g, x: [add_call(g, aten._to_copy.default, (x,), {"dtype": torch.float64})], "float64"),
        (lambda g, x: [add_call(g, aten.bernoulli.default, (x,))], "aten.bernoulli.default"),
    ),
    ids=("float64", "random"),
)
def test_what_is_not_native_says_why(make: Maker, reason: str) -> None:
    made = make_program(graph_of(make, (3, torch.float32)), ())
    assert isinstance(made, str) and reason in made


def spoilt(bases: np.ndarray, code: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same program with one number wrong each."""
    found = []
    for name in ("code", "per_row", "width"):
        for value in (-7, 1 << 20, 1 << 40):
            found.append((bases, code.copy()))
            found[-1][1][name][0] = value
    for name in ("out", "a"):
        for field in ("base", "offset", "stride"):
            for value in (-7, 1 << 20, 1 << 40):
                found.append((bases, code.copy()))
                found[-1][1][name][field][0] = value
    for name in ("per_row", "row_bytes", "kind"):
        for value in (-1, 1 << 12, 1 << 40):
            found.append((bases.copy(), code))
            found[-1][0][name][0] = value
    return found


def test_a_program_that_would_leave_its_memory_is_refused() -> None:
    made = program_of(graph_of(gates, (90, torch.float32), (30, torch.float32)))
    none = NO_SOURCES
    extension.Program(made.bases, made.instructions, none, made.views, made.functions)
    refused = 0
    for bases, code in spoilt(made.bases, made.instructions):
        try:
            extension.Program(bases, code, none)
        except ValueError:
            refused += 1
    assert refused > 25
    for base in range(len(made.bases)):  # less memory than the instructions touch
        bases = made.bases.copy()
        bases["row_bytes"][base] -= 1
        with pytest.raises(ValueError):
            extension.Program(bases, made.instructions, none)
    program = extension.Program(made.bases, made.instructions, none, made.views, made.functions)
    too_little = np.array([(0, 8)] * 5, dtype=np.int64)
    assert not ran(program, extension.Room(), 3, too_little)


CONCATENATED = {
    "softmax": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "gelu": torch.nn.functional.gelu,
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (5,)),
}


@pytest.mark.parametrize("name", CONCATENATED)
def test_what_is_written_into_part_of_a_concatenation(name: str) -> None:
    """Forward: the result goes into a part. Backward of a split: the gradient does."""
    call = CONCATENATED[name]

    @fxbatch.operation
    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y.sin(), call(x), y])

    @fxbatch.operation
    def parted(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.split([2, 5, 4])
        return call(b) * a.sum() + c.sin().sum()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 11)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return joined(parted(y).sin(), y)

    check_equal(Model(), torch.randn(7, 4))
