"""Calls that vmap has no good rule for, said in calls that it has one for; used while the body is traced.

In: ATen calls of the per-instance body. Out: what takes their place, in the form `make_fx` takes.

    index_add(x, 0, index, y)      =>  scatter_add(x, 0, expand(index), y)
    copy(x[1], y)                  =>  expand(y)                       (what `x[1] = y` is, functionally)
    select_scatter(x, y, 0, i)     =>  cat([x[:i], y[None], x[i + 1:]])

Where vmap has no rule and PyTorch has a decomposition, PyTorch's is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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


# -- Calls that speak of memory (strides, memory formats), as calls that speak of elements.

_FORMATS = (torch.channels_last, torch.channels_last_3d)


def _positions(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor | None:
    """Which elements of x a strided view shows; None where x itself is no plain block of memory."""
    if not x.is_contiguous() or x.storage_offset():
        return None
    found = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for i, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[i] = length
        found = found + (torch.arange(length, device=x.device) * step).reshape(shape)
    return found


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    at = _positions(x, size, stride, storage_offset)
    return NotImplemented if at is None else aten.index.Tensor(x.reshape(-1), [at])


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    at = _positions(x, size, stride, storage_offset)
    return NotImplemented if at is None else x.reshape(-1).index_put([at], source).reshape(x.shape)


def to_copy(x: Tensor, *, memory_format: torch.memory_format | None = None, **kwargs: Any) -> Tensor:
    if memory_format not in _FORMATS:
        return NotImplemented
    copied: Tensor = aten._to_copy.default(x, **kwargs)
    return copied


def clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return aten.clone.default(x) if memory_format in _FORMATS else NotImplemented


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Without dimensions all elements roll as one row."""
    if dims:
        return NotImplemented
    return x.clone() if not x.dim() else x.reshape(-1).roll(shifts, 0).reshape(x.shape)


def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    blocks = [x if x.dim() == 2 else x.reshape(1, -1) for x in tensors]
    width, left, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(aten.constant_pad_nd.default(x, [left, width - left - x.shape[1]]))
        left += x.shape[1]
    return torch.cat(rows)


MEMORY: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten._to_copy.default: to_copy,
    aten.clone.default: clone,
    aten.roll.default: roll,
    aten.block_diag.default: block_diag,
}


# -- Random fills of tensors, as draws that vmap makes anew for each row.


def _unit(x: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), as many as x has, wide enough to take the logarithm of what is left to 1."""
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    return torch.rand(x.shape, dtype=wide, device=x.device)


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None or not x.dtype.is_floating_point:
        return NotImplemented
    return torch.rand(x.shape, dtype=x.dtype, device=x.device) * (high - low) + low


def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return torch.randn(x.shape, dtype=x.dtype, device=x.device) * std + mean


def log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> Tensor:
    return NotImplemented if generator is not None else normal_functional(x, mean, std).exp()


def exponential(x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return (-torch.log1p(-_unit(x)) / rate).to(x.dtype)


def cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return (torch.tan(math.pi * (_unit(x) - 0.5)) * sigma + median).to(x.dtype)


def geometric(x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """How many trials until the first success: 1, 2, ..."""
    if generator is not None:
        return NotImplemented
    return torch.ceil(torch.log1p(-_unit(x)) / math.log1p(-p)).clamp_min(1).to(x.dtype)


RANDOM_FILLS: dict[Any, Callable[..., Any]] = {
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal_functional,
    aten.log_normal.default: log_normal,
    aten.exponential.default: exponential,
    aten.cauchy.default: cauchy,
    aten.geometric.default: geometric,
}


# -- Reductions of segments of rows, as scatters: `torch.segment_reduce` and `nn.EmbeddingBag`.

_START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -float("inf"), "min": float("inf")}
_WORDS = {"max": "amax", "min": "amin", "mean": "sum"}


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """Segments along a dimension, others for each index of the dimensions before it: [*lead, segments, ...].

    Eager compares lengths with the data, and tells where they differ, unless `unsafe`; a batch doesn't look.
    """
    if offsets is None and not unsafe:
        raise NotImplementedError("segment_reduce looks at its lengths: give offsets, or unsafe=True")
    if offsets is None:
        assert lengths is not None, "segment_reduce needs lengths or offsets"
        offsets = torch.cat([lengths.new_zeros((*lengths.shape[:-1], 1)), lengths.cumsum(-1)], -1)
    axis %= data.dim()
    lead, rest, count = data.shape[:axis], data.shape[axis + 1 :], offsets.shape[-1] - 1
    segments = segment_of(data.shape[axis], offsets)
    start = _START[reduce] if initial is None else initial
    found = reduce_segments(data.reshape(-1, *rest), segments, count, reduce, start)
    found = found.reshape(*lead, count, *rest)
    if reduce != "mean":
        return found
    sizes = offsets.diff(dim=-1).reshape(*lead, count, *[1] * len(rest))
    empty = float("nan") if initial is None else start
    return torch.where(sizes > 0, found / sizes.clamp_min(1), empty).to(data.dtype)


def segment_of(rows: int, offsets: Tensor) -> Tensor:
    """i64 [*lead, rows]: which segment each row lies in; -1 before the first offset, the last one after the end."""
    at = torch.arange(rows, device=offsets.device)
    return (at[:, None] >= offsets[..., None, :]).sum(-1) - 1


def reduce_segments(data: Tensor, segments: Tensor, count: int, reduce: str, start: float) -> Tensor:
    """[lead * count, ...]: rows of `data` [lead * rows, ...] reduced by their segments [*lead, rows]; those of
    segments -1 and `count` are left out. A mean is a sum here."""
    lead, rest = segments.shape[:-1].numel(), data.shape[1:]
    first = torch.full((lead * (count + 2), *rest), start, dtype=data.dtype, device=data.device)
    blocks = torch.arange(lead, device=data.device)[:, None] * (count + 2)
    places = (segments.reshape(lead, -1) + 1 + blocks).reshape(-1, *[1] * len(rest)).expand(data.shape)
    whole = first.scatter_reduce(0, places, data, _WORDS.get(reduce, reduce), include_self=True)
    return whole.reshape(lead, count + 2, *rest)[:, 1 : count + 1].reshape(lead * count, *rest)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bags of rows of a table, reduced; the three other results are autograd's own, and left empty."""
    if scale_grad_by_freq or sparse:
        raise NotImplementedError("embedding_bag with sparse or scaled gradients")
    rows = weight.index_select(0, indices.reshape(-1))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    count = len(offsets) - 1 if include_last_offset else len(offsets)
    bags = segment_of(len(rows), offsets)
    if padding_idx >= 0:
        bags = torch.where(indices.reshape(-1) == padding_idx, count, bags)
    kept = torch.ones_like(rows[:, :1])
    sizes = reduce_segments(kept, bags, count, "sum", 0.0)
    if mode == 2:
        tops = reduce_segments(rows, bags, count, "max", -float("inf"))
        out = torch.where(sizes > 0, tops, 0.0)
    else:
        out = reduce_segments(rows, bags, count, "sum", 0.0)
        out = out / sizes.clamp_min(1.0) if mode == 1 else out
    empty = torch.zeros(0, dtype=torch.int64, device=weight.device)
    return out, empty, empty, empty


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
