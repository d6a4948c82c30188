"""Kernels of torch functions: what is called with `out=` takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxbatch.codegen.kernel import _TORCH, Workspace, emit_kernel
from fxbatch.codegen.operation_graphs import add_call
from tests.codegen.test_native import graph_of
from tests.trust.programs import assert_equal, two, vectors

aten = torch.ops.aten
_X = torch.rand(3, 3)
_ROWS = _X[None]
_INTEGERS = (_X * 9).long()
_ARGUMENTS: list[tuple[Any, ...]] = [
    (_X,), (_X, _X), (_X, _X, _X), (_X, 1), (_X, 0, torch.zeros(3, dtype=torch.long)), (_X, 0, _INTEGERS % 3), ([_X],),
    (_X, 0.0, 1.0), (_X > 0, _X, _X), (_INTEGERS,), (_INTEGERS, _INTEGERS), (_ROWS, _ROWS), (_ROWS, _ROWS, _ROWS),
]  # fmt: skip


def _takes_out(function: Any, args: tuple[Any, ...]) -> bool:
    try:
        expected = function(*args)
        out = torch.empty_like(expected)
        function(*args, out=out)
        return torch.equal(function(*args, out=None), expected) and torch.equal(out, expected)
    except (TypeError, RuntimeError, AttributeError, IndexError):
        return False


def test_a_kernel_is_a_list_of_calls_that_prints() -> None:
    module = graph_of(
        lambda g, x, y: [add_call(g, aten.mul.Tensor, (add_call(g, aten.tanh.default, (x,)), y))],
        (3, torch.float64), (3, torch.float64),
    )  # fmt: skip
    kernel, out = emit_kernel(module), torch.empty(2, 3, dtype=torch.float64)
    assert kernel.source.splitlines()[1:3] == [
        "    tanh_default = tanh(x0)", "    mul_tensor = mul(tanh_default, x1, out=o0)",
    ]  # fmt: skip
    x, y = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    (made,) = kernel(2, (x, y), (out,), Workspace())
    assert made is out and torch.equal(out, x.tanh() * y)
    (made,) = kernel(2, (x, y), (None,), Workspace())
    assert torch.equal(made, out)


@pytest.mark.parametrize("name", sorted(_TORCH))
def test_torch_functions_take_out(name: str) -> None:
    assert any(_takes_out(getattr(torch, name), args) for args in _ARGUMENTS)


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite", "signbit", "logical_not"])
def test_functions_of_one_value(name: str) -> None:
    assert_equal(lambda self, x: getattr(torch, name)(self.a(x)), vectors(4, 4, 4), two(), gradients=False)
