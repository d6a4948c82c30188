"""Tapes are what `make_fx` sees, and give what the function gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxbatch.codegen import batch, build_operation
from fxbatch.codegen.body import as_graph, record, run
from fxbatch.codegen.built import forget
from fxbatch.codegen.operation_graphs import Unbatched, run_graph
from fxbatch.torch_private import FakeTensorMode
from tests.codegen.operation_cases import build

UNREAD = (
    operator.getitem,
    torch.ops.aten.detach.default,
)  # not all are read, and what isn't need not be told
Function = Callable[..., list[torch.Tensor]]


def gradients(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = torch.vmap(lambda row: torch.tanh(row @ w).chunk(2)[0])(x)
    return [y, *torch.autograd.grad(y.sum(), [x, w])]


CASES: dict[str, Function] = {
    "forward and gradients": gradients,
    "several results": lambda x, w: [*torch.max(x, 1), x],
    "a constant": lambda x, w: [x * torch.tensor([1.0, 2.0, 3.0, 4.0])],
    "a write": lambda x, w: [x.detach().clone().add_(1.0), w],
    "squeezed in place": lambda x, w: [x.detach().unsqueeze(0).squeeze_(0) + 1],
    "numbers": lambda x, w: [torch.full((3,), float("nan")), torch.arange(5)],
}


@pytest.mark.parametrize("function", CASES.values(), ids=CASES.keys())
def test_a_tape_is_what_make_fx_sees(function: Function) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(torch.randn(5, 4)), mode.from_tensor(torch.randn(4, 4))]
    given: list[Any] = [x.requires_grad_() for x in fakes]
    with mode:
        tape = record(function, given)
        nodes = make_fx(function)(*given).graph.nodes
    seen = [(x.target, form(x.meta.get("val"))) for x in nodes if x.op == "call_function"]
    told = [(x.target, form(x.value)) for x in tape.calls if callable(x.target)]
    assert [x for x in told if x[0] not in UNREAD] == [x for x in seen if x[0] not in UNREAD]


def form(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("function", CASES.values(), ids=CASES.keys())
def test_its_calls_run_on_other_tensors(function: Function) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tape = record(
            function, [torch.empty(5, 4, requires_grad=True), torch.empty(4, 4, requires_grad=True)]
        )
    real = [torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    with torch.no_grad():
        found = run(tape, real)
    torch.testing.assert_close(found, function(*real), equal_nan=True)


def test_what_writes_is_told() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        tape = record(CASES["a write"], [torch.empty(5, 4), torch.empty(4, 4)])
        squeezed = record(CASES["squeezed in place"], [torch.empty(5, 4), torch.empty(4, 4)])
    assert tape.writes == [torch.ops.aten.add_.Tensor] and squeezed.writes == []


def test_random_calls_have_to_agree_at_a_third_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    plain = batch._record_joint

    def recorded(*args: Any) -> Any:
        counted.append(args[3])
        return plain(*args)

    monkeypatch.setattr(batch, "_record_joint", recorded)
    monkeypatch.delenv("FXBATCH_CACHE", raising=False)
    forget()
    last = batch.sample_rows(build(torch.tanh, [torch.randn(4)])[0].signature, ())[1]
    forget()
    cases: list[tuple[Function, int]] = [(torch.tanh, 1), (lambda x: x + torch.rand_like(x), 3)]
    cases += [(lambda x: x + last, 2)]  # a number that is no number of rows, as the comparison tells
    cases += [(lambda x: x + torch.zeros(4), 1), (lambda x: x + torch.arange(2 * last)[:4], 2)]
    for function, times in cases:
        counted.clear()
        graphs, _ = build(function, [torch.randn(4)])
        assert not isinstance(graphs, Unbatched), graphs
        assert len(set(counted)) == times and counted[0] > 10 * min(counted[1:] or [1]), "far apart"


def test_what_is_recorded_once() -> None:
    """On tensors on "meta" alone, where these say all: not of random numbers, autocast, several devices."""
    graphs, _ = build(torch.matmul, [torch.randn(3, 4), torch.randn(4, 2)])
    assert not isinstance(graphs, Unbatched), graphs
    signature = graphs.signature
    nothing, norm = (fx.GraphModule({}, fx.Graph()) for _ in range(2))
    assert batch.recorded_on(nothing, signature, ()) == torch.device("cpu")
    norm.graph.call_function(torch.ops.aten.native_batch_norm.default)
    assert batch.recorded_on(norm, signature, ()) is None, "fewer statistics on the CPU"
    assert batch.recorded_on(nothing, signature, [torch.empty(2, device="meta")]) is None
    assert batch.recorded_on(nothing, signature, [torch.eye(2).to_sparse()]) is None
    draws = replace(signature, operation=replace(signature.operation, random=True))
    assert batch.recorded_on(nothing, draws, ()) is None
    cast = replace(signature, modes=replace(signature.modes, autocast=(("cpu", torch.bfloat16),)))
    assert batch.recorded_on(nothing, cast, ()) is None


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.linear(self.norm(x)).chunk(2, -1)
        return torch.sigmoid(a) * b + torch.arange(4)


class AsksForDevice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((4,), 2.0, device=x.device)


class BranchesOnDevice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3.0 if x.device.type == "cpu" else 5.0)


class CastsByItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_body_under_an_autocast_of_its_own_is_traced_on_fake_tensors() -> None:
    """It casts tensors of its device alone, and none on "meta"."""
    forget()
    graphs, _ = build(CastsByItself(), [torch.randn(4)])
    assert not isinstance(graphs, Unbatched), graphs
    assert "bfloat16" in graphs.forward.code


WITHOUT_FAKES: list[tuple[Any, list[torch.Tensor]]] = [
    (Gates(), [torch.randn(4)]), (nn.GRUCell(4, 4), [torch.randn(4), torch.randn(4)]),
    (torch.logsumexp, [torch.randn(4)]), (F.one_hot, [torch.tensor([1, 0])]),
    (torch.outer, [torch.randn(4), torch.randn(3)]),
]  # fmt: skip


@pytest.mark.parametrize("target, inputs", WITHOUT_FAKES)
def test_bodies_are_traced_on_tensors_without_memory(
    target: Any, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fake tensors, whose first use imports torch._dynamo, and of which each call takes longer."""
    forget()
    monkeypatch.setattr(build_operation, "fake_mode", lambda **_: pytest.fail("fake tensors"))
    arguments = (0,) if target is torch.logsumexp else (3,) if target is F.one_hot else ()
    call = target if isinstance(target, nn.Module) else lambda *x: target(*x, *arguments)
    graphs, _ = build(call, inputs)
    assert not isinstance(graphs, Unbatched), graphs
    assert "meta" not in graphs.forward.code


@pytest.mark.parametrize(
    "write", [lambda x: x + x.new([1.0, 2.0, 3.0, 4.0]), lambda x: x.new_tensor([2.0]) * x]
)
def test_numbers_that_code_says_are_not_lost(write: Any) -> None:
    """A tensor on "meta" of such has none."""
    forget()
    graphs, _ = build(write, [torch.randn(4)])
    assert not isinstance(graphs, Unbatched), graphs


@pytest.mark.parametrize("module, added", [(AsksForDevice(), 2.0), (BranchesOnDevice(), None)])
def test_bodies_that_ask_for_a_device_are_traced_on_fake_tensors(
    module: nn.Module, added: float | None
) -> None:
    forget()
    graphs, _ = build(module, [torch.randn(4)])
    assert not isinstance(graphs, Unbatched), graphs
    assert "meta" not in graphs.forward.code
    assert ("3.0" if added is None else "2.0") in graphs.forward.code


@pytest.mark.parametrize("name", CASES)
def test_a_graph_node_by_node_gives_what_its_code_gives(name: str) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = as_graph(record(CASES[name], [mode.from_tensor(t) for t in (x, w)]))
    with torch.no_grad():
        ours, code = run_graph(graph, [x, w]), graph(x, w)
    for a, b in zip(ours, code, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    called: list[object] = []
    run_graph(graph, [x, w], lambda target: called.append(target) or target)
    assert called == [n.target for n in graph.graph.nodes if n.op == "call_function"]
