"""Rules for operators that move elements: views, permutations, slices, cat and stack, factories.

In: a node whose operator only says where elements go. Out: the same for rows: the dimension that differs between
instances stays in front, and index arithmetic does what crosses rows.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx
from torch.fx.proxy import Proxy

from fxbatch.ragged.expressions import Shape, Size, depends
from fxbatch.ragged.lengths import interleaved, pairs, pairs_in_a_row
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
    filled,
    name_of,
    operator_of,
    own_dimensions,
    permuted,
    place_in,
    plain,
    shape_of,
)
from fxbatch.ragged.rules import rule
from fxbatch.ragged.rules_indices import flat, table_of


def _moved(tape: PackedTape, x: Packed, val: torch.Tensor, order: list[int]) -> Packed:
    """Dimensions in another order: result dimension i is dimension order[i] of x."""
    axes = [a for a in order if a in x.axes]
    rest = [d for d in order if d not in x.axes]
    places = [0] if x.layout in (DENSE, PADDED) else []
    places += [x.place(d) for d in (*axes, *rest)]
    return tape.packed(permuted(x.rows, places), val)


@rule("permute")
def _permute(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    return _moved(tape, a["self"], val, [d % a["self"].rank for d in a["dims"]])


@rule("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT")
def _transpose(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Of the last two dimensions where none are named."""
    x, i, j = [*[tape.value(v) for v in node.args], -2, -1][:3]
    order = list(range(x.rank))
    if x.rank > 1:
        order[i], order[j] = order[j], order[i]
    return _moved(tape, x, val, order)


@rule(
    "unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"
)
def _view(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Another shape: groups of dimensions of equal products; the own dimension leads its group, before and after."""
    x = a["self"]
    shape = shape_of(val)
    if x.layout == WHOLE:
        if own_dimensions(shape):
            raise NoRule("a fixed tensor in a shape of its own")
        return tape.packed(x.rows.reshape(shape), val, WHOLE)
    axes = own_dimensions(shape)
    if name_of(node) == "squeeze" and len(axes) != len(x.axes):
        raise NoRule("a size of its own is squeezed")
    if x.layout == DENSE and not axes:
        return tape.packed(x.rows.reshape(tape.z.n, *shape), val)
    if x.layout == DENSE or not axes:
        raise NoRule("a view between a fixed shape and one of its own")
    if len(axes) != len(x.axes):
        return _pairs_in_a_row(tape, x, shape, val)
    order, physical, joined = _grouped(x.shape, shape)
    if x.layout == PADDED or len(axes) > 1:
        if not (x.layout == PADDED and len(axes) == 2) or joined:
            raise NoRule("a view that joins two sizes of its own")
        rest = [d for d in shape if not depends(d)]
        return tape.packed(x.rows.reshape(*tape.leading(shape), *rest), val)
    rows = permuted(x.rows, [0] + [x.place(d) for d in order if d not in x.axes])
    physical = [d for d in physical if d not in axes]
    rows = rows.reshape(tape.lengths(shape[axes[0]]).total, *[shape[d] for d in physical])
    wanted = [d for d in range(len(shape)) if d not in axes]
    return tape.packed(permuted(rows, [0] + [1 + physical.index(d) for d in wanted]), val)


def _pairs_in_a_row(tape: PackedTape, x: Packed, shape: Shape, val: torch.Tensor) -> Packed:
    """[T, S] as [T * S], and back: all pairs of an instance."""
    wide, narrow = (x.shape, shape) if x.layout == PADDED else (shape, x.shape)
    a = own_dimensions(wide)[0]
    if own_dimensions(wide) != (a, a + 1) or own_dimensions(narrow) != (a,):
        raise NoRule("a view that joins two sizes of its own with others")
    others = (*wide[:a], *wide[a + 2 :]), (*narrow[:a], *narrow[a + 1 :])
    if others[0] != others[1] or sympy.expand(wide[a] * wide[a + 1] - narrow[a]):
        raise NoRule("a view that joins two sizes of its own with others")
    sizes = [tape.lengths(d) for d in (wide[a], wide[a + 1], narrow[a])]
    move = pairs_in_a_row if x.layout == PADDED else pairs
    return tape.packed(tape.call(move, x.rows, *sizes), val)


def _groups(before: tuple[object, ...], after: tuple[object, ...]) -> list[tuple[list[int], list[int]]]:
    """Dimensions before and after, in groups of equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_in, first_out = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while True:
            left, right = sympy.Mul(*before[first_in:i]), sympy.Mul(*after[first_out:j])
            if sympy.expand(left - right) == 0:
                break
            if j < len(after) and (i == len(before) or _less(right, left)):
                j += 1
            elif i < len(before):
                i += 1
            else:
                raise NoRule("a view whose sizes don't compare")
        groups.append((list(range(first_in, i)), list(range(first_out, j))))
    return groups


def _less(a: Size, b: Size) -> bool:
    values = dict.fromkeys(a.free_symbols | b.free_symbols, 1009)
    return bool(a.subs(values) < b.subs(values))


def _grouped(before: tuple[object, ...], after: tuple[object, ...]) -> tuple[list[int], list[int], bool]:
    """The orders of dimensions, before and after, in which own ones and the rest of their group come first; whether any
    are joined."""
    first: list[int] = []
    others: list[int] = []
    first_out: list[int] = []
    others_out: list[int] = []
    joined = False
    for ins, outs in _groups(before, after):
        own_in = [d for d in ins if depends(before[d])]
        own_out = [d for d in outs if depends(after[d])]
        if not own_in and not own_out:
            others += ins
            others_out += outs
            continue
        sized = [d for d in ins if before[d] != 1]
        sized_out = [d for d in outs if after[d] != 1]
        if len(own_in) != 1 or len(own_out) != 1 or sized[0] != own_in[0] or sized_out[0] != own_out[0]:
            raise NoRule("a view in which a size of its own is not the first of what it is joined with")
        joined = joined or len(sized) > 1 or len(sized_out) > 1
        first += sized + [d for d in ins if d not in sized]
        first_out += sized_out + [d for d in outs if d not in sized_out]
    return first + others, first_out + others_out, joined


@rule("expand", "expand_as", "broadcast_to")
def _expand(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["self"]
    shape = shape_of(val)
    if x.layout == WHOLE and not own_dimensions(shape):
        return tape.packed(x.rows.expand(shape), val, WHOLE)
    rest = [d for d in shape if not depends(d)]
    return tape.packed(tape.aligned(tape.to_dense(x), shape).expand(*tape.leading(shape), *rest), val)


# -- slices -----------------------------------------------------------------------------------------------


@rule("select")
def _select(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, d, i = a["self"], a["dim"] % a["self"].rank, a["index"]
    if d not in x.axes:
        if depends(i):
            raise NoRule("a place of its own")
        return tape.packed(x.rows.select(x.place(d), i), val)
    one = _part(tape, x, d, tape.lengths(x.shape[d]).place(_column(tape, i)), tape.lengths(1), 1)
    if x.layout == PACKED:
        return tape.packed(one, val)
    (other,) = [a for a in x.axes if a != d]
    return tape.packed(tape.lengths(x.shape[other]).unpad(one.squeeze(x.place(d))), val)


def _part(tape: PackedTape, x: Packed, d: int, begin: Proxy | int, out: Proxy, step: int) -> Proxy:
    """As many elements along a dimension of its own as `out` says, from `begin` on."""
    size = tape.lengths(x.shape[d])
    if x.layout == PACKED:
        return x.rows.index_select(0, size.taken(begin, out, step))
    return tape.z.part(x.rows, x.place(d), begin, out, step, size.longest)


def _column(tape: PackedTape, i: Size) -> Proxy | int:
    return tape.column(i) if depends(i) else i


@rule("slice")
def _slice(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["self"]
    d = a["dim"] % x.rank
    start = a["start"] or 0
    if d not in x.axes:
        if depends(start) or depends(a["end"]):
            return _part_of_fixed(tape, val, tape.to_dense(x), d, start, a["step"])
        index = (*[slice(None)] * x.place(d), slice(start, a["end"], a["step"]))
        return tape.packed(x.rows[index], val)
    shape = shape_of(val)
    if shape[d] == x.shape[d] and a["step"] == 1:
        return tape.packed(x.rows, val)
    size, out = tape.lengths(x.shape[d]), tape.lengths(shape[d])
    begin = size.begin(_column(tape, start))
    if x.layout == PADDED and not depends(shape[d]):
        raise NoRule("a part of one of two sizes of its own, as long in all instances")
    return tape.of_rows(_part(tape, x, d, begin, out, a["step"]), d, val)


def _part_of_fixed(tape: PackedTape, val: torch.Tensor, x: Packed, d: int, start: Size, step: int) -> Packed:
    """A slice of a fixed dimension, as long as the instance says: `positions[:len(x)]`."""
    size, out = tape.lengths(int(x.shape[d])), tape.lengths(shape_of(val)[d])
    begin = size.begin(_column(tape, start))
    if x.layout == PACKED:
        padded, place = _as_padded(tape, x, val), own_dimensions(shape_of(val)).index(d) + 1
        return tape.packed(tape.z.part(padded, place, begin, out, step, x.shape[d]), val)
    rows, _ = table_of(tape, x, d)
    return tape.packed(rows.index_select(0, size.taken(begin, out, step)), val)


def _as_padded(tape: PackedTape, x: Packed, val: torch.Tensor) -> Proxy:
    """x as [n, a, b, *rest] for the two own dimensions of a result, along which it may have fixed sizes."""
    shape = shape_of(val)
    axes = own_dimensions(shape)
    order = [0, *[1 + d for d in axes], *[1 + d for d in range(len(shape)) if d not in axes]]
    return tape.spread(tape.to_dense(x)).permute(order)


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
def _split(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["self"]
    d = a["dim"] % x.rank
    if d in x.axes:
        raise NoRule("it is cut along a size of its own")
    a["dim"] = x.place(d)
    return tape.results(node, tape.apply(operator_of(node), a))


# -- cat ----------------------------------------------------------------------------------------------------


@rule("cat", "concat", "concatenate")
def _cat(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    shape = shape_of(val)
    parts = [p for p in a["tensors"] if p.rank == len(shape)]
    d = a["dim"] % len(shape)
    if d in own_dimensions(shape) or any(d in p.axes for p in parts):  # `[x, zeros(10 - len(x))]`
        return _joined(tape, parts, d, val)
    if own_dimensions(shape):
        rows = [tape.aligned(p, _with(shape, d, p.shape[d])) for p in parts]
    else:
        rows = [tape.to_dense(p).rows for p in parts]
    return tape.packed(tape.call(torch.cat, rows, place_in(shape, d)), val)


def _with(shape: tuple[object, ...], d: int, size: object) -> Shape:
    return (*shape[:d], size, *shape[d + 1 :])


def _joined(tape: PackedTape, parts: list[Packed], d: int, val: torch.Tensor) -> Packed:
    """Rows of several tensors, those of each instance one after another."""
    shape = shape_of(val)
    axes = own_dimensions(shape)
    if len(axes) > 1:
        if len(axes) > 2 or any(p.shape[a] != shape[a] for p in parts for a in axes if a != d):
            raise NoRule("other sizes of their own")
        operands = [_as_padded(tape, p, val) for p in parts]
        sizes = [tape.lengths(p.shape[d]) for p in parts]
        return tape.packed(tape.z.joined(operands, sizes, tape.lengths(shape[d]), axes.index(d) + 1), val)
    tables, lengths = zip(*[table_of(tape, tape.to_dense(p), d) for p in parts], strict=True)
    rows = tape.call(torch.cat, list(tables)).index_select(0, tape.call(interleaved, lengths))
    return tape.of_rows(rows, d, val)


@rule("slice_scatter")
def _slice_scatter(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """`x[1:3] = y` as a function."""
    x, y = tape.to_dense(a["self"]), tape.to_dense(a["src"])
    d = a["dim"] % x.rank
    start = a["start"] or 0
    if d not in x.axes:
        if depends(start) or depends(a["end"]):
            raise NoRule("a slice of its own")
        source = tape.aligned(y, _with(x.shape, d, y.shape[d]))
        return tape.packed(x.rows.slice_scatter(source, x.place(d), start, a["end"], a["step"]), val)
    if x.layout != PACKED:
        raise NoRule("a slice of one of two sizes of its own")
    size, out = tape.lengths(x.shape[d]), tape.lengths(y.shape[d])
    begin = size.begin(_column(tape, start))
    source = flat(tape, y, d, tape.aligned(y, _with(x.shape, d, y.shape[d])))
    source = source.expand(out.total, *[x.shape[i] for i in x.rest])
    return tape.packed(x.rows.index_copy(0, size.taken(begin, out, a["step"]), source), val)


@rule("select_scatter")
def _select_scatter(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """`x[0] = y` as a function."""
    x, y, i = tape.to_dense(a["self"]), a["src"], a["index"]
    d = a["dim"] % x.rank
    rest = (*x.shape[:d], *x.shape[d + 1 :])
    if d not in x.axes:
        if depends(i):
            raise NoRule("a place of its own")
        return tape.packed(x.rows.select_scatter(tape.aligned(y, rest), x.place(d), i), val)
    if x.layout != PACKED:
        raise NoRule("a row of two sizes of its own")
    size = tape.lengths(x.shape[d])
    source = tape.aligned(tape.to_dense(y), rest)
    rows = size.taken(size.place(_column(tape, i)), tape.lengths(1))
    return tape.packed(x.rows.index_copy(0, rows, source), val)


@rule("stack")
def _stack(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    shape = shape_of(val)
    d = a["dim"] % len(shape)
    inner = (*shape[:d], *shape[d + 1 :])
    rows = tape.call(torch.broadcast_tensors, *[tape.aligned(p, inner) for p in a["tensors"]])
    return tape.packed(tape.call(torch.stack, rows, place_in(shape, d)), val)


@rule("constant_pad_nd", "pad")
def _constant_pad(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, pad = a["self"], a["pad"]
    if a.get("mode", "constant") != "constant" or x.layout == WHOLE:
        raise NoRule("padding of this kind")
    if depends(a.get("value")):
        raise NoRule("padding with a size")
    value = a.get("value") or 0
    ends = {x.rank - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    for d, both in ends.items():
        for p in both:
            if depends(p) and d not in x.axes:
                raise NoRule("padding of its own length")
            if depends(p):
                tape.sized.assume(sympy.Ge(p, 0))
            elif p < 0:
                raise NoRule("padding that cuts")
    rows = x.rows
    for d, (before, after) in ends.items():
        if d in x.axes and (before != 0 or after != 0):
            size, out = tape.lengths(x.shape[d]), tape.lengths(shape_of(val)[d])
            first = _column(tape, before)
            if x.layout == PADDED:
                raise NoRule("padding of one of two sizes of its own")
            rows = tape.z.padded_rows(rows, size, out, first, value)
            if not depends(shape_of(val)[d]):
                x = tape.of_rows(rows, d, val)
                rows = x.rows
                ends[d] = (0, 0)
    rank = x.rank + 1 - (len(x.axes) if x.layout == PACKED else 0)
    flat = [0] * (2 * rank)
    for d, (before, after) in ends.items():
        if d not in x.axes:
            place = rank - 1 - x.place(d)
            flat[2 * place : 2 * place + 2] = [before, after]
    if any(flat):
        rows = tape.call(torch.nn.functional.pad, rows, flat, value=value)
    return tape.packed(rows, val)


# -- factories ------------------------------------------------------------------------------------------------

_FACTORIES = (
    "zeros", "ones", "full", "empty", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full", "new_empty",
    "scalar_tensor",
)  # fmt: skip


@rule(*_FACTORIES)
def _factory(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """A tensor made of a shape: as many rows as all instances have."""
    shape = shape_of(val)
    if isinstance(a.get("self"), Packed):
        a["dtype"], a["device"] = val.dtype, tape.z.device
    fill = a.get("fill_value")
    if depends(fill):
        if own_dimensions(shape) or isinstance(a.get("self"), Packed):
            raise NoRule("filled with a size")
        numbers = tape.number(fill, val.dtype).rows.reshape(tape.z.n, *[1] * len(shape))
        return tape.packed(numbers.expand(tape.z.n, *shape), val)
    if "size" not in a:
        raise NoRule("a factory of this kind")
    a["size"] = [*tape.leading(shape), *[d for d in shape if not depends(d)]]
    return tape.packed(tape.apply(operator_of(node), a), val)


@rule("arange")
def _arange(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    (length,) = shape_of(val)
    start, step = a.get("start", 0), a.get("step", 1)
    if not depends(length):
        raise NoRule("a range of sizes that is as long in all instances")
    if depends(step):
        raise NoRule("a range whose step is a size")
    size = tape.lengths(length)
    places = size.position if step == 1 else size.position * step
    if depends(start):
        places = places + size.each(tape.number(start, torch.int64).rows)
    elif start:
        places = places + start
    return tape.packed(places if val.dtype == torch.int64 else places.to(val.dtype), val)


@rule("eye")
def _eye(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """The unit matrix; of an instance's own size it is one for all, as large as the largest."""
    shape = shape_of(val)
    if len(own_dimensions(shape)) != 2:
        raise NoRule("a unit matrix with one size of its own")
    sizes = [tape.lengths(d).longest for d in shape]
    unit = tape.call(torch.eye, *sizes, dtype=val.dtype, device=tape.z.device)
    return tape.packed(unit.expand(tape.z.n, -1, -1), val)


@rule("repeat")
def _repeat(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Copies; along the rows, all rows of an instance one time after another."""
    x, times = a["self"], a["repeats"]
    lead = len(times) - x.rank
    none = x.axes and times[lead + x.axes[0]] == 0
    if x.layout not in (DENSE, PACKED) or any(depends(t) for t in times) or none:
        raise NoRule("copies of its own size")
    rows = x.rows
    if x.axes and times[lead + x.axes[0]] != 1:
        rows = rows.index_select(0, tape.rows_of(x).again(tape.lengths(shape_of(val)[lead + x.axes[0]])))
    counts = [1, *times[:lead], *[times[lead + d] for d in x.rest]]
    return tape.packed(filled(rows, 1, 0, lead).repeat(counts), val)


@rule("view_as_real", "view_as_complex")
def _complex(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """A last dimension of two numbers, or none."""
    return tape.packed(tape.apply(operator_of(node), a), val)


@rule("tril", "triu")
def _triangle(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["self"]
    if x.layout == PADDED and x.axes == (x.rank - 2, x.rank - 1):
        how = name_of(node)
        if x.rank > 2:
            raise NoRule("triangles in more than two dimensions")
        return tape.packed(getattr(x.rows, how)(plain(a["diagonal"])), val)
    if x.layout == DENSE:
        return tape.packed(tape.apply(operator_of(node), a), val)
    raise NoRule("a triangle of one size of its own")
