"""Parts of packed values by numbers that differ in each call: spans of a sentence, one position of its table. All calls
of one form are one family, whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from tests.oracle import check_equal
from tests.ragged.test_packed_calls import families

Spans = list[tuple[int, int]]
READS: dict[str, tuple[Callable[[Tensor, int, int], Tensor], int]] = {  # and how many families read
    "from, to": (lambda h, a, b: h[a:b], 1),
    "from": (lambda h, a, b: h[a:], 1),
    "to": (lambda h, a, b: h[:b], 1),
    "beyond the end": (lambda h, a, b: h[a : b + 3], 1),
    "of some columns": (lambda h, a, b: h[a:b, 1:4], 1),
    "every second": (lambda h, a, b: h[a::2], 1),
    "in a batch of one": (lambda h, a, b: h.unsqueeze(0)[:, a, :], 1),
    "from the end": (lambda h, a, b: h[-2:] * (b - a), 1),
    "with a new dimension": (lambda h, a, b: h[None, a:b], 1),
}


class Tagger(nn.Module):
    def __init__(self, read: Callable[[Tensor, int, int], Tensor]) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(4, 6), read

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Tensor, spans: Spans) -> Tensor:
        h = torch.tanh(self.inner(x))
        total = h.sum()
        for a, b in spans:
            total = total + (self.read(h, a, b) ** 2).mean()
        return total


def sentences(seed: int, count: int = 12) -> tuple[list[Tensor], list[Spans]]:
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most, (), generator=generator))

    xs, spans = [], []
    for n in (number(4, 15) for _ in range(count)):
        xs.append(torch.randn(n, 4, generator=generator))
        starts = [number(0, n) for _ in range(number(1, 5))]
        spans.append([(a, number(a + 1, n + 1)) for a in starts])
    return xs, spans


def reading(model: nn.Module) -> list[object]:
    """The functions of the families that read parts."""
    return [f for f in families(model) if f.function is not None and "getitem" in str(f.signature)]


@pytest.mark.parametrize("name", READS)
def test_values_gradients_and_one_family(name: str) -> None:
    read, count = READS[name]
    torch.manual_seed(0)
    model = Tagger(read)
    for seed in range(3):
        check_equal(model, *sentences(seed))
    assert len(reading(model)) == count
    assert not any(f.reason for f in families(model))


def test_slices_of_what_is_as_long_in_all_are_views_with_their_numbers() -> None:
    """Gates of a cell: their sizes are no instance's own."""
    torch.manual_seed(0)
    model = Tagger(lambda h, a, b: h[:, 0:3] * h[:, 3:6])
    for seed in range(2):
        check_equal(model, *sentences(seed))
    assert [f.places for f in families(model) if "getitem" in str(f.signature)] == [(), ()]


def test_steps_do_not_grow_with_the_numbers_that_are_met() -> None:
    torch.manual_seed(0)
    model = Tagger(READS["from, to"][0])
    model(*sentences(0))
    steps = []
    for seed in (1, 2):
        before = sum(f.steps for f in families(model))
        model(*sentences(seed, 12 * seed))
        steps.append(sum(f.steps for f in families(model)) - before)
    assert steps[1] <= steps[0] <= 7  # of twice as many sentences


@pytest.mark.parametrize("span", [(3, 1), (2, 2), (5, 9), (0, 0), (-2, 2), (1, -1), (100, 200)])
def test_spans_that_are_empty_or_reach_beyond(span: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Tagger(lambda h, a, b: h[a:b].sum(0))
    xs, spans = sentences(0)
    model(xs, spans)
    check_equal(model, xs, [[*mine, span] for mine in spans])


@pytest.mark.parametrize("place", [20, -20])
def test_a_place_beyond_the_end_is_the_users_error(place: int) -> None:
    torch.manual_seed(0)
    model = Tagger(READS["in a batch of one"][0])
    xs, spans = sentences(0)
    model(xs, spans)
    spans[3] = [(place, place + 1)]
    with pytest.raises(IndexError, match=f"index {place} is out of bounds for dimension 1"):
        model(xs, spans)
