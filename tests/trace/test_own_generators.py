"""Calls with a generator of the user's draw when they are made, in the order of the instance's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch

pytestmark = pytest.mark.usefixtures("as_users_have_it")


class Noise(nn.Module):
    """Draws in many ways, of one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """One instance."""
        g = torch.Generator().manual_seed(len(x))
        h = self.l(x)
        d = h.detach().clone()
        before, rows = d * 1, d[:1]
        d.exponential_(generator=g)
        drawn: list[Any] = [
            torch.bernoulli(before.sigmoid(), generator=g), torch.normal(before, 1.0, generator=g),
            torch.multinomial(h[0].softmax(0), 2, generator=g), torch.empty_like(h).uniform_(generator=g),
            before.clone().bernoulli_(0.3, generator=g), d.clone().log_normal_(generator=g), d, rows, before,
        ]  # fmt: skip
        total = torch.zeros(3)
        total += before.sum(0)
        total.geometric_(0.5, generator=g)
        return h.sum() + total.sum() + sum((x * 1.5).sum() for x in drawn)


@pytest.mark.parametrize("adaptive", [True, False])
def test_draws_are_the_loops(adaptive: bool) -> None:
    torch.manual_seed(0)
    model, plain = Noise(), Noise()
    plain.load_state_dict(model.state_dict())
    batched = fxbatch.autobatch(adaptive=adaptive)(Noise.forward)
    for _ in range(4):
        xs = [torch.randn(n, 3) for n in (2, 3, 1, 2)]
        found, expected = batched(model, xs), torch.stack([plain(x) for x in xs])
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(model.l.weight.grad, plain.l.weight.grad)


def seeded(m: Noise, x: Tensor) -> Tensor:
    torch.manual_seed(len(x))
    h = m.l(x)
    return (torch.randn_like(h) * h).sum()


def seeded_apart(m: Noise, x: Tensor) -> Tensor:
    h = m.l(x)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        h = nn.functional.dropout(h, 0.5, training=True)
    return h.sum()


def seeded_for_real_tensors(m: Noise, x: Tensor) -> Tensor:
    torch.manual_seed(2)
    return (m.l(x) * torch.randn(3)).sum()


@pytest.mark.parametrize(
    "code", [seeded, seeded_apart, seeded_for_real_tensors], ids=lambda code: code.__name__
)
def test_a_forward_that_seeds_the_generator(code: Any) -> None:
    model = Noise()
    batched, always = fxbatch.autobatch(code), fxbatch.autobatch(adaptive=False)(code)
    for _ in range(4):
        xs = [torch.randn(n, 3) for n in (2, 3, 1, 2)]
        expected = torch.stack([code(model, x) for x in xs])
        torch.testing.assert_close(batched(model, xs), expected)
        if code is seeded_for_real_tensors:
            torch.testing.assert_close(always(model, xs), expected)
            continue
        with pytest.raises(fxbatch.TraceError, match=r"seeds torch's generator.*test_own_generators.py:\d+"):
            always(model, xs)


@pytest.mark.parametrize("write", ["apply_", "map_", "map2_"])
def test_functions_of_numbers_are_refused(write: str) -> None:
    arguments: dict[str, Any] = {
        "apply_": lambda x: (lambda v: v * 2,),
        "map_": lambda x: (x, lambda a, b: a + b),
        "map2_": lambda x: (x, x, lambda a, b, c: a + b + c),
    }

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m(x).detach()
        getattr(h, write)(*arguments[write](x))
        return h.sum()

    layer, xs = nn.Linear(3, 3), [torch.randn(n, 3) for n in (2, 3, 1)]
    with pytest.raises(fxbatch.InPlaceError, match=r"apply_.*test_own_generators.py:\d+"):
        fxbatch.autobatch(adaptive=False)(forward)(layer, xs)


def test_a_write_to_what_requires_a_gradient_that_draws_is_refused() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).exponential_(generator=torch.Generator()).sum()

    layer, xs = nn.Linear(3, 3), [torch.randn(n, 3) for n in (2, 3, 1)]
    with pytest.raises(
        fxbatch.TraceError, match=r"exponential_ .* generator of its own.*test_own_generators.py:\d+"
    ):
        fxbatch.autobatch(adaptive=False)(forward)(layer, xs)
