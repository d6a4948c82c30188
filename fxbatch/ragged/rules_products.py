"""Rules for products: with a parameter, row by row; between values of the instances; attention.

In: linear, matmul and its kin, scaled_dot_product_attention. Out: one product for all rows where a parameter is a
factor; padded products, in which padding is zero along what is summed, where both factors are the instances'.
"""

from __future__ import annotations

import torch
from torch import fx

from fxbatch.ragged.expressions import Shape
from fxbatch.ragged.lower import (
    DENSE,
    PACKED,
    WHOLE,
    Arguments,
    Code,
    Emitted,
    Emitter,
    NoRule,
    Packed,
    Traced,
    name_of,
    own_dimensions,
    shape_of,
)
from fxbatch.ragged.padding import multiplied
from fxbatch.ragged.rules import rule, weights_code


@rule("linear")
def _linear(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = a["input"] = e.to_dense(a["input"])
    weights_code(a["weight"], a["bias"])
    if x.rank - 1 in x.axes:
        raise NoRule("a product along a size of its own with a parameter")
    return e.packed(e.call(node.target, a), val)


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def _matmul(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    left = a["self"]
    if node.target is torch.ops.aten.vdot.default and left.dtype.is_complex:
        raise NoRule("a product of conjugates")
    right = a.get("other", a.get("mat2", a.get("vec", a.get("tensor"))))
    return product(e, left, right, val)


@rule("addmm", "addbmm", "baddbmm", "addmv")
def _addmm(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    if name_of(node) == "addbmm":
        raise NoRule("a sum over products")
    left, right = a.get("mat1", a.get("batch1", a.get("mat"))), a.get("mat2", a.get("batch2", a.get("vec")))
    product_code = product(e, left, right, val)
    added = e.aligned(a["self"], product_code.shape)
    beta, alpha = a["beta"], a["alpha"]
    first = added if beta == 1 else f"{added} * {e.source(beta)}"
    return e.packed(f"{first} + {product_code.name}" + ("" if alpha == 1 else f" * {e.source(alpha)}"), val)


def product(e: Emitter, a: Packed, b: Packed, val: torch.Tensor) -> Packed:
    """torch.matmul(a, b): [..., m, k] x [..., k, p]; vectors are matrices with a dimension of size 1."""
    out = shape_of(val)
    if a.layout == WHOLE and b.layout == WHOLE:
        a = e.to_dense(a)
    by_rows = a.layout in (DENSE, PACKED) and a.rank > 1 and a.rank - 1 not in a.axes
    if b.layout == WHOLE and by_rows and b.rank <= 2:
        return e.packed(f"{a.name} @ {b.name}", val)  # rows by a parameter
    if b.layout == WHOLE and a.layout == PACKED and a.rank == 1:
        raise NoRule("a product along a size of its own with a parameter")
    if a.layout == WHOLE and a.rank == 2 and b.layout == PACKED and b.rank == 2 and b.axes == (1,):
        return e.packed(f"{b.name} @ {a.name}.t()", val)  # a parameter by columns
    batch = own_dimensions(out[:-2]) if a.rank > 2 and b.rank > 2 else ()
    alike = a.layout == b.layout == PACKED and a.rank == b.rank and a.axes == b.axes == batch
    if batch and alike and a.shape[batch[0]] == b.shape[batch[0]]:
        return e.packed(f"{a.name} @ {b.name}", val)  # a product for each row
    return _padded_product(e, a, b, val)


def _padded_product(e: Emitter, a: Packed, b: Packed, val: torch.Tensor) -> Packed:
    inner_a = a.rank - 1
    inner_b = b.rank - 2 if b.rank > 1 else 0
    clear = inner_a in a.axes or inner_b in b.axes
    if clear and (inner_a in a.axes) != (inner_b in b.axes):
        raise NoRule("a product along a size of its own with a fixed one")
    # of two factors that are padded along what is summed, one is enough to be zero there: the other one is finite
    left = e.spread(a, clear=[inner_a] if clear else ())
    right = e.spread(b, clear=[inner_b] if clear and b.layout == PACKED else ())
    rank = max(a.rank, b.rank, 2)
    left = _ranked(e, left, a, rank, vector_at=1)
    right = _ranked(e, right, b, rank, vector_at=2)
    along = f"{_padded_along(e, a, 1)}, {_padded_along(e, b, 2)}"
    name = e.line(f"{e.const(multiplied)}({left}, {right}, {along})")
    if a.rank == 1:
        name = e.line(f"{name}.squeeze(-2)")
    if b.rank == 1:
        name = e.line(f"{name}.squeeze(-1)")
    return e.gathered(name, val)


def _padded_along(e: Emitter, v: Packed, vector_at: int) -> str:
    """The sizes that a factor is padded along, and their places, counted from the end."""
    of_vector = -1 if vector_at == 1 else -2
    places = [(e.lengths(v.shape[a]), of_vector if v.rank == 1 else a - v.rank) for a in v.axes]
    return f"[{', '.join(f'({size}, {place})' for size, place in places)}]"


def _ranked(e: Emitter, name: str, v: Packed, rank: int, *, vector_at: int) -> str:
    """A factor as [n or nothing, *batch, rows, columns] with `rank` dimensions after n."""
    have = v.rank
    if have == 1:
        name = e.line(f"{name}.unsqueeze({-2 if vector_at == 1 else -1})")
        have = 2
    return name if v.layout == WHOLE else e.filled(name, 1, have, rank)


@rule("_cdist_forward")
def _distances(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Distances between the rows of two tensors of an instance."""
    x, y = e.to_dense(a["x1"]), e.to_dense(a["x2"])
    if x.rank != y.rank or any(d != v.rank - 2 for v in (x, y) for d in v.axes):
        raise NoRule("distances along a size of its own")
    a["x1"], a["x2"] = Code(e.spread(x)), Code(e.spread(y))
    return e.gathered(e.line(e.call(node.target, a)), val)


@rule("linalg_matrix_power")
def _matrix_power(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Of matrices by themselves; whole, as the power 0 has a gradient of zeros."""
    x = a["self"] = e.to_dense(a["self"])
    if x.layout not in (DENSE, PACKED) or any(d >= x.rank - 2 for d in x.axes):
        raise NoRule("matrices of their own size")
    return e.packed(e.call(node.target, a), val)


@rule("scaled_dot_product_attention")
def _attention(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Attention of each instance by itself: queries, keys and values padded, padding hidden from the queries."""
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    if _of_items(q, k, v, mask):
        return e.packed(e.call(node.target, a), val)
    if any(x.rank != q.rank or set(x.axes) - {x.rank - 2} for x in (q, k, v)):
        raise NoRule("attention with a size of its own elsewhere than along queries or keys")
    if a.get("enable_gqa") or all(x.layout == WHOLE for x in (q, k, v)):
        raise NoRule("attention of this kind")
    names = [_heads(e, e.to_dense(x)) for x in (q, k, v)]
    mask_code = _mask(e, mask, q.shape[:-2]) if isinstance(mask, Packed) else "None"
    how = f"{e.source(a['dropout_p'])}, {bool(a['is_causal'])}, {e.source(a['scale'])}"
    name = e.line(f"z.attention({', '.join(names)}, {e.lengths(k.shape[-2])}, {mask_code}, {how})")
    *heads, _, features = shape_of(val)
    shape = ", ".join(map(str, ("n", *heads, f"{name}.shape[-2]", features)))
    return e.gathered(e.line(f"{name}.reshape({shape})"), val)


def _of_items(q: Packed, k: Packed, v: Packed, mask: Packed | None) -> bool:
    """Whether each of an instance's items attends within itself, as the characters of words do: a batch of more."""
    if any(
        x.layout != PACKED or x.axes != (0,) or x.shape[0] != q.shape[0] or x.rank != 4 for x in (q, k, v)
    ):
        return False
    if mask is None or mask.layout == WHOLE:
        return mask is None or mask.rank < 4
    return mask.layout == PACKED and mask.axes == (0,) and mask.rank == 4


def _heads(e: Emitter, x: Packed) -> str:
    """[n, heads, longest, features]."""
    name = e.spread(x)
    return e.line(f"{name}.reshape(n, -1, *{name}.shape[-2:])")


def _mask(e: Emitter, mask: Packed, shape: Shape) -> str:
    """An attention mask as something that broadcasts to [n, heads, queries, keys]; shape: of the heads."""
    heads = [int(d) for d in shape]
    if any(d < mask.rank - 2 for d in mask.axes):
        raise NoRule("an attention mask with a size of its own among its heads")
    name = e.spread(mask)
    lead = "" if mask.layout == WHOLE else "n, "
    outer = [int(d) for d in mask.shape[:-2]]
    if mask.rank < 2:
        raise NoRule("an attention mask with one dimension")
    full = [1] * (len(heads) - len(outer)) + outer
    if all(d == 1 for d in full):
        return e.line(f"{name}.reshape({lead}{'1, ' if lead else ''}*{name}.shape[-2:])")
    fulled = ", ".join(map(str, heads))
    name = e.line(f"{name}.reshape({lead}{''.join(f'{d}, ' for d in full)}*{name}.shape[-2:])")
    name = e.line(f"{name}.expand({lead}{fulled}, *{name}.shape[-2:])")
    return e.line(f"{name}.reshape({lead}-1, *{name}.shape[-2:])")
