"""Calls that vmap has no good rule for, said in calls that it has one for; used while the body is traced.

In: ATen calls of the per-instance body. Out: what takes their place, in the form `make_fx` takes.

    index_add(x, 0, index, y)      =>  scatter_add(x, 0, expand(index), y)
    copy(x[1], y)                  =>  expand(y)                       (what `x[1] = y` is, functionally)
    select_scatter(x, y, 0, i)     =>  cat([x[:i], y[None], x[i + 1:]])

Where vmap has no rule and PyTorch has a decomposition, PyTorch's is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxbatch.codegen.decompose_memory import MEMORY
from fxbatch.codegen.decompose_random import RANDOM_FILLS
from fxbatch.codegen.decompose_segments import embedding_bag, segment_reduce
from fxbatch.torch_private import decompositions_without_vmap_rule

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]


def _along(x: Tensor, dim: int, index: Tensor, like: Tensor) -> Tensor:
    """A one-dimensional index of positions along `dim`, as an index of every element of `like`."""
    sizes = [1] * like.dim()
    sizes[dim] = index.numel()
    return index.reshape(sizes).expand(like.shape).to(torch.int64)


def _at_least_1d(*tensors: Tensor) -> list[Tensor]:
    return [x.reshape(1) if x.dim() == 0 else x for x in tensors]


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    wide, source = _at_least_1d(x, source)
    dim %= wide.dim()
    added = source if alpha == 1 else source * alpha
    if x.dtype is torch.bool:
        hits = wide.to(torch.int32).scatter_add(dim, _along(wide, dim, index, source), added.to(torch.int32))
        return hits.to(torch.bool).reshape(x.shape)
    return wide.scatter_add(dim, _along(wide, dim, index, source), added).reshape(x.shape)


def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    wide, source = _at_least_1d(x, source)
    dim %= wide.dim()
    return wide.scatter(dim, _along(wide, dim, index, source), source).reshape(x.shape)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    (wide,) = _at_least_1d(x)
    dim %= wide.dim()
    at = torch.arange(wide.shape[dim], device=x.device)
    place = torch.where(index.reshape(-1) < 0, index.reshape(-1) + wide.shape[dim], index.reshape(-1))
    hit = (at[:, None] == place[None, :]).any(1)
    sizes = [1] * wide.dim()
    sizes[dim] = wide.shape[dim]
    fill = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.where(hit.reshape(sizes), fill.to(x.dtype), wide).reshape(x.shape)


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    wide, source = _at_least_1d(x, source)
    dim %= wide.dim()
    places = _along(wide, dim, index, source)
    return wide.scatter_reduce(dim, places, source, reduce, include_self=include_self).reshape(x.shape)


def take(x: Tensor, index: Tensor) -> Tensor:
    found: Tensor = aten.index.Tensor(x.reshape(-1), [index])
    return found


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """`x[:, mask] = value` chooses, where each chosen place gets the same; any other index is left to vmap."""
    masks = [(dim, mask) for dim, mask in enumerate(indices) if mask is not None]
    if len(masks) != 1 or masks[0][1].dtype is not torch.bool:
        return NotImplemented
    dim, mask = masks[0]
    rest = x.dim() - dim - mask.dim()  # x is [*dim, *mask, *rest], the chosen [*dim, how many, *rest]
    wide = values.reshape(*[1] * (dim + 1 + rest - values.dim()), *values.shape)
    if wide.dim() != dim + 1 + rest or wide.shape[dim] != 1:
        return NotImplemented
    value = wide.reshape(*wide.shape[:dim], *[1] * mask.dim(), *wide.shape[dim + 1 :]).to(x.dtype)
    return torch.where(mask.reshape(*mask.shape, *[1] * rest), x + value if accumulate else value, x)


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As a new tensor, so that what is written later isn't seen in the source."""
    return source.to(x.dtype).to(x.device).expand(x.shape).clone()


def fill(x: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return copy(x, value)
    return torch.full_like(x, value)


def zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def masked_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value.to(x.dtype), x)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    if source.numel() == 0:
        return x.clone()
    wide, mask = torch.broadcast_tensors(x, mask)
    nth = mask.reshape(-1).to(torch.int64).cumsum(0).sub(1).clamp_min(0)
    return torch.where(mask, source.reshape(-1)[nth].reshape(mask.shape), wide)


def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    dim %= x.dim()
    index %= x.shape[dim]
    return _between(x, source.unsqueeze(dim).to(x.dtype), dim, index, index + 1)


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    dim %= x.dim()
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if step == 1:
        return _between(x, source.to(x.dtype), dim, first, max(first, last))
    at = torch.arange(first, max(first, last), step, device=x.device)
    return index_copy(x, dim, at, source.expand(*x.shape[:dim], len(at), *x.shape[dim + 1 :]).to(x.dtype))


def _between(x: Tensor, middle: Tensor, dim: int, start: int, end: int) -> Tensor:
    sizes = list(x.shape)
    sizes[dim] = end - start
    pieces = [x.narrow(dim, 0, start), middle.expand(sizes), x.narrow(dim, end, x.shape[dim] - end)]
    return torch.cat([piece for piece in pieces if piece.shape[dim]] or [x], dim)


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """A sum of products, as one contraction (`nn.Bilinear` is one)."""
    rank = a.dim() + len(expand1)
    letters = [chr(ord("a") + i) for i in range(rank)]
    terms = [
        "".join(x for i, x in enumerate(letters) if i not in expanded)
        for expanded in (expand1, expand2, expand3)
    ]
    kept = "".join(x for i, x in enumerate(letters) if i not in sumdim)
    return torch.einsum(f"{','.join(terms)}->{kept}", a, b, c)


def pdist(x: Tensor, p: float = 2) -> Tensor:
    left, right = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return torch.linalg.vector_norm(x[left] - x[right], p, dim=1)


def permute_copy(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.permute(tuple(dims)).clone()


def linalg_lu(x: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    factors, pivots = torch.linalg.lu_factor(x, pivot=pivot)
    p, lower, upper = torch.lu_unpack(factors, pivots)
    return p, lower, upper


def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Of integers: vmap's rule makes them floating-point numbers; eager cuts the factors to integers."""
    if x.is_floating_point() or x.is_complex():
        return NotImplemented
    product = torch.bmm(a, b).sum(0, dtype=x.dtype) * int(alpha)
    return product if not int(beta) else x * int(beta) + product


def searchsorted_number(
    rows: Tensor, number: float, *, sorter: Tensor | None = None, **kwargs: Any
) -> Tensor:
    common = torch.result_type(rows, number)
    sought = torch.full((), number, dtype=common, device=rows.device)
    return torch.searchsorted(rows.to(common), sought, sorter=sorter, **kwargs)


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Labels end at the first negative one. (PyTorch's decomposition adds the hinges of what comes after it.)"""
    scores, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = scores.shape[1]
    at = torch.arange(classes, device=x.device)
    valid = at < torch.where(labels < 0, at, classes).amin(-1, keepdim=True)
    safe = torch.where(valid, labels, 0)
    is_target = (valid[..., None] & (safe[..., None] == at)).any(-2)
    hinges = torch.relu(
        1 - scores.gather(-1, safe)[..., None] + scores[..., None, :]
    )  # [rows, labels, classes]
    losses = torch.where(valid[..., None] & ~is_target[..., None, :], hinges, 0).sum((-2, -1)) / classes
    whole = losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()
    return whole, is_target.to(x.dtype).reshape(target.shape)


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.where(x <= 0, x * ((lower + upper) / 2), x), noise
    slope = torch.rand_like(x) * (upper - lower) + lower
    drawn = torch.where(x <= 0, slope, 1.0)
    return x * drawn, drawn


def is_all_true(x: Tensor) -> Tensor:
    """What torch.distributions asks of its arguments; vmap's rule takes no scalars."""
    return x.reshape(-1).all()


def is_any_true(x: Tensor) -> Tensor:
    return x.reshape(-1).any()


DECOMPOSITIONS: Decompositions = {
    aten._is_all_true.default: is_all_true,
    aten._is_any_true.default: is_any_true,
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_reduce.default: index_reduce,
    aten.take.default: take,
    aten.put.default: put,
    aten.copy.default: copy,
    aten.fill.Scalar: fill,
    aten.fill.Tensor: fill,
    aten.zero.default: zero,
    aten.masked_fill.Tensor: masked_fill,
    aten.masked_scatter.default: masked_scatter,
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
    aten._trilinear.default: trilinear,
    aten._pdist_forward.default: pdist,
    aten.permute_copy.default: permute_copy,
    aten.linalg_lu.default: linalg_lu,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
    aten.index_put.default: index_put,
    aten.addbmm.default: addbmm,
    aten.searchsorted.Scalar: searchsorted_number,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    aten.segment_reduce.default: segment_reduce,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    **RANDOM_FILLS,
    **MEMORY,
}


@functools.cache
def decompositions() -> Decompositions:
    """Ours, and PyTorch's own of the calls that vmap has no rule for."""
    return {**decompositions_without_vmap_rule(), **DECOMPOSITIONS}
