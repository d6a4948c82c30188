"""Modules that meet nothing but buffers, as in `embed(self.unknown)`, run as they are: as in the loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxbatch
from tests.oracle import check_equal


class Words(nn.Module):
    """Sums rows of a table; every second word is hidden behind an id that is a buffer."""

    unknown: Tensor

    def __init__(self, *, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, max_norm=max_norm)
        self.register_buffer("unknown", torch.tensor(0), persistent=False)

    @fxbatch.autobatch
    def forward(self, words: list[Tensor]) -> Tensor:
        rows = [self.table(self.unknown if i % 2 else word) for i, word in enumerate(words)]
        return torch.stack(rows).tanh().sum()


class Counting(Words):
    """Advances its buffer between two look-ups."""

    @fxbatch.autobatch
    def forward(self, words: list[Tensor]) -> Tensor:
        self.unknown.fill_(len(words))
        first = self.table(self.unknown)
        self.unknown.add_(1)
        return (first * self.table(self.unknown) * self.table(words[0])).sum()


def sentences() -> list[list[Tensor]]:
    return [[torch.tensor((3 * n + i) % 11) for i in range(n + 2)] for n in range(4)]


def test_values_and_gradients() -> None:
    check_equal(Words(), sentences())


def test_a_buffer_that_changes_is_read_as_it_was() -> None:
    model = Counting()
    with fxbatch.disabled():
        expected = model(sentences())
    assert torch.allclose(model(sentences()), expected)


def test_a_table_that_its_calls_change_runs_as_it_is() -> None:
    class Only(Words):
        @fxbatch.autobatch
        def forward(self, words: list[Tensor]) -> Tensor:
            found: Tensor = self.table(self.unknown)
            return found

    check_equal(Only(max_norm=0.5), sentences())
