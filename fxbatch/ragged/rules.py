"""How each kind of operator acts on packed values: the table of rules.

In: a node of a sized graph and the emitter that holds its arguments. Out: the node's value, its code written.

    RULES["aten::softmax"]         # rows by themselves, or over the rows of each instance
    rule_of(torch.ops.aten.relu.default)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxbatch.ragged.expressions import depends
from fxbatch.ragged.lengths import WithoutNaN
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
    Rule,
    Traced,
    keeps_all,
    name_of,
    operator_of,
    own_dimensions,
    shape_of,
)
from fxbatch.ragged.recurrent import NODES
from fxbatch.ragged.rules_items import ITEMWISE_COMPOSITES, by_items, of_aten, results_of
from fxbatch.ragged.values_alone import batched_by_vmap
from fxbatch.ragged.whole_tensor import norm, product, product_of_rows

OfArguments = Callable[[Emitter, fx.Node, Arguments, Traced], Emitted]
RULES: dict[str, Rule] = {}


def rule(*names: str, space: str = "aten") -> Callable[[OfArguments], OfArguments]:
    """Register a rule for operators of these names."""

    def register(function: OfArguments) -> OfArguments:
        for name in names:
            RULES[f"{space}::{name}"] = lambda e, node: function(e, node, e.bound(node), node.meta["val"])
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

    def apply(e: Emitter, node: fx.Node) -> Emitted:
        values = tensors_of(e, node)
        random = e.draws and not keeps_all(e, node)
        if all(v.layout == WHOLE for v in values) and not random and _fixed(e, node):
            return whole(e, node)
        if own is None and pointwise:
            return point(e, node)
        reason = NoRule("no rule for it")
        if own is not None:
            try:
                return own(e, node)
            except NoRule as error:
                reason = error
        if by_items(e, node, values):
            return e.results(node, e.call(target, e.bound(node)))
        if values and _fixed(e, node) and all(v.layout in (WHOLE, DENSE) for v in values):
            return batched_by_vmap(e, node)
        raise reason

    return apply


def tensors_of(e: Emitter, node: fx.Node) -> list[Packed]:
    """The tensors among the arguments of a node."""
    return [v for v in e.leaves(node)[0] if isinstance(v, Packed)]


def _fixed(e: Emitter, node: fx.Node) -> bool:
    """Whether neither the results nor the arguments of a node have a size of their own."""
    own_results = any(own_dimensions(shape_of(t)) for t in results_of(node))
    return not own_results and not any(map(depends, e.leaves(node)[0]))


def whole(e: Emitter, node: fx.Node) -> Emitted:
    """An operator on what is the same for all instances: once."""
    if node.target in NODES:
        raise NoRule("no instance in it")
    return e.results(node, e.call(node.target, e.bound(node)), WHOLE)


# -- pointwise ------------------------------------------------------------------------------------------


def point(e: Emitter, node: fx.Node) -> Emitted:
    """Elements by themselves: all arguments in the layout of the result."""
    arguments = e.bound(node)
    results = results_of(node)
    shape = shape_of(results[0])
    random = torch.Tag.nondeterministic_seeded in node.target.tags or name_of(node) == "dropout"
    columns = False
    first = next((v for v in tensors_of(e, node)), None)
    for name, x in arguments.items():
        if isinstance(x, Packed):
            if random:
                x = e.to_dense(x)
            arguments[name] = Code(e.aligned(x, shape))
        elif isinstance(x, (list, tuple)):
            arguments[name] = [Code(e.aligned(y, shape)) if isinstance(y, Packed) else y for y in x]
        elif depends(x):
            arguments[name] = Code(_number(e, x, first, shape))
            columns = True
    arguments.pop("memory_format", None)
    if columns:
        return e.packed(_packet_call(e, node, arguments), results[0])
    target = operator_of(node)
    if "memory_format" in {a.name for a in target._schema.arguments}:
        arguments["memory_format"] = None
        if name_of(node) == "contiguous":
            return e.packed(f"{arguments['self']}", results[0])
    return e.results(node, e.call(target, arguments))


def _packet_call(e: Emitter, node: fx.Node, arguments: dict[str, Any]) -> str:
    """A call of an operator with a tensor where it has a number."""
    target = operator_of(node)
    packet = getattr(torch.ops.aten, name_of(node))
    parts = []
    named = False
    for a in target._schema.arguments:
        x = arguments.get(a.name, a.default_value)
        if a.has_default_value() and x == a.default_value and not isinstance(x, Code):
            named = True  # what follows one that is left out
            continue
        parts.append(f"{a.name}={e.source(x)}" if a.kwarg_only or named else e.source(x))
    return f"{e.const(packet)}({', '.join(parts)})"


def _number(e: Emitter, x: sympy.Expr, like: Packed | None, shape: tuple[object, ...]) -> str:
    """A number of each instance as a tensor that promotes as the number does."""
    integral = bool(x.is_integer)
    dtype = torch.int64 if integral else torch.get_default_dtype()
    if like is not None:
        floating = like.dtype.is_floating_point or like.dtype.is_complex
        if floating or (integral and like.dtype != torch.bool):
            dtype = like.dtype
    name = e.line(f"z.tensor({e.column(x)}, {e.const(dtype)})")
    return e.aligned(Packed(name, DENSE, (), dtype), shape)


@rule("masked_fill")
def _masked_fill(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """A value that is a tensor may be another one in each instance."""
    value = a["value"]
    if not isinstance(value, Packed) or value.layout == WHOLE:
        return point(e, node)
    shape = shape_of(val)
    x, mask, fill = (e.aligned(a[name], shape) for name in ("self", "mask", "value"))
    return e.packed(f"torch.where({mask}, {fill}.to({x}.dtype), {x})", val)


@rule("copy")
def _copy(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """x.copy_(y), of which y is left: torch has no derivative of it as a function."""
    shape = shape_of(val)
    like, source = e.aligned(a["self"], shape), e.aligned(a["src"], shape)
    return e.packed(f"{source}.to({e.const(val.dtype)}).expand_as({like})", val)


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

    def apply(e: Emitter, node: fx.Node) -> Emitted:
        target = operator_of(node)
        arguments = e.bound(node)
        over = OVER.get(name)
        if "other" in arguments:  # torch.max(a, b): element by element
            return point(e, node)
        argument = arguments.get(where)
        if where == "dims" and not argument:
            raise NoRule("no dimensions are named")
        x = arguments["self"] = e.to_dense(arguments["self"])
        dims = dims_of(x, argument)
        if any(d in x.axes for d in dims) or where not in arguments:
            if over is None:
                raise NoRule("it acts along a size of its own")
            return over(e, node, x, dims)
        over_all = argument is None or argument == []
        if over_all and (x.layout != DENSE or "dim" not in arguments or target._overloadname == "default"):
            raise NoRule("over all dimensions")
        if not over_all and name in ("prod", "cumprod"):
            return products_of_columns(e, node, x, dims)
        places = [x.place(d) for d in dims]
        arguments[where] = places if over_all or isinstance(argument, (list, tuple)) else places[0]
        return e.results(node, e.call(target, arguments))

    return apply


RULES.update({f"aten::{name}": _along_rule(name) for name in _ALONG})


OverRows = Callable[[Emitter, fx.Node, Packed, list[int]], Emitted]
OVER: dict[str, OverRows] = {}


def over(*names: str) -> Callable[[OverRows], OverRows]:
    """Register what operators do over the rows of each instance."""

    def register(function: OverRows) -> OverRows:
        for name in names:
            OVER[name] = function
        return function

    return register


def _reduced(e: Emitter, x: Packed, dims: list[int], first: str) -> tuple[str, str]:
    """x with its other reduced dimensions reduced by `first` ("sum"); the Lengths of its rows."""
    if x.layout != PACKED:
        raise NoRule("it acts along one of two sizes of its own" if x.layout == PADDED else "no own size")
    others = [x.place(d) for d in dims if d not in x.axes]
    name = x.name
    if others:
        name = e.line(f"{name}.{first}({tuple(others)})")
    return name, e.rows_of(x)


def _kept(e: Emitter, node: fx.Node, code: str, result: torch.Tensor | None = None) -> Packed:
    """A reduced value, the node's or one of its results, with the dimensions of size 1 that keepdim=True leaves."""
    val = node.meta["val"] if result is None else result
    if not e.bound(node).get("keepdim"):
        return e.packed(code, val)
    return e.packed(f"({code}).reshape(n, {''.join(f'{d}, ' for d in shape_of(val))})", val)


def _divided(e: Emitter, v: Packed, size: object, node: fx.Node) -> Packed:
    """A value divided by a size of the instance."""
    count = e.line(f"z.tensor({e.column(size)}, {e.const(v.dtype)})")
    return e.packed(f"{v.name} / {e.aligned(Packed(count, DENSE, (), v.dtype), v.shape)}", node.meta["val"])


def _count(x: Packed, dims: list[int]) -> int:
    return math.prod(int(x.shape[d]) for d in dims if d not in x.axes)


def _masked_reduction(e: Emitter, node: fx.Node, x: Packed, dims: list[int], fill: str, how: str) -> Emitted:
    """Over one or both of two own sizes: padding is `fill`, and reduces to nothing. how: a method."""
    name = e.hidden(x, dims, fill)
    name = e.line(f"{name}.{how}({tuple(x.place(d) for d in dims)})")
    if all(a in dims for a in x.axes):
        return _kept(e, node, name)
    return _other_rows(e, name, x, dims, node.meta["val"])


@over("sum")
def _sum(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    if e.bound(node).get("dtype") is not None or x.dtype != node.meta["val"].dtype:
        dtype = node.meta["val"].dtype
        x = e.by_elements(x, f"{x.name}.to({e.const(dtype)})", dtype)
    if product := _of_products(e, node, x, dims) or _weighted(e, node, x, dims):
        return _kept(e, node, product)
    return _summed(e, node, x, dims)


def _weighted(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> str:
    """A sum over rows `[T, d]` times weights `[T, 1]`, which nothing else reads: "" for another."""
    times = node.args[0]
    assert isinstance(times, fx.Node)
    if times.target is not torch.ops.aten.mul.Tensor or e.is_read(times) or dims != [0] or x.axes != (0,):
        return ""
    factors = [e.value(f) for f in times.args]
    if not all(
        isinstance(f, Packed) and f.layout == PACKED and f.axes == (0,) and f.rank == 2 for f in factors
    ):
        return ""
    weights, rows = sorted(factors, key=lambda f: bool(f.shape[1] != 1))
    if weights.shape != (x.shape[0], 1) or rows.shape != x.shape or weights.dtype != rows.dtype:
        return ""
    return f"{e.lengths(x.shape[0])}.weighted({weights.name}, {rows.name})"


def _of_products(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> str:
    """A sum or mean over rows that are products with a parameter, which nothing else reads: "" for another."""
    linear = node.args[0]
    assert isinstance(linear, fx.Node)
    if linear.target is not torch.ops.aten.linear.default or e.is_read(linear) or dims != list(x.axes):
        return ""
    a = e.bound(linear)
    rows, weight, bias = a["input"], a["weight"], a["bias"]
    if rows.layout != PACKED or rows.axes != x.axes or weight.layout != WHOLE or rows.dtype != x.dtype:
        return ""
    how = name_of(node)
    operands = f"{rows.name}, {weight.name}, {bias.name if isinstance(bias, Packed) else 'None'}"
    return f"{e.rows_of(x)}.of_products({operands}, {how!r})"


@over("mean")
def _mean(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    if x.layout == PADDED:
        total = _masked_reduction(e, node, x, dims, "0", "sum")
        for a in dims:
            if a in x.axes:
                total = _divided(e, total, x.shape[a], node)
        count = _count(x, dims)
        return total if count == 1 else e.packed(f"{total.name} / {count}", node.meta["val"])
    if product := _of_products(e, node, x, dims):
        return _kept(e, node, product)
    name, size = _reduced(e, x, dims, "sum")
    if (count := _count(x, dims)) == 1:
        return _kept(e, node, f"{size}.mean({name})")
    return _kept(e, node, f"{size}.divided({size}.sum({name}), {count})")


@over("amax", "amin")
def _amax(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    how = name_of(node)
    if x.layout == PADDED:
        return _masked_reduction(e, node, x, dims, no_extreme(x.dtype, how[1:]), how)
    if [d for d in dims if d not in x.axes]:
        raise NoRule("an extreme over rows and columns: ties share their gradient")
    name, size = _reduced(e, x, dims, how)
    return _kept(e, node, f"{size}.extreme({name}, {no_extreme(x.dtype, how[1:])}, {how!r})")


@over("max", "min")
def _max(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    how = name_of(node)
    if "dim" not in e.bound(node):
        # torch.max(x): its elements as one row each; equal ones share the gradient, as those of amax do.
        if x.layout != PACKED:
            raise NoRule("an extreme of all elements of two sizes of its own")
        operands = f"{x.name}, {no_extreme(x.dtype, how)}, {how!r}"
        return e.packed(f"{e.rows_of(x)}.none_empty().extreme_of_all({operands})", node.meta["val"])
    if x.layout == PADDED:
        name = e.line(f"{_hidden(e, x, dims[0], how)}.{how}({x.place(dims[0])})")
        return tuple(_other_rows(e, f"{name}[{i}]", x, dims, t) for i, t in enumerate(node.meta["val"]))
    size = e.rows_of(x)
    name = e.line(f"{size}.none_empty().pad({x.name}, {no_extreme(x.dtype, how)}).{how}(1)")
    return tuple(_kept(e, node, f"{name}[{i}]", t) for i, t in enumerate(node.meta["val"]))


def no_extreme(dtype: torch.dtype, how: str) -> str:
    """The number to pad with before a maximum (`how="max"`) or a minimum, so that padding isn't the extreme."""
    if dtype == torch.bool:
        return str(how == "min")
    if dtype.is_floating_point:
        return "float('-inf')" if how == "max" else "float('inf')"
    limits = torch.iinfo(dtype)
    return str(limits.min if how == "max" else limits.max)


def _hidden(e: Emitter, x: Packed, d: int, how: str) -> str:
    """A padded value for an extreme along d, one of its two own sizes; an error where an instance has no extreme."""
    size, fill = e.lengths(x.shape[d]), no_extreme(x.dtype, how)
    return e.line(f"{size}.none_empty().hide({x.name}, {x.place(d)}, {fill})")


def _other_rows(e: Emitter, name: str, x: Packed, dims: list[int], val: torch.Tensor) -> Packed:
    """The packed rows that are left when a padded value was reduced along one of its two own sizes: the other's."""
    (other,) = [a for a in x.axes if a not in dims]
    name = e.line(f"{e.lengths(x.shape[other])}.unpad({name})")
    rest = [size for i, size in enumerate(shape_of(val)) if i not in own_dimensions(shape_of(val))]
    return e.packed(f"{name}.reshape({name}.shape[0], {''.join(f'{size}, ' for size in rest)})", val)


@over("argmax", "argmin")
def _argmax(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    how = name_of(node)
    if x.layout == PADDED and len(dims) == 1:
        name = e.line(f"{_hidden(e, x, dims[0], how[3:])}.{how}({x.place(dims[0])})")
        return _other_rows(e, name, x, dims, node.meta["val"])
    if x.layout != PACKED or dims != list(x.axes):
        raise NoRule("a place among all elements")
    size = e.rows_of(x)
    return _kept(e, node, f"{size}.none_empty().pad({x.name}, {no_extreme(x.dtype, how[3:])}).{how}(1)")


@over("any", "all")
def _any(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    how = name_of(node)
    fill = "False" if how == "any" else "True"
    x = e.by_elements(x, f"({x.name} != 0)", torch.bool)
    if x.layout == PADDED:
        return _masked_reduction(e, node, x, dims, fill, how)
    name, size = _reduced(e, x, dims, how)
    return _kept(e, node, f"{size}.pad({name}, {fill}).{how}(1)")


@over("logsumexp")
def _logsumexp(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    if x.layout == PADDED:
        return _masked_reduction(e, node, x, dims, "float('-inf')", "logsumexp")
    places = (1, *[x.place(d) + 1 for d in dims if d not in x.axes])
    padded = f"{e.rows_of(x)}.pad({x.name}, float('-inf'))"
    return _kept(e, node, f"{padded}.logsumexp({places})")


@over("softmax", "log_softmax", "_softmax", "_log_softmax")
def _softmax(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    how = name_of(node).lstrip("_")
    dtype = node.meta["val"].dtype
    start = x.name if x.dtype == dtype else f"{x.name}.to({e.const(dtype)})"
    size = e.lengths(x.shape[dims[0]])
    if x.layout == PACKED:
        if how == "softmax":
            return e.packed(f"{size}.softmax({start})", node.meta["val"])
        return e.packed(f"{size}.unpad({size}.pad({start}, float('-inf')).{how}(1))", node.meta["val"])
    place = x.place(dims[0])
    return e.packed(f"{size}.hide({start}, {place}).{how}({place})", node.meta["val"])


@over("prod")
def _prod(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    if x.layout != PACKED or dims != list(x.axes) or x.dtype != node.meta["val"].dtype:
        raise NoRule("a product of more than the rows")
    return _kept(e, node, f"{e.const(product_of_rows)}({x.name}, {e.rows_of(x)}, 'prod')")


def products_of_columns(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    """prod or cumprod along a dimension of fixed size."""
    how, val = name_of(node), node.meta["val"]
    if x.layout == PADDED or not x.rank or x.dtype != val.dtype or len(dims) != 1:
        raise NoRule("a product in another layout or type")
    sizes = f"{e.rows_of(x)}.list" if x.layout == PACKED else "[1] * n"
    result = e.line(f"{e.const(product)}({x.name}, {sizes}, {x.place(dims[0])}, {how!r})")
    if e.bound(node).get("keepdim"):
        result = e.line(f"{result}.unsqueeze({x.place(dims[0])})")
    return e.packed(result, val)


@over("count_nonzero")
def _count_nonzero(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    return _summed(e, node, e.by_elements(x, f"({x.name} != 0).to(torch.int64)", torch.int64), dims)


@over("nansum")
def _nansum(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    return _summed(e, node, e.by_elements(x, f"{e.const(WithoutNaN)}.apply({x.name})", x.dtype), dims)


def _summed(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    if x.layout == PADDED:
        return _masked_reduction(e, node, x, dims, "0", "sum")
    name, size = _reduced(e, x, dims, "sum")
    return _kept(e, node, f"{size}.sum({name})")


@over("flip")
def _flip(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    if x.layout != PACKED:
        raise NoRule("two sizes of its own")
    name = e.line(f"{x.name}.index_select(0, {e.rows_of(x)}.reversed)")
    others = [x.place(d) for d in dims if d not in x.axes]
    return e.packed(f"{name}.flip({tuple(others)})" if others else name, node.meta["val"])


@over("norm", "linalg_vector_norm")
def _norm(e: Emitter, node: fx.Node, x: Packed, dims: list[int]) -> Emitted:
    """Zeros add nothing to a norm."""
    arguments = e.bound(node)
    order = arguments.get("p", arguments.get("ord"))
    order = 2 if order is None else order
    if x.layout != PACKED or not 0 < order < float("inf") or arguments.get("dtype") is not None:
        raise NoRule("this norm over rows")
    of_one_number = all(x.shape[d] == 1 for d in dims if d not in x.axes)
    others = [x.place(d) for d in dims if d not in x.axes]
    size = e.rows_of(x)
    name = e.line(f"{x.name}" if not others else f"{x.name}.flatten(1)")
    if others and len(others) != x.rank - 1:
        raise NoRule("this norm over rows and some columns")
    padded = f"{size}.pad({name})" + (".flatten(1)" if others else "")
    if of_one_number:
        return _kept(e, node, f"{e.const(norm)}({padded}, {order}, {size})")
    return _kept(e, node, f"torch.linalg.vector_norm({padded}, {order}, 1)")


@rule("batch_norm")
def _batch_norm(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    """Normalisation by what is known of each channel, the second dimension: all other dimensions are rows."""
    x = a["input"]
    if a["training"] or x.layout == WHOLE or x.rank < 2 or 1 in x.axes:
        raise NoRule("statistics of all items")
    operands = weights_code(a["running_mean"], a["running_var"], a["weight"], a["bias"])
    return normalised_channels(e, x, f"{operands}, False, 0.0, {a['eps']}", val)


def weights_code(*operands: Packed | None) -> str:
    """Operands that are the same for all instances, as arguments of a call."""
    if any(isinstance(v, Packed) and v.layout != WHOLE for v in operands):
        raise NoRule("weights of each instance")
    return ", ".join(v.name if isinstance(v, Packed) else "None" for v in operands)


def normalised_channels(e: Emitter, x: Packed, arguments: str, val: torch.Tensor) -> Packed:
    """Batch normalisation of the second dimension, with these further arguments."""
    moved = e.line(f"{x.name}.movedim({x.place(1)}, -1)")
    code = f"torch.nn.functional.batch_norm({moved}.reshape(-1, {x.shape[1]}), {arguments})"
    return e.packed(f"{code}.view({moved}.shape).movedim(-1, {x.place(1)})", val)


@rule("layer_norm", "rms_norm")
def _layer_norm(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    x = a["input"] = e.to_dense(a["input"])
    last = range(x.rank - len(a["normalized_shape"]), x.rank)
    if any(d in x.axes for d in last):
        raise NoRule("it normalises along a size of its own")
    weights_code(a["weight"], a.get("bias"))
    return e.packed(e.call(node.target, a), val)


@rule("embedding")
def _embedding(e: Emitter, node: fx.Node, a: Arguments, val: Traced) -> Emitted:
    if a["weight"].layout != WHOLE:
        raise NoRule("a table of each instance")
    index = a["indices"] = e.to_dense(a["indices"])
    if index.layout == PADDED:
        if a["scale_grad_by_freq"] or a["sparse"]:
            raise NoRule("gradients that count indices")
        a["indices"] = Code(e.hidden(index, index.axes))
        return e.gathered_as(index, e.call(node.target, a), val)
    return e.packed(e.call(node.target, a), val)
