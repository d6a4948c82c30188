"""Indexing, row writes, segments and losses: what vmap alone can't batch, against one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbatch.codegen.body import record
from fxbatch.codegen.decompose import decompositions, fused_gru_cell, fused_lstm_cell
from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.operation_graphs import OperationGraphs, Unbatched
from fxbatch.torch_private import fake_mode, native_kernels, tree_leaves
from tests.codegen.operation_cases import assert_equals_rows, build, run_kernels
from tests.trust.programs import assert_equal, two, vectors

IDX = torch.tensor


def D(*s: int) -> torch.Tensor:
    return torch.randn(s, dtype=torch.float64)


def _write_row(x: Any, y: Any) -> Any:
    x = x.clone()
    x[1] = y
    return x.tanh()


def _write_rows(x: Any, i: Any, y: Any) -> Any:
    x = x.clone()
    x[i] = y
    return x * 2


def _write_slices(x: Any, y: Any) -> Any:
    x = x.clone()
    x[:2] = y
    x[::2] = 3.0
    return x * 2


def _write_masked(x: Any, m: Any) -> Any:
    x = x * 2
    x[m] = 0.5
    return x


def _fill(x: Any, y: Any) -> Any:
    x = x * 1
    x.zero_()
    x[0] = y
    return x


FUNCTIONS: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "index_add": (lambda x, i, y: x.index_add(0, i, y), [D(5, 4), IDX([1, 0, 1]), D(3, 4)]),
    "index_add, scaled": (lambda x, i, y: x.index_add(1, i, y, alpha=2), [D(4, 5), IDX([1, 0]), D(4, 2)]),
    "index_add, i32": (lambda x, i, y: x.index_add(0, i.int(), y), [D(5), IDX([1, 0, 1]), D(3)]),
    "index_add, bool": (lambda x, i: (x > 0).index_add(0, i, x[i] > 0), [D(5), IDX([1, 0, 1])]),
    "index_select by a number": (lambda x, i: x.index_select(1, i), [D(5, 4, 3), IDX(2)]),
    "index_copy": (lambda x, i, y: x.index_copy(0, i, y), [D(5, 4), IDX([1, 0]), D(2, 4)]),
    "index_put": (lambda x, i, y: x.index_put((i,), y), [D(5, 4), IDX([1, 0, 3]), D(3, 4)]),
    "index_put, added": (
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        [D(5, 4), IDX([1, 0, 1]), D(3, 4)],
    ),
    "scatter_add": (
        lambda x, i, y: x.scatter_add(0, i[:, None].expand(3, 4), y),
        [D(5, 4), IDX([1, 0, 1]), D(3, 4)],
    ),
    "scatter_reduce": (
        lambda x, i, y: x.scatter_reduce(0, i[:, None].expand(3, 4), y, "mean"),
        [D(5, 4), IDX([1, 0, 1]), D(3, 4)],
    ),
    "take": (torch.take, [D(5, 4), IDX(3)]),
    "strided": (lambda x: x.as_strided((2, 3), (1, 2), 1) * 2, [D(3, 4)]),
    "strided, overlapping": (lambda x: torch.as_strided_copy(x, (2, 2), (1, 1)), [D(5)]),
    "rolled, flat": (lambda x: torch.roll(x, 2), [D(3, 4)]),
    "masked values": (lambda x, m, y: x.index_put((m,), y), [D(3, 4), IDX([True, False, True]), D(4)]),
    "masked values, added": (
        lambda x, m, y: x.index_put((m,), y, accumulate=True),
        [D(3, 4), IDX([True, False, True]), D(1, 4)],
    ),
    "write a row": (_write_row, [D(3, 4), D(4)]),
    "write rows": (_write_rows, [D(5, 4), IDX([1, 0, 3]), D(3, 4)]),
    "write slices": (_write_slices, [D(5, 4), D(2, 4)]),
    "write where": (_write_masked, [D(3, 4), IDX([True, False, True])]),
    "fill": (_fill, [D(3, 4), D(4)]),
    "all filled": (lambda x: (x * 1).fill_(2.0) * 3, [D(3)]),
    "masked fill by a tensor": (lambda x, m, y: x.masked_fill(m, y), [D(3), IDX([True, False, True]), D()]),
    "cdist": (torch.cdist, [D(4, 3), D(2, 3)]),
    "solve": (torch.linalg.solve, [D(3, 3), D(3)]),
    "message passing": (
        lambda h, b, e: torch.zeros_like(h).index_add(0, e, h[b].tanh()),
        [D(5, 4), IDX([0, 1, 4]), IDX([1, 0, 2])],
    ),
    "chebyshev": (lambda x: torch.special.chebyshev_polynomial_t(x.detach(), 3) * x, [D(4)]),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), [D(5), IDX(1)]),
    "cross entropy, ignored": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=2, reduction="sum"),
        [D(3, 5), IDX([1, 2, 0])],
    ),
    "nll": (lambda x, t: F.nll_loss(x.log_softmax(-1), t), [D(5), IDX(1)]),
    "log probability": (lambda x, t: x.log_softmax(-1)[t], [D(5), IDX(1)]),
    "margins of one label": (
        lambda x, t: F.multi_margin_loss(x, t, p=2, weight=torch.ones(4, dtype=x.dtype)),
        [D(2, 4), IDX([3, 1])],
    ),
    "mse": (F.mse_loss, [D(5), D(5)]),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="sum"), [D(5), D(5)]),
    "softsign of a scalar": (F.softsign, [D()]),
    "one hot": (lambda x, i: F.one_hot(i, 4) * x, [D(2, 4), IDX([1, 3])]),
}
MODULES: dict[str, tuple[nn.Module, list[torch.Tensor]]] = {
    "bilinear": (nn.Bilinear(4, 3, 5), [D(4), D(3)]),
    "lstm": (nn.LSTM(4, 5, batch_first=True), [D(3, 4)]),
    "lstm, two layers, both ways": (nn.LSTM(4, 5, num_layers=2, bidirectional=True), [D(3, 4)]),
    "gru": (nn.GRU(4, 5), [D(3, 4)]),
    "bags": (nn.EmbeddingBag(6, 3), [IDX([[2, 1], [0, 2]])]),
    "bags, largest": (nn.EmbeddingBag(6, 3, mode="max"), [IDX([[2, 1], [0, 3]])]),
    "bags, summed, padded": (nn.EmbeddingBag(6, 3, mode="sum", padding_idx=2), [IDX([[2, 1], [0, 2]])]),
    "normalized rows": (nn.LayerNorm(2), [D(3, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions(name: str) -> None:
    assert_equals_rows(*FUNCTIONS[name])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.index_fill(0, torch.tensor([1, -1]), 2.0),
        lambda x: x.masked_scatter(torch.tensor([True, False, True, False]), x * 2),
        lambda x: x.reshape(1, 1, 2, 2).to(memory_format=torch.channels_last).sin(),
    ],
)
def test_calls_without_a_rule_of_ours(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_equal(lambda self, x: function(self.a(x)), vectors(4, 4, 4), two())


@pytest.mark.parametrize("name", list(MODULES))
def test_modules(name: str) -> None:
    module, inputs = MODULES[name]
    assert_equals_rows(module.double(), inputs)


def test_ill_conditioned_numbers_still_batch() -> None:
    """Both gradients are rounding errors: eager's and ours are judged by float64."""
    graphs, _ = build(lambda x: F.normalize(x, dim=-1), [torch.randn(3, 1)])
    assert not isinstance(graphs, Unbatched), graphs


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_small_losses_of_logits_are_exact(label: float) -> None:
    """torch.func's own form of this loss has log(1 + e): 15% off at 15, zero at 17."""
    target = torch.full((), label)
    graphs, _ = build(F.binary_cross_entropy_with_logits, [torch.zeros(()), target])
    assert isinstance(graphs, OperationGraphs), graphs
    x = torch.tensor([3.0, 7.0, 10.0, 15.0, 17.0, 30.0]) * (1 if label else -1)
    rows, grads = [x, target.expand(len(x)).clone()], [torch.ones(len(x))]
    (losses,), (gradient, _), _ = run_kernels(
        graphs, rows, [], grads, len(x), given=False, workspace=Workspace()
    )
    exact = torch.log1p(torch.exp(-x.abs().double()))
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=0)
    assert gradient is not None
    torch.testing.assert_close(gradient.double(), torch.expm1(-exact) * x.sign(), rtol=1e-6, atol=0)


# Random fills: the argument list of the method, and which part of the numbers lies below 1.5.
FILLS: dict[str, tuple[tuple[float, ...], float]] = {
    "uniform_": ((1.0, 3.0), 0.25),
    "normal_": ((1.5, 0.1), 0.5),
    "exponential_": ((2.0,), 1 - math.exp(-3)),
}


@pytest.mark.parametrize("name", FILLS)
def test_random_fills_are_drawn_anew_for_each_row(name: str) -> None:
    args, below = FILLS[name]
    graphs, _ = build(lambda x: getattr(x.clone(), name)(*args) + 0 * x, [torch.randn(4000)])
    assert not isinstance(graphs, Unbatched) and graphs.random
    rows = graphs.forward(3, torch.zeros(3, 4000))[0]
    assert rows.shape == (3, 4000) and not torch.equal(rows[0], rows[1]) and rows.isfinite().all()
    for row in (rows[0], torch.zeros(4000).__getattribute__(name)(*args)):
        assert abs((row < 1.5).double().mean().item() - below) < 0.05  # six standard deviations


@pytest.mark.parametrize(
    ("module", "inputs", "reason"),
    [
        (nn.Embedding(4, 3, max_norm=1.0), [IDX(2)], "it writes to shared operand weight"),
        (nn.BatchNorm1d(4), [torch.randn(3, 4)], "it writes to shared operand num_batches_tracked"),
    ],
)
def test_what_is_written_is_named(module: nn.Module, inputs: list[torch.Tensor], reason: str) -> None:
    graphs, _ = build(module, inputs)
    assert isinstance(graphs, Unbatched) and graphs.reason.startswith(reason), graphs


@pytest.mark.parametrize("bias", [True, False])
def test_cells_that_cuda_fuses_are_those_of_the_cpu(bias: bool) -> None:
    x, h, c = D(3, 4), D(3, 5), D(3, 5)
    gru, lstm = nn.GRUCell(4, 5, bias, dtype=torch.float64), nn.LSTMCell(4, 5, bias, dtype=torch.float64)
    for cell, fused, states in ((gru, fused_gru_cell, (h,)), (lstm, fused_lstm_cell, (h, c))):
        biases = (cell.bias_ih, cell.bias_hh) if bias else (None, None)
        gates = x @ cell.weight_ih.T, h @ cell.weight_hh.T
        wanted = cell(x, states if len(states) > 1 else h)
        found = fused(*gates, states[-1], *biases)
        for got, expected in zip(found, wanted if len(states) > 1 else (wanted,), strict=False):
            torch.testing.assert_close(got, expected)


def on_cuda(kind: Any, *shape: int) -> list[torch.Tensor]:
    """The results of a module whose parameters have types of CUDA, and no memory."""
    module = kind(4, 5, device="meta")
    parameters = {name: torch.empty(x.shape, device="cuda") for name, x in module.named_parameters()}
    call = torch.func.functional_call(module, parameters, torch.empty(*shape, device="cuda"))
    return [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.LSTM, nn.GRU])
def test_cells_on_cuda_are_calls_that_vmap_has_rules_for(kind: Any) -> None:
    """Torch calls one kernel there, of which it knows neither the shapes nor a rule."""
    with fake_mode(), native_kernels():
        tape = record(lambda: on_cuda(kind, 3, 4), [], decompositions())
    assert len(tape.calls) > 8
    assert not [call.target for call in tape.calls if "fused" in str(call.target)]


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_types_of_cells_on_cuda(kind: Any) -> None:
    with fake_mode():
        assert {(tuple(x.shape), x.device.type) for x in on_cuda(kind, 3, 4)} == {((3, 5), "cuda")}
