"""What an operation raises when it runs is caught by the forward in the loop, which runs by default; what torch does
not count (`.data`) is not done twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxbatch
from fxbatch import autobatch

pytestmark = pytest.mark.usefixtures("as_users_have_it")


class Words(nn.Module):
    """A word that is not in the table has a vector of its own."""

    def __init__(self, look_up: Callable[[nn.Embedding, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.table, self.unknown, self.out = nn.Embedding(5, 4), nn.Parameter(torch.zeros(4)), nn.Linear(4, 3)
        self.look_up = look_up

    def forward(self, word: Tensor) -> Tensor:
        """One instance."""
        try:
            vector = self.table(word) if self.look_up is None else self.look_up(self.table, word)
        except (IndexError, RuntimeError):
            vector = self.unknown
        return self.out(vector).sum()


LOOK_UPS = {
    "module": None,
    "function": lambda table, word: F.embedding(word, table.weight),
    "index": lambda table, word: table.weight[word],
    "index_select": lambda table, word: table.weight.index_select(0, word[None])[0],
    "loss": lambda table, word: (
        F.nll_loss(table.weight[0][None].log_softmax(1), word[None]) * table.weight[1]
    ),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_the_forward_catches_it(name: str) -> None:
    torch.manual_seed(0)
    look_up: Any = LOOK_UPS[name]
    model, good = Words(look_up), [torch.tensor(k % 4) for k in range(6)]
    words = [torch.tensor(k) for k in (0, 1, 7, 2, 3, 3)]
    batched = autobatch(Words.forward)
    for data in (good, good, words, words, good):
        torch.testing.assert_close(batched(model, data), torch.stack([model(w) for w in data]))


def test_one_that_nobody_catches_is_the_loops_and_changes_nothing() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, word: Tensor) -> Tensor:
            return self.out(self.table(word)).sum()

    model, good = Plain(), [torch.tensor(k % 4) for k in range(6)]
    batched = autobatch(Plain.forward)
    for _ in range(3):
        batched(model, good)
    with pytest.raises(IndexError):
        batched(model, [*good[:3], torch.tensor(7), *good[3:]])
    engine = model.__dict__["_fxbatch_engines"][batched.__fxbatch__]
    assert not engine.refusals.reason(training=True)
    torch.testing.assert_close(batched(model, good), torch.stack([model(w) for w in good]))


def test_where_all_is_batched_it_is_raised() -> None:
    with pytest.raises(IndexError):
        autobatch(adaptive=False)(Words.forward)(Words(), [torch.tensor(k) for k in (0, 1, 7)])


class Deep(nn.Module):
    """Some layers, one of which may be given a look at what runs."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layer, self.look = nn.Linear(3, 3), look

    def forward(self, x: Tensor) -> Tensor:
        """One instance."""
        h = torch.tanh(self.layer(x))
        return Looking.apply(torch.tanh(self.layer(h)), self.look).sum()


class Looking(torch.autograd.Function):
    """Runs call by call, and calls a function of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        look()
        return torch.from_numpy(x.detach().numpy().copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_the_end_of_a_checkpoint_is_none() -> None:
    torch.manual_seed(0)
    model, xs = Deep(), torch.randn(32, 3)
    batched = autobatch(Deep.forward)
    torch.stack([model(x) for x in xs]).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for _ in range(4):
        model.zero_grad()
        checkpoint(lambda x: batched(model, x), xs, use_reentrant=False).sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    engine = model.__dict__["_fxbatch_engines"][batched.__fxbatch__]
    assert not engine.refusals.reason(training=True)


def test_what_a_handler_of_signals_raises_is_none() -> None:
    """As a limit of time does: the loop would go on."""

    class Late(Exception):
        pass

    calls: list[int] = []

    def look() -> None:
        calls.append(len(calls))
        if calls[-1] == 80:
            raise Late

    model, xs = Deep(look), torch.randn(16, 3)
    batched = autobatch(Deep.forward)
    with pytest.raises(Late):
        for _ in range(12):
            batched(model, xs)
    assert len(calls) == 81


class Averages(nn.Module):
    """Running averages through `.data`, as vector quantisers keep them, and a value that is written to a buffer."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.layer, self.way, self.plain = nn.Linear(4, 3), way, torch.ones(3)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """One instance."""
        h = self.layer(x)
        held = (self.count, self.plain, self.weight)[self.way % 3]
        held.data.mul_(0.9)
        if self.way < 3:
            held.data.add_(h.detach() * 0.1)
        elif h.sum() > 0:
            h = h * 2
        return h.sum()


@pytest.mark.parametrize("way", range(6))
def test_what_is_written_through_data_is_written_once(way: int) -> None:
    torch.manual_seed(0)
    model, xs = Averages(way), list(torch.randn(8, 4))
    other, batched = copy.deepcopy(model), autobatch(Averages.forward)
    for _ in range(3):
        torch.testing.assert_close(batched(other, xs), torch.stack([model(x) for x in xs]))
        for a, b in zip(
            (model.count, model.plain, model.weight), (other.count, other.plain, other.weight), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("view", ["expand", "row", "view"])
def test_a_gradient_of_a_view_of_a_parameter(view: str) -> None:
    """Deep set prediction: the loop runs, and always batched it is an error that says so."""

    class Descent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.start = nn.Linear(4, 4), nn.Parameter(torch.rand(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            views = {"expand": self.start.expand(2, 4), "row": self.start[0], "view": self.start.view(4)}
            now = views[view]
            error = (self.layer(now) - x).square().mean()
            (slope,) = torch.autograd.grad(error, [now], create_graph=True)
            return (now - slope).sum()

    torch.manual_seed(0)
    model, xs = Descent(), torch.randn(6, 4)
    batched = autobatch(Descent.forward)
    for _ in range(3):
        torch.testing.assert_close(batched(model, xs), torch.stack([model(x) for x in xs]))
    with pytest.raises(fxbatch.TraceError, match=r"torch\.autograd\.grad inside"):
        autobatch(adaptive=False)(Descent.forward)(model, xs)
