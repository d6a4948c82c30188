"""Reductions of segments of rows, as scatters: `torch.segment_reduce` and `nn.EmbeddingBag`.

In: ATen calls of the per-instance body. Out: each row goes to the segment that it lies in.

    segment_reduce(rows, "sum", offsets=[0, 2, 5])  =>  scatter_add(zeros [2, d], 0, segments, rows)
"""

from __future__ import annotations

import torch
from torch import Tensor

_START = {"sum": 0.0, "mean": float("nan"), "prod": 1.0, "max": -float("inf"), "min": float("inf")}
_WORDS = {"max": "amax", "min": "amin"}


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
    """Segments along the first dimension; where lengths don't add up, no error tells (as with `unsafe`)."""
    if axis != 0 or (reduce == "mean" and initial is not None):
        raise NotImplementedError("segment_reduce along another axis, or a mean with an initial value")
    if offsets is None:
        assert lengths is not None, "segment_reduce needs lengths or offsets"
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    start = _START[reduce] if initial is None else initial
    return reduce_segments(data, segment_of(len(data), offsets), len(offsets) - 1, reduce, start)


def segment_of(rows: int, offsets: Tensor) -> Tensor:
    """i64 [rows]: which segment each row lies in; -1 before the first offset, the last one after the end."""
    at = torch.arange(rows, device=offsets.device)
    return (at[:, None] >= offsets[None, :]).sum(1) - 1


def reduce_segments(data: Tensor, segments: Tensor, count: int, reduce: str, start: float) -> Tensor:
    """[count, ...]: rows of `data` reduced by segment; rows of segments -1 and `count` are left out."""
    first = torch.full((count + 2, *data.shape[1:]), start, dtype=data.dtype, device=data.device)
    places = (segments + 1).reshape(-1, *[1] * (data.dim() - 1)).expand(data.shape)
    word = _WORDS.get(reduce, reduce)
    whole = first.scatter_reduce(0, places, data, word, include_self=reduce != "mean")
    return whole[1 : count + 1]


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
