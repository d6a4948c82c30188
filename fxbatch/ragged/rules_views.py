"""Rules for operators that move elements: views, permutations, slices, cat and stack, factories.

In: a node whose operator only says where elements go. Out: the same for rows: the dimension that differs between
instances stays in front, and index arithmetic does what crosses rows.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from fxbatch.ragged.expressions import Shape, Size, depends
from fxbatch.ragged.lengths import interleaved, pairs, pairs_in_a_row
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
    name_of,
    own_dimensions,
    shape_of,
)
from fxbatch.ragged.rules import rule
from fxbatch.ragged.rules_indices import flat, table_of


def _moved(e: Emitter, x: Packed, val: torch.Tensor, order: list[int]) -> Packed:
    """Dimensions in another order: result dimension i is dimension order[i] of x."""
    axes = [a for a in order if a in x.axes]
    rest = [d for d in order if d not in x.axes]
    places = [0] if x.layout in (DENSE, PADDED) else []
    places += [x.place(d) for d in (*axes, *rest)]
    return e.packed(e.permuted(x.name, places), val)


@rule("permute")
def _permute(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    return _moved(e, a["self"], val, [d % a["self"].rank for d in a["dims"]])


@rule("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT")
def _transpose(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Of the last two dimensions where none are named."""
    x, i, j = [*[e.value(v) for v in node.args], -2, -1][:3]
    order = list(range(x.rank))
    if x.rank > 1:
        order[i], order[j] = order[j], order[i]
    return _moved(e, x, val, order)


@rule(
    "unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"
)
def _view(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Another shape: groups of dimensions of equal products; the own dimension leads its group, before and after."""
    x = a["self"]
    shape = shape_of(val)
    if x.layout == WHOLE:
        if own_dimensions(shape):
            raise NoRule("a fixed tensor in a shape of its own")
        return e.packed(f"{x.name}.reshape({shape})", val, WHOLE)
    axes = own_dimensions(shape)
    if name_of(node) == "squeeze" and len(axes) != len(x.axes):
        raise NoRule("a size of its own is squeezed")
    if x.layout == DENSE and not axes:
        return e.packed(f"{x.name}.reshape({', '.join(map(str, ('n', *shape)))})", val)
    if x.layout == DENSE or not axes:
        raise NoRule("a view between a fixed shape and one of its own")
    if len(axes) != len(x.axes):
        return _pairs_in_a_row(e, x, shape, val)
    order, physical, joined = _grouped(x.shape, shape)
    if x.layout == PADDED or len(axes) > 1:
        if not (x.layout == PADDED and len(axes) == 2) or joined:
            raise NoRule("a view that joins two sizes of its own")
        rest = ", ".join(str(d) for d in shape if not depends(d))
        return e.packed(f"{x.name}.reshape(*{x.name}.shape[:3], {rest})", val)
    name = e.permuted(x.name, [0] + [x.place(d) for d in order if d not in x.axes])
    physical = [d for d in physical if d not in axes]
    rest = "".join(f"{shape[d]}, " for d in physical)
    name = e.line(f"{name}.reshape({e.lengths(shape[axes[0]])}.total, {rest})")
    wanted = [d for d in range(len(shape)) if d not in axes]
    return e.packed(e.permuted(name, [0] + [1 + physical.index(d) for d in wanted]), val)


def _pairs_in_a_row(e: Emitter, x: Packed, shape: Shape, val: torch.Tensor) -> Packed:
    """[T, S] as [T * S], and back: all pairs of an instance."""
    wide, narrow = (x.shape, shape) if x.layout == PADDED else (shape, x.shape)
    a = own_dimensions(wide)[0]
    if own_dimensions(wide) != (a, a + 1) or own_dimensions(narrow) != (a,):
        raise NoRule("a view that joins two sizes of its own with others")
    others = (*wide[:a], *wide[a + 2 :]), (*narrow[:a], *narrow[a + 1 :])
    if others[0] != others[1] or sympy.expand(wide[a] * wide[a + 1] - narrow[a]):
        raise NoRule("a view that joins two sizes of its own with others")
    sizes = ", ".join(e.lengths(d) for d in (wide[a], wide[a + 1], narrow[a]))
    move = e.const(pairs_in_a_row if x.layout == PADDED else pairs)
    return e.packed(f"{move}({x.name}, {sizes})", val)


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
def _expand(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = a["self"]
    shape = shape_of(val)
    if x.layout == WHOLE and not own_dimensions(shape):
        return e.packed(f"{x.name}.expand({shape})", val, WHOLE)
    name = e.aligned(e.to_dense(x), shape)
    rest = [d for d in shape if not depends(d)]
    return e.packed(f"{name}.expand({', '.join(map(str, (*e.leading(shape), *rest)))})", val)


# -- slices -----------------------------------------------------------------------------------------------


@rule("select")
def _select(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, d, i = a["self"], a["dim"] % a["self"].rank, a["index"]
    if d not in x.axes:
        if depends(i):
            raise NoRule("a place of its own")
        return e.packed(f"{x.name}.select({x.place(d)}, {i})", val)
    one = _part(e, x, d, _start(e, i, e.lengths(x.shape[d])), e.lengths(1), 1)
    if x.layout == PACKED:
        return e.packed(one, val)
    (other,) = [a for a in x.axes if a != d]
    return e.packed(f"{e.lengths(x.shape[other])}.unpad({one}.squeeze({x.place(d)}))", val)


def _part(e: Emitter, x: Packed, d: int, begin: str, out: str, step: int) -> str:
    """As many elements along a dimension of its own as `out` says, from `begin` on."""
    size = e.lengths(x.shape[d])
    if x.layout == PACKED:
        return e.line(f"{x.name}.index_select(0, {size}.taken({begin}, {out}, {step}))")
    return e.line(f"z.part({x.name}, {x.place(d)}, {begin}, {out}, {step}, {size}.longest)")


def _start(e: Emitter, i: Size, size: str) -> str:
    if depends(i):
        return f"(lambda c: np.where(c < 0, c + {size}.sizes, c))({e.column(i)})"
    return str(i) if i >= 0 else f"{size}.sizes + {i}"


def _begin(e: Emitter, start: Size, size: str) -> str:
    """The first element of a slice, which is no error where there are fewer."""
    return f"np.minimum({_start(e, start, size)}, {size}.sizes).clip(0)"


@rule("slice")
def _slice(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = a["self"]
    d = a["dim"] % x.rank
    start = a["start"] or 0
    if d not in x.axes:
        if depends(start) or depends(a["end"]):
            return _part_of_fixed(e, val, e.to_dense(x), d, start, a["step"])
        index = ", ".join([":"] * x.place(d) + [f"{start}:{a['end']}:{a['step']}"])
        return e.packed(f"{x.name}[{index}]", val)
    shape = shape_of(val)
    if shape[d] == x.shape[d] and a["step"] == 1:
        return e.packed(x.name, val)
    size, out = e.lengths(x.shape[d]), e.lengths(shape[d])
    begin = _begin(e, start, size)
    if x.layout == PADDED and not depends(shape[d]):
        raise NoRule("a part of one of two sizes of its own, as long in all instances")
    return e.of_rows(_part(e, x, d, begin, out, a["step"]), d, val)


def _part_of_fixed(e: Emitter, val: torch.Tensor, x: Packed, d: int, start: Size, step: int) -> Packed:
    """A slice of a fixed dimension, as long as the instance says: `positions[:len(x)]`."""
    size, out = e.lengths(int(x.shape[d])), e.lengths(shape_of(val)[d])
    begin = _begin(e, start, size)
    if x.layout == PACKED:
        padded, place = _as_padded(e, x, val), own_dimensions(shape_of(val)).index(d) + 1
        return e.packed(f"z.part({padded}, {place}, {begin}, {out}, {step}, {x.shape[d]})", val)
    rows, _ = table_of(e, x, d)
    return e.packed(f"{rows}.index_select(0, {size}.taken({begin}, {out}, {step}))", val)


def _as_padded(e: Emitter, x: Packed, val: torch.Tensor) -> str:
    """x as [n, a, b, *rest] for the two own dimensions of a result, along which it may have fixed sizes."""
    shape = shape_of(val)
    axes = own_dimensions(shape)
    order = [0, *[1 + d for d in axes], *[1 + d for d in range(len(shape)) if d not in axes]]
    return e.line(f"{e.spread(e.to_dense(x))}.permute({order})")


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
def _split(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = a["self"]
    d = a["dim"] % x.rank
    if d in x.axes:
        raise NoRule("it is cut along a size of its own")
    a["dim"] = x.place(d)
    return e.results(node, e.call(node.target, a))


# -- cat ----------------------------------------------------------------------------------------------------


@rule("cat", "concat", "concatenate")
def _cat(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    shape = shape_of(val)
    parts = [p for p in a["tensors"] if p.rank == len(shape)]
    d = a["dim"] % len(shape)
    if d in own_dimensions(shape) or any(d in p.axes for p in parts):  # `[x, zeros(10 - len(x))]`
        return _joined(e, parts, d, val)
    if own_dimensions(shape):
        names = [e.aligned(p, _with(shape, d, p.shape[d])) for p in parts]
    else:
        names = [e.to_dense(p).name for p in parts]
    place = Packed("", layout_of(shape), shape, val.dtype).place(d)
    return e.packed(f"torch.cat([{', '.join(names)}], {place})", val)


def _with(shape: tuple[object, ...], d: int, size: object) -> Shape:
    return (*shape[:d], size, *shape[d + 1 :])


def _joined(e: Emitter, parts: list[Packed], d: int, val: torch.Tensor) -> Packed:
    """Rows of several tensors, those of each instance one after another."""
    shape = shape_of(val)
    axes = own_dimensions(shape)
    if len(axes) > 1:
        if len(axes) > 2 or any(p.shape[a] != shape[a] for p in parts for a in axes if a != d):
            raise NoRule("other sizes of their own")
        operands = ", ".join(_as_padded(e, p, val) for p in parts)
        sizes = ", ".join(e.lengths(p.shape[d]) for p in parts)
        out, place = e.lengths(shape[d]), axes.index(d) + 1
        return e.packed(f"z.joined(({operands},), ({sizes},), {out}, {place})", val)
    names, lengths = zip(*[table_of(e, e.to_dense(p), d) for p in parts], strict=True)
    order = e.line(f"{e.const(interleaved)}(({', '.join(lengths)},))")
    name = e.line(f"torch.cat([{', '.join(names)}]).index_select(0, {order})")
    return e.of_rows(name, d, val)


@rule("slice_scatter")
def _slice_scatter(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """`x[1:3] = y` as a function."""
    x, y = e.to_dense(a["self"]), e.to_dense(a["src"])
    d = a["dim"] % x.rank
    start = a["start"] or 0
    if d not in x.axes:
        if depends(start) or depends(a["end"]):
            raise NoRule("a slice of its own")
        source = e.aligned(y, _with(x.shape, d, y.shape[d]))
        operands = f"{x.name}, {source}, {x.place(d)}, {start}, {a['end']}, {a['step']}"
        return e.packed(f"torch.slice_scatter({operands})", val)
    if x.layout != PACKED:
        raise NoRule("a slice of one of two sizes of its own")
    size, out = e.lengths(x.shape[d]), e.lengths(y.shape[d])
    begin = _begin(e, start, size)
    source = flat(e, y, d, e.aligned(y, _with(x.shape, d, y.shape[d])))
    rows = f"{size}.taken({begin}, {out}, {a['step']})"
    return e.packed(f"{x.name}.index_copy(0, {rows}, {source}.expand({out}.total, *{x.name}.shape[1:]))", val)


@rule("select_scatter")
def _select_scatter(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """`x[0] = y` as a function."""
    x, y, i = e.to_dense(a["self"]), a["src"], a["index"]
    d = a["dim"] % x.rank
    rest = (*x.shape[:d], *x.shape[d + 1 :])
    if d not in x.axes:
        if depends(i):
            raise NoRule("a place of its own")
        return e.packed(f"torch.select_scatter({x.name}, {e.aligned(y, rest)}, {x.place(d)}, {i})", val)
    if x.layout != PACKED:
        raise NoRule("a row of two sizes of its own")
    size = e.lengths(x.shape[d])
    source = e.aligned(e.to_dense(y), rest)
    rows = f"{size}.taken({_start(e, i, size)}, {e.lengths(1)})"
    return e.packed(f"{x.name}.index_copy(0, {rows}, {source})", val)


@rule("stack")
def _stack(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    shape = shape_of(val)
    d = a["dim"] % len(shape)
    inner = (*shape[:d], *shape[d + 1 :])
    names = [e.aligned(p, inner) for p in a["tensors"]]
    place = Packed("", layout_of(shape), shape, val.dtype).place(d)
    return e.packed(f"torch.stack(torch.broadcast_tensors({', '.join(names)}), {place})", val)


@rule("constant_pad_nd", "pad")
def _constant_pad(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, pad = a["self"], a["pad"]
    if a.get("mode", "constant") != "constant" or x.layout == WHOLE:
        raise NoRule("padding of this kind")
    if depends(a.get("value")):
        raise NoRule("padding with a size")
    value = e.const(a.get("value") or 0)
    ends = {x.rank - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    for d, both in ends.items():
        for p in both:
            if depends(p) and d not in x.axes:
                raise NoRule("padding of its own length")
            if depends(p):
                e.graph.assume(sympy.Ge(p, 0))
            elif p < 0:
                raise NoRule("padding that cuts")
    name = x.name
    for d, (before, after) in ends.items():
        if d in x.axes and (before != 0 or after != 0):
            size, out = e.lengths(x.shape[d]), e.lengths(shape_of(val)[d])
            first = e.column(before) if depends(before) else before
            if x.layout == PADDED:
                raise NoRule("padding of one of two sizes of its own")
            name = e.line(f"z.padded_rows({name}, {size}, {out}, {first}, {value})")
            if not depends(shape_of(val)[d]):
                x = e.of_rows(name, d, val)
                name = x.name
                ends[d] = (0, 0)
    rank = x.rank + 1 - (len(x.axes) if x.layout == PACKED else 0)
    flat = [0] * (2 * rank)
    for d, (before, after) in ends.items():
        if d not in x.axes:
            place = rank - 1 - x.place(d)
            flat[2 * place : 2 * place + 2] = [before, after]
    if any(flat):
        name = e.line(f"torch.nn.functional.pad({name}, {flat}, value={value})")
    return e.packed(name, val)


# -- factories ------------------------------------------------------------------------------------------------

_FACTORIES = (
    "zeros", "ones", "full", "empty", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full", "new_empty",
    "scalar_tensor",
)  # fmt: skip


@rule(*_FACTORIES)
def _factory(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """A tensor made of a shape: as many rows as all instances have."""
    shape = shape_of(val)
    if isinstance(a.get("self"), Packed):
        a["dtype"], a["device"] = val.dtype, Code("z.device")
    fill = a.get("fill_value")
    if depends(fill):
        if own_dimensions(shape) or isinstance(a.get("self"), Packed):
            raise NoRule("filled with a size")
        filled = e.line(f"z.tensor({e.column(fill)}, {e.const(val.dtype)}).reshape(n, {'1, ' * len(shape)})")
        return e.packed(f"{filled}.expand(n, {''.join(f'{d}, ' for d in shape)})", val)
    if "size" not in a:
        raise NoRule("a factory of this kind")
    rest = [str(d) for d in shape if not depends(d)]
    a["size"] = Code(f"[{', '.join([*e.leading(shape), *rest])}]")
    return e.packed(e.call(node.target, a), val)


@rule("arange")
def _arange(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    (length,) = shape_of(val)
    start, step = a.get("start", 0), a.get("step", 1)
    if not depends(length):
        raise NoRule("a range of sizes that is as long in all instances")
    if depends(step):
        raise NoRule("a range whose step is a size")
    size = e.lengths(length)
    name = f"{size}.position" if step == 1 else f"({size}.position * {step})"
    if depends(start):
        name = f"({name} + {size}.each(z.tensor({e.column(start)}, torch.int64)))"
    elif start:
        name = f"({name} + {start})"
    return e.packed(name if val.dtype == torch.int64 else f"{name}.to({e.const(val.dtype)})", val)


@rule("eye")
def _eye(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """The unit matrix; of an instance's own size it is one for all, as large as the largest."""
    shape = shape_of(val)
    if len(own_dimensions(shape)) != 2:
        raise NoRule("a unit matrix with one size of its own")
    sizes = [f"{e.lengths(d)}.longest" for d in shape]
    code = f"torch.eye({', '.join(sizes)}, dtype={e.const(val.dtype)}, device=z.device)"
    return e.packed(f"{code}.expand(n, -1, -1)", val)


@rule("repeat")
def _repeat(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Copies; along the rows, all rows of an instance one time after another."""
    x, times = a["self"], a["repeats"]
    lead = len(times) - x.rank
    none = x.axes and times[lead + x.axes[0]] == 0
    if x.layout not in (DENSE, PACKED) or any(depends(t) for t in times) or none:
        raise NoRule("copies of its own size")
    name = x.name
    if x.axes and times[lead + x.axes[0]] != 1:
        out = e.lengths(shape_of(val)[lead + x.axes[0]])
        name = e.line(f"{name}.index_select(0, {e.rows_of(x)}.again({out}))")
    for _ in range(lead):
        name = e.line(f"{name}.unsqueeze(1)")
    counts = [1, *times[:lead], *[times[lead + d] for d in x.rest]]
    return e.packed(f"{name}.repeat({', '.join(map(str, counts))})", val)


@rule("view_as_real", "view_as_complex")
def _complex(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """A last dimension of two numbers, or none."""
    return e.packed(e.call(node.target, a), val)


@rule("tril", "triu")
def _triangle(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = a["self"]
    if x.layout == PADDED and x.axes == (x.rank - 2, x.rank - 1):
        how = name_of(node)
        if x.rank > 2:
            raise NoRule("triangles in more than two dimensions")
        return e.packed(f"torch.{how}({x.name}, {e.source(a['diagonal'])})", val)
    if x.layout == DENSE:
        return e.packed(e.call(node.target, a), val)
    raise NoRule("a triangle of one size of its own")
