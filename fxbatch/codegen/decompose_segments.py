"""Reductions of segments of rows, as scatters: `torch.segment_reduce` and `nn.EmbeddingBag`.

In: ATen calls of the per-instance body. Out: each row goes to the segment that it lies in.

    segment_reduce(rows, "sum", offsets=[0, 2, 5])  =>  scatter_add(zeros [2, d], 0, segments, rows)
"""

from __future__ import annotations

import torch
from torch import Tensor

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
