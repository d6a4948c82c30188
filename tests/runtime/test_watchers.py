"""Who watches torch sees what runs: profilers a range a step, dispatch modes the loop."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch


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


@pytest.mark.parametrize("method", ["forward", "waiting"])
def test_flops_are_the_loops(method: str, trees: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)

    class Other(Model):
        forward = fxbatch.autobatch()(getattr(Model, method))

    model = Other()
    model(trees)
    counts = []
    for context in (torch.enable_grad(), fxbatch.disabled()):
        with context, warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
            warnings.simplefilter("ignore", fxbatch.LoopWarning)
            model.zero_grad()
            model(trees).sum().backward()
        counts.append((counter.get_flop_counts(), [p.grad.clone() for p in model.parameters()]))  # type: ignore[union-attr]
    assert counts[0][0] == counts[1][0]
    torch.testing.assert_close(counts[0][1], counts[1][1])


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_is_an_error_where_all_is_to_be_batched(trees: list[Any]) -> None:
    class Other(Model):
        forward = fxbatch.autobatch(adaptive=False)(Model.forward)

    model = Other()
    expected = model(trees)
    traces = [fxbatch.trace(model, tree) for tree in trees]
    with Seen() as seen:
        for given in (trees, traces):
            with pytest.raises(fxbatch.TraceError, match="a torch dispatch mode"):
                model(given)
    assert not seen.calls
    assert torch.equal(model(traces), expected)


def test_a_dispatch_mode_sees_the_batched_kernels_of_a_backward_pass(trees: list[Any]) -> None:
    model = Model()
    model(trees).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    loss = model(trees).sum()
    with Seen() as seen:
        loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
    assert 0 < seen.calls["mm"] + seen.calls["addmm"] <= 10


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
