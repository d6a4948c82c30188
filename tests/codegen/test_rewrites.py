"""The rewriting passes, text before and text after: graphs are written as nested calls, n rows symbolic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxbatch.codegen.operation_graphs import add_call
from fxbatch.codegen.rewrites import apply_rewrite
from fxbatch.codegen.simplify import clean
from fxbatch.torch_private import FakeTensorMode

aten = torch.ops.aten
SIZES = (5, 7)
Build = Callable[..., Any]
Rewrite = str | Callable[[fx.Graph], Any]  # a row of the table, or `clean`


def apply(graph: fx.Graph, rewrite: Rewrite) -> Any:
    return rewrite(graph) if callable(rewrite) else apply_rewrite(graph, rewrite)


class Draft:
    """A graph under construction: `d.x(2, 3)` is a placeholder `[n, 2, 3]`, `d.w(3)` one without rows."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        self.n = self.graph.placeholder("n")
        self.n.meta["values"] = SIZES

    def _place(self, name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["values"] = tuple(torch.empty(shape, dtype=dtype) for shape in shapes)
        return node

    def x(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self._place(name, [(n, *shape) for n in SIZES], dtype)

    def w(self, name: str, *shape: int) -> fx.Node:
        return self._place(name, [shape, shape], torch.float32)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(self.graph, target, args, kwargs)

    def slice(self, x: fx.Node, start: int, end: int) -> fx.Node:
        return self.call(aten.slice.Tensor, x, 1, start, end)


def text(graph: fx.Graph) -> list[str]:
    """The results as nested calls: `add(mm(x, w), b)`."""
    return [_text(x) for x in graph.output_node().args[0]]  # type: ignore[union-attr]  # a tuple of nodes


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if not isinstance(value, fx.Node) or value.op == "placeholder":
        return str(value)
    if value.target is operator.getitem:
        return f"{_text(value.args[0])}[{value.args[1]}]"
    name = value.target.__name__.split(".")[0]  # type: ignore[union-attr]  # all targets are functions
    if name == "slice":
        return f"{_text(value.args[0])}[{value.args[2]}:{value.args[3]}]"
    return f"{name}({', '.join(map(_text, value.args))})"


def product_and_bias(d: Draft) -> Any:
    return d.call(aten.add.Tensor, d.call(aten.mm.default, d.x("x", 4), d.w("w", 4, 3)), d.w("b", 3))


def product_of_matrices_and_bias(d: Draft) -> Any:
    product = d.call(aten.mm.default, d.call(aten.reshape.default, d.x("x", 2, 4), [-1, 4]), d.w("w", 4, 3))
    return d.call(aten.add.Tensor, d.call(aten.reshape.default, product, [d.n, 2, 3]), d.w("b", 3))


def product_used_twice(d: Draft) -> Any:
    product = d.call(aten.mm.default, d.x("x", 4), d.w("w", 4, 3))
    return d.call(aten.add.Tensor, product, d.w("b", 3)), product


def bias_of_rows(d: Draft) -> Any:
    return d.call(aten.add.Tensor, d.call(aten.mm.default, d.x("x", 4), d.w("w", 4, 3)), d.x("b", 3))


def added_product(d: Draft) -> Any:
    x, a, b = d.x("x", 3), d.x("a", 3), d.x("b", 3)
    return d.call(aten.add.Tensor, x, d.call(aten.mul.Tensor, a, b))


def added_broadcast(d: Draft) -> Any:
    x, a, b = d.x("x", 3), d.w("a", 3), d.w("b", 3)
    return d.call(aten.add.Tensor, x, d.call(aten.mul.Tensor, a, b))


def two_linear(d: Draft) -> Any:
    left = d.call(aten.addmm.default, d.w("b", 3), d.x("x", 4), d.w("w", 4, 3))
    right = d.call(aten.addmm.default, d.w("c", 3), d.x("h", 5), d.w("u", 5, 3))
    return d.call(aten.add.Tensor, left, right)


def gates(d: Draft) -> Any:
    z = d.x("z", 9)
    a, b = (d.call(aten.sigmoid.default, d.slice(z, i, i + 3)) for i in (0, 3))
    return a, b, d.call(aten.tanh.default, d.slice(z, 6, 9))


def gates_apart(d: Draft) -> Any:
    z = d.x("z", 9)
    return tuple(d.call(aten.sigmoid.default, d.slice(z, i, i + 3)) for i in (0, 6))


def gates_of_two_products(d: Draft) -> Any:
    z, y = d.x("z", 6), d.x("y", 6)
    sums = [d.call(aten.add.Tensor, d.slice(z, i, i + 3), d.slice(y, i, i + 3)) for i in (0, 3)]
    return tuple(d.call(aten.sigmoid.default, x) for x in sums)


def crossed_slices(d: Draft) -> Any:
    z, y = d.x("z", 6), d.x("y", 6)
    return tuple(d.call(aten.add.Tensor, d.slice(z, i, i + 3), d.slice(y, 3 - i, 6 - i)) for i in (0, 3))


def gradients_of_gates(d: Draft) -> Any:
    s, a, b = d.x("s", 6), d.call(aten.exp.default, d.x("a", 3)), d.call(aten.exp.default, d.x("b", 3))
    back = aten.sigmoid_backward.default
    pieces = [d.call(back, a, d.slice(s, 0, 3)), d.call(back, b, d.slice(s, 3, 6))]
    return d.call(aten.cat.default, pieces, 1)


def gradients_of_slices(d: Draft) -> Any:
    g, h = d.x("g", 3), d.x("h", 3)
    wide = [d.n, 6]
    left = d.call(aten.slice_backward.default, g, wide, 1, 0, 3, 1)
    right = d.call(aten.slice_backward.default, h, wide, 1, 3, 6, 1)
    return d.call(aten.add.Tensor, left, right)


def gradient_of_one_slice(d: Draft) -> Any:
    return d.call(aten.slice_backward.default, d.x("g", 3), [d.n, 9], 1, 3, 6, 1)


def overlapping_slices(d: Draft) -> Any:
    g, h = d.x("g", 3), d.x("h", 3)
    left = d.call(aten.slice_backward.default, g, [d.n, 4], 1, 0, 3, 1)
    right = d.call(aten.slice_backward.default, h, [d.n, 4], 1, 1, 4, 1)
    return d.call(aten.add.Tensor, left, right)


def slices_of_one_row(d: Draft) -> Any:
    left = d.call(aten.cat.default, [d.w("g", 1, 3), d.w("h", 1, 3)], 1)
    right = d.call(aten.cat.default, [d.x("i", 3), d.x("j", 3)], 1)
    return d.call(aten.add.Tensor, left, right)


def cast_and_back(d: Draft) -> Any:
    wide = d.call(aten._to_copy.default, d.x("x", 3, dtype=torch.bfloat16), dtype=torch.float32)
    return d.call(aten._to_copy.default, wide, dtype=torch.bfloat16)


def cast_away_and_back(d: Draft) -> Any:
    narrow = d.call(aten._to_copy.default, d.x("x", 3), dtype=torch.bfloat16)
    return d.call(aten._to_copy.default, narrow, dtype=torch.float32)


def views_in_circles(d: Draft) -> Any:
    x = d.x("x", 3)
    return d.call(aten.squeeze.dim, d.call(aten.unsqueeze.default, x, 1), 1), d.call(
        aten.t.default, d.call(aten.t.default, x)
    )


def neutral_numbers(d: Draft) -> Any:
    x = d.x("x", 3)
    zeros = d.call(aten.zeros.default, [d.n, 3])
    return d.call(aten.add.Tensor, d.call(aten.mul.Tensor, x, 1), zeros)


def added_derivative(d: Draft) -> Any:
    x, a, b, y = (d.x(name, 3) for name in "xaby")
    return d.call(aten.add.Tensor, x, d.call(aten.tanh_backward.default, d.call(aten.mul.Tensor, a, b), y))


def derivative_of_a_factor_without_rows(d: Draft) -> Any:
    x, a, y, b = d.x("x", 3), d.x("a", 3), d.x("y", 3), d.w("b", 3)
    return d.call(aten.add.Tensor, x, d.call(aten.tanh_backward.default, d.call(aten.mul.Tensor, a, b), y))


def derivative_read_twice(d: Draft) -> Any:
    x, a, b, y = (d.x(name, 3) for name in "xaby")
    derivative = d.call(aten.tanh_backward.default, d.call(aten.mul.Tensor, a, b), y)
    return d.call(aten.add.Tensor, x, derivative), derivative


def look_up(d: Draft) -> Any:
    return d.call(aten.embedding.default, d.w("table", 9, 3), d.x("i", dtype=torch.int64))


def look_up_many(d: Draft) -> Any:
    return d.call(aten.embedding.default, d.w("table", 9, 3), d.x("i", 2, 4, dtype=torch.int64), 5)


def rows_and_shared_matrix(d: Draft) -> Any:
    matrix = d.call(aten.expand.default, d.w("w", 4, 3), [d.n, 4, 3])
    return d.call(aten.bmm.default, d.x("x", 2, 4), matrix)


def shared_matrix_and_vector(d: Draft) -> Any:
    wide = d.call(aten.expand.default, d.call(aten.reshape.default, d.w("w", 3, 4), [1, 3, 4]), [d.n, 3, 4])
    return d.call(aten.bmm.default, wide, d.x("x", 4, 1))


def outer_products_added(d: Draft) -> Any:
    outer = d.call(aten.bmm.default, d.x("g", 3, 1), d.x("x", 1, 4))
    return d.call(aten.sum.dim_IntList, d.call(aten.reshape.default, outer, [d.n, 1, 3, 4]), [0]), d.call(
        aten.bmm.default, d.x("a", 3, 1), d.x("b", 1, 4)
    )


def dots(d: Draft) -> Any:
    return d.call(aten.bmm.default, d.x("x", 1, 4), d.x("y", 4, 1))


def matrix_of_each_row(d: Draft) -> Any:
    return d.call(aten.bmm.default, d.x("x", 2, 4), d.x("y", 4, 3))


def rows_last(d: Draft) -> Any:
    product = d.call(aten.mm.default, d.w("w", 3, 4), d.call(aten.permute.default, d.x("x", 4), [1, 0]))
    return d.call(aten.permute.default, d.call(aten.tanh.default, product), [1, 0])


def rows_last_by_themselves(d: Draft) -> Any:
    turned = d.call(aten.permute.default, d.x("x", 3), [1, 0])
    return d.call(aten.mul.Tensor, turned, d.w("w", 3, 1))


CASES: list[tuple[Rewrite, Build, list[str], list[str]]] = [
    ("linear", product_and_bias, ["add(mm(x, w), b)"], ["addmm(b, x, w)"]),
    (
        "linear",
        product_of_matrices_and_bias,
        ["add(reshape(mm(reshape(x, [-1, 4]), w), [n, 2, 3]), b)"],
        ["reshape(addmm(b, reshape(x, [-1, 4]), w), [n, 2, 3])"],
    ),
    ("products", added_product, ["add(x, mul(a, b))"], ["addcmul(x, a, b)"]),
    (
        "products",
        two_linear,
        ["add(addmm(b, x, w), addmm(c, h, u))"],
        ["addmm(addmm(add(b, c), x, w), h, u)"],
    ),
    (
        "products",
        added_derivative,
        ["add(x, tanh_backward(mul(a, b), y))"],
        ["addcmul(x, tanh_backward(a, y), b)"],
    ),
    ("lookups", look_up, ["embedding(table, i)"], ["index_select(table, 0, i)"]),
    (
        "lookups",
        look_up_many,
        ["embedding(table, i, 5)"],
        ["reshape(index_select(table, 0, reshape(i, [mul(n, 8)])), [n, 2, 4, 3])"],
    ),
    (
        "batched_products",
        rows_and_shared_matrix,
        ["bmm(x, expand(w, [n, 4, 3]))"],
        ["reshape(mm(reshape(x, [mul(n, 2), 4]), w), [n, 2, 3])"],
    ),
    (
        "batched_products",
        shared_matrix_and_vector,
        ["bmm(expand(reshape(w, [1, 3, 4]), [n, 3, 4]), x)"],
        [
            "reshape(mm(reshape(x, [n, 4]), permute(reshape(reshape(w, [1, 3, 4]), [3, 4]), [1, 0])), [n, 3, 1])"
        ],
    ),
    (
        "batched_products",
        outer_products_added,
        ["sum(reshape(bmm(g, x), [n, 1, 3, 4]), [0])", "bmm(a, b)"],
        ["reshape(mm(permute(reshape(g, [n, 3]), [1, 0]), reshape(x, [n, 4])), [1, 3, 4])", "mul(a, b)"],
    ),
    (
        "batched_products",
        dots,
        ["bmm(x, y)"],
        ["reshape(sum(mul(reshape(x, [n, 4]), reshape(y, [n, 4])), [1]), [n, 1, 1])"],
    ),
    (
        "batched_products",
        rows_last,
        ["permute(tanh(mm(w, permute(x, [1, 0]))), [1, 0])"],
        ["permute(permute(tanh(mm(x, permute(w, [1, 0]))), [1, 0]), [1, 0])"],
    ),
    (
        "gates",
        gates,
        ["sigmoid(z[0:3])", "sigmoid(z[3:6])", "tanh(z[6:9])"],
        ["sigmoid(z[0:6])[0:3]", "sigmoid(z[0:6])[3:6]", "tanh(z[6:9])"],
    ),
    (
        "gates",
        gates_of_two_products,
        ["sigmoid(add(z[0:3], y[0:3]))", "sigmoid(add(z[3:6], y[3:6]))"],
        ["sigmoid(add(z, y))[0:3]", "sigmoid(add(z, y))[3:6]"],
    ),
    (
        "gates",
        gradients_of_gates,
        ["cat([sigmoid_backward(exp(a), s[0:3]), sigmoid_backward(exp(b), s[3:6])], 1)"],
        ["sigmoid_backward(cat([exp(a), exp(b)], 1), s)"],
    ),
    (
        "slices",
        gradients_of_slices,
        ["add(slice_backward(g, [n, 6], 1, 0, 3, 1), slice_backward(h, [n, 6], 1, 3, 6, 1))"],
        ["cat([g, h], 1)"],
    ),
    (
        "slices",
        gradient_of_one_slice,
        ["slice_backward(g, [n, 9], 1, 3, 6, 1)"],
        ["cat([zeros([n, 3]), g, zeros([n, 3])], 1)"],
    ),
    (clean, cast_and_back, ["_to_copy(_to_copy(x))"], ["x"]),
    (clean, views_in_circles, ["squeeze(unsqueeze(x, 1), 1)", "t(t(x))"], ["x", "x"]),
    (clean, neutral_numbers, ["add(mul(x, 1), zeros([n, 3]))"], ["x"]),
]
UNCHANGED: list[tuple[Rewrite, Build]] = [
    ("linear", product_used_twice),
    ("linear", bias_of_rows),
    ("products", added_broadcast),
    ("products", derivative_of_a_factor_without_rows),
    ("products", derivative_read_twice),
    ("lookups", added_product),
    ("batched_products", matrix_of_each_row),
    ("batched_products", rows_last_by_themselves),
    ("gates", gates_apart),
    ("gates", crossed_slices),
    ("slices", slices_of_one_row),
    (clean, cast_away_and_back),
    (clean, product_and_bias),
]


def graph_of(build: Build) -> fx.Graph:
    draft = Draft()
    made = build(draft)
    draft.graph.output(made if isinstance(made, tuple) else (made,))
    return draft.graph


@pytest.mark.parametrize(
    ("rewrite", "build", "before", "after"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_before_and_after(rewrite: Rewrite, build: Build, before: list[str], after: list[str]) -> None:
    graph = graph_of(build)
    assert text(graph) == before
    assert apply(graph, rewrite)
    graph.lint()
    assert text(graph) == after


@pytest.mark.parametrize(("rewrite", "build"), UNCHANGED, ids=lambda x: getattr(x, "__name__", ""))
def test_nothing_to_do(rewrite: Rewrite, build: Build) -> None:
    graph = graph_of(build)
    before = text(graph)
    changed = apply(graph, rewrite)
    assert changed is graph or not changed
    assert text(graph) == before


def test_overlapping_gradients_are_added() -> None:
    graph = graph_of(overlapping_slices)
    apply_rewrite(graph, "slices")
    assert text(graph) == ["add(cat([g, zeros([n, 1])], 1), cat([zeros([n, 1]), h], 1))"]
