"""What building an operation takes does not grow with the tables that it looks things up in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbatch.codegen.operation_graphs import OperationGraphs
from fxbatch.torch_private import FakeTensor, TorchDispatchMode
from tests.codegen.operation_cases import assert_equals_rows, build

ROWS, WIDTH = 20_000, 8


class Largest(TorchDispatchMode):
    """Counts the results as large as the table that have memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            real = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and not x.is_meta
            if (
                real
                and x.layout is torch.strided
                and x.untyped_storage().nbytes() >= 4 * ROWS * WIDTH
                and not _is_view(func)
            ):
                self.found.append(f"{func} {list(x.shape)}")
        return result


def _is_view(func: Any) -> bool:
    return func.is_view or func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Tied(nn.Module):
    """A table that is looked up twice, among other parameters."""

    def __init__(self, padding: int | None, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=padding, sparse=sparse)
        self.l = nn.Linear(2 * WIDTH, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.l(torch.cat([self.embed(a), self.embed(b)])))


INDEX = torch.tensor(3)
TABLE = nn.Parameter(torch.randn(ROWS, WIDTH))
CASES: dict[str, tuple[Callable[[], Any], list[torch.Tensor]]] = {
    "embedding": (lambda: nn.Embedding(ROWS, WIDTH), [INDEX]),
    "padding 0": (lambda: nn.Embedding(ROWS, WIDTH, padding_idx=0), [INDEX]),
    "padding last": (lambda: nn.Embedding(ROWS, WIDTH, padding_idx=-1), [INDEX]),
    "sparse": (lambda: nn.Embedding(ROWS, WIDTH, sparse=True), [INDEX]),
    "several words": (lambda: nn.Embedding(ROWS, WIDTH), [torch.tensor([1, 0, 1])]),
    "looked up twice": (lambda: Tied(1), [INDEX, INDEX]),
    "looked up twice, sparse": (lambda: Tied(None, sparse=True), [INDEX, INDEX]),
    "bag": (lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), [torch.tensor([[1, 0, 1]])]),
    "bag with padding": (lambda: nn.EmbeddingBag(ROWS, WIDTH, padding_idx=1), [torch.tensor([[1, 0, 2]])]),
    "index": (lambda: lambda i, table: table[i], [INDEX]),
    "several indices": (lambda: lambda i, table: table[i].sum(0), [torch.tensor([[1, 0], [0, 2]])]),
    "index_select": (lambda: lambda i, table: table.index_select(0, i), [torch.tensor([2, 2])]),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_as_large_as_the_table_is_made(name: str) -> None:
    make, inputs = CASES[name]
    target = make()
    with Largest() as mode:
        graphs, _ = build(target, inputs, shared=() if isinstance(target, nn.Module) else (TABLE,))
    assert isinstance(graphs, OperationGraphs), graphs
    assert graphs.checked
    assert mode.found == []


SMALL: dict[str, tuple[Callable[..., Any], torch.Tensor, tuple[int, ...]]] = {
    "rows of a matrix": (lambda i, table: table.index_select(0, i) * 2, torch.tensor([4, 1, 4]), (5, 3)),
    "rows of a block": (lambda i, table: table.index_select(0, i).tanh(), torch.tensor([4, 1]), (5, 2, 3)),
    "numbers of a vector": (lambda i, table: table.index_select(0, i).exp(), torch.tensor([4, 4]), (5,)),
    "columns": (lambda i, table: table.index_select(1, i).exp(), torch.tensor([2, 0]), (5, 3)),
    "single numbers": (lambda i, table: table.gather(0, i).exp(), torch.tensor([[4, 1, 4]]), (5, 3)),
    "fewer columns": (lambda i, table: table.gather(0, i).exp(), torch.tensor([[4, 1]]), (5, 3)),
    "a bag with padding": (
        lambda i, table: F.embedding_bag(i, table, padding_idx=1, mode="sum"), torch.tensor([[4, 1, 4]]), (5, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_rows_that_are_selected_have_the_gradient_of_one_by_one(name: str) -> None:
    body, index, shape = SMALL[name]
    table = nn.Parameter(torch.randn(shape))
    assert_equals_rows(body, [index], shared=(table,))


def test_the_gradient_of_selected_rows_takes_no_table_a_row_of_the_batch() -> None:
    table = nn.Parameter(torch.randn(50, 3))
    graphs, _ = build(lambda i, table: table.index_select(0, i), [torch.tensor([4, 1])], shared=(table,))
    assert isinstance(graphs, OperationGraphs) and graphs.parameters is not None
    assert "scatter_add" not in graphs.parameters.code
    assert "embedding_dense_backward" in graphs.parameters.code
