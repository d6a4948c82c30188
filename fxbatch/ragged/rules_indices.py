"""Rules for look-ups and scatters: an instance's own indices mean its own rows.

In: index, index_select, gather, index_add, scatter and their kin. Out: the same on the rows of all instances, each
index moved by the first row of its instance. An index out of the instance's range stays an error: it never reads or
writes another instance's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.proxy import Proxy

from fxbatch.ragged.expressions import Shape, depends
from fxbatch.ragged.lower import (
    DENSE,
    PACKED,
    PADDED,
    WHOLE,
    Arguments,
    Given,
    NoRule,
    Packed,
    PackedTape,
    Traced,
    layout_of,
    operator_of,
    own_dimensions,
    plain,
    shape_of,
)
from fxbatch.ragged.rules import rule


def table_of(tape: PackedTape, x: Packed, d: int) -> tuple[Proxy, Proxy]:
    """The rows of x along dimension d, of all instances one after another, and their Lengths."""
    if x.layout == PACKED:
        if x.axes != (d,):
            raise NoRule("indices along a fixed dimension of rows")
        return x.rows, tape.lengths(x.shape[d])
    if x.layout != DENSE:
        raise NoRule("indices into two sizes of its own")
    rows = x.rows if d == 0 else x.rows.movedim(d + 1, 1)
    return rows.flatten(0, 1), tape.lengths(int(x.shape[d]))


def _aligned_rows(tape: PackedTape, x: Packed, shape: Shape, d: int) -> Proxy:
    """The rows along dimension d of what x is where it meets a value of this shape."""
    rows, layout = tape.aligned(tape.to_dense(x), shape), layout_of(shape)
    rows = rows.expand(-1, *shape) if layout == DENSE and x.shape != shape else rows
    return table_of(tape, Packed(rows, layout, shape, x.dtype), d)[0]


def _rows(tape: PackedTape, index: Packed, size: Proxy, *, from_end: bool = False) -> Proxy:
    """Rows of the table that indices mean. from_end: negative ones count from the end, else they are errors."""
    if index.layout == PADDED:
        raise NoRule("indices with two sizes of their own")
    if index.dtype == torch.bool:
        raise NoRule("a mask")
    sizes = tape.rows_of(index) if index.layout == PACKED else None
    return tape.z.rows(size, index.rows, sizes, from_end)


@rule("index")
def _index(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, indexed = a["self"], a["indices"]
    places = [i for i, v in enumerate(indexed) if v is not None]
    indices = [indexed[i] for i in places]
    if any(v.dtype == torch.bool for v in indices):
        return _by_mask(tape, x, indices, places, val)
    if x.layout == WHOLE:
        return _of_whole(tape, x, indices, places, val)
    if all(v.layout == WHOLE for v in indices) and not any(d in x.axes for d in places):
        return _columns(tape, x, indexed, places, val)
    if places != list(range(len(places))):
        raise NoRule("indices of later dimensions")
    if x.layout == PADDED:
        raise NoRule("indices into two sizes of its own")
    indices = [tape.to_dense(v) for v in indices]
    if len(indices) > 1:
        common = shape_of(val)[: val.dim() - (x.rank - len(places))]
        layout = layout_of(common)
        indices = [Packed(tape.aligned(v, common), layout, common, v.dtype) for v in indices]
    first = indices[0]
    if any(d > 0 for d in x.axes):
        raise NoRule("indices of rows whose own size is not the first")
    if own_dimensions(first.shape) not in ((), (0,)):
        raise NoRule("indices whose own size is not their first")
    table, size = table_of(tape, x, 0)
    rows = _rows(tape, first, size, from_end=True)
    if len(indices) == 1 and first.rank == 1 and first.layout == PACKED:
        return tape.packed(table.index_select(0, rows), val)
    return tape.packed(table[(rows, *[v.rows for v in indices[1:]])], val)


def _columns(
    tape: PackedTape, x: Packed, indices: Sequence[Packed | None], places: list[int], val: object
) -> Packed:
    """x[:, index] with an index that is the same for all instances: the same columns, elsewhere."""
    if places != list(range(places[0], places[0] + len(places))):
        raise NoRule("indices of later dimensions")  # what they give is put in front
    held = [x.place(d) for d in places]
    if held != list(range(held[0], held[0] + len(held))):
        raise NoRule("indices of dimensions that lie apart")
    picks = [plain(indices[d]) for d in places]
    return tape.packed(x.rows[(*[slice(None)] * held[0], *picks)], val)


def _by_mask(
    tape: PackedTape, x: Packed, indices: list[Packed], places: list[int], val: torch.Tensor
) -> Packed:
    """The rows that a mask of one dimension picks: how many of each instance is known when it runs."""
    if len(indices) > 1 or indices[0].rank != 1 or x.shape[places[0]] != indices[0].shape[0]:
        raise NoRule("a mask")
    d = places[0]
    table, _ = table_of(tape, tape.to_dense(x), d)
    return tape.packed(table.index_select(0, tape.rows_where(indices[0], shape_of(val)[d])), val)


@rule("nonzero")
def _nonzero(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Packed:
    """The places of a mask of rows."""
    x = a["self"]
    if x.rank != 1:
        raise NoRule("a mask of more dimensions")
    size = tape.lengths(x.shape[0])
    mask = tape.by_elements(x, x.rows.ne(0), torch.bool)
    picked = tape.rows_where(mask, shape_of(val)[0])
    return tape.packed(size.position.index_select(0, picked).unsqueeze(1), val)


def _of_whole(
    tape: PackedTape, x: Packed, indices: list[Packed], places: list[int], val: torch.Tensor
) -> Packed:
    """A parameter by indices of the instances."""
    if places != list(range(len(places))):
        raise NoRule("indices of later dimensions")
    common = shape_of(val)[: val.dim() - (x.rank - len(places))]
    if len(own_dimensions(common)) == 2 and len(indices) == 1:
        return tape.gathered_as(indices[0], x.rows[tape.hidden(indices[0], indices[0].axes)], val)
    if own_dimensions(common) not in ((), (0,)):
        raise NoRule("indices whose own size is not their first")
    picks = [tape.aligned(tape.to_dense(v), common) for v in indices]
    return tape.packed(x.rows[tuple(picks)], val)


@rule("index_select")
def _index_select(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, index = a["self"], tape.to_dense(a["index"])
    d = a["dim"] % x.rank
    if x.layout == WHOLE:
        if d != 0:
            raise NoRule("columns of a parameter")
        picked = x.rows.index_select(0, index.rows.reshape(-1))
        return tape.packed(picked if index.axes else picked.reshape(tape.z.n, *shape_of(val)), val)
    if a["index"].layout == WHOLE and d not in x.axes:
        return tape.packed(x.rows.index_select(x.place(d), a["index"].rows), val)
    table, size = table_of(tape, x, d)
    return tape.of_rows(table.index_select(0, _rows(tape, index, size).reshape(-1)), d, val)


@rule("index_add", "index_copy", "index_reduce", "index_fill")
def _index_add(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, index = tape.to_dense(a["self"]), tape.to_dense(a["index"])
    d = a["dim"] % x.rank
    table, size = table_of(tape, x, d)
    if "source" in a:
        shape = (*x.shape[:d], index.shape[0], *x.shape[d + 1 :])
        a["source"] = _aligned_rows(tape, a["source"], shape, d)
    fills = node.target is torch.ops.aten.index_fill.int_Scalar  # the one of these that counts from the end
    rows = _rows(tape, index, size, from_end=fills).reshape(-1)
    a["self"], a["dim"], a["index"] = table, 0, rows
    return tape.of_rows(tape.apply(operator_of(node), a), d, val)


@rule("index_put")
def _index_put(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = tape.to_dense(a["self"])
    indices = a["indices"]
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool:
        return _put_where(tape, x, indices[0], a["values"], a["accumulate"], val)
    if any(v is None or v.dtype == torch.bool for v in indices):
        raise NoRule("writes to a mask or to later dimensions")
    if len(indices) > 1:
        raise NoRule("writes to several indices")
    index = tape.to_dense(a["indices"][0])
    if index.rank != 1:
        raise NoRule("writes to indices of more dimensions")
    table, size = table_of(tape, x, 0)
    source = _aligned_rows(tape, a["values"], (index.shape[0], *x.shape[1:]), 0)
    rows = _rows(tape, index, size, from_end=True).reshape(-1)
    if not a["accumulate"]:
        written = table.index_put((rows,), source)
    else:
        written = table.index_add(0, rows, source.expand(rows.shape[0], *x.shape[1:]))
    return tape.of_rows(written, 0, val)


def _put_where(
    tape: PackedTape, x: Packed, mask: Packed, values: Packed, accumulate: bool, val: object
) -> Packed:
    """x[mask] = values, where these are the same for all that the mask picks."""
    rest = x.shape[mask.rank :]
    if accumulate or values.rank > len(rest) or mask.shape != x.shape[: mask.rank] or values.dtype != x.dtype:
        raise NoRule("writes to a mask")
    flags = Packed(
        functools.reduce(lambda x, _: x.unsqueeze(-1), rest, mask.rows),
        mask.layout,
        (*mask.shape, *[1] * len(rest)),
        mask.dtype,
    )
    if any(a >= mask.rank for a in x.axes):
        raise NoRule("writes to a mask of other dimensions than its own")
    operands = tape.aligned(flags, x.shape), tape.aligned(values, x.shape), x.rows
    return tape.packed(tape.call(torch.where, *operands), val)


@rule("gather")
def _gather(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, index = tape.to_dense(a["self"]), tape.to_dense(a["index"])
    d = a["dim"] % max(x.rank, 1)
    if _crosses_rows(tape, x, index, d):
        table, size = table_of(tape, x, d)
        rows = flat(tape, index, d, _rows(tape, index, size))
        return tape.of_rows(table.gather(0, rows), d, val)
    return tape.packed(x.rows.gather(x.place(d), index.rows), val)


def flat(tape: PackedTape, index: Packed, d: int, rows: Proxy) -> Proxy:
    """Rows of the table for each element, the indices along d of all instances one after another."""
    if index.layout == PACKED:
        return rows
    return (rows if d == 0 else rows.movedim(d + 1, 1)).flatten(0, 1)


def _crosses_rows(tape: PackedTape, x: Packed, index: Packed, d: int) -> bool:
    """Whether indices along d are of rows of the instances. torch.gather may be given fewer indices than x has
    elsewhere; rows of all instances must be as many."""
    crosses = d in x.axes or d in index.axes
    if crosses and (index.axes not in ((d,), ()) or x.layout == PADDED):
        raise NoRule("two sizes of its own")
    for i in range(x.rank):
        differs = depends(x.shape[i]) or depends(index.shape[i])
        if i != d and differs and not tape.sized.equal(x.shape[i], index.shape[i]):
            raise NoRule("fewer indices than rows")
    return crosses


@rule("scatter_add", "scatter", "scatter_reduce")
def _scatter(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, index = tape.to_dense(a["self"]), tape.to_dense(a["index"])
    d = a["dim"] % max(x.rank, 1)
    source = a.get("src")
    if isinstance(source, Packed):
        source = tape.to_dense(source)
        if not all(tape.sized.equal(a, b) for a, b in zip(source.shape, index.shape, strict=True)):
            raise NoRule("fewer indices than sources")
        a["src"] = source
    if _crosses_rows(tape, x, index, d):
        table, size = table_of(tape, x, d)
        a["index"] = flat(tape, index, d, _rows(tape, index, size))
        if isinstance(source, Packed):
            a["src"] = flat(tape, source, d, source.rows)
        a["self"], a["dim"] = table, 0
        return tape.of_rows(tape.apply(operator_of(node), a), d, val)
    a["self"], a["dim"], a["index"] = x, x.place(d), index
    return tape.packed(tape.apply(operator_of(node), a), val)


def _beside(*names: str, first: str = "self", table: str) -> None:
    """Register operators that look each element up in a table which is the same for all instances."""

    def apply(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
        x, other = a[first], a[table]
        if not isinstance(x, Packed) or x.layout == WHOLE or not isinstance(other, Packed):
            raise NoRule("a table of each instance")
        if other.layout != WHOLE or other.rank != 1 or isinstance(a.get("sorter"), Packed):
            raise NoRule("a table of each instance")
        return tape.packed(tape.apply(operator_of(node), a), val)

    rule(*names)(apply)


_beside("bucketize", table="boundaries")
_beside("searchsorted", table="sorted_sequence")
_beside("isin", first="elements", table="test_elements")
