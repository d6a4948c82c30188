"""Rules for recurrent layers, convolutions, pooling, running results, sorts and shifts along rows, and for losses.

In: nn.LSTM, nn.GRU, nn.RNN, convolutions, nll_loss and its kin. Out: torch's kernels for packed sequences; products
with the rows that a kernel meets, and one convolution of images with zeros beyond their ends; losses as elements that
are summed.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.fx.proxy import Proxy

from fxbatch.ragged.expressions import Shape, depends
from fxbatch.ragged.lower import (
    DENSE,
    PACKED,
    PADDED,
    Arguments,
    Given,
    NoRule,
    Packed,
    PackedTape,
    Traced,
    name_of,
    operator_of,
    own_dimensions,
    plain,
    shape_of,
)
from fxbatch.ragged.padding import without_gradients
from fxbatch.ragged.recurrent import NAMES
from fxbatch.ragged.rules import no_extreme, over, rule, weights_of
from fxbatch.ragged.whole_tensor import product_of_rows, topk


@rule(*NAMES, space="fxbatch_ragged")
def _recurrent(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = tape.to_dense(a["input"])
    time = 1 if a["batch_first"] else 0
    if x.axes != (time,) or x.shape[1 - time] != 1:
        raise NoRule("no rows of its own as the steps of one sequence")
    many = isinstance(a["hx"], (list, tuple))
    states = [tape.to_dense(h) for h in (a["hx"] if many else [a["hx"]])]
    if any(h.axes for h in states):
        raise NoRule("states of their own sizes")
    size = tape.lengths(x.shape[time])
    first = [h.rows.squeeze(2) for h in states]  # [n, layers, 1, h]
    names = ("has_biases", "num_layers", "dropout", "train", "bidirectional")
    how = [plain(a[name]) for name in names]
    steps = x.rows.reshape(size.total, -1)
    outputs = tape.z.recurrent(name_of(node), size, steps, first, weights_of(*a["params"]), *how)
    ends = [tape.packed(outputs[i + 1], t) for i, t in enumerate(val[1:])]
    return (tape.packed(outputs[0].unsqueeze(1), val[0]), *ends)


@rule("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Cells act on each row."""
    many = isinstance(a["hx"], (list, tuple))
    x, *states = [tape.to_dense(v) for v in (a["input"], *(a["hx"] if many else [a["hx"]]))]
    weights_of(*[v for name, v in a.items() if name[:2] in ("w_", "b_")])
    if x.rank != 2 or 1 in x.axes or any(h.shape[0] != x.shape[0] or h.layout != x.layout for h in states):
        raise NoRule("states that are no rows beside those of the input")
    rows = [v.rows if v.layout == PACKED else v.rows.flatten(0, 1) for v in (x, *states)]
    a["input"], a["hx"] = rows[0], rows[1:] if many else rows[1]
    outputs = tape.apply(operator_of(node), a)

    def back(h: Proxy) -> Proxy:
        return h if x.layout == PACKED else h.unflatten(0, (tape.z.n, x.shape[0]))

    if not many:
        return tape.packed(back(outputs), val)
    return tuple(tape.packed(back(outputs[i]), t) for i, t in enumerate(val))


@rule("conv1d")
def _conv1d(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, weight, bias = tape.to_dense(a["input"]), a["weight"], a["bias"]
    weights = weights_of(weight, bias)
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
    size, out = tape.lengths(x.shape[time]), tape.lengths(shape_of(val)[-1])
    rows = x.rows if x.rank == 2 else x.rows.squeeze(1)  # [total, channels]
    result = tape.z.conv1d(size, out, rows, *weights, left, stride, dilation, plain(a["groups"]))
    return tape.packed(result if x.rank == 2 else result.unsqueeze(1), val)


@rule("convolution", "_convolution_mode")
def _convolution(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """One of all instances' images, of which one or two sizes are their own: beyond the end of a smaller one are zeros,
    as beyond that of any image."""
    x = tape.to_dense(a["input"])
    weights_of(a["weight"], a["bias"])
    if a.get("transposed") or 1 in x.axes or not set(x.axes) - {0}:
        raise NoRule("a convolution of this kind")
    images = tape.spread(x, clear=[d for d in x.axes if d > 1])
    a["input"] = images.flatten(0, 1)
    result = tape.apply(operator_of(node), a).unflatten(0, images.shape[:2])
    shape = shape_of(val)
    if len(axes := own_dimensions(shape)) == 2:
        result = tape.call(without_gradients, result, [(tape.lengths(shape[d]), d + 1) for d in axes])
    return tape.gathered(result, val)


@rule("max_pool2d_with_indices")
def _max_pool(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """The largest of the rows that a sliding kernel meets: what max_pool1d is made of, an image of height 1."""
    x = tape.to_dense(a["self"])
    time = x.rank - 1
    kernel, padding, dilation = (a[name] for name in ("kernel_size", "padding", "dilation"))
    stride = a["stride"] or kernel
    flat = x.axes == (time,) and x.shape[time - 1] == 1 and kernel[0] == 1 and padding[0] == 0
    if not flat or not own_dimensions(shape_of(val[0])) or a["ceil_mode"]:
        raise NoRule("pooling of this kind")
    _refuse_readers(node, "the places of what is pooled")
    size, out = tape.lengths(x.shape[time]), tape.lengths(shape_of(val[0])[time])
    fill = no_extreme(x.dtype, "max")
    met = tape.z.windows(size, out, x.rows, kernel[1], padding[1], stride[1], dilation[1], fill)
    return (tape.packed(met.max(1)[0], val[0]), None)


def _refuse_readers(node: fx.Node, of: str) -> None:
    """Raises where more is read than the first result of a node."""
    if any(len(user.users) for user in node.users if user.args[1] != 0):
        raise NoRule(of)


# -- along rows ---------------------------------------------------------------------------------------------


@over("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def _running(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    """Running sums, products and extremes: what follows a row is not in it, so padding may be anything that leaves
    what is computed of it finite."""
    how = name_of(node)
    val = node.meta["val"]
    if x.layout == PADDED and how in ("cumsum", "logcumsumexp") and x.dtype == val.dtype:
        return tape.packed(getattr(x.rows, how)(x.place(dims[0])), val)
    if x.layout != PACKED:
        raise NoRule("a running result along one of two sizes of its own")
    size = tape.lengths(x.shape[dims[0]])
    if how == "cumprod" and x.dtype == val.dtype:
        return tape.packed(tape.call(product_of_rows, x.rows, size, "cumprod"), val)
    if isinstance(val, torch.Tensor):
        rows = x.rows if x.dtype == val.dtype else x.rows.to(val.dtype)
        padded = size.pad(rows, int(how == "cumprod")) if how in ("cumsum", "cumprod") else size.spread(rows)
        return tape.packed(size.unpad(getattr(padded, how)(1)), val)
    extremes = getattr(size.spread(x.rows), how)(1)
    return tuple(tape.packed(size.unpad(extremes[i]), t) for i, t in enumerate(val))


@over("sort", "argsort")
def _sort(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    """Rows in order: padding is what comes last, and stable sorts keep it behind rows that are equal to it."""
    if x.layout != PACKED:
        raise NoRule("it sorts along one of two sizes of its own")
    size = tape.lengths(x.shape[dims[0]])
    down = bool(tape.bound(node)["descending"])
    rows = size.pad(x.rows, _last(x.dtype, down)).sort(dim=1, descending=down, stable=True)
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return tape.packed(size.unpad(rows[1]), val)
    return tuple(tape.packed(size.unpad(rows[i]), t) for i, t in enumerate(val))


def _last(dtype: torch.dtype, descending: bool) -> float:
    """The number that is sorted behind all others."""
    if dtype.is_floating_point and not descending:
        return math.nan
    return no_extreme(dtype, "max" if descending else "min")


@over("topk")
def _topk(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    """The first rows. That no instance has fewer is asked when the body is traced."""
    a = tape.bound(node)
    if x.layout != PACKED or not a["sorted"] or depends(a["k"]):
        raise NoRule("as many as the instance says, along one of two sizes of its own, or not sorted")
    size, val, down = tape.lengths(x.shape[dims[0]]), node.meta["val"], bool(a["largest"])
    first = tape.call(topk, size.pad(x.rows, _last(x.dtype, down)), size, plain(a["k"]), down)
    return tuple(tape.packed(first[i].movedim(-1, dims[0] + 1), t) for i, t in enumerate(val))


@over("roll")
def _roll(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    shifts = tape.bound(node)["shifts"]
    if x.layout != PACKED or dims != list(x.axes) or len(shifts) != 1 or depends(shifts[0]):
        raise NoRule("shifts of more than the rows")
    return tape.packed(x.rows.index_select(0, tape.rows_of(x).rolled(shifts[0])), node.meta["val"])


@over("unfold")
def _unfold(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    """Windows of rows, whose places are the last dimension."""
    a, val = tape.bound(node), node.meta["val"]
    if x.layout != PACKED or not own_dimensions(shape_of(val)) or depends(a["size"]) or depends(a["step"]):
        raise NoRule("windows as long as the instance says")
    size, out = tape.lengths(x.shape[dims[0]]), tape.lengths(shape_of(val)[dims[0]])
    return tape.packed(tape.z.windows(size, out, x.rows, a["size"], 0, a["step"], 1).movedim(1, -1), val)


# -- losses -------------------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


def _reduced(
    tape: PackedTape,
    elements: Proxy,
    shape: Shape,
    reduction: int,
    val: torch.Tensor,
    weights: Proxy | None = None,
) -> Packed:
    """Elements summed or averaged over an instance; weights: what a mean is divided by the sum of."""
    if reduction == 0:
        return tape.packed(elements, val)
    axes = own_dimensions(shape)
    if len(axes) > 1:
        raise NoRule("a loss over two sizes of its own")
    fixed = math.prod(int(d) for d in shape if not depends(d))

    def total(numbers: Proxy) -> Proxy:
        flat = numbers.reshape(numbers.shape[0], -1).sum(1)
        return tape.lengths(shape[axes[0]]).sum(flat) if axes else flat

    summed = total(elements)
    if reduction == _SUM:
        return tape.packed(summed, val)
    if weights is not None:
        return tape.packed(summed / total(weights), val)
    if axes:
        return tape.packed(tape.lengths(shape[axes[0]]).divided(summed, fixed), val)
    return tape.packed(summed / fixed, val)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
      "soft_margin_loss", "poisson_nll_loss")  # fmt: skip
def _loss(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Losses that are elements summed or averaged."""
    reduction = a["reduction"]
    shape: Shape = ()
    for v in a.values():
        if isinstance(v, Packed):
            shape = _broadcast(shape, v.shape)
    for name, v in a.items():
        if isinstance(v, Packed):
            a[name] = tape.aligned(v, shape)
    a["reduction"] = 0
    return _reduced(tape, tape.apply(operator_of(node), a), shape, reduction, val)


def _broadcast(a: tuple[object, ...], b: tuple[object, ...]) -> Shape:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


@rule("nll_loss", "nll_loss_nd", "nll_loss_forward")
def _nll(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x, target, weight = tape.to_dense(a["self"]), tape.to_dense(a["target"]), a["weight"]
    if x.rank in (1, 2) and x.rank - 1 in x.axes:
        return _nll_of_places(tape, a, val, x, target)
    if x.rank not in (1, 2) or x.layout != target.layout or x.rank != target.rank + 1:
        raise NoRule("classes along a size of its own")
    (of_classes,) = weights_of(weight)
    logp, t, ignored = x.rows, target.rows, plain(a["ignore_index"])
    if x.layout == DENSE and x.rank == 2:
        logp, t = logp.flatten(0, 1), t.flatten()
    how = {"reduction": "none", "ignore_index": ignored}
    elements = tape.call(torch.nn.functional.nll_loss, logp, t, of_classes, **how)
    weights = tape.z.class_weights(t, of_classes, ignored, x.dtype)
    if x.layout == DENSE and x.rank == 2:
        elements, weights = (v.reshape(tape.z.n, x.shape[0]) for v in (elements, weights))
    first = val[0] if isinstance(val, (tuple, list)) else val
    reduced = _reduced(tape, elements, target.shape, a["reduction"], first, weights)
    if not isinstance(val, (tuple, list)):
        return reduced
    _refuse_readers(node, "the total weight of a loss")
    return (reduced, None)


def _nll_of_places(tape: PackedTape, a: Arguments, val: Traced, x: Packed, target: Packed) -> Given:
    """Classes are the instance's own rows: the head of each word, the node that a pointer means."""
    if isinstance(a["weight"], Packed) or isinstance(val, (tuple, list)):
        raise NoRule("weights of classes along a size of its own")
    classes, t = tape.lengths(x.shape[-1]), target.rows
    ignored = t.eq(plain(a["ignore_index"]))
    labels = t.masked_fill(ignored, 0)
    if x.rank == 1:
        picked = x.rows.index_select(0, tape.z.rows(classes, labels, None))
    elif x.layout == PADDED and target.layout == PACKED and target.shape == x.shape[:1]:
        rows = tape.lengths(x.shape[0])
        places = tape.z.elements((rows, classes), (rows.position, labels), rows)
        picked = x.rows.flatten().index_select(0, places)
    else:
        raise NoRule("classes along a size of its own")
    elements = (-picked).masked_fill(ignored, 0)
    weights = tape.z.class_weights(t, None, plain(a["ignore_index"]), x.dtype)
    return _reduced(tape, elements, target.shape, a["reduction"], val, weights)
