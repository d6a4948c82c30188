"""How each ATen call is written in a kernel's source: as a view, with `out=`, or as a plain call.

out_call(aten.sigmoid.default)   # ("sigmoid", torch.sigmoid): about 0.9 us a call, 2.0 us by torch.ops
view_text(node, "x", name)       # "x[:, 0:150]" for a slice
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.sizes import shape
from fxbatch.torch_private import direct_call

aten = torch.ops.aten

# Functions of the torch namespace with the arguments of their ATen namesakes, and `out=`.
_TORCH = (
    "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "erf", "sin", "cos", "reciprocal",
    "log1p", "expm1", "exp2", "log2",
    "mul", "add", "sub", "div", "pow", "maximum", "minimum", "mm", "bmm", "addmm",
    "baddbmm", "addcmul", "addcdiv", "where", "sum", "mean", "amax", "amin", "index_select", "gather", "eq",
    "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clamp", "clamp_min",
    "clamp_max", "sign", "cumsum", "floor", "ceil", "round", "atan2", "fmod", "remainder", "bitwise_and",
    "bitwise_or", "bitwise_not", "prod", "argmax", "argmin", "matmul", "isnan", "lerp", "floor_divide",
)  # fmt: skip
# The torch functions take a number for a tensor, and then do what these do.
_SCALARS = {
    aten.mul.Scalar: torch.mul, aten.div.Scalar: torch.div, aten.add.Scalar: torch.add,
    aten.sub.Scalar: torch.sub, aten.div.Scalar_mode: torch.div,
}  # fmt: skip
_VIEWS = (
    aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default,
    aten.detach.default, aten.diagonal.default,
)  # fmt: skip

# Calls that honour the strides of the memory they are told to write to, beside the pointwise ones.
_STRIDED = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.sum.dim_IntList,
    aten.mean.dim, aten.amax.default, aten.amin.default, aten.prod.dim_int, aten.logsumexp.default,
    aten.index_select.default, aten.gather.default, aten.index.Tensor, aten.scatter_add.default,
    aten.index_add.default, aten.cumsum.default, aten.tril.default, aten.triu.default, aten.cat.default,
})  # fmt: skip
# Pointwise calls that don't: PyTorch writes their result as one dense block, beyond the part it was given.
_DENSE = frozenset({aten.gelu.default, aten.gelu_backward.default})


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its first argument's memory (a reshape may yet have to copy)."""
    return node.op == "call_function" and node.target in _VIEWS


def is_cast(node: fx.Node) -> bool:
    """Whether the node copies its first argument to another dtype: a copy into given memory does that too."""
    if node.op != "call_function" or node.target is not aten._to_copy.default:
        return False
    if not isinstance(node.args[0], fx.Node) or node.kwargs.get("memory_format") is not None:
        return False
    source, value = node.args[0].meta["values"][0], node.meta["values"][0]
    return bool(source.device == value.device and source.layout is value.layout is torch.strided)


def view_text(node: fx.Node, source: str, argument: Callable[[Any], str], *, owned: bool) -> str:
    """Python for a view; `owned` memory is contiguous, so that a reshape of it never copies."""
    target, args = node.target, node.args
    if target is aten.reshape.default:
        return f"{source}.{'view' if owned else 'reshape'}({_unpacked(args[1], argument)})"
    if target is aten.permute.default:
        return (
            f"{source}.t()"
            if list(args[1]) == [1, 0]
            else f"{source}.permute({_unpacked(args[1], argument)})"
        )
    if target is aten.expand.default:
        return f"{source}.expand({_unpacked(args[1], argument)})"
    if target is aten.detach.default:
        return source
    if target is aten.select.int:
        dim = args[1] % len(shape(node.args[0]))
        return f"{source}[{':, ' * dim}{argument(args[2])}]"
    if target is aten.slice.Tensor:
        return _slice_text(node, source, argument)
    rest = ", ".join(argument(x) for x in args[1:])
    return f"{source}.diagonal({rest})"


def _unpacked(sizes: Any, argument: Callable[[Any], str]) -> str:
    """`8, 300`, which is 0.5 us cheaper to pass than `(8, 300)`."""
    return ", ".join(argument(x) for x in sizes) or "()"


def split_text(source: str, names: dict[tuple[int, int], str], size: int, dim: int) -> str:
    """Several slices `start:end` of one dimension in one call: 2.6 us for four, 6 us one by one."""
    targets: list[str] = []
    sizes: list[int] = []
    at = 0
    for (start, end), name in [*sorted(names.items()), ((size, size), "")]:
        if start > at:
            targets.append("_")
            sizes.append(start - at)
        if name:
            targets.append(name)
            sizes.append(end - start)
        at = end
    return f"{', '.join(targets)} = {source}.split_with_sizes({tuple(sizes)}, {dim})"


def _slice_text(node: fx.Node, source: str, argument: Callable[[Any], str]) -> str:
    given: list[Any] = list(node.args[1:])
    dim, start, end, step = given + [None] * (4 - len(given))
    dim = (dim or 0) % len(shape(node.args[0]))
    first = "" if start is None else argument(start)
    last = "" if end is None or (isinstance(end, int) and end >= 2**62) else argument(end)
    stride = "" if step in (None, 1) else f":{argument(step)}"
    return f"{source}[{':, ' * dim}{first}:{last}{stride}]"


@functools.lru_cache(maxsize=1024)
def out_call(target: Any) -> tuple[str, str, Callable[..., Any]] | None:
    """(name, out argument, function) that writes its result where it is told, or None.

    Overloads that PyTorch generates (a plain call and a copy) don't count.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if target in _SCALARS:
        return _SCALARS[target].__name__, "out", _SCALARS[target]
    found = _out_overload(target)
    if found is None:
        return None
    overload, out_name = found
    word = target._schema.name.split("::")[1]
    if word in _TORCH and out_name == "out":
        return word, "out", getattr(torch, word)
    return word, out_name, direct_call(overload)


def _out_overload(target: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    packet = target.overloadpacket
    plain = [(a.name, str(a.type)) for a in target._schema.arguments]
    if len(target._schema.returns) != 1 or str(target._schema.returns[0].type) != "Tensor":
        return None
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = [a for a in overload._schema.arguments if a.is_out]
        if len(outs) != 1 or torch.Tag.generated in overload.tags:
            continue
        if [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out] == plain:
            return overload, outs[0].name
    return None


def honours_strides(node: fx.Node) -> bool:
    """Whether `out=` may be a part of a wider tensor: softmax and its like write past the end of one.

    Checked call by call against PyTorch 2.11 and 2.13 (tests/codegen/test_strided_outputs.py).
    """
    if is_cast(node) or node.target in _STRIDED:
        return True
    tags = getattr(node.target, "tags", ())
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and node.target not in _DENSE
    )


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result needs the same elements of the inputs alone."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
