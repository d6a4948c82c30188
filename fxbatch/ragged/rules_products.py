"""Rules for products: with a parameter, row by row; between values of the instances; attention.

In: linear, matmul and its kin, scaled_dot_product_attention. Out: one product for all rows where a parameter is a
factor; padded products, in which padding is zero along what is summed, where both factors are the instances'.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.proxy import Proxy

from fxbatch.ragged.expressions import Shape
from fxbatch.ragged.lower import (
    DENSE,
    PACKED,
    WHOLE,
    Arguments,
    Given,
    NoRule,
    Packed,
    PackedTape,
    Traced,
    filled,
    name_of,
    operator_of,
    own_dimensions,
    plain,
    shape_of,
)
from fxbatch.ragged.padding import multiplied
from fxbatch.ragged.rules import rule, weights_of


@rule("linear")
def _linear(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["input"] = tape.to_dense(a["input"])
    weights_of(a["weight"], a["bias"])
    if x.rank - 1 in x.axes:
        raise NoRule("a product along a size of its own with a parameter")
    return tape.packed(tape.apply(operator_of(node), a), val)


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def _matmul(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    left = a["self"]
    if node.target is torch.ops.aten.vdot.default and left.dtype.is_complex:
        raise NoRule("a product of conjugates")
    right = a.get("other", a.get("mat2", a.get("vec", a.get("tensor"))))
    return product(tape, left, right, val)


@rule("addmm", "addbmm", "baddbmm", "addmv")
def _addmm(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    if name_of(node) == "addbmm":
        raise NoRule("a sum over products")
    left, right = a.get("mat1", a.get("batch1", a.get("mat"))), a.get("mat2", a.get("batch2", a.get("vec")))
    multiplied_rows = product(tape, left, right, val)
    added = tape.aligned(a["self"], multiplied_rows.shape)
    beta, alpha = a["beta"], a["alpha"]
    first = added if beta == 1 else added * plain(beta)
    second = multiplied_rows.rows if alpha == 1 else multiplied_rows.rows * plain(alpha)
    return tape.packed(first + second, val)


def product(tape: PackedTape, a: Packed, b: Packed, val: torch.Tensor) -> Packed:
    """torch.matmul(a, b): [..., m, k] x [..., k, p]; vectors are matrices with a dimension of size 1."""
    out = shape_of(val)
    if a.layout == WHOLE and b.layout == WHOLE:
        a = tape.to_dense(a)
    by_rows = a.layout in (DENSE, PACKED) and a.rank > 1 and a.rank - 1 not in a.axes
    if b.layout == WHOLE and by_rows and b.rank <= 2:
        return tape.packed(a.rows @ b.rows, val)  # rows by a parameter
    if b.layout == WHOLE and a.layout == PACKED and a.rank == 1:
        raise NoRule("a product along a size of its own with a parameter")
    if a.layout == WHOLE and a.rank == 2 and b.layout == PACKED and b.rank == 2 and b.axes == (1,):
        return tape.packed(b.rows @ a.rows.t(), val)  # a parameter by columns
    batch = own_dimensions(out[:-2]) if a.rank > 2 and b.rank > 2 else ()
    alike = a.layout == b.layout == PACKED and a.rank == b.rank and a.axes == b.axes == batch
    if batch and alike and a.shape[batch[0]] == b.shape[batch[0]]:
        return tape.packed(a.rows @ b.rows, val)  # a product for each row
    return _padded_product(tape, a, b, val)


def _padded_product(tape: PackedTape, a: Packed, b: Packed, val: torch.Tensor) -> Packed:
    inner_a = a.rank - 1
    inner_b = b.rank - 2 if b.rank > 1 else 0
    clear = inner_a in a.axes or inner_b in b.axes
    if clear and (inner_a in a.axes) != (inner_b in b.axes):
        raise NoRule("a product along a size of its own with a fixed one")
    # of two factors that are padded along what is summed, one is enough to be zero there: the other one is finite
    left = tape.spread(a, clear=[inner_a] if clear else ())
    right = tape.spread(b, clear=[inner_b] if clear and b.layout == PACKED else ())
    rank = max(a.rank, b.rank, 2)
    left = _ranked(left, a, rank, vector_at=1)
    right = _ranked(right, b, rank, vector_at=2)
    along = _padded_along(tape, a, 1), _padded_along(tape, b, 2)
    result = tape.call(multiplied, left, right, *along)
    if a.rank == 1:
        result = result.squeeze(-2)
    if b.rank == 1:
        result = result.squeeze(-1)
    return tape.gathered(result, val)


def _padded_along(tape: PackedTape, v: Packed, vector_at: int) -> list[tuple[Proxy, int]]:
    """The sizes that a factor is padded along, and their places, counted from the end."""
    of_vector = -1 if vector_at == 1 else -2
    return [(tape.lengths(v.shape[a]), of_vector if v.rank == 1 else a - v.rank) for a in v.axes]


def _ranked(x: Proxy, v: Packed, rank: int, *, vector_at: int) -> Proxy:
    """A factor as [n or nothing, *batch, rows, columns] with `rank` dimensions after n."""
    if v.rank == 1:
        x = x.unsqueeze(-2 if vector_at == 1 else -1)
    return x if v.layout == WHOLE else filled(x, 1, max(v.rank, 2), rank)


@rule("_cdist_forward")
def _distances(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Distances between the rows of two tensors of an instance."""
    x, y = tape.to_dense(a["x1"]), tape.to_dense(a["x2"])
    if x.rank != y.rank or any(d != v.rank - 2 for v in (x, y) for d in v.axes):
        raise NoRule("distances along a size of its own")
    a["x1"], a["x2"] = tape.spread(x), tape.spread(y)
    return tape.gathered(tape.apply(operator_of(node), a), val)


@rule("linalg_matrix_power")
def _matrix_power(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Of matrices by themselves; whole, as the power 0 has a gradient of zeros."""
    x = a["self"] = tape.to_dense(a["self"])
    if x.layout not in (DENSE, PACKED) or any(d >= x.rank - 2 for d in x.axes):
        raise NoRule("matrices of their own size")
    return tape.packed(tape.apply(operator_of(node), a), val)


@rule("scaled_dot_product_attention")
def _attention(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Attention of each instance by itself: queries, keys and values padded, padding hidden from the queries."""
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    if _of_items(q, k, v, mask):
        return tape.packed(tape.apply(operator_of(node), a), val)
    if any(x.rank != q.rank or set(x.axes) - {x.rank - 2} for x in (q, k, v)):
        raise NoRule("attention with a size of its own elsewhere than along queries or keys")
    if a.get("enable_gqa") or all(x.layout == WHOLE for x in (q, k, v)):
        raise NoRule("attention of this kind")
    queries, keys, values = [_heads(tape, tape.to_dense(x)) for x in (q, k, v)]
    hidden = _mask(tape, mask, q.shape[:-2]) if isinstance(mask, Packed) else None
    how = plain(a["dropout_p"]), bool(a["is_causal"]), plain(a["scale"])
    attended = tape.z.attention(queries, keys, values, tape.lengths(k.shape[-2]), hidden, *how)
    *heads, _, features = shape_of(val)
    return tape.gathered(attended.reshape(tape.z.n, *heads, attended.shape[-2], features), val)


def _of_items(q: Packed, k: Packed, v: Packed, mask: Packed | None) -> bool:
    """Whether each of an instance's items attends within itself, as the characters of words do: a batch of more."""
    if any(
        x.layout != PACKED or x.axes != (0,) or x.shape[0] != q.shape[0] or x.rank != 4 for x in (q, k, v)
    ):
        return False
    if mask is None or mask.layout == WHOLE:
        return mask is None or mask.rank < 4
    return mask.layout == PACKED and mask.axes == (0,) and mask.rank == 4


def _heads(tape: PackedTape, x: Packed) -> Proxy:
    """[n, heads, longest, features]."""
    padded = tape.spread(x)
    return padded.reshape(tape.z.n, -1, padded.shape[-2], padded.shape[-1])


def _mask(tape: PackedTape, mask: Packed, shape: Shape) -> Proxy:
    """An attention mask as something that broadcasts to [n, heads, queries, keys]; shape: of the heads."""
    heads = [int(d) for d in shape]
    if any(d < mask.rank - 2 for d in mask.axes):
        raise NoRule("an attention mask with a size of its own among its heads")
    if mask.rank < 2:
        raise NoRule("an attention mask with one dimension")
    padded = tape.spread(mask)
    lead = [] if mask.layout == WHOLE else [tape.z.n]
    last = padded.shape[-2], padded.shape[-1]
    outer = [int(d) for d in mask.shape[:-2]]
    full = [1] * (len(heads) - len(outer)) + outer
    if all(d == 1 for d in full):
        return padded.reshape(*lead, *[1] * len(lead), *last)
    padded = padded.reshape(*lead, *full, *last).expand(*lead, *heads, *last)
    return padded.reshape(*lead, -1, *last)
