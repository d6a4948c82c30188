"""Rules for recurrent layers, convolutions, pooling, running results, sorts and shifts along rows, and for losses.

In: nn.LSTM, nn.GRU, nn.RNN, convolutions, nll_loss and its kin. Out: torch's kernels for packed sequences; products
with the rows that a kernel meets, and one convolution of images with zeros beyond their ends; losses as elements that
are summed.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fxbatch.ragged.expressions import Shape, depends
from fxbatch.ragged.lower import (
    DENSE,
    PACKED,
    PADDED,
    Arguments,
    Code,
    Emitted,
    Emitter,
    NoRule,
    Packed,
    Traced,
    name_of,
    operator_of,
    own_dimensions,
    shape_of,
)
from fxbatch.ragged.padding import without_gradients
from fxbatch.ragged.recurrent import NAMES
from fxbatch.ragged.rules import no_extreme, over, rule, weights_code
from fxbatch.ragged.whole_tensor import product_of_rows, topk


@rule(*NAMES, space="fxbatch_ragged")
def _recurrent(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = e.to_dense(a["input"])
    time = 1 if a["batch_first"] else 0
    if x.axes != (time,) or x.shape[1 - time] != 1:
        raise NoRule("no rows of its own as the steps of one sequence")
    many = isinstance(a["hx"], (list, tuple))
    states = [e.to_dense(h) for h in (a["hx"] if many else [a["hx"]])]
    if any(h.axes for h in states):
        raise NoRule("states of their own sizes")
    size = e.lengths(x.shape[time])
    first = ", ".join(f"{h.name}.squeeze(2)" for h in states)  # [n, layers, 1, h]
    params = weights_code(*a["params"])
    names = ("has_biases", "num_layers", "dropout", "train", "bidirectional")
    how = ", ".join(e.source(a[name]) for name in names)
    operands = f"{size}, {x.name}.reshape({size}.total, -1), [{first}], [{params}]"
    line = e.line(f"z.recurrent({name_of(node)!r}, {operands}, {how})")
    rows = e.packed(f"{line}[0].unsqueeze(1)", val[0])
    ends = [e.packed(f"{line}[{i + 1}]", t) for i, t in enumerate(val[1:])]
    return (rows, *ends)


@rule("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Cells act on each row."""
    many = isinstance(a["hx"], (list, tuple))
    x, *states = [e.to_dense(v) for v in (a["input"], *(a["hx"] if many else [a["hx"]]))]
    weights_code(*[v for name, v in a.items() if name[:2] in ("w_", "b_")])
    if x.rank != 2 or 1 in x.axes or any(h.shape[0] != x.shape[0] or h.layout != x.layout for h in states):
        raise NoRule("states that are no rows beside those of the input")
    rows = [v.name if v.layout == PACKED else e.line(f"{v.name}.flatten(0, 1)") for v in (x, *states)]
    a["input"], a["hx"] = Code(rows[0]), [Code(h) for h in rows[1:]] if many else Code(rows[1])
    line = e.line(e.call(node.target, a))
    back = "" if x.layout == PACKED else f".unflatten(0, (n, {x.shape[0]}))"
    if not many:
        return e.packed(line + back, val)
    return tuple(e.packed(f"{line}[{i}]{back}", t) for i, t in enumerate(val))


@rule("conv1d")
def _conv1d(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, weight, bias = e.to_dense(a["input"]), a["weight"], a["bias"]
    operands = weights_code(weight, bias)
    time = x.rank - 1
    if x.axes != (time,) or (x.rank == 3 and x.shape[0] != 1):
        raise NoRule("a convolution over something else than one sequence")
    stride, dilation = int(a["stride"][0]), int(a["dilation"][0])
    kernel = int(weight.shape[2])
    reach = dilation * (kernel - 1)
    padding = a["padding"]
    if isinstance(padding, str):
        left = reach // 2 if padding == "same" else 0
    else:
        left = int(padding[0])
    size, out = e.lengths(x.shape[time]), e.lengths(shape_of(val)[-1])
    rows = x.name if x.rank == 2 else e.line(f"{x.name}.squeeze(1)")  # [total, channels]
    how = f"{left}, {stride}, {dilation}, {e.source(a['groups'])}"
    name = e.line(f"z.conv1d({size}, {out}, {rows}, {operands}, {how})")
    return e.packed(name if x.rank == 2 else f"{name}.unsqueeze(1)", val)


@rule("convolution", "_convolution_mode")
def _convolution(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """One of all instances' images, of which one or two sizes are their own: beyond the end of a smaller one are zeros,
    as beyond that of any image."""
    x = e.to_dense(a["input"])
    weights_code(a["weight"], a["bias"])
    if a.get("transposed") or 1 in x.axes or not set(x.axes) - {0}:
        raise NoRule("a convolution of this kind")
    images = e.spread(x, clear=[d for d in x.axes if d > 1])
    a["input"] = Code(f"{images}.flatten(0, 1)")
    name = e.line(f"{e.call(operator_of(node), a)}.unflatten(0, {images}.shape[:2])")
    shape = shape_of(val)
    if len(axes := own_dimensions(shape)) == 2:
        along = ", ".join(f"({e.lengths(shape[d])}, {d + 1})" for d in axes)
        name = e.line(f"{e.const(without_gradients)}({name}, [{along}])")
    return e.gathered(name, val)


@rule("max_pool2d_with_indices")
def _max_pool(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """The largest of the rows that a sliding kernel meets: what max_pool1d is made of, an image of height 1."""
    x = e.to_dense(a["self"])
    time = x.rank - 1
    kernel, padding, dilation = (a[name] for name in ("kernel_size", "padding", "dilation"))
    stride = a["stride"] or kernel
    flat = x.axes == (time,) and x.shape[time - 1] == 1 and kernel[0] == 1 and padding[0] == 0
    if not flat or not own_dimensions(shape_of(val[0])) or a["ceil_mode"]:
        raise NoRule("pooling of this kind")
    _refuse_readers(node, "the places of what is pooled")
    size, out = e.lengths(x.shape[time]), e.lengths(shape_of(val[0])[time])
    operands = f"{size}, {out}, {x.name}, {kernel[1]}, {padding[1]}, {stride[1]}, {dilation[1]}"
    return (e.packed(f"z.windows({operands}, {no_extreme(x.dtype, 'max')}).max(1)[0]", val[0]), None)


def _refuse_readers(node: fx.Node, of: str) -> None:
    """Raises where more is read than the first result of a node."""
    if any(len(user.users) for user in node.users if user.args[1] != 0):
        raise NoRule(of)


# -- along rows ---------------------------------------------------------------------------------------------


@over("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def _running(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    """Running sums, products and extremes: what follows a row is not in it, so padding may be anything that leaves
    what is computed of it finite."""
    how = name_of(node)
    val = node.meta["val"]
    if x.layout == PADDED and how in ("cumsum", "logcumsumexp") and x.dtype == val.dtype:
        return e.packed(f"{x.name}.{how}({x.place(dims[0])})", val)
    if x.layout != PACKED:
        raise NoRule("a running result along one of two sizes of its own")
    size = e.lengths(x.shape[dims[0]])
    if how == "cumprod" and x.dtype == val.dtype:
        return e.packed(f"{e.const(product_of_rows)}({x.name}, {size}, 'cumprod')", val)
    if isinstance(val, torch.Tensor):
        start = x.name if x.dtype == val.dtype else e.line(f"{x.name}.to({e.const(val.dtype)})")
        padded = {"cumsum": f"pad({start}, 0)", "cumprod": f"pad({start}, 1)"}.get(how, f"spread({start})")
        return e.packed(f"{size}.unpad({size}.{padded}.{how}(1))", val)
    name = e.line(f"{size}.spread({x.name}).{how}(1)")
    return tuple(e.packed(f"{size}.unpad({name}[{i}])", t) for i, t in enumerate(val))


@over("sort", "argsort")
def _sort(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    """Rows in order: padding is what comes last, and stable sorts keep it behind rows that are equal to it."""
    if x.layout != PACKED:
        raise NoRule("it sorts along one of two sizes of its own")
    size = e.lengths(x.shape[dims[0]])
    down = bool(e.bound(node)["descending"])
    padded = f"{size}.pad({x.name}, {_last(x.dtype, down)})"
    name = e.line(f"{padded}.sort(dim=1, descending={down}, stable=True)")
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return e.packed(f"{size}.unpad({name}[1])", val)
    return tuple(e.packed(f"{size}.unpad({name}[{i}])", t) for i, t in enumerate(val))


def _last(dtype: torch.dtype, descending: bool) -> str:
    """The number that is sorted behind all others."""
    if dtype.is_floating_point and not descending:
        return "float('nan')"
    return no_extreme(dtype, "max" if descending else "min")


@over("topk")
def _topk(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    """The first rows. That no instance has fewer is asked when the body is traced."""
    a = e.bound(node)
    if x.layout != PACKED or not a["sorted"] or depends(a["k"]):
        raise NoRule("as many as the instance says, along one of two sizes of its own, or not sorted")
    size, val, down = e.lengths(x.shape[dims[0]]), node.meta["val"], bool(a["largest"])
    padded = f"{size}.pad({x.name}, {_last(x.dtype, down)})"
    name = e.line(f"{e.const(topk)}({padded}, {size}, {e.source(a['k'])}, {down})")
    return tuple(e.packed(f"{name}[{i}].movedim(-1, {dims[0] + 1})", t) for i, t in enumerate(val))


@over("roll")
def _roll(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    shifts = e.bound(node)["shifts"]
    if x.layout != PACKED or dims != list(x.axes) or len(shifts) != 1 or depends(shifts[0]):
        raise NoRule("shifts of more than the rows")
    rows = f"{e.rows_of(x)}.rolled({shifts[0]})"
    return e.packed(f"{x.name}.index_select(0, {rows})", node.meta["val"])


@over("unfold")
def _unfold(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    """Windows of rows, whose places are the last dimension."""
    a, val = e.bound(node), node.meta["val"]
    if x.layout != PACKED or not own_dimensions(shape_of(val)) or depends(a["size"]) or depends(a["step"]):
        raise NoRule("windows as long as the instance says")
    size, out = e.lengths(x.shape[dims[0]]), e.lengths(shape_of(val)[dims[0]])
    return e.packed(f"z.windows({size}, {out}, {x.name}, {a['size']}, 0, {a['step']}, 1).movedim(1, -1)", val)


# -- losses -------------------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


def _reduced(
    e: Emitter, name: str, shape: Shape, reduction: int, val: torch.Tensor, weights: str = ""
) -> Packed:
    """Elements summed or averaged over an instance; weights: what a mean is divided by the sum of."""
    if reduction == 0:
        return e.packed(name, val)
    axes = own_dimensions(shape)
    if len(axes) > 1:
        raise NoRule("a loss over two sizes of its own")
    fixed = math.prod(int(d) for d in shape if not depends(d))

    def total(elements: str) -> str:
        flat = e.line(f"{elements}.reshape({elements}.shape[0], -1).sum(1)")
        return e.line(f"{e.lengths(shape[axes[0]])}.sum({flat})") if axes else flat

    summed = total(name)
    if reduction == _SUM:
        return e.packed(summed, val)
    if weights:
        return e.packed(f"{summed} / {total(weights)}", val)
    if axes:
        return e.packed(f"{e.lengths(shape[axes[0]])}.divided({summed}, {fixed})", val)
    return e.packed(f"{summed} / {fixed}", val)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
      "soft_margin_loss", "poisson_nll_loss")  # fmt: skip
def _loss(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Losses that are elements summed or averaged."""
    reduction = a["reduction"]
    shape: Shape = ()
    for v in a.values():
        if isinstance(v, Packed):
            shape = _broadcast(shape, v.shape)
    for name, v in a.items():
        if isinstance(v, Packed):
            a[name] = Code(e.aligned(v, shape))
    a["reduction"] = 0
    return _reduced(e, e.line(e.call(node.target, a)), shape, reduction, val)


def _broadcast(a: tuple[object, ...], b: tuple[object, ...]) -> Shape:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


@rule("nll_loss", "nll_loss_nd", "nll_loss_forward")
def _nll(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x, target, weight = e.to_dense(a["self"]), e.to_dense(a["target"]), a["weight"]
    if x.rank in (1, 2) and x.rank - 1 in x.axes:
        return _nll_of_places(e, a, val, x, target)
    if x.rank not in (1, 2) or x.layout != target.layout or x.rank != target.rank + 1:
        raise NoRule("classes along a size of its own")
    weight_code = weights_code(weight)
    logp, t = x.name, target.name
    if x.layout == DENSE and x.rank == 2:
        logp, t = e.line(f"{logp}.flatten(0, 1)"), e.line(f"{t}.flatten()")
    ignored = e.source(a["ignore_index"])
    operands = f"{logp}, {t}, {weight_code}, reduction='none', ignore_index={ignored}"
    name = e.line(f"torch.nn.functional.nll_loss({operands})")
    weights = e.line(f"z.class_weights({t}, {weight_code}, {ignored}, {e.const(x.dtype)})")
    if x.layout == DENSE and x.rank == 2:
        name, weights = (e.line(f"{v}.reshape(n, {x.shape[0]})") for v in (name, weights))
    first = val[0] if isinstance(val, (tuple, list)) else val
    reduced = _reduced(e, name, target.shape, a["reduction"], first, weights)
    if not isinstance(val, (tuple, list)):
        return reduced
    _refuse_readers(node, "the total weight of a loss")
    return (reduced, None)


def _nll_of_places(e: Emitter, a: Arguments, val: Traced, x: Packed, target: Packed) -> Emitted:
    """Classes are the instance's own rows: the head of each word, the node that a pointer means."""
    if isinstance(a["weight"], Packed) or isinstance(val, (tuple, list)):
        raise NoRule("weights of classes along a size of its own")
    classes, t = e.lengths(x.shape[-1]), target.name
    ignored = e.line(f"{t} == {e.source(a['ignore_index'])}")
    labels = e.line(f"{t}.masked_fill({ignored}, 0)")
    if x.rank == 1:
        picked = f"{x.name}.index_select(0, z.rows({classes}, {labels}, None))"
    elif x.layout == PADDED and target.layout == PACKED and target.shape == x.shape[:1]:
        rows = e.lengths(x.shape[0])
        places = e.line(f"z.elements(({rows}, {classes}), ({rows}.position, {labels}), {rows})")
        picked = f"{x.name}.flatten().index_select(0, {places})"
    else:
        raise NoRule("classes along a size of its own")
    name = e.line(f"(-{picked}).masked_fill({ignored}, 0)")
    weights = e.line(f"z.class_weights({t}, None, {e.source(a['ignore_index'])}, {e.const(x.dtype)})")
    return _reduced(e, name, target.shape, a["reduction"], val, weights)
