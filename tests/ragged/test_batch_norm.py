"""BatchNorm over the rows of a minibatch: equal to one call on all rows; refused without the option."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import BatchCoupledError


class Gin(nn.Module):
    """A graph isomorphism network of one layer, with BatchNorm in its MLP, as it is usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def rows(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = x.index_add(0, edges[1], x[edges[0]])
        return self.second(torch.relu(self.norm(self.first(h))))

    @fxbatch.autobatch(batch_norm="minibatch")
    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.rows(x, edges).sum(0)


def graphs(*sizes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.randn(n, 6, dtype=torch.float64) for n in sizes], [
        torch.randint(n, (2, 2 * n)) for n in sizes
    ]


def test_rows_of_all_instances_are_one_batch() -> None:
    torch.manual_seed(0)
    model = Gin().double()
    other = copy.deepcopy(model)
    for sizes in ((3, 5, 2), (4, 1, 7, 3)):
        xs, edges = graphs(*sizes)
        found = model(xs, edges)
        starts = torch.tensor([0, *sizes]).cumsum(0)
        joined = torch.cat([e + s for e, s in zip(edges, starts, strict=False)], 1)
        rows = other.rows(torch.cat(xs), joined)
        expected = torch.stack([part.sum(0) for part in rows.split(list(sizes))])
        torch.testing.assert_close(found, expected)
        for m, result in ((model, found), (other, expected)):
            m.zero_grad()
            result.square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
        torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
    assert int(model.norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    model.eval()
    before = copy.deepcopy(dict(model.named_buffers()))
    xs, edges = graphs(3, 5)
    found = model(xs, edges)
    with fxbatch.disabled():
        torch.testing.assert_close(found, model(xs, edges))
    torch.testing.assert_close(before, dict(model.named_buffers()))


def test_refused_without_the_option() -> None:
    class Plain(Gin):
        @fxbatch.autobatch
        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.rows(x, edges).sum(0)

    with pytest.raises(BatchCoupledError, match="norm"):
        Plain().double()(*graphs(3, 5))


def test_refused_where_instances_need_several_graphs() -> None:
    class Branch(Gin):
        @fxbatch.autobatch(batch_norm="minibatch")
        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.rows(x, edges).sum(0) * (2 if len(x) > 4 else 1)

    model = Branch().double()
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(BatchCoupledError, match="one set of rows"):
        model(*graphs(3, 9, 2))
    torch.testing.assert_close(before, dict(model.named_buffers()))
