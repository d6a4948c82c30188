"""Who watches torch sees what runs: profilers a range a step, FlopCounterMode flops, dispatch modes the kernels."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxbatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(8, 4), nn.Linear(4, 2)

    def encode(self, tree: Any) -> Tensor:
        return (
            torch.tanh(self.cell(torch.cat([self.encode(t) for t in tree])))
            if isinstance(tree, tuple)
            else tree
        )

    @fxbatch.autobatch
    def forward(self, tree: Any) -> Tensor:
        return self.out(self.encode(tree)).square().sum()

    @fxbatch.autobatch
    def waiting(self, tree: Any) -> Tensor:
        h = self.encode(tree)
        return self.out(h if h.sum() > 0 else -h).square().sum()


@pytest.fixture(scope="module")
def trees() -> list[Any]:
    a, b, c = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    return [(a, b), ((a, b), c), (c, (b, (a, c)))]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("method", ["forward", "waiting"])
def test_flops_are_counted(method: str, native: bool, trees: list[Any]) -> None:
    class Other(Model):
        forward = fxbatch.autobatch(native=native, deduplicate=False)(getattr(Model, method))

    model = Other()
    counts = []
    for context in (torch.enable_grad(), torch.enable_grad(), fxbatch.disabled()):
        with context, FlopCounterMode(display=False) as counter:
            model.zero_grad()
            model(trees).sum().backward()
        counts.append((counter.get_total_flops(), [p.grad.clone() for p in model.parameters()]))  # type: ignore[union-attr]
    forward = (
        2 * 8 * 4 * 6 + 2 * 4 * 2 * 3
    )  # six calls of cell, three of out; backward has two products for each
    assert (
        counts[0][0] == counts[1][0] == 3 * forward
    )  # the counter knows no products of vectors: not the loop's
    torch.testing.assert_close(counts[0][1], counts[2][1])
    torch.testing.assert_close(counts[1][1], counts[2][1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(trees)
    assert counter.get_total_flops() == forward


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_batched_kernels_and_stays(trees: list[Any]) -> None:
    model = Model()
    expected = model(trees)  # its graphs are built
    with Seen() as seen, torch.no_grad():
        torch.testing.assert_close(model(trees), expected)
        before = seen.calls["neg"]
        torch.neg(expected)
        assert seen.calls["neg"] == before + 1
    products = seen.calls["mm"] + seen.calls["addmm"] + seen.calls["bmm"]
    launches = [row.launches for row in fxbatch.explain(model, trees).operations if row.operation == "out"]
    assert 0 < products <= 5
    assert launches == [1]


@pytest.mark.parametrize("native", [True, False])
def test_a_profiler_sees_a_range_a_step(native: bool, trees: list[Any]) -> None:
    class Other(Model):
        forward = fxbatch.autobatch(native=native, fuse=False)(Model.forward)

    model = Other()
    expected = model(trees)
    expected.sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        found = model(trees)
        found.sum().backward()
    assert torch.equal(found, expected)
    names = [event.key for event in profiler.key_averages()]
    for wanted in ("out x3 forward", "out x3 backward", "out x3 parameter gradients", "cell x3 forward"):
        assert wanted in names, names
