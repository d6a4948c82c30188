"""How each kind of operator acts on packed values: the table of rules.

In: a node of a sized graph and the tape that has its arguments. Out: the node's value, its calls recorded.

    RULES["aten::softmax"]         # rows by themselves, or over the rows of each instance
    rule_of(torch.ops.aten.relu.default)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
import torch
from torch import fx
from torch.fx.proxy import Proxy

from fxbatch.ragged.expressions import Shape, depends
from fxbatch.ragged.lengths import WithoutNaN
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
    Rule,
    Traced,
    keeps_all,
    name_of,
    operator_of,
    own_dimensions,
    plain,
    shape_of,
)
from fxbatch.ragged.recurrent import NODES
from fxbatch.ragged.rules_items import ITEMWISE_COMPOSITES, by_items, of_aten, results_of
from fxbatch.ragged.values_alone import batched_by_vmap
from fxbatch.ragged.whole_tensor import norm, product, product_of_rows

OfArguments = Callable[[PackedTape, fx.Node, Arguments, Traced], Given]
RULES: dict[str, Rule] = {}


def rule(*names: str, space: str = "aten") -> Callable[[OfArguments], OfArguments]:
    """Register a rule for operators of these names."""

    def register(function: OfArguments) -> OfArguments:
        for name in names:
            RULES[f"{space}::{name}"] = lambda tape, node: function(
                tape, node, tape.bound(node), node.meta["val"]
            )
        return function

    return register


def kept_whole() -> frozenset[str]:
    """Composite operators that rules handle: they are not taken apart."""
    return frozenset(RULES) | POINTWISE_COMPOSITES | ITEMWISE_COMPOSITES


POINTWISE_COMPOSITES = of_aten(
    "dropout", "relu6", "selu", "to", "type_as", "contiguous", "clip", "square", "true_divide", "where",
    "masked_fill", "float_power", "subtract", "multiply", "divide", "absolute", "negative", "not_equal", "greater",
    "less", "less_equal", "greater_equal", "arccos", "fix", "logical_and", "clamp", "silu", "positive", "detach",
    "log_sigmoid",
)  # fmt: skip
_POINTWISE = POINTWISE_COMPOSITES | of_aten(
    "clone", "alias", "_to_copy", "full_like", "zeros_like", "ones_like", "empty_like", "native_dropout", "rand_like",
    "randn_like", "bernoulli", "lift_fresh_copy", "lift_fresh", "fill", "hardswish", "_prelu_kernel", "leaky_relu",
    "rsub", "floor_divide", "complex", "polar", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__",
)  # fmt: skip


def rule_of(target: torch._ops.OpOverload) -> Rule:
    """The rule of an operator: its own, that of its kind, or the one for what has no size of its own."""
    name = target._schema.name
    own = RULES.get(name)
    pointwise = torch.Tag.pointwise in target.tags or name in _POINTWISE

    def apply(tape: PackedTape, node: fx.Node) -> Given:
        values = tensors_of(tape, node)
        random = tape.draws and not keeps_all(tape, node)
        if all(v.layout == WHOLE for v in values) and not random and _fixed(tape, node):
            return whole(tape, node)
        if own is None and pointwise:
            return point(tape, node)
        reason = NoRule("no rule for it")
        if own is not None:
            try:
                return own(tape, node)
            except NoRule as error:
                reason = error
        if by_items(tape, node, values):
            return tape.results(node, tape.apply(target, tape.bound(node)))
        if values and _fixed(tape, node) and all(v.layout in (WHOLE, DENSE) for v in values):
            return batched_by_vmap(tape, node)
        raise reason

    return apply


def tensors_of(tape: PackedTape, node: fx.Node) -> list[Packed]:
    """The tensors among the arguments of a node."""
    return [v for v in tape.leaves(node)[0] if isinstance(v, Packed)]


def _fixed(tape: PackedTape, node: fx.Node) -> bool:
    """Whether neither the results nor the arguments of a node have a size of their own."""
    own_results = any(own_dimensions(shape_of(t)) for t in results_of(node))
    return not own_results and not any(map(depends, tape.leaves(node)[0]))


def whole(tape: PackedTape, node: fx.Node) -> Given:
    """An operator on what is the same for all instances: once."""
    if node.target in NODES:
        raise NoRule("no instance in it")
    return tape.results(node, tape.apply(operator_of(node), tape.bound(node)), WHOLE)


# -- pointwise ------------------------------------------------------------------------------------------


def point(tape: PackedTape, node: fx.Node) -> Given:
    """Elements by themselves: all arguments in the layout of the result."""
    arguments = tape.bound(node)
    results = results_of(node)
    shape = shape_of(results[0])
    target = operator_of(node)
    random = torch.Tag.nondeterministic_seeded in target.tags or name_of(node) == "dropout"
    columns = False
    first = next((v for v in tensors_of(tape, node)), None)
    for name, x in arguments.items():
        if isinstance(x, Packed):
            arguments[name] = tape.aligned(tape.to_dense(x) if random else x, shape)
        elif isinstance(x, (list, tuple)):
            arguments[name] = [tape.aligned(y, shape) if isinstance(y, Packed) else y for y in x]
        elif depends(x):
            arguments[name] = _number(tape, x, first, shape)
            columns = True
    arguments.pop("memory_format", None)
    if columns:
        return tape.packed(_packet_call(tape, target, arguments), results[0])
    if "memory_format" in {a.name for a in target._schema.arguments}:
        arguments["memory_format"] = None
        if name_of(node) == "contiguous":
            return tape.packed(arguments["self"], results[0])
    return tape.results(node, tape.apply(target, arguments))


def _packet_call(tape: PackedTape, target: torch._ops.OpOverload, arguments: Arguments) -> Proxy:
    """A call of an operator with a tensor where it has a number."""
    args, kwargs, named = [], {}, False
    for a in target._schema.arguments:
        x = arguments.get(a.name, a.default_value)
        if a.has_default_value() and not isinstance(x, Proxy) and x == a.default_value:
            named = True  # what follows one that is left out
        elif a.kwarg_only or named:
            kwargs[a.name] = plain(x)
        else:
            args.append(plain(x))
    return tape.call(target.overloadpacket, *args, **kwargs)


def _number(tape: PackedTape, x: sympy.Expr, like: Packed | None, shape: Shape) -> Proxy:
    """A number of each instance as a tensor that promotes as the number does."""
    integral = bool(x.is_integer)
    dtype = torch.int64 if integral else torch.get_default_dtype()
    if like is not None:
        floating = like.dtype.is_floating_point or like.dtype.is_complex
        if floating or (integral and like.dtype != torch.bool):
            dtype = like.dtype
    return tape.aligned(tape.number(x, dtype), shape)


@rule("masked_fill")
def _masked_fill(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """A value that is a tensor may be another one in each instance."""
    value = a["value"]
    if not isinstance(value, Packed) or value.layout == WHOLE:
        return point(tape, node)
    x, mask, fill = (tape.aligned(a[name], shape_of(val)) for name in ("self", "mask", "value"))
    return tape.packed(tape.call(torch.where, mask, fill.to(x.dtype), x), val)


@rule("copy")
def _copy(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """x.copy_(y), of which y is left: torch has no derivative of it as a function."""
    like, source = (tape.aligned(a[name], shape_of(val)) for name in ("self", "src"))
    return tape.packed(source.to(val.dtype).expand_as(like), val)


# -- rows by themselves, or over rows ---------------------------------------------------------------------


def dims_of(x: Packed, dims: int | Sequence[int] | None) -> list[int]:
    """Dimensions that an operator acts on, none given for all."""
    if dims is None or dims == []:
        return list(range(x.rank))
    return [d % max(x.rank, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


_ALONG = (
    "softmax", "log_softmax", "_softmax", "_log_softmax", "sum", "mean", "amax", "amin", "max", "min", "prod", "cumsum",
    "cumprod", "logsumexp", "sort", "argsort", "topk", "argmax", "argmin", "norm", "linalg_vector_norm", "var", "std",
    "all", "any", "flip", "roll", "median", "logcumsumexp", "cummax", "cummin", "aminmax", "nansum", "count_nonzero",
    "kthvalue", "mode", "glu", "var_mean", "std_mean", "unfold", "_fft_r2c", "_fft_c2c", "_fft_c2r",
)  # fmt: skip
_DIMS_ARGUMENT = {"flip": "dims", "roll": "dims", "unfold": "dimension"}


def _along_rule(name: str) -> Rule:
    """An operator along dimensions: over the rows of each instance, or where they are the same for all the same,
    elsewhere."""
    where = _DIMS_ARGUMENT.get(name, "dim")

    def apply(tape: PackedTape, node: fx.Node) -> Given:
        target = operator_of(node)
        arguments = tape.bound(node)
        over = OVER.get(name)
        if "other" in arguments:  # torch.max(a, b): element by element
            return point(tape, node)
        argument = arguments.get(where)
        if where == "dims" and not argument:
            raise NoRule("no dimensions are named")
        x = arguments["self"] = tape.to_dense(arguments["self"])
        dims = dims_of(x, argument)
        if any(d in x.axes for d in dims) or where not in arguments:
            if over is None:
                raise NoRule("it acts along a size of its own")
            return over(tape, node, x, dims)
        over_all = argument is None or argument == []
        if over_all and (x.layout != DENSE or "dim" not in arguments or target._overloadname == "default"):
            raise NoRule("over all dimensions")
        if not over_all and name in ("prod", "cumprod"):
            return products_of_columns(tape, node, x, dims)
        places = [x.place(d) for d in dims]
        arguments[where] = places if over_all or isinstance(argument, (list, tuple)) else places[0]
        return tape.results(node, tape.apply(target, arguments))

    return apply


RULES.update({f"aten::{name}": _along_rule(name) for name in _ALONG})


OverRows = Callable[[PackedTape, fx.Node, Packed, list[int]], Given]
OVER: dict[str, OverRows] = {}


def over(*names: str) -> Callable[[OverRows], OverRows]:
    """Register what operators do over the rows of each instance."""

    def register(function: OverRows) -> OverRows:
        for name in names:
            OVER[name] = function
        return function

    return register


def _reduced(tape: PackedTape, x: Packed, dims: list[int], how: str) -> tuple[Proxy, Proxy]:
    """x with its other reduced dimensions reduced by a method ("sum"); the Lengths of its rows."""
    if x.layout != PACKED:
        raise NoRule("it acts along one of two sizes of its own" if x.layout == PADDED else "no own size")
    others = tuple(x.place(d) for d in dims if d not in x.axes)
    return getattr(x.rows, how)(others) if others else x.rows, tape.rows_of(x)


def _kept(tape: PackedTape, node: fx.Node, rows: Proxy, result: torch.Tensor | None = None) -> Packed:
    """A reduced value, the node's or one of its results, with the dimensions of size 1 that keepdim=True leaves."""
    val = node.meta["val"] if result is None else result
    return tape.packed(
        rows.reshape(tape.z.n, *shape_of(val)) if tape.bound(node).get("keepdim") else rows, val
    )


def _divided(tape: PackedTape, v: Packed, size: object, node: fx.Node) -> Packed:
    """A value divided by a size of the instance."""
    return tape.packed(v.rows / tape.aligned(tape.number(size, v.dtype), v.shape), node.meta["val"])


def _count(x: Packed, dims: list[int]) -> int:
    return math.prod(int(x.shape[d]) for d in dims if d not in x.axes)


def _masked_reduction(
    tape: PackedTape, node: fx.Node, x: Packed, dims: list[int], fill: float, how: str
) -> Given:
    """Over one or both of two own sizes: padding is `fill`, and reduces to nothing. how: a method."""
    reduced = getattr(tape.hidden(x, dims, fill), how)(tuple(x.place(d) for d in dims))
    if all(a in dims for a in x.axes):
        return _kept(tape, node, reduced)
    return _other_rows(tape, reduced, x, dims, node.meta["val"])


@over("sum")
def _sum(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    dtype = node.meta["val"].dtype
    if tape.bound(node).get("dtype") is not None or x.dtype != dtype:
        x = tape.by_elements(x, x.rows.to(dtype), dtype)
    product = _of_products(tape, node, x, dims)
    product = _weighted(tape, node, x, dims) if product is None else product
    return _summed(tape, node, x, dims) if product is None else _kept(tape, node, product)


def _weighted(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Proxy | None:
    """A sum over rows `[T, d]` times weights `[T, 1]`, which nothing else reads; None for another."""
    times = node.args[0]
    assert isinstance(times, fx.Node)
    if times.target is not torch.ops.aten.mul.Tensor or tape.is_read(times) or dims != [0] or x.axes != (0,):
        return None
    factors = [tape.value(f) for f in times.args]
    if not all(
        isinstance(f, Packed) and f.layout == PACKED and f.axes == (0,) and f.rank == 2 for f in factors
    ):
        return None
    weights, rows = sorted(factors, key=lambda f: bool(f.shape[1] != 1))
    if weights.shape != (x.shape[0], 1) or rows.shape != x.shape or weights.dtype != rows.dtype:
        return None
    return tape.lengths(x.shape[0]).weighted(weights.rows, rows.rows)


def _of_products(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Proxy | None:
    """A sum or mean over rows that are products with a parameter, which nothing else reads; None for another."""
    linear = node.args[0]
    assert isinstance(linear, fx.Node)
    if linear.target is not torch.ops.aten.linear.default or tape.is_read(linear) or dims != list(x.axes):
        return None
    a = tape.bound(linear)
    rows, weight, bias = a["input"], a["weight"], a["bias"]
    if rows.layout != PACKED or rows.axes != x.axes or weight.layout != WHOLE or rows.dtype != x.dtype:
        return None
    return tape.rows_of(x).of_products(rows.rows, weight.rows, plain(bias), name_of(node))


@over("mean")
def _mean(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    count = _count(x, dims)
    if x.layout == PADDED:
        total = _masked_reduction(tape, node, x, dims, 0, "sum")
        for a in dims:
            if a in x.axes:
                total = _divided(tape, total, x.shape[a], node)
        return total if count == 1 else tape.packed(total.rows / count, node.meta["val"])
    if (product := _of_products(tape, node, x, dims)) is not None:
        return _kept(tape, node, product)
    rows, size = _reduced(tape, x, dims, "sum")
    return _kept(tape, node, size.mean(rows) if count == 1 else size.divided(size.sum(rows), count))


@over("amax", "amin")
def _amax(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    how = name_of(node)
    fill = no_extreme(x.dtype, how[1:])
    if x.layout == PADDED:
        return _masked_reduction(tape, node, x, dims, fill, how)
    if [d for d in dims if d not in x.axes]:
        raise NoRule("an extreme over rows and columns: ties share their gradient")
    rows, size = _reduced(tape, x, dims, how)
    return _kept(tape, node, size.extreme(rows, fill, how))


@over("max", "min")
def _max(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    how, val = name_of(node), node.meta["val"]
    fill = no_extreme(x.dtype, how)
    if "dim" not in tape.bound(node):
        # torch.max(x): its elements as one row each; equal ones share the gradient, as those of amax do.
        if x.layout != PACKED:
            raise NoRule("an extreme of all elements of two sizes of its own")
        return tape.packed(tape.rows_of(x).none_empty().extreme_of_all(x.rows, fill, how), val)
    if x.layout == PADDED:
        extremes = getattr(_hidden(tape, x, dims[0], how), how)(x.place(dims[0]))
        return tuple(_other_rows(tape, extremes[i], x, dims, t) for i, t in enumerate(val))
    extremes = getattr(tape.rows_of(x).none_empty().pad(x.rows, fill), how)(1)
    return tuple(_kept(tape, node, extremes[i], t) for i, t in enumerate(val))


def no_extreme(dtype: torch.dtype, how: str) -> float:
    """The number to pad with before a maximum (`how="max"`) or a minimum, so that padding isn't the extreme."""
    if dtype == torch.bool:
        return how == "min"
    if dtype.is_floating_point:
        return -math.inf if how == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if how == "max" else limits.max


def _hidden(tape: PackedTape, x: Packed, d: int, how: str) -> Proxy:
    """A padded value for an extreme along d, one of its two own sizes; an error where an instance has no extreme."""
    return tape.lengths(x.shape[d]).none_empty().hide(x.rows, x.place(d), no_extreme(x.dtype, how))


def _other_rows(tape: PackedTape, reduced: Proxy, x: Packed, dims: list[int], val: torch.Tensor) -> Packed:
    """The packed rows that are left when a padded value was reduced along one of its two own sizes: the other's."""
    (other,) = [a for a in x.axes if a not in dims]
    size, shape = tape.lengths(x.shape[other]), shape_of(val)
    rest = [n for i, n in enumerate(shape) if i not in own_dimensions(shape)]
    return tape.packed(size.unpad(reduced).reshape(size.total, *rest), val)


@over("argmax", "argmin")
def _argmax(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    how = name_of(node)
    if x.layout == PADDED and len(dims) == 1:
        places = getattr(_hidden(tape, x, dims[0], how[3:]), how)(x.place(dims[0]))
        return _other_rows(tape, places, x, dims, node.meta["val"])
    if x.layout != PACKED or dims != list(x.axes):
        raise NoRule("a place among all elements")
    padded = tape.rows_of(x).none_empty().pad(x.rows, no_extreme(x.dtype, how[3:]))
    return _kept(tape, node, getattr(padded, how)(1))


@over("any", "all")
def _any(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    how = name_of(node)
    x = tape.by_elements(x, x.rows.ne(0), torch.bool)
    if x.layout == PADDED:
        return _masked_reduction(tape, node, x, dims, how == "all", how)
    rows, size = _reduced(tape, x, dims, how)
    return _kept(tape, node, getattr(size.pad(rows, how == "all"), how)(1))


@over("logsumexp")
def _logsumexp(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    if x.layout == PADDED:
        return _masked_reduction(tape, node, x, dims, -math.inf, "logsumexp")
    places = (1, *[x.place(d) + 1 for d in dims if d not in x.axes])
    return _kept(tape, node, tape.rows_of(x).pad(x.rows, -math.inf).logsumexp(places))


@over("softmax", "log_softmax", "_softmax", "_log_softmax")
def _softmax(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    how, val = name_of(node).lstrip("_"), node.meta["val"]
    rows = x.rows if x.dtype == val.dtype else x.rows.to(val.dtype)
    size = tape.lengths(x.shape[dims[0]])
    if x.layout == PACKED:
        if how == "softmax":
            return tape.packed(size.softmax(rows), val)
        return tape.packed(size.unpad(size.pad(rows, -math.inf).log_softmax(1)), val)
    place = x.place(dims[0])
    return tape.packed(getattr(size.hide(rows, place), how)(place), val)


@over("prod")
def _prod(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    if x.layout != PACKED or dims != list(x.axes) or x.dtype != node.meta["val"].dtype:
        raise NoRule("a product of more than the rows")
    return _kept(tape, node, tape.call(product_of_rows, x.rows, tape.rows_of(x), "prod"))


def products_of_columns(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    """prod or cumprod along a dimension of fixed size."""
    how, val = name_of(node), node.meta["val"]
    if x.layout == PADDED or not x.rank or x.dtype != val.dtype or len(dims) != 1:
        raise NoRule("a product in another layout or type")
    sizes = tape.rows_of(x).list if x.layout == PACKED else [1] * tape.z.n
    result = tape.call(product, x.rows, sizes, x.place(dims[0]), how)
    return tape.packed(result.unsqueeze(x.place(dims[0])) if tape.bound(node).get("keepdim") else result, val)


@over("count_nonzero")
def _count_nonzero(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    return _summed(tape, node, tape.by_elements(x, x.rows.ne(0).to(torch.int64), torch.int64), dims)


@over("nansum")
def _nansum(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    return _summed(tape, node, tape.by_elements(x, tape.call(WithoutNaN.apply, x.rows), x.dtype), dims)


def _summed(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    if x.layout == PADDED:
        return _masked_reduction(tape, node, x, dims, 0, "sum")
    rows, size = _reduced(tape, x, dims, "sum")
    return _kept(tape, node, size.sum(rows))


@over("flip")
def _flip(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    if x.layout != PACKED:
        raise NoRule("two sizes of its own")
    rows = x.rows.index_select(0, tape.rows_of(x).reversed)
    others = tuple(x.place(d) for d in dims if d not in x.axes)
    return tape.packed(rows.flip(others) if others else rows, node.meta["val"])


@over("norm", "linalg_vector_norm")
def _norm(tape: PackedTape, node: fx.Node, x: Packed, dims: list[int]) -> Given:
    """Zeros add nothing to a norm."""
    arguments = tape.bound(node)
    order = arguments.get("p", arguments.get("ord"))
    order = 2 if order is None else order
    if x.layout != PACKED or not 0 < order < math.inf or arguments.get("dtype") is not None:
        raise NoRule("this norm over rows")
    of_one_number = all(x.shape[d] == 1 for d in dims if d not in x.axes)
    others = [x.place(d) for d in dims if d not in x.axes]
    if others and len(others) != x.rank - 1:
        raise NoRule("this norm over rows and some columns")
    size = tape.rows_of(x)
    padded = size.pad(x.rows.flatten(1)).flatten(1) if others else size.pad(x.rows)
    if of_one_number:
        return _kept(tape, node, tape.call(norm, padded, order, size))
    return _kept(tape, node, tape.call(torch.linalg.vector_norm, padded, order, 1))


@rule("batch_norm")
def _batch_norm(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    """Normalisation by what is known of each channel, the second dimension: all other dimensions are rows."""
    x = a["input"]
    if a["training"] or x.layout == WHOLE or x.rank < 2 or 1 in x.axes:
        raise NoRule("statistics of all items")
    weights = weights_of(a["running_mean"], a["running_var"], a["weight"], a["bias"])
    return normalised_channels(tape, x, [*weights, False, 0.0, a["eps"]], val)


def weights_of(*operands: Packed | None) -> list[Proxy | None]:
    """Operands that are the same for all instances, as arguments of a call."""
    if any(isinstance(v, Packed) and v.layout != WHOLE for v in operands):
        raise NoRule("weights of each instance")
    return [v.rows if isinstance(v, Packed) else None for v in operands]


def normalised_channels(
    tape: PackedTape, x: Packed, arguments: Sequence[object], val: torch.Tensor
) -> Packed:
    """Batch normalisation of the second dimension, with these further arguments."""
    moved = x.rows.movedim(x.place(1), -1)
    normalised = tape.call(torch.nn.functional.batch_norm, moved.reshape(-1, x.shape[1]), *arguments)
    return tape.packed(normalised.view(moved.shape).movedim(-1, x.place(1)), val)


@rule("layer_norm", "rms_norm")
def _layer_norm(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["input"] = tape.to_dense(a["input"])
    last = range(x.rank - len(a["normalized_shape"]), x.rank)
    if any(d in x.axes for d in last):
        raise NoRule("it normalises along a size of its own")
    weights_of(a["weight"], a.get("bias"))
    return tape.packed(tape.apply(operator_of(node), a), val)


@rule("embedding")
def _embedding(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    if a["weight"].layout != WHOLE:
        raise NoRule("a table of each instance")
    index = a["indices"] = tape.to_dense(a["indices"])
    if index.layout == PADDED:
        if a["scale_grad_by_freq"] or a["sparse"]:
            raise NoRule("gradients that count indices")
        a["indices"] = tape.hidden(index, index.axes)
        return tape.gathered_as(index, tape.apply(operator_of(node), a), val)
    return tape.packed(tape.apply(operator_of(node), a), val)
