"""What no result depends on has no gradient, None and not zeros, as in the loop: an optimizer with momentum or decay
would move it. What is computed without gradients requires none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests.tools.target_model import Item


class Two(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code, self.used, self.other = code, nn.Linear(4, 4), nn.Linear(4, 4)

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: Any) -> Any:
        return self.code(self, x)


def unread_rows(m: Two, item: Item) -> Any:
    assert len(list(m.other(item.rows))) == len(item.rows)
    return torch.tanh(m.used(item.rows)[0])


def asked_rows(m: Two, item: Item) -> Any:
    y = m.used(item.rows)
    return y[0] if m.other(item.rows)[0].sum().item() > 0 else y[-1]


def masking_rows(m: Two, item: Item) -> Any:
    return torch.tanh(m.used(item.rows)[0]) * (m.other(item.rows)[0] > 0).float()


def masking(m: Two, item: Item) -> Any:
    x = item.rows[0]
    return torch.tanh(m.used(x)) * (m.other(x) > 0).float()


@pytest.mark.parametrize("code", [unread_rows, asked_rows, masking_rows, masking])
def test_parameters(code: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    made = Two(code)
    for sizes in ((3, 5, 2, 4), (6, 1, 7)):
        made.zero_grad()
        torch.stack(made([Item(torch.randn(n, 4)) for n in sizes])).sum().backward()
        assert {n for n, p in made.named_parameters() if p.grad is not None} == {"used.weight", "used.bias"}


def test_inputs() -> None:
    def asking(m: Two, pair: Any) -> torch.Tensor:
        a, b = pair
        return torch.tanh(m.used(b)) if torch.tanh(m.used(a)).sum().item() > 0 else torch.tanh(m.used(a))

    torch.manual_seed(0)
    made = Two(asking)
    pairs = [tuple(torch.randn(4, requires_grad=True) for _ in range(2)) for _ in range(8)]
    flags = []
    for disabled in (False, True):
        with fxbatch.disabled() if disabled else torch.enable_grad():
            torch.stack(made(pairs)).sum().backward()
        flags.append([x.grad is None for pair in pairs for x in pair])
        for x in (x for pair in pairs for x in pair):
            x.grad = None
    assert flags[0] == flags[1] and len(set(flags[1][::2])) == 2


def test_packed_results_that_were_computed_without_gradients_require_none() -> None:
    def target(m: Two, item: Item) -> Any:
        with torch.no_grad():
            wanted = m.other(item.rows).sigmoid()
        return m.used(item.rows) * wanted, wanted

    made = Two(target)
    for _ in range(2):
        found = made([Item(torch.randn(n, 4)) for n in (3, 5, 2, 4)])
        assert all(a.requires_grad and not b.requires_grad for a, b in found)


class First(torch.autograd.Function):
    """2x; its backward gives y no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y * 0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2, None


class Counting(First):
    """The same, of code that is not plain: it runs call by call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return x * 2 + y * 0


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(First.apply(self.linear(x), y))


class Pair(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code, self.used, self.other = code, nn.Linear(4, 4), nn.Linear(4, 4)
        self.within = Within()

    def forward(self, x: Any, y: Any) -> Any:
        return self.code(self, x, y)


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x, y: First.apply(m.used(x), m.other(y)),
        lambda m, x, y: First.apply(m.used(x), y),
        lambda m, x, y: First.apply(y, m.used(x)),
        lambda m, x, y: First.apply(m.used(x), y * 3),
        lambda m, x, y: First.apply(m.used(x), m.other.weight[0]) + 0 * y,
        lambda m, x, y: torch.tanh(First.apply(torch.tanh(m.used(x)), torch.sigmoid(m.other(y)))),
        lambda m, x, y: First.apply(First.apply(m.used(x), y), m.other(x)) + First.apply(m.other(y), x),
        lambda m, x, y: Counting.apply(m.used(x), m.other(y)),
        lambda m, x, y: Counting.apply(y, m.used(x)),
        lambda m, x, y: m.within(m.used(x), m.other(y)),
    ],
    ids=[
        "both computed", "one given", "the other computed", "a product", "a parameter", "fused", "twice",
        "call by call", "call by call, one given", "in a module",
    ],
)  # fmt: skip
def test_a_backward_that_returns_none(code: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Pair(code)
    xs, ys = ([torch.randn(4, requires_grad=True) for _ in range(5)] for _ in range(2))

    def gradients(results: list[torch.Tensor]) -> list[torch.Tensor | None]:
        leaves = [*xs, *ys, *model.parameters()]
        return list(torch.autograd.grad(torch.stack(results).sum(), leaves, allow_unused=True))

    expected = gradients([model(x, y) for x, y in zip(xs, ys, strict=True)])
    batched = fxbatch.autobatch(model.forward, adaptive=False, out="list")
    for _ in range(2):
        found = gradients(batched(xs, ys))
        assert [g is None for g in found] == [g is None for g in expected]
        torch.testing.assert_close(
            [g for g in found if g is not None], [g for g in expected if g is not None]
        )


@pytest.mark.parametrize("options", [{}, {"backward": "autograd"}, {"mode": "unrolled"}])
def test_an_instance_that_the_loss_leaves_out(options: dict[str, Any]) -> None:
    """It has no gradient, and zeros where torch's autograd goes through each step."""
    torch.manual_seed(0)
    xs = [torch.randn(4, requires_grad=True) for _ in range(3)]
    forward = Pair(lambda m, x, y: torch.tanh(m.used(x))).forward
    results = fxbatch.autobatch(forward, adaptive=False, out="list", **options)(xs, xs)
    first, second, _ = torch.autograd.grad(results[0].sum(), xs, allow_unused=True)
    assert first.any() and (second is None if not options else not second.any())


class Accumulator(nn.Module):
    """Writes to a tensor that it has made: before what reads it has run, or with what is recorded."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.late = nn.Linear(4, 4), late

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4)
        y = self.out(x) + total
        if self.late:
            total.fill_(1.0)
            return y
        total += y
        out.copy_(total)
        return total


def test_writes_are_seen_in_inference_mode() -> None:
    """A tensor that is made there has no version: a write behind a call that had not run changed what it read."""
    given, outs, model = (
        [torch.randn(4) for _ in range(5)],
        [torch.empty(4) for _ in range(5)],
        Accumulator(late=False),
    )
    with torch.inference_mode():
        found = model(given, outs)
        for x, y, out in zip(given, found, outs, strict=True):
            torch.testing.assert_close(y, Accumulator.forward.__wrapped__(model, x, torch.empty(4)))
            torch.testing.assert_close(out, y)
        assert found.is_inference() and not any(out.is_inference() for out in outs)
        with pytest.raises(fxbatch.InPlaceError, match="was written to after an operation had used it"):
            Accumulator(late=True)(given, outs)
