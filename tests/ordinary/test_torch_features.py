"""Features of torch around and in a decorated forward: checkpoints, forward mode, normed weights, arrays, export."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import fxbatch
from fxbatch.errors import BatchCoupledError
from tests.oracle import check_equal

SIZE = 4


class Model(nn.Module):
    """A layer, and code that uses it for one instance."""

    def __init__(self, code: Callable[[nn.Module, Any], Any], layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.code = layer, code
        self.batched = fxbatch.autobatch(**{"adaptive": False, **options})(self.forward)

    def forward(self, x: Any) -> Any:
        return self.code(self.layer, x)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE).double()


def instances() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(6, SIZE, dtype=torch.float64, requires_grad=True)


def trained(
    model: Model, xs: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The result and all gradients of the second minibatch: the first builds graphs."""
    for _ in range(2):
        model.zero_grad()
        xs.grad = None
        out = run(xs)
        (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
    assert xs.grad is not None
    return [
        out.detach(),
        xs.grad.clone(),
        *[p.grad.clone() for p in model.parameters() if p.grad is not None],
    ]


@pytest.mark.parametrize("backward", ["compiled", "autograd"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_and_around(reentrant: bool, backward: str) -> None:
    def inside(m: nn.Module, x: Any) -> Any:
        return checkpoint(lambda y: m(y).tanh(), m(x), use_reentrant=reentrant)

    for code in (inside, lambda m, x: m(m(x).tanh())):
        model, xs = Model(code, layer(), backward=backward), instances()
        around = functools.partial(checkpoint, model.batched, use_reentrant=reentrant)
        run = model.batched if code is inside else around
        found = trained(model, xs, run)
        with fxbatch.disabled():
            expected = trained(model, xs, model.batched)
        torch.testing.assert_close(found, expected)


class Words(nn.Module):
    """A recurrence of bare parameters over words, and a layer over rows of another number in each instance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(20, 8))

    def one(self, given: Any) -> torch.Tensor:
        if isinstance(given, torch.Tensor):
            return torch.tanh(self.layer(given)).sum(0) * 2
        h = self.layer.bias
        for word in given:
            h = torch.tanh(self.layer.weight @ h + self.table[word])
        return h


@pytest.mark.parametrize(
    "given", [[[0, 1, 2], [3, 7], [2, 4, 1], [5, 6]], [torch.ones(n, 8) * n for n in (1, 3, 2)]]
)
@pytest.mark.parametrize("check", [0, 2])
def test_checkpoint_around_the_first_minibatches(given: list[Any], check: int) -> None:
    """What is learnt in the first is no part of the graph, which the checkpoint compares with the second."""
    model = Words()
    checked = fxbatch.autobatch(adaptive=False, check=check, check_gradients=check > 0)(model.one)
    for _ in range(3):
        found: list[list[torch.Tensor]] = []
        for context in (contextlib.nullcontext(), fxbatch.disabled()):
            model.zero_grad()
            with context:
                checkpoint(checked, given, use_reentrant=False).square().sum().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("backward", ["compiled", "autograd"])
def test_hooks_of_what_no_result_depends_on_are_not_called(backward: str) -> None:
    def code(m: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return x.exp() if (m(x) * x).sum() > 0 else x.sin()

    model, xs = Model(code, layer(), backward=backward), instances()
    heard: list[torch.Tensor | None] = []
    for p in model.parameters():
        p.register_hook(heard.append)
        p.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad))
    model.batched(xs).sum().backward()
    assert not heard
    assert xs.grad is not None


@pytest.mark.parametrize("losses", [[0], [1], [0, 1]])
def test_hooks_of_what_the_loss_does_not_depend_on_are_not_called(losses: list[int]) -> None:
    """Of several results some may be in no loss: their parameters' gradients are None, and nobody hears of it."""

    def code(m: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared, first, second = m.children()
        return first(shared(x)).tanh(), second(shared(x)).tanh()

    found: list[tuple[list[str], list[torch.Tensor | None]]] = []
    for decorated in (True, False):
        model, xs = Model(code, nn.Sequential(*[layer() for _ in range(3)])), instances()
        heard: list[str] = []

        def listen(name: str, p: nn.Parameter, heard: list[str] = heard) -> None:
            p.register_hook(lambda grad: [heard.append(name), grad * 2][1])
            p.register_post_accumulate_grad_hook(lambda p: heard.append(f"after {name}"))

        for name, p in model.named_parameters():
            listen(name, p)
        with contextlib.nullcontext() if decorated else fxbatch.disabled():
            results = model.batched(xs)
        torch.stack([results[i].sum() for i in losses]).sum().backward()
        found.append((sorted(heard), [xs.grad, *[p.grad for p in model.parameters()]]))
    (heard, batched), (expected, loop) = found
    assert heard == expected
    assert len(heard) == 4 * (1 + len(losses))
    torch.testing.assert_close(batched, loop)


class TwoHeads(nn.Module):
    """One operation of two results, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = layer(), layer(), nn.Parameter(torch.ones(SIZE).double())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x) * self.both, self.second(x) + self.both.sin()


class _StraightThrough(torch.autograd.Function):
    """Its result is computed without the weight, whose gradient it gives all the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad * 3


class StraightThrough(TwoHeads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _StraightThrough.apply(x, self.both), self.second(x)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", [TwoHeads, StraightThrough])
@pytest.mark.parametrize("losses", [[0], [1], [0, 1]])
def test_parameters_of_a_result_that_is_in_no_loss_have_no_gradient(
    losses: list[int], kind: type[TwoHeads], native: bool
) -> None:
    """None, as in the loop, and not zeros, by which an optimizer with weight decay would move them."""
    model = Model(lambda m, x: m(x.sin()), kind(), native=native)
    for _ in range(2):  # call by call, then by graphs
        found = []
        for decorated in (True, False):
            xs = instances()
            model.zero_grad()
            with contextlib.nullcontext() if decorated else fxbatch.disabled():
                results = model.batched(xs)
            torch.stack([results[i].sum() for i in losses]).sum().backward()
            found.append([xs.grad, *[p.grad for p in model.parameters()]])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("backward", ["compiled", "autograd"])
def test_forward_mode(backward: str) -> None:
    model, xs = Model(lambda m, x: m(x).tanh() * 2, layer(), backward=backward), instances().detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(xs, torch.ones_like(xs))
        found = forward_ad.unpack_dual(model.batched(dual)).tangent
        with fxbatch.disabled():
            expected = forward_ad.unpack_dual(model.batched(dual)).tangent
    assert expected.abs().sum() > 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm]
)
def test_normed_weights_in_training(norm: Any) -> None:
    model, xs = Model(lambda m, x: m(x).tanh(), norm(layer())), instances()
    twin = copy.deepcopy(model)
    found = trained(model, xs, model.batched)
    with fxbatch.disabled():
        expected = trained(twin, xs, twin.batched)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    model.eval(), twin.eval()
    with fxbatch.disabled():
        expected = [twin.batched(xs)]
    torch.testing.assert_close([model.batched(xs)], expected)


def test_a_table_with_a_largest_norm_says_what_to_write() -> None:
    words = [torch.tensor(i) for i in (1, 2, 1)]
    model = Model(lambda m, x: m(x) * 2, nn.Embedding(10, SIZE, max_norm=1.0))
    with pytest.raises(BatchCoupledError, match=r"max_norm=1.0 .*embedding_renorm_.*test_torch_features.py"):
        model.batched(words)
    plain = nn.Embedding(10, SIZE)
    with torch.no_grad():
        plain.weight.mul_(5)
        torch.embedding_renorm_(plain.weight, torch.arange(10), 1.0, 2.0)
    found = Model(lambda m, x: m(x) * 2, plain).batched(words)
    assert found.norm(dim=1).max() < 2.001


def test_hard_gumbel_softmax() -> None:
    model = Model(lambda m, x: F.gumbel_softmax(m(x), hard=True) * m(x), layer())
    xs = instances()
    out = model.batched(xs)
    assert ((out != 0).sum(1) == 1).all()
    out.sum().backward()
    assert xs.grad is not None and model.layer.weight.grad.abs().sum() > 0


ARRAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "index": lambda m, x: m(x)[np.array([0, 2])],
    "mask": lambda m, x: m(x)[np.array([True, False, True, False])],
    "written index": lambda m, x: _write(m(x).clone(), np.array([1, 3])),
    "product": lambda m, x: m(x) * np.arange(4.0),
    "quotient": lambda m, x: m(x) / np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32),
    "matrix": lambda m, x: m(x) @ np.ones((4, 2)),
    "scalar": lambda m, x: np.float32(2) * m(x) + m(x) * np.int64(3),
}


def _write(t: torch.Tensor, places: Any) -> torch.Tensor:
    t[places] = 0.5
    return t


@pytest.mark.filterwarnings("ignore:__array_wrap__")
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_numpy(name: str) -> None:
    model, xs = Model(ARRAYS[name], layer()), instances().detach()
    with torch.no_grad():
        found = model.batched(xs)
        with fxbatch.disabled():
            torch.testing.assert_close(found, model.batched(xs))


def test_an_array_on_the_left_and_one_of_another_type() -> None:
    array = np.arange(4.0)
    model, xs = Model(lambda m, x: array * m(x), layer()), instances()
    expected = Model(lambda m, x: torch.from_numpy(array) * m(x), layer()).batched(xs)
    torch.testing.assert_close(model.batched(xs), expected)
    for other in (np.arange(4), np.array(2.0, dtype=np.float32)):
        with pytest.raises(TypeError, match=r"different rules: write torch\.from_numpy"):
            Model(lambda m, x: m(x) * other, layer()).batched(xs)  # noqa: B023 - called at once


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 2)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def test_export_and_tracing_see_the_loop() -> None:
    scorer, x = Scorer(), torch.randn(3, SIZE)
    expected = scorer(x)
    torch.testing.assert_close(torch.export.export(scorer, (x,)).module()(x), expected)
    rows = list(x)
    torch.testing.assert_close(torch.export.export(scorer, (rows,)).module()(rows), expected)


@pytest.mark.parametrize("dynamic", [Dim("batch"), Dim.DYNAMIC, Dim.AUTO], ids=str)
@pytest.mark.parametrize("called_before", [False, True])
def test_a_dynamic_number_of_instances_is_not_fixed_in_silence(dynamic: Any, called_before: bool) -> None:
    """torch.onnx.export(dynamic_shapes=...) exports by Dim.AUTO, which would take the number given for a constant."""
    scorer, x = Scorer(), torch.randn(3, SIZE)
    for _ in range(3 if called_before else 0):
        scorer(x)
    with pytest.raises(Exception, match="leave the first dimension static"):
        torch.export.export(scorer, (x,), dynamic_shapes={"x": {0: dynamic}})
    with pytest.raises(Exception, match="leave the first dimension static"):
        torch.export.export(scorer, (), {"x": x}, dynamic_shapes={"x": {0: dynamic}})


@pytest.mark.filterwarnings("ignore")
def test_torchscript_sees_the_loop_or_one_instance() -> None:
    scorer, x = Scorer(), torch.randn(3, SIZE)
    torch.testing.assert_close(torch.jit.trace(scorer, (x,))(x), scorer(x))
    torch.testing.assert_close(torch.jit.script(scorer)(x[0]), scorer(x)[0])


def test_what_can_not_be_exported_says_what_to_write() -> None:
    scorer, x = Scorer(), torch.randn(3, SIZE)
    with pytest.raises(Exception, match="to export it: strict=False"):
        torch.export.export(scorer, (x,), strict=True)
    with pytest.raises(fxbatch.FxbatchError, match="compile_minibatch"):
        torch.fx.symbolic_trace(scorer)


def test_statistics_that_a_norm_does_not_take_are_not_saved() -> None:
    """`batch_norm` in eval after a layer whose parameters have gradients: on the CPU it gives no mean and deviation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval()

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)).square().sum()

    torch.manual_seed(0)
    check_equal(Net(), [torch.rand(1, 2, 3, 3) for _ in range(6)])
