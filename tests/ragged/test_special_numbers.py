"""Packed rules on numbers at the edge, values, gradients and what requires gradients, against the loop: infinities,
NaN, huge and subnormal numbers, zeros of both signs, ties, rows of -inf only, large numbers that differ little."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from fxbatch.ragged.check import check_against_body
from fxbatch.ragged.packed_function import PackedFunction
from tests.ragged.against_loop import difference

inf = math.inf
Body = Callable[[torch.Tensor], torch.Tensor]


def drawn_from(*numbers: float) -> Callable[[int], torch.Tensor]:
    return lambda t: torch.tensor(numbers)[torch.randint(len(numbers), (t, 5))]


NUMBERS: dict[str, Callable[[int], torch.Tensor]] = {
    "all": drawn_from(
        0.0, -0.0, 1.0, 1.0, -2.5, inf, -inf, math.nan, 1e30, -1e30, 3e37, 1e-45, -1e-45, 89.0, -104.0, 7.0
    ),
    "all with finite products": drawn_from(
        0.0, -0.0, 1.0, 1.0, -2.5, inf, -inf, math.nan, 1e15, -1e15, 3e18, 1e-45, -1e-45, 89.0, -104.0, 7.0
    ),
    "infinities": drawn_from(0.0, -0.0, 1.0, 1.0, -1.0, inf),
    "ties": drawn_from(1.0, 1.0, 0.0, -0.0, 2.0),
    "of -inf": lambda t: torch.full((t, 5), -inf),
    "zeros": lambda t: torch.zeros(t, 5),
    "large": lambda t: 1e4 + torch.randn(t, 5),
    "larger": lambda t: 1e6 * (1 + 1e-4 * torch.randn(t, 5)),
}
REDUCTIONS: dict[str, Body] = {
    "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "prod": lambda x: x.prod(0), "amax": lambda x: x.amax(0),
    "amax, kept": lambda x: x.amax(0, keepdim=True), "amax of columns": lambda x: x.t().amax(1, keepdim=True),
    "amax of every second row": lambda x: x[::2].amax(0, keepdim=True),
    "amax of what is spread": lambda x: x.view(-1, 5, 1).expand(-1, 5, 3).amax(0, keepdim=True),
    "share of the largest": lambda x: x / x.amax(0, keepdim=True), "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(0)[0], "place of max": lambda x: x.max(0)[1], "min": lambda x: x.min(0)[0],
    "max of all": lambda x: x.max(), "min of all": lambda x: x.min(), "amax of all": lambda x: x.amax(),
    "argmax": lambda x: x.argmax(0), "argmin": lambda x: x.argmin(0), "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0), "logsumexp": lambda x: x.logsumexp(0),
    "softmax of columns": lambda x: x.softmax(1).sum(0), "weighted sum": lambda x: (x.softmax(0) * x).sum(0),
    "var": lambda x: x.var(0), "std": lambda x: x.std(0), "var, divided by n": lambda x: x.var(0, unbiased=False),
    "var of all": lambda x: x.var(), "var and mean": lambda x: torch.var_mean(x, 0)[0],
    "norm 1": lambda x: x.norm(1, dim=0),
    "largest norm": lambda x: x.norm(inf, dim=0), "cumsum": lambda x: x.cumsum(0), "cummax": lambda x: x.cummax(0)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(0), "nansum": lambda x: x.nansum(0), "nanmean": lambda x: x.nanmean(0),
    "any": lambda x: (x > 0).any(0), "all": lambda x: (x > 0).all(0), "sort": lambda x: x.sort(0)[0],
    "median": lambda x: x.median(0)[0], "attention": lambda x: torch.softmax(x @ x.t(), -1) @ x,
    "flip": lambda x: x.flip(0),
    "product": lambda x: x @ torch.ones(5, dtype=x.dtype), "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "mse": lambda x: F.mse_loss(x, x * 2), "clamp": lambda x: x.clamp(-1, 1).sum(0), "diff": lambda x: x.diff(dim=0),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "norm": lambda x: x.norm(dim=0), "norm, kept": lambda x: x.norm(dim=0, keepdim=True),
    "norm 3": lambda x: x.norm(3, dim=0),
    "norm of all": lambda x: x.norm(), "norm of every second row": lambda x: x[::2].norm(dim=0),
    "normalize": lambda x: F.normalize(x, dim=0), "normalize columns": lambda x: F.normalize(x, dim=1),
    "columns by columns": lambda x: x.t() @ x, "rows by rows": lambda x: x @ x.t(),
    "three factors": lambda x: (x.t() @ x) @ x.t(), "products of every second row": lambda x: x[::2].t() @ x[::2],
    "products of what is spread": lambda x: x[:, :1].expand(-1, 4).t() @ x[:, :1].expand(-1, 4),
    "outer": lambda x: torch.outer(x[:, 0], x[:, 1]), "by a vector": lambda x: x.t() @ x[:, 0],
    "cumprod": lambda x: x.cumprod(0), "cumprod of columns": lambda x: x.cumprod(1),
    "prod of columns": lambda x: x.prod(1),
    "cumprod of every second row": lambda x: x[::2].cumprod(0), "cummin": lambda x: x.cummin(0)[0],
    "topk": lambda x: x.topk(1, dim=0)[0], "topk, smallest": lambda x: x.topk(1, dim=0, largest=False)[0],
    "places of topk": lambda x: x.topk(1, dim=0)[1], "topk of all": lambda x: x.topk(len(x), dim=0)[0],
    "topk of half": lambda x: x.topk(len(x) // 2 + 1, dim=0)[0], "topk of columns": lambda x: x.topk(2, dim=1)[0],
    "nearest": lambda x: (x[:, :1] - x[:, :1].t()).abs().topk(1, dim=1)[0],
    "pairs": lambda x: (x[:, None] - x[None]).pow(2).sum(-1).mean(1),
    "norm of pairs": lambda x: (x[:, None] - x[None]).norm(dim=1),
    "products of pairs": lambda x: (x[:, :1] * x[:, :1].t()).sum(0),
    "pairs by rows": lambda x: (x[:, :1] * x[:, :1].t()) @ x,
    "triangle by rows": lambda x: (x[:, :1] - x[:, :1].t()).tril() @ x,
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0), dim=0),
    "logsumexp of all": lambda x: x.logsumexp((0, 1)), "einsum": lambda x: torch.einsum("ti,si->ts", x, x).sum(1),
    "group_norm": lambda x: F.group_norm(x.t()[None], 5)[0], "instance_norm": lambda x: F.instance_norm(x.t()[None])[0],
    "conv1d": lambda x: F.conv1d(x.t()[None], torch.ones(3, 5, 3, dtype=x.dtype), padding=1)[0].t(),
    "scattered": lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x)) // 2, x),
    "masked": lambda x: x[x[:, 0] > 0].sum(0),
    "remainder": lambda x: torch.fmod(x, 2.5).sum(0), "count": lambda x: x.count_nonzero(0),
}  # fmt: skip


def loop_of(body: Body, rows: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[body(row[0])] for row in rows]


# Infinity less a product of finite numbers that overflows: infinity where the processor's kernel multiplies and adds in
# one instruction, NaN where it rounds the product first. Torch's own kernels do either, by processor and shape.
INEXACT = {(name, "all") for name in ("columns by columns", "rows by rows", "products of every second row")}


@functools.lru_cache(maxsize=1)  # a body is traced once for all kinds of numbers
def lowered(body: Body) -> PackedFunction:
    return PackedFunction.of(lambda *tensors: [body(tensors[0])], [torch.randn(3, 5)], ((0,),), [])


def difference_at_the_edge(body: Body, make: Callable[[int], torch.Tensor]) -> str:
    """How the packed form differs from the loop, in values, gradients and what requires them; empty: it does not."""
    function = lowered(body)
    torch.manual_seed(7)
    instances = [[make(t).requires_grad_()] for t in (3, 5, 1, 8)]
    sizes = function.columns_of(list(zip(*instances, strict=True)))
    instances = [i for i, fits in zip(instances, function.graph.fitting(sizes), strict=True) if fits]
    columns = list(zip(*instances, strict=True))
    outputs, z = function(columns, [], function.columns_of(columns), torch.device("cpu"))
    packed = function.apart(outputs, z)
    flags = [row[0].requires_grad for row in loop_of(body, instances)]
    if [t.requires_grad for t in packed[0]] != flags:
        return f"gradients are required as {[t.requires_grad for t in packed[0]]}, not {flags}"
    return difference(packed, instances, lambda rows, _: loop_of(body, rows))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_rules_at_the_edge(name: str) -> None:
    for kind, make in NUMBERS.items():
        if (name, kind) not in INEXACT:
            wrong = difference_at_the_edge(REDUCTIONS[name], make)
            assert not wrong, f"{kind}: {wrong}"


def test_a_packed_form_is_compared_where_no_operand_takes_gradients() -> None:
    """A weight whose gradient is too large to be compared is the only one that takes gradients."""
    weight = torch.zeros(1 << 18, 5).requires_grad_()
    body = lambda *tensors: [F.embedding(tensors[0], tensors[1])]  # noqa: E731
    function = PackedFunction.of(body, [torch.arange(3)], ((0,),), [weight])
    check_against_body(function, [[torch.arange(2), torch.arange(4)]], [weight])
