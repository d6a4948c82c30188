"""Look-ups and scatters by an instance's own indices, against the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxbatch.ragged.packed_function import PackedFunction
from tests.ragged.against_loop import check_packed
from tests.ragged.test_rules import ALL, SOME, W

GRAPHS = [(3, 2), (5, 9), (1, 4), (4, 1), (7, 3), (3, 3), (2, 0)]


def graph(n: int, e: int) -> list[torch.Tensor]:
    return [torch.randn(n, 6), torch.randint(n, (2, e))]


def zeros(h: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(h)


def edge_softmax(h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    scores = (h[e[0]] * h[e[1]]).sum(1)
    top = torch.full((len(h),), -1e30, dtype=h.dtype).scatter_reduce(0, e[1], scores.detach(), "amax")
    weight = (scores - top[e[1]]).exp()
    return weight / zeros(h[:, 0]).index_add(0, e[1], weight)[e[1]]


ON_GRAPHS: dict[str, Callable[..., Any]] = {
    "rows of sources": lambda h, e: h[e[0]],
    "index_select": lambda h, e: h.index_select(0, e[0]) * 2,
    "index_add": lambda h, e: zeros(h).index_add(0, e[1], h[e[0]]),
    "index_add in place": lambda h, e: zeros(h).index_add_(0, e[1], h[e[0]]),
    "index_put": lambda h, e: zeros(h).index_put((e[1],), h[e[0]], accumulate=True),
    "scatter_add": lambda h, e: zeros(h).scatter_add(0, e[1].unsqueeze(1).expand(-1, 6), h[e[0]]),
    "scatter_reduce": lambda h, e: zeros(h).scatter_reduce(
        0, e[1].unsqueeze(1).expand(-1, 6), h[e[0]], "amax", include_self=False
    ),
    "degrees": lambda h, e: h / zeros(h[:, 0]).index_add(0, e[1], torch.ones(e.shape[1]).to(h)).clamp(min=1)[:, None],
    "edge softmax": edge_softmax,
}  # fmt: skip


@pytest.mark.parametrize("name", ON_GRAPHS)
def test_graphs(name: str) -> None:
    function = check_packed(ON_GRAPHS[name], graph, GRAPHS, ((0,), (1,)))
    assert not function.lowered.alone, function.lowered.source


def tags(t: int) -> list[torch.Tensor]:
    return [torch.randn(t, 6), torch.randint(6, (t,))]


def places(t: int) -> list[torch.Tensor]:
    return [torch.randn(t, 6), torch.randint(t, (t,))]


ON_ROWS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a column a row": (lambda x, t: x.log_softmax(1)[torch.arange(len(t)), t].sum(), tags, ALL),
    "gather by columns": (lambda x, t: x.gather(1, t.unsqueeze(1)).squeeze(1), tags, ALL),
    "gather by rows": (lambda x, t: x.gather(0, t.unsqueeze(1).expand(-1, 6)), places, SOME),
    "negative indices": (lambda x, t: x[t - 1], places, SOME),
}


@pytest.mark.parametrize("name", ON_ROWS)
def test_rows(name: str) -> None:
    body, make, sizes = ON_ROWS[name]
    assert not check_packed(body, make, sizes, ((0,), (0,))).lowered.alone


def test_a_row_that_was_found() -> None:
    make = lambda t: [torch.randn(t, 6)]  # noqa: E731
    assert not check_packed(lambda x: x[x.sum(1).argmax(0)], make, SOME, ((0,),)).lowered.alone


def test_fixed_number_of_places() -> None:
    make = lambda t: [torch.randn(t, 6), torch.randint(t, (3,))]  # noqa: E731
    assert not check_packed(lambda x, i: x[i], make, SOME, ((0,), ())).lowered.alone


def test_rows_of_a_parameter() -> None:
    make = lambda t: [torch.randn(t, 6)]  # noqa: E731
    body = lambda x, w: w[torch.arange(len(x)) % 8] + x  # noqa: E731
    assert not check_packed(body, make, ALL, ((0,),), (W,)).lowered.alone


def test_fewer_indices_than_rows_do_not_fit() -> None:
    def body(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [x.gather(1, i.unsqueeze(1))]

    x = torch.randn(5, 6)
    function = PackedFunction.of(body, [x, torch.zeros(5, dtype=torch.int64)], ((0,), (0,)), [])
    columns = [[x, x], [torch.zeros(5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]]
    assert function.graph.fitting(function.columns_of(columns)).tolist() == [True, False]


def test_an_index_out_of_range_does_not_read_the_next_instance() -> None:
    def body(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [x[i]]

    x = torch.randn(5, 6)
    function = PackedFunction.of(body, [x, torch.zeros(3, dtype=torch.int64)], ((0,), (0,)), [])
    for wrong in (5, -6):
        columns = [[x, torch.randn(9, 6)], [torch.full((3,), wrong), torch.zeros(2, dtype=torch.int64)]]
        with pytest.raises(IndexError):
            function(columns, [], function.columns_of(columns), torch.device("cpu"))


def put(x: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    made = x * 1
    made[where] = value
    return made


PERM, EDGES = torch.tensor([2, 0, -1]), torch.tensor([-1.0, 0.0, 0.5])

SAME_FOR_ALL: dict[str, Callable[[torch.Tensor], Any]] = {
    "columns": lambda x: x[:, PERM] * x[..., [0, 2, 3]],
    "columns of columns": lambda x: x.view(len(x), 2, 3)[:, [1, 0, 1], PERM],
    "columns before rows": lambda x: x.t()[PERM],
    "a table of columns": lambda x: x[:, PERM[:, None].expand(3, 2)],
    "index_select": lambda x: x.index_select(1, PERM.clamp(min=0)),
    "columns of scores": lambda x: (x @ x.t()).unsqueeze(2).expand(-1, -1, 3)[:, :, PERM],
    "a mask of rows that is written": lambda x: put(x, x[:, 0] > 0, 0.5),
    "a row for all of a mask": lambda x: put(x, x.sum(1) > 0, W[0].to(x)),
    "a mask of elements that is written": lambda x: put(x, x > 0.3, 0.0),
    "a mask of scores that is written": lambda x: put(x @ x.t(), x[:, :1] > x[:, 0], -1.0),
    "bins": lambda x: (torch.bucketize(x, EDGES), torch.searchsorted(EDGES, x), torch.isin(x.long(), PERM)),
    "nansum": lambda x: (torch.where(x > 1, torch.nan, x).nansum(0), torch.where(x > 1, torch.nan, x).nanmean(0)),
    "views as copies": lambda x: torch.unsqueeze_copy(torch.transpose_copy(x, 0, 1), 0),
    "vdot": lambda x: torch.vdot(x[:, 0], x[:, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_FOR_ALL)
def test_what_is_the_same_for_all_instances(name: str) -> None:
    sizes = [(3,), (5,), (4,)] if name == "nansum" else ALL
    made = check_packed(SAME_FOR_ALL[name], lambda t: [torch.randn(t, 6)], sizes, ((0,),))
    assert not made.lowered.alone, made.lowered.alone


@pytest.mark.parametrize("accumulate", [False, True])
def test_one_row_written_to_two_places_of_each(accumulate: bool) -> None:
    """What is written is the same for both places of an instance, and for all instances."""

    def body(x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.mul(1).index_put((i,), w[0], accumulate=accumulate)

    make = lambda t: [torch.randn(t, 4), torch.tensor([0, 2])]  # noqa: E731
    function = check_packed(body, make, [(4,), (7,), (3,)], ((0,), ()), (torch.randn(5, 4),))
    assert not function.lowered.alone


def test_a_row_of_a_parameter_by_one_index() -> None:
    def body(x: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.sum(0) * w.index_select(0, k)

    make = lambda t: [torch.randn(t, 4), torch.tensor(t % 3)]  # noqa: E731
    assert not check_packed(body, make, [(4,), (7,), (3,)], ((0,), ()), (torch.randn(5, 4),)).lowered.alone
