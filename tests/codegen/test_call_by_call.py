"""What runs call by call: its arguments are filled in as the pytree would, and modules are made ready once a step."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbatch
from fxbatch import signature as module
from fxbatch.codegen import call_by_call
from fxbatch.ir import Operation, Signature, Slot, Template
from fxbatch.runtime import forward as forward_module
from fxbatch.runtime import operation_cache
from tests.oracle import check_equal


@pytest.mark.parametrize(
    "arguments",
    [
        ((Slot("input", 1), 2, Slot("shared", 0)), {"x": Slot("input", 0), "y": None}),
        (([Slot("input", 0), Slot("shared", 0)], (Slot("input", 1),)), {}),
        ((), {"rows": {"a": Slot("input", 1)}, "b": Slot("input", 0)}),
        ((OrderedDict(a=Slot("input", 0)), slice(1, None)), {"class": Slot("shared", 0)}),
        ((), {}),
    ],
)
def test_a_binder_calls_with_what_the_template_holds(arguments: Any) -> None:
    template = Template.of(arguments)
    inputs, shared = [torch.ones(1), torch.ones(2)], [torch.ones(3)]
    call = template.binder(len(inputs))(lambda *args, **kwargs: repr((args, kwargs)), shared)
    for _ in range(2):
        assert call(*inputs) == repr(template.fill(input=inputs, shared=shared))


class Model(nn.Module):
    """Operations of all kinds, of which nothing is built."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)
        self.norm = nn.LayerNorm(3)

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        h = (torch.zeros_like(x), torch.zeros_like(x))
        for _ in range(3):
            h = self.cell(x, h)
            x = self.norm(torch.cat([h[0], x]).view(2, 3).sum(0)) * 2
        return torch.stack([x, h[1]], dim=1).softmax(dim=0)


def test_calls_one_by_one_equal_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_cache, "MANY_NEW", -1)
    monkeypatch.setattr(operation_cache, "ENOUGH_CALLS", 10**9)
    twins: list[Any] = []
    made = module.structural_twin
    model, data = Model(), [torch.randn(3) for _ in range(12)]
    check_equal(model, data)
    report = fxbatch.explain(model, data)
    assert len(report.unbatched) == len(report.operations)

    def counted(m: nn.Module, known: Any) -> nn.Module:
        twins.append(m)
        return made(m, known)

    monkeypatch.setattr(module, "structural_twin", counted)
    model(data)
    assert not twins, (
        "modules of torch with the parameters that they were recorded with are called as they are"
    )
    model.cell.weight_hh, model.norm = nn.Parameter(torch.randn(12, 3)), nn.LayerNorm(3)
    check_equal(model, data)


def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_cache, "MANY_NEW", -1)
    monkeypatch.setattr(operation_cache, "ENOUGH_CALLS", 10**9)


@pytest.mark.parametrize("instances", [1, 3, 12])
def test_without_gradients_calls_are_given_rows_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, instances: int
) -> None:
    """Inputs that lie together, apart, and one for all; several outputs; nothing is gathered or put together."""
    _one_by_one(monkeypatch)
    gathered: list[int] = []
    monkeypatch.setattr(
        forward_module.StepViews, "__getitem__", lambda views, k: gathered.append(k) or pytest.fail("views")
    )

    class Mixed(Model):
        @fxbatch.autobatch(adaptive=False, fuse=False)
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            values, places = h.sort(descending=bool(h[0] > 0))
            pair = self.cell(values if places.sum() > 2 else x, (h, values))
            for row in (torch.zeros(3), torch.ones(3)):
                h = torch.where(h > row, pair[0], pair[1]) + row.sum()
            return torch.stack([h, values.flip(0), pair[1]])

    model, data = Mixed(), [torch.randn(3) for _ in range(instances)]
    with torch.no_grad():
        check_equal(model, data, gradients=False)
        model(data)
    assert not gathered


def test_a_step_of_many_calls_asks_autograd_once_and_its_parameters_hooks_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _one_by_one(monkeypatch)
    asked: list[int] = []
    engine = call_by_call.run_backward

    def counted(ends: Any, *rest: Any, **options: Any) -> Any:
        asked.append(len(ends))
        return engine(ends, *rest, **options)

    monkeypatch.setattr(call_by_call, "run_backward", counted)
    model, data = Model(), [torch.randn(3, requires_grad=True) for _ in range(5)]
    check_equal(model, data)
    steps, asked = fxbatch.explain(model, data).steps, []
    heard: list[torch.Size] = []
    model.norm.weight.register_hook(lambda grad: heard.append(grad.shape))
    loss = sum(y.sum() for y in model(data))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert 0 < len(asked) <= steps and max(asked) > 5 and not any(n % 5 for n in asked), (
        "outputs of five calls"
    )
    assert heard == [torch.Size([3])], "given once, with the whole gradient"


def test_a_graph_that_is_kept_is_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_by_one(monkeypatch)
    model, x = Model(), torch.randn(3, requires_grad=True)
    loss = model([x, x * 2])[1].sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)


class Twice(nn.Module):
    """Operations that are given one parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.begin = nn.LSTMCell(3, 3), nn.Parameter(torch.randn(3))
        self.tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        cast(nn.Linear, self.tied[1]).weight = cast(nn.Linear, self.tied[0]).weight

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.cell(x, (self.begin, self.begin))[0] + self.tied(x * 2))


def test_a_parameter_that_is_given_twice_has_its_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_by_one(monkeypatch)
    check_equal(Twice(), [torch.randn(3) for _ in range(4)])


class Doubled(torch.autograd.Function):
    """Writes to the gradient that it is given, and reads it by its place in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # as torch's documentation has it
        return grad.mul_(2).as_strided((4,), (1,), 0).clone()


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.same = nn.ReLU(inplace=True), nn.Identity()

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.same(x) * 2
        return self.act(y.clone()) + y, cast(Tensor, Doubled.apply(y)) * 3


@pytest.mark.parametrize("n", [1, 4])
def test_what_writes_or_reads_by_place_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    _one_by_one(monkeypatch)
    check_equal(Writer(), [torch.randn(4, requires_grad=True) for _ in range(n)])


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (torch.tanh, True), (Tensor.__add__, True), (F.linear, True), (F.softmax, True), (Tensor.split, True),
        (Tensor.add_, False), (lambda x: x, False), (Tensor.__getitem__, True),
    ],
)  # fmt: skip
def test_functions_of_torch_that_only_read(function: Any, reads: bool) -> None:
    signature = Signature(Operation("f", "function", function), (), (), arguments=Template.of(((), {})))
    assert (signature.only_reads is function) is reads
    inplace = Template.of(((Slot("input", 0), True), {}))
    relu = Signature(Operation("f", "function", F.relu), (), (), arguments=inplace)
    assert relu.only_reads is None
