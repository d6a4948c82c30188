"""What a family of programs has in common is found once, and found anew where the model changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.decorator import find_autobatched
from fxbatch.runtime.engine import Engine
from tests import models as M
from tests.oracle import check_equal


def engine_of(made: nn.Module) -> Engine:
    auto, owner = find_autobatched(made)
    return auto.engine(owner)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signatures whose compiled operations are looked for."""
    names: list[str] = []
    found = Engine.compiled

    def counting(self: Engine, signature: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(signature.name)
        return found(self, signature, *args, **kwargs)

    monkeypatch.setattr(Engine, "compiled", counting)
    return names


def test_operations_are_looked_for_once_a_family(compiled: list[str]) -> None:
    made = M.TreeLSTM()
    for _ in range(
        2
    ):  # a family's programs have the same table of signatures, which grows in the first round
        made(M.trees(1, [15] * 8)).sum().backward()
        with torch.no_grad():
            made(M.trees(1, [15] * 8))
    assert compiled
    compiled.clear()
    for seed in range(2, 6):
        made(M.trees(seed, [17] * 7)).sum().backward()
        with torch.no_grad():
            made(M.trees(seed, [14] * 9))
    assert not compiled
    assert engine_of(made).structures.counts()["family"] == 3  # with gradients twice, and without


def freeze(made: nn.Module) -> None:
    next(made.parameters()).requires_grad_(False)


def thaw(made: nn.Module) -> None:
    next(made.parameters()).requires_grad_(True)


def replace(made: nn.Module) -> None:
    linear = next(m for m in made.modules() if isinstance(m, nn.Linear))
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))


def other_memory(made: nn.Module) -> None:
    for p in made.parameters():
        p.data = torch.randn_like(p)


def other_strides(made: nn.Module) -> None:
    linear = next(m for m in made.modules() if isinstance(m, nn.Linear))
    linear.weight.data = torch.randn_like(linear.weight).t().contiguous().t()


def step(made: nn.Module) -> None:
    made.zero_grad()
    made(M.trees(8, [4, 2])).sum().backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()


def load(made: nn.Module) -> None:
    made.load_state_dict({k: torch.randn_like(v) for k, v in made.state_dict().items()})


CHANGES: tuple[Callable[[nn.Module], object], ...] = (
    freeze, step, thaw, replace, other_memory, other_strides, load, nn.Module.double, nn.Module.float, step,
)  # fmt: skip


@pytest.mark.parametrize("native", [True, False])
def test_a_model_that_changes_between_calls(native: bool) -> None:
    made = M.with_options(M.TreeLSTM(), native=native)
    for k, change in enumerate(CHANGES):
        made.zero_grad()
        check_equal(made, M.trees(k, [6, 3]))
        with torch.no_grad():
            check_equal(made, M.trees(k, [5]), gradients=False)
        change(made)
    check_equal(made, M.trees(20, [6, 3]))


def test_parameters_that_move_between_planning_and_running() -> None:
    made, trees = M.TreeLSTM(), M.trees(3, [6, 2])
    traced = fxbatch.TracedDataset(made, trees)
    for ready in fxbatch.prefetch(made, [[traced[0], traced[1]]]):
        old = [p.data for p in made.parameters()]
        for p in made.parameters():
            p.data = torch.randn_like(p)
        for t in old:
            t.fill_(float("nan"))
        found = made(ready)
    with fxbatch.disabled():
        torch.testing.assert_close(found, made(trees))


class Program(nn.Module):
    """A state machine: what runs next is asked of the state, so phases call other layers each time."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.register_buffer("scale", torch.ones(4))

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: torch.Tensor, steps: list[int]) -> torch.Tensor:
        for layer in steps:
            x = torch.tanh(self.layers[layer](x)) * self.scale
            if bool((x.sum() > 1e9).item()):
                break
        return x


def programs(seed: int) -> tuple[list[torch.Tensor], list[list[int]]]:
    torch.manual_seed(seed)
    return list(torch.randn(5, 4)), [torch.randint(6, (n,)).tolist() for n in (2, 3, 4, 5, 6)]


def test_phases_that_call_other_operations_have_one_set_of_them() -> None:
    made = Program()
    for seed in range(8):
        made(*programs(seed)).sum().backward()
    structures = engine_of(made).structures
    before, families = structures.misses["operations"], structures.misses["family"]
    for seed in range(8, 14):
        made(*programs(seed)).sum().backward()
    assert structures.misses["family"] > families  # phases of other signatures came
    assert structures.misses["operations"] == before
    check_equal(made, *programs(20))


def test_a_layer_that_no_phase_calls_may_go() -> None:
    """Operations of one set may be of modules that this minibatch does not have any more."""
    made = Program()
    for seed in range(6):
        made(*programs(seed)).sum().backward()
    del made.layers[5]
    x, steps = programs(30)
    check_equal(made, x, [[s % 5 for s in each] for each in steps])
