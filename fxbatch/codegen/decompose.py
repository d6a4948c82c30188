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

from fxbatch.torch_private import decompositions_without_vmap_rule

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]


def _along(dim: int, index: Tensor, like: Tensor) -> Tensor:
    """A one-dimensional index of positions along `dim`, as an index of every element of `like`."""
    sizes = [1] * like.dim()
    sizes[dim] = index.numel()
    return index.reshape(sizes).expand(like.shape).to(torch.int64)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    wide, source = torch.atleast_1d(x, source)
    dim %= wide.dim()
    added = source if alpha == 1 else source * alpha
    if x.dtype is torch.bool:
        hits = wide.to(torch.int32).scatter_add(dim, _along(dim, index, source), added.to(torch.int32))
        return hits.to(torch.bool).reshape(x.shape)
    return wide.scatter_add(dim, _along(dim, index, source), added).reshape(x.shape)


def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    wide, source = torch.atleast_1d(x, source)
    dim %= wide.dim()
    return wide.scatter(dim, _along(dim, index, source), source).reshape(x.shape)


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """vmap takes an index without dimensions for one that leaves no dimension."""
    return NotImplemented if index.dim() or not x.dim() else x.index_select(dim, index.reshape(1))


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> object:
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
    letters_left = "".join(x for i, x in enumerate(letters) if i not in sumdim)
    return torch.einsum(f"{','.join(terms)}->{letters_left}", a, b, c)


# -- Random fills of tensors, as draws that vmap makes anew for each row.


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: object = None) -> Tensor:
    if generator is not None or not x.dtype.is_floating_point:
        return NotImplemented
    return torch.rand(x.shape, dtype=x.dtype, device=x.device) * (high - low) + low


def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: object = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return torch.randn(x.shape, dtype=x.dtype, device=x.device) * std + mean


def exponential(x: Tensor, rate: float = 1.0, *, generator: object = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    # in [0, 1), and wide enough to take the logarithm of what is left to 1
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    unit = torch.rand(x.shape, dtype=wide, device=x.device)
    return (-torch.log1p(-unit) / rate).to(x.dtype)


# -- Cells that are one kernel on CUDA.


def fused_gru_cell(
    gates: Tensor,
    gates_of_state: Tensor,
    h: Tensor,
    bias: Tensor | None = None,
    bias_of_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `torch.gru_cell` calls on CUDA, as it is on the CPU. The second result is for its own backward."""
    if bias is not None and bias_of_state is not None:
        gates, gates_of_state = gates + bias, gates_of_state + bias_of_state
    (reset, update, new), (r, u, n) = gates.chunk(3, -1), gates_of_state.chunk(3, -1)
    new = (new + (reset + r).sigmoid() * n).tanh()
    return (h - new) * (update + u).sigmoid() + new, torch.empty_like(gates)


def fused_lstm_cell(
    gates: Tensor,
    gates_of_state: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    bias_of_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.lstm_cell` calls on CUDA, as it is on the CPU. The third result is for its own backward."""
    gates = gates + gates_of_state
    if bias is not None and bias_of_state is not None:
        gates = gates + bias + bias_of_state
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, torch.empty_like(gates)


# Torch has no fake ones of these.
torch.library.register_fake("aten::_thnn_fused_gru_cell", fused_gru_cell)
torch.library.register_fake("aten::_thnn_fused_lstm_cell", fused_lstm_cell)


# -- `nn.EmbeddingBag`: reductions of bags of rows, as scatters.


def _reduce_bags(rows: Tensor, bags: Tensor, count: int, reduce: str, start: float) -> Tensor:
    """[count, d]: rows [rows, d] reduced by their bags [rows]; those of bags -1 and `count` are left out."""
    first = torch.full((count + 2, rows.shape[1]), start, dtype=rows.dtype, device=rows.device)
    places = (bags + 1)[:, None].expand(rows.shape)
    return first.scatter_reduce(0, places, rows, reduce, include_self=True)[1 : count + 1]


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
    at = torch.arange(len(rows), device=offsets.device)
    bags = (at[:, None] >= offsets).sum(-1) - 1  # -1: before the first offset
    if padding_idx >= 0:
        bags = torch.where(indices.reshape(-1) == padding_idx, count, bags)
    ones = torch.ones_like(rows[:, :1])
    sizes = _reduce_bags(ones, bags, count, "sum", 0.0)
    if mode == 2:
        tops = _reduce_bags(rows, bags, count, "amax", -float("inf"))
        out = torch.where(sizes > 0, tops, 0.0)
    else:
        out = _reduce_bags(rows, bags, count, "sum", 0.0)
        out = out / sizes.clamp_min(1.0) if mode == 1 else out
    empty = torch.zeros(0, dtype=torch.int64, device=weight.device)
    return out, empty, empty, empty


DECOMPOSITIONS: Decompositions = {
    # vmap's own rules take no scalars. torch.distributions checks its arguments so.
    aten._is_all_true.default: lambda x: x.reshape(-1).all(),
    aten._is_any_true.default: lambda x: x.reshape(-1).any(),
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_select.default: index_select,
    aten.take.default: lambda x, index: aten.index.Tensor(x.reshape(-1), [index]),
    aten.copy.default: copy,
    aten.fill.Scalar: torch.full_like,
    aten.fill.Tensor: copy,
    aten.zero.default: torch.zeros_like,
    aten.masked_fill.Tensor: lambda x, mask, value: torch.where(mask, value.to(x.dtype), x),
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
    aten._trilinear.default: trilinear,
    aten.index_put.default: index_put,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal_functional,
    aten.exponential.default: exponential,
    aten._thnn_fused_gru_cell.default: fused_gru_cell,
    aten._thnn_fused_lstm_cell.default: fused_lstm_cell,
}


@functools.cache
def decompositions() -> Decompositions:
    """Ours, and PyTorch's own of the calls that vmap has no rule for."""
    return {**decompositions_without_vmap_rule(), **DECOMPOSITIONS}
