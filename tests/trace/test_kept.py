"""What one minibatch knows of modules serves the next, until a module changes; results are those of eager all along."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from fxbatch import ir
from fxbatch.trace import module_state
from fxbatch.trace import table as table_module
from fxbatch.trace.places import first_changed
from fxbatch.trace.state import current_recorder
from fxbatch.trace.table import SignatureTable
from tests.trace.made import value
from tests.trace.test_examined import CHANGES, Cell

modules = sys.modules["fxbatch.trace.modules"]


def look(*roots: nn.Module) -> module_state.ModulesMet:
    return module_state.ModulesMet.of(roots, {})


def unchanged(found: module_state.ModulesMet) -> bool:
    return found.places is not None and first_changed(found.places) is None


class Other(Cell):
    """Another class with the same attributes."""


MORE: dict[str, Callable[[Cell], object]] = {
    "parameter of the same type": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.zeros(4, 3))),
    "class": lambda m: setattr(m, "__class__", Other),
    "mode, unseen": lambda m: m.__dict__.__setitem__("training", False),
}


@pytest.mark.parametrize("change", [*CHANGES, *MORE])
def test_a_change_is_seen(change: str, recorded_by: str) -> None:
    m = Cell()
    found = look(m)
    assert unchanged(found)
    (CHANGES | MORE)[change](m)
    assert not unchanged(found)


def test_numbers_and_gradients_are_no_change(recorded_by: str) -> None:
    m = Cell()
    found = look(m)
    with torch.no_grad():
        m.inner[0].weight.add_(1)
    m.requires_grad_(False)
    m.count = 2
    assert unchanged(found)


def test_modules_that_list_others_unseen_are_looked_at_again(recorded_by: str) -> None:
    class Hiding(nn.Module):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            return iter([("", self)])

    assert look(nn.Sequential(Hiding())).places is None
    assert look(nn.LazyLinear(3)).places is None


class Model(nn.Module):
    """Operations of each kind: modules, a bare parameter in a function, operators, a constant."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5).eval()
        self.norm = inner or nn.LayerNorm(3)
        self.weight = nn.Parameter(torch.eye(3))

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x[:3])
        h = F.linear(self.norm(h), self.weight) + self.drop(h)
        return h * x[3:] + h


def inputs(n: int = 3) -> list[torch.Tensor]:
    return [torch.randn(6) for _ in range(n)]


def results_and_gradients(model: nn.Module, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The stacked results, and the gradients of their sum to the parameters that have some."""
    model.zero_grad()
    results = model(xs)
    results.sum().backward()
    return [results.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def batched_and_one_by_one(
    model: nn.Module, xs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of the decorated and of the undecorated forward."""
    batched = results_and_gradients(model, xs)
    with fxbatch.disabled():
        return batched, results_and_gradients(model, xs)


def agree(model: nn.Module, xs: list[torch.Tensor]) -> None:
    """Values and gradients are those of the undecorated forward."""
    torch.testing.assert_close(*batched_and_one_by_one(model, xs))


class Wrong(Model):
    """Recorded, its results or its gradients are others than in the loop."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x[:3])
        if current_recorder() is None:
            return h
        return h + 0.5 if self.what == "values" else h.detach() + 0 * h


@pytest.mark.parametrize("what", ["values", "gradients"])
def test_what_differs_does_not_agree(what: str, recorded_by: str) -> None:
    with pytest.raises(AssertionError):
        agree(Wrong(what), inputs())


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose calls went the long way, in order."""
    seen: list[nn.Module] = []
    recorded = modules._recorded

    def counted(call: modules.ModuleCall) -> Any:
        seen.append(call.module)
        return recorded(call)

    monkeypatch.setattr(modules, "_recorded", counted)
    return seen


def test_the_second_minibatch_looks_at_no_module(looked_at: list[nn.Module], recorded_by: str) -> None:
    if recorded_by == "python":
        pytest.skip("the table of calls is in C")
    model = Model()
    agree(model, inputs())
    assert len(looked_at) >= 3
    looked_at.clear()
    agree(model, inputs(5))
    assert [type(m).__name__ for m in looked_at] in (
        [],
        ["Dropout"] * 5,
    )  # what gives its input is never settled


CHANGES_OF_MODELS: dict[str, Callable[[Model], object]] = {
    "training": lambda m: m.layer.train(False),
    "weights replaced": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(3, 3))),
    "weights of a layer replaced": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.randn(3, 3))),
    "numbers of a parameter": lambda m: setattr(m.weight, "data", torch.randn(3, 3)),
    "a layer replaced": lambda m: setattr(m, "layer", nn.Linear(3, 3)),
    "a layer without bias": lambda m: setattr(m.layer, "bias", None),
    "a layer of another kind": lambda m: setattr(m, "norm", nn.Sequential(nn.Linear(3, 3), nn.Tanh())),
    "a hook": lambda m: m.layer.register_forward_hook(lambda mod, args, out: out * 2),
    "frozen": lambda m: m.layer.requires_grad_(False),
    "tied": lambda m: setattr(m, "weight", m.layer.weight),
    "parameter of a function, other shape": lambda m: setattr(m.weight, "data", torch.randn(1, 3)),
}


@pytest.mark.parametrize("change", CHANGES_OF_MODELS)
def test_results_follow_changes_between_minibatches(change: str, recorded_by: str) -> None:
    model = Model()
    for _ in range(2):
        agree(model, inputs())
    CHANGES_OF_MODELS[change](model)
    for _ in range(2):
        batched, expected = batched_and_one_by_one(model, inputs())
        torch.testing.assert_close(batched, expected)


def test_a_module_outside_the_tree_is_watched_too(recorded_by: str) -> None:
    outside = nn.Linear(3, 3)

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = outside  # in the tree at first

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outside(x[:3])

    model, xs = Uses(), inputs()
    for _ in range(2):
        agree(model, xs)
    del model.own
    for _ in range(2):
        torch.testing.assert_close(model(xs), torch.stack([outside(x[:3]) for x in xs]))
    outside.register_forward_hook(lambda mod, args, out: out + 1)
    torch.testing.assert_close(model(xs), torch.stack([outside(x[:3]) for x in xs]))


def test_a_parameter_of_no_module_may_change_its_shape(recorded_by: str) -> None:
    loose = nn.Parameter(torch.randn(2, 3))

    @fxbatch.autobatch
    def score(x: torch.Tensor) -> torch.Tensor:
        return F.linear(value(x)[:3], loose).sum()

    xs = inputs()
    for rows in (2, 2, 4, 4):
        loose.data = torch.randn(rows, 3)
        torch.testing.assert_close(score(xs), torch.stack([(loose @ x[:3]).sum() for x in xs]))


def test_a_change_while_recording_is_not_handed_on(looked_at: list[nn.Module], recorded_by: str) -> None:
    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.drop.train(False)
            return self.drop(self.layer(x[:3])) * 2

    model = Switches()
    for _ in range(3):
        model.train()
        agree(model, inputs())
        looked_at.clear()
    agree(model, inputs())
    assert looked_at


def test_modes_of_torch_are_told_apart_across_minibatches(recorded_by: str) -> None:
    model, xs = Model(), inputs()
    for _ in range(2):
        agree(model, xs)
        with torch.no_grad():
            plain = model(xs)
        assert not plain.requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(xs)
            with fxbatch.disabled():
                torch.testing.assert_close(
                    half, model(xs), rtol=2**-5, atol=2**-5
                )  # of bfloat16: 2**-8 a step


def test_columns_are_those_of_the_snapshot_while_another_thread_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a snapshot and its columns another thread may ask for both: it was given older columns."""
    table, seen = SignatureTable(100), []

    def meanwhile(*args: Any) -> ir.SignatureColumns:
        asked.append(None)
        if len(asked) == 1:
            seen.append(table.snapshot_and_columns())
        return ir.signature_columns(*args)

    asked: list[None] = []

    table.constant(ir.TensorSpec((2,), torch.float32, torch.device("cpu")))
    monkeypatch.setattr(table_module, "signature_columns", meanwhile)
    found = table.snapshot_and_columns()
    for signatures, columns in (found, seen[0]):
        assert len(signatures) == len(columns.width) == 1
