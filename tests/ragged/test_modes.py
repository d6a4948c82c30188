"""Packed forwards in autocast, and with arguments that are given once for all instances: as the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from tests.oracle import check_equal, compare_in_autocast, run
from tests.ragged.own_size_models import CASES
from tests.ragged.test_packed_forward import variants_of
from tests.trust.programs import model

# Layers that torch computes in bfloat16, and such that it computes in float32.
IN_AUTOCAST = [
    "DETR", "relative bias", "GIN", "GRU then attention", "statistics pooling", "weighted loss", "NetVLAD",
    "kernel matrix",
]  # fmt: skip


@pytest.mark.parametrize("name", IN_AUTOCAST)
def test_autocast(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    made = model(case.forward, case.parts(), adaptive=False, out="list")
    for sizes in case.sizes[:2]:
        batch = [case.make(t) for t in sizes]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = run(made, [batch])
            with fxbatch.disabled():
                theirs = run(made, [batch])
        compare_in_autocast(ours, theirs, torch.bfloat16)
    assert sum(v.calls for v in variants_of(made)) >= 2
    if name == "GIN":
        check_equal(made, [case.make(t) for t in case.sizes[0]])  # without autocast another graph
        assert len(variants_of(made)) >= 2


@pytest.mark.parametrize("name", IN_AUTOCAST)
@pytest.mark.parametrize("data_made_within", [True, False])
def test_inference_mode(name: str, data_made_within: bool) -> None:
    """Packed as under no_grad; what was built there serves calls under no_grad and in training."""
    case = CASES[name]
    torch.manual_seed(0)
    made = model(case.forward, case.parts(), adaptive=False, out="list")
    sizes = case.sizes[0]
    batch = [case.make(t) for t in sizes]
    with torch.inference_mode():
        inside = [case.make(t) for t in sizes] if data_made_within else batch
        ours = made(inside)
        with fxbatch.disabled():
            theirs = made(inside)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (variant,) = variants_of(made)
    with torch.no_grad():
        made(batch)
    assert variant.calls == 2 and variants_of(made) == [variant]
    check_equal(made, batch)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    @fxbatch.autobatch(adaptive=False, shared=("memory", "scale"))
    def forward(self, x: torch.Tensor, memory: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = self.l(x)
        weight = F.softmax(h @ memory.t() * scale, -1)
        return self.out((h + weight @ memory).mean(0))


def test_arguments_given_once() -> None:
    made = Shared()
    for size in (5, 7):
        memory = torch.randn(size, 8, requires_grad=True)
        for sizes in ((4, 7, 2, 5), (3, 1, 6)):
            check_equal(made, [torch.randn(t, 8) for t in sizes], memory)
            check_equal(made, [torch.randn(t, 8) for t in sizes], memory, 2.0)
    variants = variants_of(made)
    assert len(variants) == 4 and all(v.function.lowered.layouts["arg1_1"] == "whole" for v in variants)


def test_one_instance_with_arguments_given_once() -> None:
    made, memory = Shared(), torch.randn(5, 8)
    check_equal(made, [torch.randn(t, 8) for t in (4, 7)], memory)
    check_equal(made, [torch.randn(3, 8)], memory)


def test_a_tensor_of_all_instances_that_is_not_declared() -> None:
    """Each instance brings it, as far as packing knows."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 3)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.out(x.sum(0) + y.mean(0))

    made, y = Both(), torch.randn(6, 8, requires_grad=True)
    check_equal(made, [torch.randn(t, 8) for t in (4, 7, 2)], [y, y, y])
    function: Callable[..., Any] = variants_of(made)[0].function
    assert function is not None


class Switching(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code, self.l, self.k = code, nn.Linear(8, 8), nn.Linear(8, 8)

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: torch.Tensor) -> Any:
        return self.code(self, x)


def casting(m: Switching, x: torch.Tensor) -> Any:
    """Inside of the forward."""
    h = m.l(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = m.l(x) @ h.t()
        with torch.autocast("cpu", enabled=False):
            weights = scores.float().softmax(-1)
        found = weights @ h
    return found.float().mean(0), scores, m.l(x)


def target(m: Switching, x: torch.Tensor) -> Any:
    """What is computed without gradients, and once more with them."""
    with torch.no_grad():
        wanted = m.l(x)
        means = m.k(x)
    return m.l(x) * wanted, wanted, means.mean(0), m.k(x).mean(0)


def weighing(m: Switching, x: torch.Tensor) -> Any:
    """A product without gradients, whose sum is taken with them."""
    h = m.l(x)
    with torch.no_grad():
        product = h[:, :1] * m.k(x)
    return product.sum(0) + h.sum(0)


@pytest.mark.parametrize("code", [casting, target, weighing])
def test_modes_inside_of_the_forward(code: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    made = Switching(code)
    for sizes in ((4, 7, 2, 5), (3, 1, 6)):
        batch = [torch.randn(n, 8) for n in sizes]
        ours = made(batch)
        assert not torch.is_autocast_enabled("cpu")
        with fxbatch.disabled():
            theirs = made(batch)
        flags = [[t.requires_grad for t in result] for result in theirs]
        assert [[t.requires_grad for t in result] for result in ours] == flags
        compare_in_autocast(run(made, [batch]), _loop(made, batch), torch.bfloat16)
    assert bool(variants_of(made)) == (code is not casting)  # which is recorded


def _loop(made: nn.Module, batch: list[torch.Tensor]) -> list[torch.Tensor | None]:
    with fxbatch.disabled():
        return run(made, [batch])


def test_a_write_without_gradients_is_not_packed_as_one_with_them() -> None:
    def clamped(m: Switching, x: torch.Tensor) -> torch.Tensor:
        h = m.l(F.dropout(x, 1e-9))  # what draws numbers is not compared when it is built
        with torch.no_grad():
            h.clamp_(-0.1, 0.1)
        return m.k(h)

    made = Switching(clamped)
    check_equal(made, [torch.randn(n, 8) for n in (4, 7, 5)])
