"""Recurrent layers, convolutions, attention layers and losses of torch, against the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ragged.against_loop import check_packed
from tests.ragged.test_rules import ALL, PAIRS, SOME, B, rows, two

LONG = [(3,), (5,), (9,)]
torch.manual_seed(2)


SEVERAL = [s for s in SOME if s[0] > 1 or not torch.__version__.startswith(("2.11", "2.12"))]


def of_module(module: nn.Module, call: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """`call(module, *tensors)` as a body with the module's parameters last, and these."""
    names = [name for name, _ in module.named_parameters()]

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *tensors: torch.Tensor) -> Any:
            return call(self.inner, *tensors)

    bound = Bound()

    def body(*tensors: torch.Tensor) -> Any:
        count = len(tensors) - len(names)
        state = {f"inner.{name}": t for name, t in zip(names, tensors[count:], strict=True)}
        return torch.func.functional_call(bound, state, tensors[:count])

    return body, [p.detach() for p in module.parameters()]


def layers() -> dict[str, tuple[nn.Module, Callable[..., Any], Any]]:
    plain = lambda m, x: m(x)  # noqa: E731
    columns = lambda m, x: m(x.t())  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are not used here
        stack = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, norm_first=True, activation="gelu"), 2
        )
    causal = lambda m, x: m(x, nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype))  # noqa: E731
    return {
        "LSTM": (nn.LSTM(6, 4, 2, bidirectional=True), plain, SOME),
        "GRU": (nn.GRU(6, 4), plain, SOME),
        "RNN": (nn.RNN(6, 4, nonlinearity="relu"), plain, SOME),
        "LSTM with a projection": (nn.LSTM(6, 4, proj_size=2), plain, SOME),
        "LSTM batch first": (nn.LSTM(6, 4, batch_first=True), lambda m, x: m(x[None])[0][0], SOME),
        "LSTM with states": (nn.LSTM(6, 4), lambda m, x: m(x, (x.sum(0)[None, :4], x.sum(0)[None, :4])), SOME),
        "convolution": (nn.Conv1d(6, 4, 3, padding=1), columns, SOME),
        "convolution without padding": (nn.Conv1d(6, 4, 3), columns, LONG),
        "strided, dilated convolution": (nn.Conv1d(6, 4, 3, stride=2, padding=2, dilation=2), columns, LONG),
        "convolution of the same size": (nn.Conv1d(6, 4, 5, padding="same"), columns, SOME),
        "average pooling": (
            nn.AvgPool1d(3, stride=2, padding=1), lambda m, x: m(x.t()).t(), LONG
        ),
        "GRU cell": (nn.GRUCell(6, 6), lambda m, x: m(x, torch.tanh(m(x))), ALL),
        "LSTM cell": (nn.LSTMCell(6, 4), lambda m, x: m(x, m(x))[0], SOME),
        "RNN cell of one row": (nn.RNNCell(6, 6), lambda m, x: m(x.sum(0)), SOME),
        "convolution in groups": (nn.Conv1d(6, 6, 3, padding=1, groups=3), columns, SOME),
        "convolution and maximum": (
            nn.Conv1d(6, 4, 3, padding=1), lambda m, x: torch.relu(m(x.t()[None])).amax(2)[0], SOME
        ),
        "convolution of images of their own height": (
            nn.Conv2d(1, 4, 3, padding=1), lambda m, x: m(x[None, None]).relu().sum(2), SOME
        ),
        "strided, dilated convolution in groups of images of their own width": (
            nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2), dilation=(1, 2), groups=2),
            lambda m, x: m(x.t().reshape(2, 3, -1)), LONG,
        ),
        "convolution of images that keep their size": (
            nn.Conv2d(1, 4, (3, 5), padding="same"), lambda m, x: m(x[None, None]).sum(3), SOME
        ),
        "convolution of volumes of their own depth": (
            nn.Conv3d(2, 4, (3, 1, 2), padding=(1, 0, 1)),
            lambda m, x: m(x.view(1, 1, -1, 2, 3).repeat(1, 2, 1, 1, 1)), SOME,
        ),
        "encoder layer": (nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), plain, ALL),
        "encoder, norm first": (stack, plain, ALL),
        "encoder with a causal mask": (nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0), causal, SOME),
        # Before torch 2.13 a sentence of one word asks for another graph here, and runs by itself.
        "attention with its weights": (nn.MultiheadAttention(6, 2), lambda m, x: m(x, x, x), SEVERAL),
    }  # fmt: skip


LAYERS = layers()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_layers(name: str) -> None:
    module, call, sizes = LAYERS[name]
    body, parameters = of_module(module, call)
    function = check_packed(body, rows, sizes, ((0,),), parameters)
    assert bool(function.lowered.alone) == (name == "average pooling"), function.lowered.source


def test_decoder_layer() -> None:
    body, parameters = of_module(nn.TransformerDecoderLayer(6, 2, 12, dropout=0.0), lambda m, a, b: m(a, b))
    assert not check_packed(body, two, PAIRS, ((0,), (0,)), parameters).lowered.alone


IMAGES: dict[str, tuple[nn.Module, Callable[..., Any]]] = {
    "both sizes": (nn.Conv2d(1, 4, 3, padding=1), lambda m, a, b: m((a @ b.t())[None]).amax((1, 2))),
    "both sizes, one more": (nn.Conv2d(1, 2, (2, 1), padding=(1, 0)), lambda m, a, b: m((a @ b.t())[None]).exp()),
    "as many as rows": (
        nn.Conv2d(1, 4, (3, 1), padding=(1, 0)), lambda m, a, b: m((a @ b.t())[:, None, :, None]).amax(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_of_two_sizes(name: str) -> None:
    body, parameters = of_module(*IMAGES[name])
    assert not check_packed(body, two, PAIRS, ((0,), (0,)), parameters).lowered.alone


def test_what_torch_asks_about_sizes_and_decides_nothing_is_traced_once_more() -> None:
    body, parameters = of_module(
        nn.Conv2d(1, 4, (3, 1), padding=(1, 0)), lambda m, a, b: m((a @ b.t())[:, None, :, None]).sum(2)
    )
    graph = check_packed(body, two, [*PAIRS, (16, 4), (17, 9), (30, 2)], ((0,), (0,)), parameters).graph
    assert any(guard.has(16) for guard in graph.guards), graph.guards  # from 16 images on another kernel
    assert not [sizes for sizes in graph._tried if min(sizes) > 1]


def tagged(t: int) -> list[torch.Tensor]:
    return [torch.randn(t, 6), torch.randint(6, (t,))]


LOSSES: dict[str, tuple[Callable[..., Any], Any]] = {
    "cross entropy": (F.cross_entropy, SOME),
    "summed, some ignored": (lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=2), ALL),
    "smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), SOME),
    "weighted": (lambda x, t: F.cross_entropy(x, t, B[:6].abs().to(x.dtype)), SOME),
    "squares": (lambda x, t: F.mse_loss(x, x * 2), SOME),
    "binary": (lambda x, t: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype)), SOME),
    "smooth": (lambda x, t: F.smooth_l1_loss(x, x * 3, reduction="sum"), ALL),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    body, sizes = LOSSES[name]
    assert not check_packed(body, tagged, sizes, ((0,), (0,))).lowered.alone
