"""What is known of passes that had nothing to do holds the columns of a table, and is counted in bytes."""

from __future__ import annotations

import torch
from torch import nn

import fxbatch
from fxbatch import caches


def test_columns_that_are_held_count_by_their_signatures() -> None:
    """A router by numbers that each instance has of its own, whose table grows with each minibatch."""
    torch.manual_seed(0)
    layer, parts = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.bincount(layer(x).argmax(1), minlength=3).tolist()
        rows = [part(rows) for part, rows in zip(m, torch.split(x, sizes), strict=False)]
        return torch.cat(rows).sum()

    before = set(caches._live["idle passes"])
    batched = fxbatch.autobatch(adaptive=False)(forward)
    with torch.no_grad():
        for n in range(4, 10):
            xs = [torch.randn(n + k, 6) for k in range(3)]
            torch.testing.assert_close(batched(parts, xs), torch.stack([forward(parts, x) for x in xs]))
    mine = [cache for cache in set(caches._live["idle passes"]) - before if len(cache)]
    assert mine
    for cache in mine:
        assert cache.size == sum(columns.bytes for columns, _ in cache) >= 128 * len(cache)
