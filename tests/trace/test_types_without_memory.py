"""Types of torch's own functions, from tensors on the device "meta": what fake tensors say, in a tenth of the time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbatch
from fxbatch.ir import TensorSpec
from fxbatch.trace.operations import (
    BodyRun,
    TooManyCallsError,
    _run_without_memory,
    is_torchs_own,
    run_on_fakes,
)

Body = Callable[[Any, Any], Any]
WEIGHT = nn.Parameter(torch.randn(3, 4))
BODIES: dict[str, Body] = {
    "tanh": lambda t, s: torch.tanh(t[0]),
    "linear": lambda t, s: F.linear(t[0], s[0]),
    "rows of a weight": lambda t, s: F.embedding(t[1], s[0]),
    "sum": lambda t, s: t[0].sum(-1, keepdim=True),
    "largest": lambda t, s: t[0].max(0),
    "sorted": lambda t, s: torch.sort(t[0]),
    "view": lambda t, s: t[0].view(-1)[2:4],
    "transposed": lambda t, s: t[0].t(),
    "parts": lambda t, s: t[0].chunk(2, -1),
    "itself": lambda t, s: t[0].contiguous(),
    "detached": lambda t, s: t[0].detach(),
    "whole numbers": lambda t, s: t[1] + 1,
    "mixed": lambda t, s: t[1] * t[0][0, 0],
    "divided": lambda t, s: t[1] / 2,
    "compared": lambda t, s: t[0] > 0,
    "written": lambda t, s: t[0].add_(1),
    "a row written": lambda t, s: t[0].__setitem__(0, 1.0),
    "random": lambda t, s: F.dropout(t[0], 0.5, True),
    "drawn": lambda t, s: torch.rand_like(t[0]),
    "normed": lambda t, s: F.layer_norm(t[0], (4,)),
    "softmax": lambda t, s: torch.softmax(t[0], 0),
    "loss": lambda t, s: F.cross_entropy(t[0][:2], t[1]),
    "made": lambda t, s: t[0].new_zeros(3),
    "other precision": lambda t, s: t[0].double(),
    "product": lambda t, s: torch.einsum("ij,kj->ik", t[0], s[0]),
    "convolved": lambda t, s: F.conv1d(t[0][None], s[0][:, :, None].expand(3, 4, 2).transpose(1, 0)),
    "new": lambda t, s: torch.zeros(3) + t[0].sum(),
    "new, where another is": lambda t, s: torch.zeros(3, device=t[0].device),
    "new, by the device's name": lambda t, s: torch.arange(3, device="cpu") + t[0].new_ones(2, 3),
    "moved to where it is": lambda t, s: t[1].to(t[0].device),
    "by the device's kind": lambda t, s: t[0] if t[0].device.type == "cpu" and t[0].is_cpu else t[0][0],
    "by the device's number": lambda t, s: t[0] if t[0].get_device() < 0 and not t[0].is_meta else t[0][0],
    "attended": lambda t, s: F.scaled_dot_product_attention(t[0], t[0], t[0]),
}
KINDS = (TensorSpec.of(torch.ones(3, 4)), TensorSpec.of(torch.ones(2, dtype=torch.int64)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_they_are_those_of_fake_tensors(name: str, grad: bool) -> None:
    expected = run_on_fakes(BODIES[name], KINDS, [WEIGHT], grad=grad)
    result = _run_without_memory(BODIES[name], KINDS, [WEIGHT], grad=grad)
    assert isinstance(result, BodyRun)
    assert result == expected


@pytest.mark.parametrize(
    "body",
    [
        lambda t, s: t[1].item(),
        lambda t, s: t[0] if torch.ones(2).sum() > 1 else t[0][0],
        lambda t, s: t[0][t[0] > 0],
        lambda t, s: t[0].is_meta,
        lambda t, s: t[0].device,
        lambda t, s: (t[0], t[0].device),
        lambda t, s: t[0].cpu(),
        lambda t, s: F.linear(t[0], s[0].t()),
        lambda t, s: t[0].new_zeros(t[0].stride(0)),
        lambda t, s: F.ctc_loss(t[0][:, None], t[1][None], torch.tensor([3]), torch.tensor([2])),
    ],
)
def test_what_they_could_say_otherwise_is_for_fake_tensors(body: Body) -> None:
    assert _run_without_memory(body, KINDS, [WEIGHT], grad=True) is None


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU(4, 5, 2), nn.RNN(4, 5, nonlinearity="relu"), nn.LSTM(4, 6, proj_size=3, bidirectional=True),
        nn.LSTM(4, 5, batch_first=True), nn.LSTMCell(4, 5), nn.BatchNorm1d(4).eval(),
    ],
    ids=str,
)  # fmt: skip
def test_layers_are_those_of_fake_tensors(layer: nn.Module, grad: bool) -> None:
    weights = dict(layer.named_parameters()) | dict(layer.named_buffers())
    body: Body = lambda t, s: torch.func.functional_call(layer, dict(zip(weights, s, strict=True)), t[0])  # noqa: E731
    kinds, shared = (KINDS[0],), list(weights.values())
    expected = run_on_fakes(body, kinds, shared, grad=grad)
    assert _run_without_memory(body, kinds, shared, grad=grad) == expected
    assert expected == run_on_fakes(body, kinds, shared, grad=grad, plain=True)


def test_calls_of_torch_are_counted() -> None:
    body: Body = lambda t, s: [t[0].tanh() for _ in range(9)]  # noqa: E731
    assert _run_without_memory(body, KINDS, [], grad=True, most=9) is not None
    with pytest.raises(TooManyCallsError, match="more than 8 times"):  # and not again on fake tensors
        _run_without_memory(body, KINDS, [], grad=True, most=8)


def test_autocast_and_several_devices_are_for_fake_tensors() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _run_without_memory(BODIES["linear"], KINDS, [WEIGHT], grad=True) is None
    kinds = (KINDS[0], TensorSpec((2,), torch.float32, torch.device("cuda")))
    assert _run_without_memory(BODIES["tanh"], kinds, [], grad=True) is None


def test_whose_code_is_torchs_own() -> None:
    for func in (torch.tanh, torch.Tensor.add, F.relu, torch.Tensor.__getitem__):
        assert is_torchs_own(func)
    assert is_torchs_own(torch.lstm)
    for func in (lambda x: x, torch.Tensor.stride, torch.Tensor.as_strided, F.ctc_loss):
        assert not is_torchs_own(func)


class Branching(nn.Linear):
    """A class of a user's; an exchanged `forward`; a module with a hook: their code asks what it likes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.device.type == "cpu" else x


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda m, a, out: out * 2 if out.device.type == "cpu" else out)
    return module


def exchanged(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x * 3 if not x.is_meta else x
    return module


@pytest.mark.parametrize(
    "make", [lambda: Branching(4, 4), lambda: hooked(nn.Linear(4, 4)), lambda: exchanged(nn.Linear(4, 4))]
)
def test_code_of_users_in_modules_is_run_on_fake_tensors(make: Callable[[], nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

    model, rows = Model(), list(torch.randn(3, 4))
    with fxbatch.disabled():
        expected = model(rows)
    torch.testing.assert_close(model(rows), expected)


def test_a_default_device_is_heard_after_one_within_a_forward() -> None:
    """torch looks the factories that take it up once, in a process."""
    code = """
import fxbatch, torch
def forward(x):
    with torch.device("meta"):
        torch.zeros(1)
    return torch.tanh(x)
fxbatch.autobatch(forward, adaptive=False)([torch.ones(3)] * 2)
with torch.device("meta"):
    assert torch.zeros(3).is_meta and torch.ones(3).is_meta and torch.arange(3).is_meta
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Rows(torch.nn.Module):
    """A softmax over the rows of `[T, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: Any) -> Any:
        return self.layer(x).softmax(0).sum(0)


class Made(torch.nn.Module):
    """The sum of the rows of `[T, 3]`, and a tensor that the forward makes."""

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: Any) -> Any:
        return x.sum(0), torch.ones(2)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 5, 3)], ids=["recorded", "packed"])
def test_a_default_device_changes_nothing_where_no_tensor_is_made(sizes: tuple[int, ...]) -> None:
    """What fxbatch makes for itself is made on the CPU: "meta" would have no numbers."""
    model, batch = Rows(), [torch.randn(n, 3) for n in sizes]
    with fxbatch.disabled():
        expected = model(batch)
    with torch.device("meta"):
        explained = str(fxbatch.explain(model, batch))
        torch.testing.assert_close(model(batch), expected)
    assert "call by call" not in explained
    assert ("no order needs fewer" if len(set(sizes)) == 1 else "packed") in explained


def test_a_packed_forward_makes_tensors_on_the_default_device_of_now() -> None:
    model, sentences = Made(), [torch.randn(n, 3) for n in (2, 5, 3)]
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            results = model(sentences)
        assert [made.device.type for _, made in results] == [device] * 3
        torch.testing.assert_close([x for x, _ in results], [x.sum(0) for x in sentences])
