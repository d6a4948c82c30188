"""Hard cases met in whole models: what strangers' models do that small cases don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests.oracle import check_equal


class Complex(nn.Module):
    def __init__(self, filtered: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.filtered = filtered

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.filtered(torch.fft.rfft(self.linear(x)), self.filter)).sum(-1)


FILTERS: dict[str, Callable[[Any, Any], Any]] = {
    "conjugate": lambda x, f: x * f.conj(),
    "part of a conjugate": lambda x, f: x[1:3] * f.conj()[2:4],
    "conjugate twice": lambda x, f: x * f.conj().conj(),
    "adjoint": lambda x, f: f[None].mH @ x[None],
    "transposed": lambda x, f: f[None].mT @ x[None],
    "negative": lambda x, f: x * torch._neg_view(f),
    "both": lambda x, f: x * torch._neg_view(f.conj()),
}


@pytest.mark.parametrize("name", FILTERS)
def test_views_of_parameters_that_conjugate(name: str) -> None:
    """`weight.conj()` shares the memory of `weight` and has its strides: only a bit tells them apart."""
    torch.manual_seed(0)
    check_equal(Complex(FILTERS[name]), torch.randn(5, 8))


class Machine(nn.Module):
    """A Turing machine's head: parts of one vector, of which some go unused, go through softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 12)
        self.write = nn.Linear(4, 6)
        self.memory = nn.Parameter(torch.randn(8, 6) * 0.1)

    @fxbatch.autobatch
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        memory, reads = self.memory, []
        for x in xs:
            key, _, _, shift, _ = self.head(x).split([6, 1, 1, 3, 1])
            weight = torch.softmax(memory @ key, 0)
            shift = torch.softmax(shift, 0)
            weight = shift[0] * weight.roll(-1) + shift[1] * weight + shift[2] * weight.roll(1)
            reads.append(weight @ memory)
            memory = memory + torch.outer(weight, self.write(x))
        return torch.stack(reads).sum(0)


@pytest.mark.parametrize("backward", ("compiled", "autograd"))
def test_a_machine_that_reads_and_writes(backward: str) -> None:
    torch.manual_seed(0)
    model = Machine()
    batch = [list(torch.randn(n, 4)) for n in (3, 3, 1, 2, 5, 3)]
    bound = fxbatch.autobatch(backward=backward)(Machine.forward.__fxbatch__.fn)
    check_equal(bound.__get__(model), batch, model64=bound.__get__(copy_in_double(model)))


def copy_in_double(model: Machine) -> Machine:
    made = Machine().double()
    made.load_state_dict(model.state_dict())
    return made


class Policy(nn.Module):
    """Scores of a distribution's outcomes: torch.distributions checks its arguments as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x)
        chosen = torch.distributions.Categorical(logits=scores).log_prob(action)
        noise = torch.distributions.Normal(scores[0], scores[1].exp()).log_prob(x[0])
        return chosen + noise


def test_distributions_are_batched() -> None:
    torch.manual_seed(0)
    model, x, actions = Policy(), torch.randn(6, 4), [torch.tensor(i % 3) for i in range(6)]
    check_equal(model, x, actions)
    assert not fxbatch.explain(model, x, actions).unbatched


@pytest.mark.parametrize("shape", ((), (3,), (0,)))
@pytest.mark.parametrize("asked", (torch._is_all_true, torch._is_any_true))
def test_truth_of_instances_is_their_own(asked: Any, shape: tuple[int, ...]) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return asked(self.linear(x)[: shape[0]] > 0 if shape else self.linear(x)[0] > 0)

    torch.manual_seed(0)
    check_equal(Asks(), torch.randn(8, 4))
