"""Rules for look-ups and scatters: an instance's own indices mean its own rows.

In: index, index_select, gather, index_add, scatter and their kin. Out: the same on the rows of all instances, each
index moved by the first row of its instance. An index out of the instance's range stays an error: it never reads or
writes another instance's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxbatch.ragged.expressions import Shape, depends
from fxbatch.ragged.lower import (
    DENSE,
    PACKED,
    PADDED,
    WHOLE,
    Arguments,
    Code,
    Emitted,
    Emitter,
    NoRule,
    Packed,
    Traced,
    layout_of,
    own_dimensions,
    shape_of,
)
from fxbatch.ragged.rules import rule


def table_of(e: Emitter, x: Packed, d: int) -> tuple[str, str]:
    """The rows of x along dimension d, of all instances one after another, and their Lengths."""
    if x.layout == PACKED:
        if x.axes != (d,):
            raise NoRule("indices along a fixed dimension of rows")
        return x.name, e.lengths(x.shape[d])
    if x.layout != DENSE:
        raise NoRule("indices into two sizes of its own")
    name = x.name if d == 0 else e.line(f"{x.name}.movedim({d + 1}, 1)")
    size = e.lengths(int(x.shape[d]))
    return e.line(f"{name}.reshape({size}.total, *{name}.shape[2:])"), size


def _aligned_rows(e: Emitter, x: Packed, shape: Shape, d: int) -> str:
    """The rows along dimension d of what x is where it meets a value of this shape."""
    x = e.to_dense(x)
    return table_of(e, Packed(e.aligned(x, shape), layout_of(shape), shape, x.dtype), d)[0]


def _rows(e: Emitter, index: Packed, size: str, *, from_end: bool = False) -> str:
    """Rows of the table that indices mean. from_end: negative ones count from the end, else they are errors."""
    if index.layout == PADDED:
        raise NoRule("indices with two sizes of their own")
    if index.dtype == torch.bool:
        raise NoRule("a mask")
    sizes = e.rows_of(index) if index.layout == PACKED else None
    return e.line(f"z.rows({size}, {index.name}, {sizes}, {from_end})")


@rule("index")
def _index(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, indexed = a["self"], a["indices"]
    places = [i for i, v in enumerate(indexed) if v is not None]
    indices = [indexed[i] for i in places]
    if any(v.dtype == torch.bool for v in indices):
        return _by_mask(e, x, indices, places, val)
    if x.layout == WHOLE:
        return _of_whole(e, x, indices, places, val)
    if all(v.layout == WHOLE for v in indices) and not any(d in x.axes for d in places):
        return _columns(e, x, indexed, places, val)
    if places != list(range(len(places))):
        raise NoRule("indices of later dimensions")
    if x.layout == PADDED:
        raise NoRule("indices into two sizes of its own")
    indices = [e.to_dense(v) for v in indices]
    if len(indices) > 1:
        common = shape_of(val)[: val.dim() - (x.rank - len(places))]
        layout = layout_of(common)
        indices = [Packed(e.aligned(v, common), layout, common, v.dtype) for v in indices]
    first = indices[0]
    if any(d > 0 for d in x.axes):
        raise NoRule("indices of rows whose own size is not the first")
    if own_dimensions(first.shape) not in ((), (0,)):
        raise NoRule("indices whose own size is not their first")
    table, size = table_of(e, x, 0)
    names = [_rows(e, first, size, from_end=True), *[v.name for v in indices[1:]]]
    if len(names) == 1 and first.rank == 1 and first.layout == PACKED:
        return e.packed(f"{table}.index_select(0, {names[0]})", val)
    return e.packed(f"{table}[{', '.join(names)}]", val)


def _columns(
    e: Emitter, x: Packed, indices: Sequence[Packed | None], places: list[int], val: object
) -> Packed:
    """x[:, index] with an index that is the same for all instances: the same columns, elsewhere."""
    if places != list(range(places[0], places[0] + len(places))):
        raise NoRule("indices of later dimensions")  # what they give is put in front
    held = [x.place(d) for d in places]
    if held != list(range(held[0], held[0] + len(held))):
        raise NoRule("indices of dimensions that lie apart")
    picks = [indices[d].name for d in places]
    return e.packed(f"{x.name}[{', '.join([':'] * held[0] + picks)}]", val)


def _by_mask(e: Emitter, x: Packed, indices: list[Packed], places: list[int], val: torch.Tensor) -> Packed:
    """The rows that a mask of one dimension picks: how many of each instance is known when it runs."""
    if len(indices) > 1 or indices[0].rank != 1 or x.shape[places[0]] != indices[0].shape[0]:
        raise NoRule("a mask")
    d = places[0]
    table, _ = table_of(e, e.to_dense(x), d)
    return e.packed(f"{table}.index_select(0, {e.rows_where(indices[0], shape_of(val)[d])})", val)


@rule("nonzero")
def _nonzero(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Packed:
    """The places of a mask of rows."""
    x = a["self"]
    if x.rank != 1:
        raise NoRule("a mask of more dimensions")
    size = e.lengths(x.shape[0])
    mask = e.by_elements(x, f"({x.name} != 0)", torch.bool)
    picked = e.rows_where(mask, shape_of(val)[0])
    return e.packed(f"{size}.position.index_select(0, {picked}).unsqueeze(1)", val)


def _of_whole(e: Emitter, x: Packed, indices: list[Packed], places: list[int], val: torch.Tensor) -> Packed:
    """A parameter by indices of the instances."""
    if places != list(range(len(places))):
        raise NoRule("indices of later dimensions")
    common = shape_of(val)[: val.dim() - (x.rank - len(places))]
    if len(own_dimensions(common)) == 2 and len(indices) == 1:
        return e.gathered_as(indices[0], f"{x.name}[{e.hidden(indices[0], indices[0].axes)}]", val)
    if own_dimensions(common) not in ((), (0,)):
        raise NoRule("indices whose own size is not their first")
    names = [e.aligned(e.to_dense(v), common) for v in indices]
    return e.packed(f"{x.name}[{', '.join(names)}]", val)


@rule("index_select")
def _index_select(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, index = a["self"], e.to_dense(a["index"])
    d = a["dim"] % x.rank
    if x.layout == WHOLE:
        if d != 0:
            raise NoRule("columns of a parameter")
        picked = f"{x.name}.index_select(0, {index.name}.reshape(-1))"
        return e.packed(f"{picked}.reshape(*{index.name}.shape, *{x.name}.shape[1:])", val)
    if a["index"].layout == WHOLE and d not in x.axes:
        return e.packed(f"{x.name}.index_select({x.place(d)}, {a['index'].name})", val)
    table, size = table_of(e, x, d)
    name = e.line(f"{table}.index_select(0, {_rows(e, index, size)}.reshape(-1))")
    return e.of_rows(name, d, val)


@rule("index_add", "index_copy", "index_reduce", "index_fill")
def _index_add(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, index = e.to_dense(a["self"]), e.to_dense(a["index"])
    d = a["dim"] % x.rank
    table, size = table_of(e, x, d)
    if "source" in a:
        shape = (*x.shape[:d], index.shape[0], *x.shape[d + 1 :])
        a["source"] = Code(_aligned_rows(e, a["source"], shape, d))
    fills = node.target is torch.ops.aten.index_fill.int_Scalar  # the one of these that counts from the end
    rows = e.line(f"{_rows(e, index, size, from_end=fills)}.reshape(-1)")
    a["self"], a["dim"], a["index"] = Code(table), 0, Code(rows)
    return e.of_rows(e.line(e.call(node.target, a)), d, val)


@rule("index_put")
def _index_put(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = e.to_dense(a["self"])
    indices = a["indices"]
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool:
        return _put_where(e, x, indices[0], a["values"], a["accumulate"], val)
    if any(v is None or v.dtype == torch.bool for v in indices):
        raise NoRule("writes to a mask or to later dimensions")
    if len(indices) > 1:
        raise NoRule("writes to several indices")
    index = e.to_dense(a["indices"][0])
    if index.rank != 1:
        raise NoRule("writes to indices of more dimensions")
    table, size = table_of(e, x, 0)
    source = _aligned_rows(e, a["values"], (index.shape[0], *x.shape[1:]), 0)
    rows = e.line(f"{_rows(e, index, size, from_end=True)}.reshape(-1)")
    if not a["accumulate"]:
        code = f"{table}.index_put(({rows},), {source})"
    else:
        code = f"{table}.index_add(0, {rows}, {source}.expand({rows}.shape[0], *{table}.shape[1:]))"
    return e.of_rows(e.line(code), 0, val)


def _put_where(e: Emitter, x: Packed, mask: Packed, values: Packed, accumulate: bool, val: object) -> Packed:
    """x[mask] = values, where these are the same for all that the mask picks."""
    rest = x.shape[mask.rank :]
    if accumulate or values.rank > len(rest) or mask.shape != x.shape[: mask.rank] or values.dtype != x.dtype:
        raise NoRule("writes to a mask")
    wide = e.line(f"{mask.name}{'.unsqueeze(-1)' * len(rest)}")
    flags = Packed(wide, mask.layout, (*mask.shape, *[1] * len(rest)), mask.dtype)
    if any(a >= mask.rank for a in x.axes):
        raise NoRule("writes to a mask of other dimensions than its own")
    code = f"torch.where({e.aligned(flags, x.shape)}, {e.aligned(values, x.shape)}, {x.name})"
    return e.packed(code, val)


@rule("gather")
def _gather(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, index = e.to_dense(a["self"]), e.to_dense(a["index"])
    d = a["dim"] % max(x.rank, 1)
    if _crosses_rows(e, x, index, d):
        table, size = table_of(e, x, d)
        rows = flat(e, index, d, _rows(e, index, size))
        return e.of_rows(e.line(f"{table}.gather(0, {rows})"), d, val)
    return e.packed(f"{x.name}.gather({x.place(d)}, {index.name})", val)


def flat(e: Emitter, index: Packed, d: int, rows: str) -> str:
    """Rows of the table for each element, the indices along d of all instances one after another."""
    if index.layout == PACKED:
        return rows
    name = rows if d == 0 else e.line(f"{rows}.movedim({d + 1}, 1)")
    return e.line(f"{name}.flatten(0, 1)")


def _crosses_rows(e: Emitter, x: Packed, index: Packed, d: int) -> bool:
    """Whether indices along d are of rows of the instances. torch.gather may be given fewer indices than x has
    elsewhere; rows of all instances must be as many."""
    crosses = d in x.axes or d in index.axes
    if crosses and (index.axes not in ((d,), ()) or x.layout == PADDED):
        raise NoRule("two sizes of its own")
    for i in range(x.rank):
        differs = depends(x.shape[i]) or depends(index.shape[i])
        if i != d and differs and not e.graph.equal(x.shape[i], index.shape[i]):
            raise NoRule("fewer indices than rows")
    return crosses


@rule("scatter_add", "scatter", "scatter_reduce")
def _scatter(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, index = e.to_dense(a["self"]), e.to_dense(a["index"])
    d = a["dim"] % max(x.rank, 1)
    source = a.get("src")
    if isinstance(source, Packed):
        source = e.to_dense(source)
        if not all(e.graph.equal(a, b) for a, b in zip(source.shape, index.shape, strict=True)):
            raise NoRule("fewer indices than sources")
        a["src"] = source
    if _crosses_rows(e, x, index, d):
        table, size = table_of(e, x, d)
        a["index"] = Code(flat(e, index, d, _rows(e, index, size)))
        if isinstance(source, Packed):
            a["src"] = Code(flat(e, source, d, source.name))
        a["self"], a["dim"] = Code(table), 0
        return e.of_rows(e.line(e.call(node.target, a)), d, val)
    a["self"], a["dim"], a["index"] = x, x.place(d), index
    return e.packed(e.call(node.target, a), val)


def _beside(*names: str, first: str = "self", table: str) -> None:
    """Register operators that look each element up in a table which is the same for all instances."""

    def apply(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
        x, other = a[first], a[table]
        if not isinstance(x, Packed) or x.layout == WHOLE or not isinstance(other, Packed):
            raise NoRule("a table of each instance")
        if other.layout != WHOLE or other.rank != 1 or isinstance(a.get("sorter"), Packed):
            raise NoRule("a table of each instance")
        return e.packed(e.call(node.target, a), val)

    rule(*names)(apply)


_beside("bucketize", table="boundaries")
_beside("searchsorted", table="sorted_sequence")
_beside("isin", first="elements", table="test_elements")
