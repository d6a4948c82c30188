"""What can't be recorded: the loop and one warning, at any size; where all is to be batched an error in each call."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxbatch
from fxbatch.errors import FxbatchError, LoopWarning, TraceError
from fxbatch.runtime.strategy import AdaptiveSwitch, Choice, Strategy


class Made(nn.Module):
    """Parts, and what a submodule of each kind that can't be recorded needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 4, max_norm=1.0)
        self.hooked = nn.Linear(4, 4)
        self.hooked.register_full_backward_hook(lambda *_: None)
        self.scripted = torch.jit.trace(nn.Linear(4, 4), torch.randn(4))
        self.n = 0


def batch_norm(self: Any, x: Any) -> Any:
    self.n += 1
    return self.norm(self.l(x).expand(3, 4)).sum(0)


def max_norm(self: Any, x: Any) -> Any:
    return self.table(torch.tensor([1, 2])).sum(0) * self.l(x)


def backward_hook(self: Any, x: Any) -> Any:
    return self.hooked(self.l(x))


def script(self: Any, x: Any) -> Any:
    return self.scripted(self.l(x))


def row_view(self: Any, x: Any) -> Any:
    buffer = torch.zeros(2, 4)
    row, other = buffer[0], buffer[1]
    row += self.l(x)
    return buffer.sum(0) + other


def derivative(self: Any, x: Any) -> Any:
    y = self.l(x)
    (found,) = torch.autograd.grad(y.square().sum(), self.l.weight, create_graph=True)
    return y + found.sum(0)


def backward(self: Any, x: Any) -> Any:
    y = self.l(x)
    y.sum().backward(retain_graph=True)
    return y


def old_constructor(self: Any, x: Any) -> Any:
    y = self.l(x)
    return y + torch.FloatTensor([y.detach().sum(), y.detach()[0]]).sum()


def hook_of_a_value(self: Any, x: Any) -> Any:
    y = self.l(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return y + 1


class Doubling(TorchFunctionMode):
    """Doubles what linear layers give."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.linear else found


class Negating(TorchDispatchMode):
    """Negates what tanh gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return -found if func is torch.ops.aten.tanh.default else found


def function_mode(self: Any, x: Any) -> Any:
    with Doubling():
        y = self.l(x)
    return torch.tanh(self.l(y))


def dispatch_mode(self: Any, x: Any) -> Any:
    y = self.l(x)
    with Negating():
        return torch.tanh(y)


REFUSED = {
    function_mode: r"a torch mode \(Doubling\)", dispatch_mode: r"a torch mode \(Negating\)",
    batch_norm: "BatchNorm1d in training", max_norm: "max_norm", backward_hook: "backward hook", script: "TorchScript",
    old_constructor: r"len\(\) of a 0-d tensor",
    hook_of_a_value: r"register_hook\(\)",
    row_view: "another tensor shares its memory", derivative: "torch.autograd.grad", backward: r"backward\(\) inside",
}  # fmt: skip


def decorated(forward: Callable[..., Any], **options: Any) -> Any:
    cls: Any = type("Model", (Made,), {"forward": fxbatch.autobatch(out="list", **options)(forward)})
    return cls()


def instances(count: int = 6) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, generator=torch.Generator().manual_seed(count)))


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy batches each minibatch, from the first instance on."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(True))


def losses(model: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a minibatch, and the gradients of their squares."""
    model.zero_grad()
    found = model(xs)
    sum(y.square().sum() for y in found).backward()
    return [y.detach() for y in found] + [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_the_loop_runs_at_any_size_and_one_warning_names_the_line(
    forward: Callable[..., Any], batches: list[int]
) -> None:
    model, looped = decorated(forward), decorated(forward, adaptive="loop")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (1, 2, 6, 2, 6):
            torch.testing.assert_close(losses(model, instances(count)), losses(looped, instances(count)))
    (warning,) = [w for w in caught if issubclass(w.category, LoopWarning)]
    message = str(warning.message)
    assert f"{forward.__name__}: its minibatches run the plain loop: " in message
    assert "test_refusals.py:" in message
    assert warning.filename == __file__
    assert model.n == looped.n
    torch.testing.assert_close(dict(model.named_buffers()), dict(looped.named_buffers()))
    assert len(batches) == 1


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_where_all_is_to_be_batched_it_is_an_error_in_each_call(forward: Callable[..., Any]) -> None:
    model = decorated(forward, adaptive=False)
    for count in (1, 2, 6, 2):
        with pytest.raises(FxbatchError, match=REFUSED[forward]):
            model(instances(count))
    assert model.n == 0


@pytest.mark.usefixtures("chooses")
def test_another_mode_of_the_model_is_batched(batches: list[int]) -> None:
    model = decorated(batch_norm)
    with pytest.warns(LoopWarning, match="BatchNorm1d in training"):
        model(instances())
    model.eval()(instances())
    model(instances())
    model.train()(instances())
    assert len(batches) == 3


@pytest.mark.usefixtures("chooses")
def test_an_exception_of_the_forward_is_its_own() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.n += 1
        if self.n == 3:
            raise ValueError("third")
        return self.norm(self.l(x).expand(3, 4)).sum(0)

    model = decorated(forward)
    with pytest.warns(LoopWarning), pytest.raises(ValueError, match="third"):
        model(instances())
    assert model.n == 3
    model.n = -100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(model(instances())) == 6
    model = decorated(forward, return_exceptions=True)
    with pytest.warns(LoopWarning):
        found = model(instances())
    assert [type(y).__name__ for y in found] == ["Tensor", "Tensor", "ValueError", *["Tensor"] * 3]


def consumes(self: Any, x: Any, words: Any) -> Any:
    h = self.l(x)
    while words:
        h = h + self.l(words.pop())
    return self.norm(h.expand(3, 4)).sum(0)


def writes(self: Any, x: Any, words: Any) -> Any:
    x.mul_(2)
    return self.norm(self.l(x).expand(3, 4)).sum(0)


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("forward", [consumes, writes], ids=lambda f: f.__name__)
def test_instances_that_have_changed_their_arguments_do_not_begin_anew(
    forward: Callable[..., Any], batches: list[int]
) -> None:
    model = decorated(forward)
    words = [instances(2) for _ in range(6)]
    with pytest.raises(TraceError, match="BatchNorm1d in training"):
        model(instances(), words)
    words = [instances(2) for _ in range(6)]
    looped = decorated(forward, adaptive="loop")
    with pytest.warns(LoopWarning):
        found = model(instances(), copy.deepcopy(words))
    torch.testing.assert_close(found, looped(instances(), words))
    assert len(batches) == 1


@pytest.mark.usefixtures("chooses")
def test_a_check_of_what_cannot_be_recorded_is_the_loop() -> None:
    model, looped = decorated(batch_norm, check=1), decorated(batch_norm, adaptive="loop")
    with pytest.warns(LoopWarning):
        torch.testing.assert_close(losses(model, instances()), losses(looped, instances()))
    torch.testing.assert_close(losses(model, instances()), losses(looped, instances()))


@pytest.mark.usefixtures("chooses")
def test_double_backward_is_an_error_once_and_then_the_loop() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.l(x).square().sum()

    model = decorated(forward)
    xs = [x.requires_grad_() for x in instances()]
    with pytest.raises(fxbatch.GradientError, match="double backward"):
        torch.autograd.grad(sum(model(xs)), xs, create_graph=True)
    with pytest.warns(LoopWarning, match="double backward"):
        first = torch.autograd.grad(sum(model(xs)), xs, create_graph=True)
    assert all(g.requires_grad for g in first)
    always = decorated(forward, adaptive=False)
    for _ in range(3):
        with pytest.raises(fxbatch.GradientError, match="double backward"):
            torch.autograd.grad(sum(always(xs)), xs, create_graph=True)


# What is active around the call


@contextlib.contextmanager
def global_hook() -> Iterator[None]:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 3)
    try:
        yield
    finally:
        hook.remove()


def plain(self: Any, x: Any) -> Any:
    return torch.tanh(self.l(x))


AROUND: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "function mode": (Doubling, "a torch function mode (Doubling)"),
    "dispatch mode": (Negating, "a torch dispatch mode"),
    "global hook": (global_hook, "hooks on all modules"),
}


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("around", AROUND)
def test_what_recorded_calls_would_not_meet_runs_the_loop(around: str, batches: list[int]) -> None:
    mode, reason = AROUND[around]
    model, looped = decorated(plain), decorated(plain, adaptive="loop")
    xs = instances()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with mode():
                torch.testing.assert_close(losses(model, xs), losses(looped, xs))
    (warning,) = caught
    assert reason in str(warning.message)
    assert not batches
    torch.testing.assert_close(losses(model, xs), losses(looped, xs))
    assert len(batches) == 1  # without it, as ever


@pytest.mark.parametrize("around", AROUND)
def test_it_is_an_error_where_all_is_to_be_batched(around: str) -> None:
    mode, reason = AROUND[around]
    model = decorated(plain, adaptive=False)
    for _ in range(2):
        with mode(), pytest.raises(TraceError) as caught:
            model(instances())
        assert reason in str(caught.value)
    model(instances())


@pytest.mark.usefixtures("chooses")
def test_torchs_own_modes_are_none_of_the_users(batches: list[int]) -> None:
    model = decorated(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
            model(instances())
    assert len(batches) == 1


@pytest.mark.usefixtures("chooses")
def test_a_transform_of_torch_func_runs_the_loop() -> None:
    model = decorated(plain)
    expected = copy.deepcopy(model)
    xs = torch.stack(instances())
    with pytest.warns(LoopWarning, match=r"torch\.func"):
        found = torch.func.grad(lambda x: torch.stack(model(x)).sum())(xs)
    with fxbatch.disabled():
        torch.testing.assert_close(found, torch.func.grad(lambda x: torch.stack(expected(x)).sum())(xs))
