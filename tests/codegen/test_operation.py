"""Every operation here, batched, against itself one row at a time: values and gradients, 0, 1, 2, 9 rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbatch import ir
from fxbatch.codegen.build_operation import UnbatchedKernel, build_operation
from fxbatch.codegen.kernel import Workspace, emit_kernel
from fxbatch.codegen.operation_graphs import OperationGraphs, Unbatched
from tests.codegen.operation_cases import (
    assert_equals_rows,
    build,
    close,
    launches,
    rows_of,
    run_kernels,
    signature_of,
)

r = torch.randn
IDX = torch.tensor


class Tree(nn.Module):
    """The binary Tree-LSTM cell, as one product."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, 5 * width)

    def forward(self, hl: Any, cl: Any, hr: Any, cr: Any) -> Any:
        i, fl, fr, o, u = self.linear(torch.cat([hl, hr])).chunk(5)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


class TwoProducts(Tree):
    """The same with a stack, slices in place of chunks and a lambda for the gates."""

    def forward(self, hl: Any, cl: Any, hr: Any, cr: Any) -> Any:
        z = F.linear(torch.stack([hl, hr]).flatten(), self.linear.weight) + self.linear.bias
        w = cl.shape[0]
        gate = lambda k: torch.sigmoid(z[k * w : (k + 1) * w])  # noqa: E731
        c = gate(0) * torch.tanh(z[4 * w :]) + gate(1) * cl + gate(2) * cr
        return gate(3) * torch.tanh(c), c


class Cell(nn.Module):
    def __init__(self, cell: nn.Module, tuple_state: bool) -> None:
        super().__init__()
        self.cell, self.tuple_state = cell, tuple_state

    def forward(self, x: Any, *state: Any) -> Any:
        return self.cell(x, state if self.tuple_state else state[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.heads(x, x, x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(r(7, 4))

    def forward(self, x: Any) -> Any:
        return (x @ self.weight.T) @ self.weight


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            a = self.linear(x)
        return a * x + self.linear(x).detach() + self.linear(x)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x: Any) -> Any:
        return x * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4)


def _sub_lstm(x: Any, h: Any, w: Any, b: Any) -> Any:
    z = torch.cat([x, h]) @ w + b
    i, o, f, g = z.split(3)
    return (i.sigmoid() - o.sigmoid()) * f.sigmoid() + g.relu()


C = lambda *s: torch.randn(s, dtype=torch.complex128)  # noqa: E731
W = lambda *s: nn.Parameter(r(*s, dtype=torch.float64))  # noqa: E731
d = torch.float64


def D(*s: int) -> torch.Tensor:
    return torch.randn(s, dtype=torch.float64)


MODULES: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "linear": (nn.Linear(4, 6), [r(4)]),
    "linear rows": (nn.Linear(4, 6), [r(3, 4)]),
    "linear no bias": (nn.Linear(4, 6, bias=False), [r(2, 3, 4)]),
    "embedding": (nn.Embedding(10, 4), [IDX(3)]),
    "embedding padding": (nn.Embedding(10, 4, padding_idx=3), [IDX(3)]),
    "embedding sequence": (nn.Embedding(10, 4, padding_idx=1), [IDX([3, 1, 3])]),
    "embedding bag": (nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)), [IDX(3)]),
    "lstm cell": (Cell(nn.LSTMCell(4, 6), True), [r(4), r(6), r(6)]),
    "lstm cell no state": (nn.LSTMCell(4, 6), [r(4)]),
    "gru cell": (Cell(nn.GRUCell(4, 6), False), [r(4), r(6)]),
    "rnn cell": (Cell(nn.RNNCell(4, 6), False), [r(4), r(6)]),
    "tree": (Tree(), [r(6), r(6), r(6), r(6)]),
    "tree, other code": (TwoProducts(), [r(6), r(6), r(6), r(6)]),
    "layer norm": (nn.LayerNorm(4), [r(4)]),
    "layer norm rows": (nn.LayerNorm(4), [r(3, 4)]),
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1)), [r(4)]),
    "silu": (nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3), nn.LogSoftmax(-1)), [r(4)]),
    "relu": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.ELU()), [r(5, 4)]),
    "dropout eval": (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).eval(), [r(4)]),
    "attention": (Attention(), [r(5, 8)]),
    "attention eval": (Attention().eval(), [r(5, 8)]),
    "transformer layer": (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [r(5, 8)]),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), [r(4, 10)]),
    "conv2d": (nn.Conv2d(2, 3, 3), [r(2, 6, 6)]),
    "group norm": (nn.GroupNorm(2, 4), [r(1, 4, 5)]),
    "tied": (Tied(), [r(4)]),
    "no grad inside": (NoGrad(), [r(4)]),
    "constants": (Constants(), [r(4)]),
    "float64": (nn.Linear(4, 6).double(), [D(4)]),
    "bfloat16": (nn.Linear(4, 6).bfloat16(), [r(4).bfloat16()]),
    "batch norm eval": (nn.BatchNorm1d(4).eval(), [r(3, 4)]),
    "prelu": (nn.PReLU(4), [r(1, 4)]),
}
FUNCTIONS: dict[str, tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = {
    "parameter product": (lambda x, w: x @ w, [D(4)], [W(4, 3)]),
    "parameter from the left": (lambda x, w: w @ x, [D(4)], [W(3, 4)]),
    "sub lstm": (_sub_lstm, [D(3), D(3)], [W(6, 12), W(12)]),
    "quadratic": (lambda x, w: x @ w @ x, [D(4)], [W(4, 4)]),
    "einsum": (lambda x, y, w: torch.einsum("i,ijk,j->k", x, w, y), [D(4), D(3)], [W(4, 3, 5)]),
    "bmm": (torch.bmm, [D(2, 3, 4), D(2, 4, 5)], []),
    "matmul": (torch.matmul, [D(3, 4), D(4, 5)], []),
    "dot": (torch.dot, [D(4), D(4)], []),
    "outer": (torch.outer, [D(4), D(3)], []),
    "attention weights": (lambda q, k, v: (q @ k.T / 2).softmax(-1) @ v, [D(3, 4), D(5, 4), D(5, 2)], []),
    "sdpa": (F.scaled_dot_product_attention, [D(3, 4), D(5, 4), D(5, 4)], []),
    "cat": (lambda x, y: torch.cat([x, y, x]), [D(3), D(3)], []),
    "cat dim 1": (lambda x, y: torch.cat([x, y], 1), [D(3, 2), D(3, 4)], []),
    "stack": (lambda x, y: torch.stack([x, y]).sum(0), [D(3), D(3)], []),
    "group used alone too": (lambda x, y: torch.cat([x, y]).tanh().sum() * x, [D(3), D(3)], []),
    "chunk": (lambda x: x.chunk(3)[1] * x.split([1, 2, 3])[2][:2], [D(6)], []),
    "slices": (lambda x: x[:2] * x[2:4] + x[4:], [D(6)], []),
    "overlapping slices": (lambda x: x[:3].tanh() * x[1:4].tanh() + x[3:].tanh(), [D(6)], []),
    "strided slice": (lambda x: x[::2] * 2, [D(6)], []),
    "select": (lambda x: x[0] * x[1] + x[-1], [D(3, 4)], []),
    "unbind": (lambda x: x.unbind()[1] * 2, [D(3, 4)], []),
    "index by input": (lambda x, i: x.index_select(0, i), [D(5, 2), IDX([1, 0])], []),
    "gather": (lambda x, i: x.gather(0, i), [D(5), IDX([1, 0])], []),
    "scatter": (lambda x, i: torch.zeros(3, dtype=d).scatter_add(0, i, x), [D(2), IDX([1, 0])], []),
    "parameter row by input": (lambda i, w: w[i], [IDX(1)], [W(3, 4)]),
    "where": (lambda x, y: torch.where(x > 0, x, y.exp()), [D(4), D(4)], []),
    "masked fill": (lambda x, m: x.masked_fill(m, 0.5), [D(3), IDX([True, False, True])], []),
    "argmax": (lambda x: x.argmax(), [D(4)], []),
    "topk": (lambda x: x.topk(2), [D(4)], []),
    "max": (lambda x: x.max(0), [D(4, 3)], []),
    "sort": (lambda x: x.sort(), [D(4)], []),
    "several outputs": (lambda x: (x.sin(), x.argmax(), x.sum()), [D(4)], []),
    "scalar": (lambda x, s: x * s + 1, [D(4), D()], []),
    "scalar of another dtype": (lambda x, s: x * s, [r(4), D()], []),
    "scalars only": (lambda s, t: s * t.exp(), [D(), D()], []),
    "integers": (lambda i: i * 2 + 1, [IDX([1, 2])], []),
    "mixed dtypes": (lambda x, i: x * i, [D(2), IDX([1, 2])], []),
    "complex": (lambda x: (x * x.conj()).real + x.abs(), [torch.randn(3, dtype=torch.complex128)], []),
    "complex parameter": (lambda x, w: x @ w, [C(3)], [C(3, 2)]),
    "zero size": (lambda x: torch.cat([x, x]) * 2, [D(0, 3)], []),
    "zero size sum": (lambda x: x.sum(0), [D(0, 3)], []),
    "identity": (lambda x: x, [D(3)], []),
    "the same twice": (lambda x: (y := x.exp(), y), [D(3)], []),
    "input and result": (lambda x: (x, x * 2, x.view(1, 3)), [D(3)], []),
    "constant result": (lambda x: torch.ones(3, dtype=d), [D(3)], []),
    "no inputs": (lambda w: w * 2, [], [W(3)]),
    "in place": (lambda x: x.clone().mul_(2).add_(1), [D(3)], []),
    "write rows": (lambda x, y: torch.zeros(4, dtype=d).index_copy(0, IDX([1, 2]), x * y), [D(2)] * 2, []),
    "norm": (lambda x: x / x.norm(), [D(4)], []),
    "cumsum": (lambda x: x.cumsum(0), [D(4)], []),
    "logsumexp": (lambda x: x.logsumexp(0), [D(4)], []),
    "cross entropy": (lambda x, y: F.cross_entropy(x, y), [D(4), IDX(2)], []),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, 0), [D(4), D(4)], []),
    "transpose": (lambda x: x.t() @ x, [D(3, 2)], []),
    "permute": (lambda x: x.permute(2, 0, 1).reshape(4, 6).tanh(), [D(2, 3, 4)], []),
    "expand": (lambda x: x.expand(3, 4) * 2, [D(4)], []),
    "repeat": (lambda x: x.repeat(2), [D(4)], []),
    "flip and roll": (lambda x: x.flip(0) + x.roll(1), [D(4)], []),
    "sizes 5 and 7": (lambda x, y, w: (x[:, None] * y[None]) @ w, [D(5), D(7)], [W(7, 5)]),
    "scale and mean": (lambda x: (x - x.mean()) / x.std(), [D(5)], []),
    "mean over parameters": (lambda x, w: (x * w.mean(0)).mean(), [D(5)], [W(7, 5)]),
    "parameters alone": (lambda x, w, v: x @ (w @ v), [D(3)], [W(3, 4), W(4, 2)]),
    "ensemble": (lambda x, w: torch.einsum("ei,eij->ej", x, w), [D(2, 3)], [W(2, 3, 4)]),
    "pad": (lambda x: F.pad(x, (1, 2)), [D(4)], []),
    "unused input": (lambda x, y: x * 2, [D(4), D(4)], []),
}  # fmt: skip
CASES = {
    **{name: (m, x, []) for name, (m, x) in MODULES.items()},
    **FUNCTIONS,
}


@pytest.mark.parametrize("name", list(CASES))
def test_batched_equals_rows(name: str) -> None:
    assert_equals_rows(*CASES[name])


@pytest.mark.parametrize("name", list(CASES))
def test_inference_saves_nothing(name: str) -> None:
    target, inputs, shared = CASES[name]
    graphs, operands = build(target, inputs, grad=False, **({"shared": shared} if shared else {}))
    assert isinstance(graphs, OperationGraphs), graphs
    assert graphs.backward is None and graphs.parameters is None and not graphs.saved_types
    rows = rows_of(inputs, 4)
    got = run_kernels(graphs, rows, operands, [], 4, given=True, workspace=Workspace())
    for i, column in enumerate(got[0]):
        for row in range(4):
            with torch.no_grad():
                close(column[row], graphs.signature.run([x[row] for x in rows], operands)[i])


def test_unbatched_has_a_reason() -> None:
    def data_dependent(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    graphs, _ = build(data_dependent, [r(3)])
    assert isinstance(graphs, Unbatched) and graphs.reason


def test_writing_to_an_input_is_not_batched() -> None:
    graphs, _ = build(lambda x: x.mul_(2), [r(3)])
    assert isinstance(graphs, Unbatched) and "writes to" in graphs.reason


def test_custom_gradient_is_noticed() -> None:
    """The graph knows the values only; the comparison with eager sees that the gradient differs."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    graphs, _ = build(Straight.apply, [r(3)])
    assert isinstance(graphs, Unbatched), "a wrong gradient went unnoticed"


def test_tree_cell_is_few_kernels() -> None:
    for cell in (Tree(), TwoProducts()):
        graphs, _ = build(cell, [r(6)] * 4)
        assert isinstance(graphs, OperationGraphs)
        assert graphs.layout == ir.Layout(((0, 2), (1,), (3,)))
        assert launches(emit_kernel(graphs.forward)) == 8
        assert graphs.backward is not None and launches(emit_kernel(graphs.backward)) <= 15
        assert graphs.parameters is not None and launches(emit_kernel(graphs.parameters)) == 2


def test_rows_are_looked_up_into_given_memory_and_the_table_s_gradient_is_not_copied() -> None:
    graphs, shared = build(nn.Embedding(10, 4), [IDX(3)])
    assert isinstance(graphs, OperationGraphs) and graphs.parameters is not None
    kernel = emit_kernel(graphs.forward)
    assert launches(kernel) == 1 and "index_select(weights_1, 0, groups_1, out=o0)" in kernel.source
    rows, out = torch.tensor([3, 9, 3]), torch.empty(3, 4)
    with torch.no_grad():
        (found,) = kernel(3, (rows, *shared), (out,), Workspace())
        assert found is out and torch.equal(out, shared[0][rows])
        given = torch.full((10, 4), 7.0)
        parameters, grads = emit_kernel(graphs.parameters), torch.ones(3, 4)
        (made,) = parameters(3, (rows, grads, *shared), (None,), Workspace())
        (written,) = parameters(3, (rows, grads, *shared), (given,), Workspace())
    assert written is given and torch.equal(made, given)
    assert made[:, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 1]


def test_sparse_embedding_keeps_its_sparse_gradient() -> None:
    graphs, shared = build(nn.Embedding(10, 4, sparse=True, padding_idx=2), [IDX(3)])
    assert isinstance(graphs, OperationGraphs), graphs
    rows, grads = [IDX([2, 3, 3])], [torch.ones(3, 4)]
    _, _, (table,) = run_kernels(graphs, rows, shared, grads, 3, given=True, workspace=Workspace())
    assert table is not None and table.is_sparse
    expected = torch.zeros(10, 4)
    expected[3] = 2
    torch.testing.assert_close(table.to_dense(), expected)


def test_random_numbers_differ_between_rows_and_runs_and_backward_uses_them() -> None:
    graphs, shared = build(nn.Dropout(0.5), [r(1000)])
    assert isinstance(graphs, OperationGraphs) and graphs.random
    rows, grads = [torch.ones(2, 1000)], [torch.ones(2, 1000)]
    runs = [run_kernels(graphs, rows, shared, grads, 2, given=True, workspace=Workspace()) for _ in range(2)]
    for (out,), (grad,), _ in runs:
        assert grad is not None and torch.equal(out, grad)
        assert not torch.equal(out[0], out[1])
        assert 0.4 < (out == 0).float().mean() < 0.6
    assert not torch.equal(runs[0][0][0], runs[1][0][0])


def test_builds_under_no_grad_and_inference_mode() -> None:
    signature, shared = signature_of(Tied(), [r(4)])
    with torch.inference_mode():
        graphs = build_operation(signature, input_needs=[True], shared_needs=[True], shared=shared)
    assert isinstance(graphs, OperationGraphs) and graphs.grad_shared == (0,) and graphs.checked


def test_autocast_is_part_of_the_operation() -> None:
    linear = nn.Linear(4, 3)
    modes = ir.Modes(training=True, autocast=(("cpu", torch.bfloat16),))
    with torch.autocast("cpu", torch.bfloat16):
        signature, shared = signature_of(linear, [r(4)], modes=modes)
    needs = {"input_needs": [True], "shared_needs": [True, True]}
    graphs = build_operation(signature, **needs, shared=shared)
    assert isinstance(graphs, OperationGraphs), graphs
    assert signature.outputs[0].dtype is torch.bfloat16
    assert graphs.forward(2, r(2, 4), *shared)[0].dtype is torch.bfloat16


def test_a_norm_under_autocast_keeps_statistics_of_the_type_of_its_weights() -> None:
    """As its kernel on the CPU does; fake tensors say the type of x."""
    modes = ir.Modes(training=True, autocast=(("cpu", torch.bfloat16),))
    with torch.autocast("cpu", torch.bfloat16):
        signature, shared = signature_of(nn.LayerNorm(4), [r(3, 4).bfloat16()], modes=modes)
    graphs = build_operation(signature, input_needs=[True], shared_needs=[True, True], shared=shared)
    assert isinstance(graphs, OperationGraphs), graphs


def test_fakes_that_say_another_type_of_what_is_kept_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxbatch.codegen.body._with_statistics", lambda normed, args: normed)
    modes, norm = ir.Modes(training=True, autocast=(("cpu", torch.bfloat16),)), nn.LayerNorm(4)
    with torch.autocast("cpu", torch.bfloat16):
        signature, shared = signature_of(norm, [r(4).bfloat16()], modes=modes)
    graphs = build_operation(signature, input_needs=[True], shared_needs=[True, True], shared=shared)
    assert isinstance(graphs, Unbatched) and "it keeps torch.float32[1]" in graphs.reason


def test_frozen_parameters_cost_nothing() -> None:
    signature, shared = signature_of(Tree(), [r(6)] * 4)
    graphs = build_operation(signature, input_needs=[True] * 4, shared_needs=[False, False], shared=shared)
    assert isinstance(graphs, OperationGraphs)
    assert graphs.parameters is None and not graphs.extra_types and graphs.grad_shared == ()


def test_call_by_call_equals_rows_and_spares_its_inputs() -> None:
    def halve_if_positive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        return y / 2 if y.sum().item() > 0 else y.mul_(3)

    signature, shared = signature_of(halve_if_positive, [r(3)], shared=[nn.Parameter(r(3))])
    kernel = UnbatchedKernel(signature)
    rows, grad = r(6, 3), r(6, 3)
    needs: dict[str, Any] = {"input_needs": (True,), "shared_needs": (True,)}
    tape = kernel.taped([rows], shared, **needs, n=6, outs=[out := torch.empty(6, 3)])
    assert tape is not None
    (given,), (weight,) = kernel.backward(tape, [grad])
    leaf, w = rows.clone().requires_grad_(), shared[0].detach().clone().requires_grad_()
    expected = torch.stack([halve_if_positive(row, w) for row in leaf])
    expected.backward(grad)
    close(out, expected.detach())
    close(given, leaf.grad)
    close(weight, w.grad)
    kernel.taped([r(0, 3)], shared, **needs, n=0, outs=[torch.empty(0, 3)])
