"""What depends on shared operands alone is computed once a run: casts, sums of biases, constants."""

from __future__ import annotations

import torch
from torch import nn

from fxbatch import ir
from fxbatch.codegen.build_operation import build_operation
from fxbatch.codegen.kernel import Kernel, Workspace, emit_kernel
from fxbatch.codegen.operation_graphs import OperationGraphs
from tests.codegen.operation_cases import build, launches, rows_of, signature_of


class _Counted:
    """A kernel's preparation, counted."""

    def __init__(self, kernel: Kernel) -> None:
        self.calls, self.inner = 0, kernel.preparation
        object.__setattr__(kernel, "preparation", self)

    def forward(self, *shared: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        assert self.inner is not None
        return self.inner.forward(*shared)


def _biases() -> tuple[Kernel, list[torch.Tensor], list[torch.Tensor]]:
    """sigmoid((x W + (b + c))): the sum of biases is hoisted."""

    def cell(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ w + (b + c).exp())

    shared = [torch.randn(4, 3), torch.randn(3), torch.randn(3)]
    graphs, operands = build(cell, [torch.randn(4)], grad=False, shared=shared)
    assert isinstance(graphs, OperationGraphs), graphs
    return emit_kernel(graphs.forward), rows_of([torch.randn(4)], 5), operands


def _expected(rows: list[torch.Tensor], shared: list[torch.Tensor]) -> torch.Tensor:
    return torch.sigmoid(rows[0] @ shared[0] + (shared[1] + shared[2]).exp())


@torch.no_grad()
def test_once_a_run() -> None:
    kernel, rows, shared = _biases()
    counted, workspace = _Counted(kernel), Workspace()
    workspace.enter_run("first")
    for _ in range(3):
        torch.testing.assert_close(kernel(5, (*rows, *shared), [None], workspace)[0], _expected(rows, shared))
    assert counted.calls == 1
    assert launches(kernel) == 2  # addmm, sigmoid


@torch.no_grad()
def test_again_in_another_run() -> None:
    """`.data` is written without a trace in the version of the parameter."""
    kernel, rows, shared = _biases()
    workspace = Workspace()
    for run in ("first", "second"):
        workspace.enter_run(run)
        torch.testing.assert_close(kernel(5, (*rows, *shared), [None], workspace)[0], _expected(rows, shared))
        shared[1].data.add_(1.0)


@torch.no_grad()
def test_again_where_written_within_a_run() -> None:
    kernel, rows, shared = _biases()
    counted, workspace = _Counted(kernel), Workspace()
    workspace.enter_run("first")
    for _ in range(2):
        torch.testing.assert_close(kernel(5, (*rows, *shared), [None], workspace)[0], _expected(rows, shared))
        shared[1].add_(1.0)
    assert counted.calls == 2


@torch.no_grad()
def test_each_time_outside_of_runs() -> None:
    kernel, rows, shared = _biases()
    counted, workspace = _Counted(kernel), Workspace()
    for _ in range(2):
        kernel(5, (*rows, *shared), [None], workspace)
    assert counted.calls == 2


def test_casts_of_weights_under_autocast() -> None:
    modes = ir.Modes(autocast=(("cpu", torch.bfloat16),))
    linear = nn.Linear(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        signature, shared = signature_of(linear, [torch.randn(4)], modes=modes)
    graphs = build_operation(signature, input_needs=(True,), shared_needs=(True, True), shared=shared)
    assert isinstance(graphs, OperationGraphs), graphs
    kernel = emit_kernel(graphs.forward)
    assert (
        launches(kernel) == 4
    )  # casts of the rows and of the result, product, bias; the weight's is hoisted
    body, prepare = kernel.source.split("prepare(")
    assert body.count("= to_copy(") == body.count("= cast_into(") == prepare.count("= to_copy(") == 1


@torch.no_grad()
def test_what_a_result_is_a_view_of_is_made_with_the_rows_and_so_is_what_reads_it() -> None:
    def cell(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = b.exp()
        return a, x * (a + 1).tanh()

    x, b = torch.randn(4), torch.randn(4)
    graphs, operands = build(cell, [x], grad=False, shared=[b])
    assert isinstance(graphs, OperationGraphs), graphs
    rows, kernel = rows_of([x], 3), emit_kernel(graphs.forward)
    a, y = kernel(3, (*rows, *operands), [None, None], Workspace())
    torch.testing.assert_close(a, operands[0].exp().expand(3, 4))
    torch.testing.assert_close(y, rows[0] * (operands[0].exp() + 1).tanh())
