"""Every other packed rule on numbers at the edge, values, gradients and what requires gradients, against the loop. See
`test_special_numbers.py` for reductions, and docs/promises.md for what differs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fxbatch.ragged.rules import RULES
from tests.ragged.test_special_numbers import NUMBERS, REDUCTIONS, Body, difference_at_the_edge, lowered

_GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS, HIDDEN, BIAS = (torch.randn(*shape, generator=_GENERATOR) for shape in ((12, 5), (12, 3), (12,)))


def w(x: torch.Tensor) -> torch.Tensor:
    return WEIGHTS.to(x.dtype)


def wh(x: torch.Tensor) -> torch.Tensor:
    return HIDDEN.to(x.dtype)


def places(x: torch.Tensor) -> torch.Tensor:
    """Two rows a place."""
    return torch.arange(x.shape[0]) // 2


def spread(x: torch.Tensor) -> torch.Tensor:
    return places(x)[:, None].expand(-1, 5).contiguous()


BODIES: dict[str, Body] = {
    "_convolution_mode": lambda x: F.conv2d(
        x[None, None], torch.ones(1, 1, 3, 1, dtype=x.dtype), padding="same"
    )[0, 0],
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[None], (2, 5))[0],
    "addbmm": lambda x: torch.addbmm(torch.ones(5, 5, dtype=x.dtype), x[:, :, None], x[:, None, :]),
    "addmm": lambda x: torch.addmm(torch.ones(5, dtype=x.dtype), x, w(x)[:5]),
    "addmv": lambda x: torch.addmv(x[:, 0], x, w(x)[0]),
    "baddbmm": lambda x: torch.baddbmm(
        x[:, :, None],
        x[:, :, None] * torch.ones(1, 1, 2, dtype=x.dtype),
        torch.ones(1, 2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3),
    ),
    "aminmax": lambda x: x.aminmax(dim=0)[0],
    "avg_pool1d": lambda x: F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t(),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "broadcast_to": lambda x: torch.broadcast_to(x[0], x.shape).sum(0),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)),
    "cat": lambda x: torch.cat([x, x.flip(0)]).sum(0),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "concat": lambda x: torch.concat([x, x], 1),
    "concatenate": lambda x: torch.concatenate([x, x], 1),
    "constant_pad_nd": lambda x: F.pad(x, (1, 2), value=2.0).sum(0),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "pad reflect": lambda x: F.pad(x.t()[None], (1, 1), mode="replicate")[0],
    "convolution": lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 1, dtype=x.dtype), padding=(1, 0))[
        0, 0
    ],
    "copy": lambda x: torch.zeros_like(x).copy_(x),
    "diagonal": lambda x: (x @ x.t()).diagonal(),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x @ x.t(), x[:, 0]),
    "dot": lambda x: torch.dot(x[:, 0], x[:, 1]),
    "vdot": lambda x: torch.vdot(x[:, 0], x[:, 1]),
    "embedding": lambda x: F.embedding((x[:, 0] > 0).long(), w(x)),
    "embedding of rows": lambda x: F.embedding(torch.arange(x.shape[0]).flip(0), x),
    "eye": lambda x: x + torch.eye(x.shape[0], 5, dtype=x.dtype),
    "eye product": lambda x: torch.eye(x.shape[0], dtype=x.dtype) @ x,
    "flatten": lambda x: x.flatten().sum(0),
    "full": lambda x: x * torch.full((x.shape[0], 5), 2.0, dtype=x.dtype),
    "gather": lambda x: x.gather(0, torch.zeros(x.shape[0], 5, dtype=torch.long)),
    "glu": lambda x: F.glu(x[:, :4], 1),
    "gru_cell": lambda x: torch.gru_cell(x, x[:, :3], w(x)[:9], wh(x)[:9]),
    "lstm_cell": lambda x: torch.lstm_cell(x, (x[:, :3], x[:, :3]), w(x), wh(x))[0],
    "rnn_tanh_cell": lambda x: torch.rnn_tanh_cell(x, x[:, :3], w(x)[:3], wh(x)[:3]),
    "rnn_relu_cell": lambda x: torch.rnn_relu_cell(x, x[:, :3], w(x)[:3], wh(x)[:3]),
    "huber_loss": lambda x: F.huber_loss(x, x * 2),
    "l1_loss": lambda x: F.l1_loss(x, x * 2),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 2),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, torch.ones_like(x)),
    "kl_div": lambda x: F.kl_div(x, torch.ones_like(x) / 5, reduction="sum"),
    "margin": lambda x: F.margin_ranking_loss(x, x * 2, torch.ones_like(x)),
    "cosine_embedding": lambda x: F.cosine_embedding_loss(
        x, x.flip(0), torch.ones(x.shape[0], dtype=x.dtype)
    ),
    "triplet": lambda x: F.triplet_margin_loss(x, x * 2, x.flip(0)),
    "multilabel": lambda x: F.multilabel_soft_margin_loss(x, torch.ones_like(x)),
    "hinge": lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, torch.arange(x.shape[0]).flip(0), x),
    "index_fill": lambda x: x.index_fill(0, torch.arange(1), 2.0),
    "index_put": lambda x: torch.zeros_like(x).index_put((places(x),), x, accumulate=True),
    "index_reduce": lambda x: torch.zeros_like(x).index_reduce(0, places(x), x, "amax"),
    "index_reduce mean": lambda x: torch.zeros_like(x).index_reduce(0, places(x), x, "mean"),
    "index_select": lambda x: x.index_select(0, places(x)),
    "index": lambda x: x[places(x)].sum(0),
    "isin": lambda x: torch.isin(x, torch.tensor([1.0, 2.0], dtype=x.dtype)),
    "kthvalue": lambda x: x.kthvalue(1, 0)[0],
    "mode": lambda x: x.mode(0)[0],
    "kthvalue place": lambda x: x.kthvalue(1, 0)[1],
    "linalg_matrix_power": lambda x: torch.linalg.matrix_power(x[:, :1] @ x[:, :1].t(), 2),
    "linear": lambda x: F.linear(x, w(x), BIAS.to(x.dtype)),
    "mT": lambda x: x.mT @ x,
    "numpy_T": lambda x: x.T @ x,
    "masked_fill": lambda x: x.masked_fill(x > 0, -1e9).softmax(0),
    "masked inf": lambda x: x.masked_fill(x > 0, -math.inf).softmax(0),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x[None], (2, 1), (1, 1), (1, 0))[0],
    "mm": lambda x: x.mm(w(x).t()),
    "mv": lambda x: x.mv(w(x)[0]),
    "mv rows": lambda x: x.t().mv(x[:, 1]),
    "bmm": lambda x: torch.bmm(x[:, :, None], x[:, None, :]).sum(0),
    "new_full": lambda x: x * x.new_full((x.shape[0], 1), 3.0),
    "new_ones": lambda x: x * x.new_ones((x.shape[0], 1)),
    "new_zeros": lambda x: x + x.new_zeros((x.shape[0], 1)),
    "ones": lambda x: x * torch.ones(x.shape[0], 1, dtype=x.dtype),
    "zeros": lambda x: x + torch.zeros(x.shape[0], 1, dtype=x.dtype),
    "new_empty": lambda x: x.new_empty((x.shape[0], 5)).fill_(1.0) * x,
    "empty": lambda x: torch.empty(x.shape[0], 5, dtype=x.dtype).fill_(1.0) * x,
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(x.shape[0], dtype=torch.long)),
    "nll weights": lambda x: F.cross_entropy(
        x,
        torch.zeros(x.shape[0], dtype=torch.long),
        weight=torch.arange(1.0, 6.0, dtype=x.dtype),
        reduction="sum",
    ),
    "nll smooth": lambda x: F.cross_entropy(x, torch.ones(x.shape[0], dtype=torch.long), label_smoothing=0.1),
    "repeat": lambda x: x.repeat(2, 1).sum(0),
    "repeat columns": lambda x: x.repeat(1, 2),
    "reshape_as": lambda x: x.reshape_as(x * 1),
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "roll": lambda x: x.roll(1, 0),
    "scatter": lambda x: torch.zeros_like(x).scatter(
        0, torch.arange(x.shape[0])[:, None].expand(-1, 5).contiguous(), x
    ),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, spread(x), x),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(0, spread(x), x, "amax"),
    "scatter_reduce mean": lambda x: torch.zeros_like(x).scatter_reduce(0, spread(x), x, "mean"),
    "scatter_reduce prod": lambda x: torch.ones_like(x).scatter_reduce(0, spread(x), x, "prod"),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype), x),
    "select_scatter": lambda x: x.select_scatter(torch.ones(5, dtype=x.dtype), 0, 0),
    "slice_scatter": lambda x: x.slice_scatter(torch.ones(1, 5, dtype=x.dtype), 0, 0, 1),
    "split": lambda x: x.split(2, 1)[0],
    "split_with_sizes": lambda x: x.split([2, 3], 1)[1],
    "tensor_split": lambda x: x.tensor_split(2, 1)[0],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "std_mean": lambda x: torch.std_mean(x, 0)[0],
    "transpose": lambda x: x.transpose(0, 1) @ x,
    "swapaxes": lambda x: x.swapaxes(0, 1) @ x,
    "swapdims": lambda x: x.swapdims(0, 1) @ x,
    "tril": lambda x: x.tril().sum(0),
    "triu": lambda x: x.triu().sum(0),
    "unbind": lambda x: x.unbind(1)[0],
    "unflatten": lambda x: x.unflatten(1, (5, 1)),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "view_as": lambda x: x.view_as(x * 1),
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm eval": lambda x: F.batch_norm(x, torch.zeros(5, dtype=x.dtype), torch.ones(5, dtype=x.dtype)),
    "prelu": lambda x: F.prelu(x, torch.ones(1, dtype=x.dtype) * 0.2),
    "leaky": lambda x: F.leaky_relu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "mish": lambda x: F.mish(x),
    "softplus": lambda x: F.softplus(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "softshrink": lambda x: F.softshrink(x),
    "hardshrink": lambda x: F.hardshrink(x),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "tanhshrink": lambda x: F.tanhshrink(x),
    "softsign": lambda x: F.softsign(x),
    "softmin": lambda x: F.softmin(x, 0),
    "where": lambda x: torch.where(x > 0, x, x * 2).sum(0),
    "nan_to_num": lambda x: x.nan_to_num(),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(0)),
    "dist": lambda x: torch.dist(x, x.flip(0)),
    "pdist": lambda x: F.pdist(x),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "cross": lambda x: torch.cross(x[:, :3], x[:, 1:4], dim=1),
    "tensordot": lambda x: torch.tensordot(x, x, ([0], [0])),
    "msort": lambda x: x.msort(),
    "nanmedian": lambda x: x.nanmedian(0)[0],
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "std": lambda x: x.std(),
    "mean all": lambda x: x.mean(),
    "sum all": lambda x: x.sum(),
    "sum of squares": lambda x: (x * x).sum(),
    "inf norm": lambda x: torch.linalg.norm(x, math.inf, dim=0),
    "norm0": lambda x: x.norm(0, dim=0),
    "norm -inf": lambda x: x.norm(-math.inf, dim=0),
    "norm .5": lambda x: x.norm(0.5, dim=0),
    "argsort": lambda x: x.argsort(stable=True, dim=0),
    "gather sorted": lambda x: x.gather(0, x.argsort(stable=True, dim=0)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.nan_to_num().sigmoid(), torch.ones_like(x)),
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], (2, 5))[0],
    "rfft of columns": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "irfft of columns": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=5, dim=1),
    "sign": lambda x: x.sign(),
    "norm of rows and columns": lambda x: torch.linalg.vector_norm(x, dim=(0, 1)),
    "bincount": lambda x: torch.bincount((x[:, 0] > 0).long(), minlength=2),
    "trapezoid": lambda x: torch.trapezoid(x, dim=0),
    "multi-head attention": lambda x: F.multi_head_attention_forward(
        x[:, None, :4],
        x[:, None, :4],
        x[:, None, :4],
        4,
        2,
        w(x)[:, :4],
        None,
        None,
        None,
        False,
        0.0,
        w(x)[:4, :4],
        None,
    )[0],
    "constant_pad_nd rows": lambda x: F.pad(x, (0, 0, 2, 0), value=-math.inf).softmax(0),
}

# Rules that give no numbers of their own, and names that an operator has only where no gradients are recorded.
NOT_MET = {
    "rand",
    "randint",
    "randn",
    "scalar_tensor",
    "unsafe_chunk",
    "unsafe_split",
    "_unsafe_view",
    "_softmax",
    "_log_softmax",
    "nll_loss",
    "nll_loss_forward",
    "constant_pad_nd",
}
# Layers and sizes of their own tests, and what docs/promises.md lets differ.
ELSEWHERE = {"nonzero", "_fft_c2c", "view_as_complex", "scaled_dot_product_attention"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "ties", "of -inf", "larger"])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0", "ignore:index_reduce", "ignore:.*x.T")
def test_rules_at_the_edge(name: str, kind: str) -> None:
    assert not difference_at_the_edge(BODIES[name], NUMBERS[kind])


def test_padding_with_an_infinity() -> None:
    assert not difference_at_the_edge(BODIES["constant_pad_nd rows"], NUMBERS["all"])


def test_every_rule_is_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is registered from now on needs a body here."""
    met: set[str] = set()
    for name, own in RULES.items():

        def noted(*args: object, name: str = name, own: object = own) -> object:
            met.add(name.partition("::")[2])
            return own(*args)

        monkeypatch.setitem(RULES, name, noted)
    for body in {**REDUCTIONS, **BODIES}.values():
        lowered(body)
    rows = {name.partition("::")[2] for name in RULES if not name.startswith("aten::")}
    assert {name.partition("::")[2] for name in RULES} - met - rows == NOT_MET | ELSEWHERE
