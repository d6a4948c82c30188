"""Which instruction of the native program each ATen call is: codes, the order of operands, a number.

pointwise(node)          # Pointwise(code=13, operands=(x, y), number=0.0) of aten.div.Tensor, or None
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.kernel_calls import is_cast
from fxbatch.codegen.sizes import dtype

aten = torch.ops.aten

# In the order of the loops in _native_loops.h.
CODES = {
    name: code
    for code, name in enumerate(
        (
            "copy", "neg", "abs", "sigmoid", "tanh", "relu", "exp", "log", "sqrt", "rsqrt", "reciprocal", "add", "mul",
            "div", "sigmoid_backward", "tanh_backward", "threshold_backward", "addcmul", "addcdiv", "where_f32",
            "where_i64", "i64_to_f32", "bool_to_i64", "bool_to_f32", "ne_i64", "eq_i64", "gt_f32", "ge_f32", "lt_f32",
            "le_f32", "copy_i64", "copy_bool",
        )
    )
}  # fmt: skip
PRODUCT, LOOKUP, SUM_ROWS, SUM_LAST, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, PICK, PUT_ADD, TABLE_GRADIENT = range(
    64, 73
)

_F32, _I64, _BOOL = torch.float32, torch.int64, torch.bool
_MIXED = {
    "where_f32": (_F32, _BOOL, _F32, _F32), "where_i64": (_I64, _BOOL, _I64, _I64), "i64_to_f32": (_F32, _I64),
    "bool_to_i64": (_I64, _BOOL), "bool_to_f32": (_F32, _BOOL), "ne_i64": (_BOOL, _I64, _I64),
    "eq_i64": (_BOOL, _I64, _I64), "gt_f32": (_BOOL, _F32, _F32), "ge_f32": (_BOOL, _F32, _F32),
    "lt_f32": (_BOOL, _F32, _F32), "le_f32": (_BOOL, _F32, _F32), "copy_i64": (_I64, _I64), "copy_bool": (_BOOL, _BOOL),
}  # fmt: skip


@dataclass(frozen=True)
class Pointwise:
    """One pointwise instruction: its operands are nodes or numbers."""

    name: str
    operands: tuple[Any, ...]
    number: float = 0.0

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the result, then of the operands."""
        return _MIXED.get(self.name, (_F32,) * (1 + len(self.operands)))


_UNARY: dict[Any, str] = {
    aten.neg.default: "neg", aten.abs.default: "abs", aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh",
    aten.relu.default: "relu", aten.exp.default: "exp", aten.log.default: "log", aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt", aten.reciprocal.default: "reciprocal",
}  # fmt: skip
_BINARY: dict[Any, str] = {
    aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div",
    aten.sigmoid_backward.default: "sigmoid_backward", aten.tanh_backward.default: "tanh_backward",
}  # fmt: skip
_COMPARE: dict[Any, str] = {
    getattr(getattr(aten, name), overload): name
    for name in ("gt", "ge", "lt", "le")
    for overload in ("Scalar", "Tensor")
}  # fmt: skip


def pointwise(node: fx.Node) -> Pointwise | None:
    """The instruction of a pointwise call, or None."""
    target, args, kwargs = node.target, node.args, node.kwargs
    if is_cast(node):
        return cast(dtype(node.args[0]), dtype(node), node.args[0])
    if target in _UNARY:
        return Pointwise(_UNARY[target], args[:1])
    if target in _BINARY:
        return Pointwise(_BINARY[target], args[:2]) if not kwargs and len(args) == 2 else None
    if target in (aten.clone.default, aten.alias.default):
        return cast(dtype(node), dtype(node), args[0])
    if target in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar):
        scale = float(_rest(node, 2, "alpha", 1))
        return Pointwise("add", args[:2], scale if target in (aten.add.Tensor, aten.add.Scalar) else -scale)
    if target is aten.rsub.Scalar:
        return Pointwise("add", (args[1], args[0]), -float(_rest(node, 2, "alpha", 1)))
    if target in (aten.addcmul.default, aten.addcdiv.default):
        name = "addcmul" if target is aten.addcmul.default else "addcdiv"
        return Pointwise(name, args[:3], float(_rest(node, 3, "value", 1)))
    if target is aten.threshold_backward.default:
        return Pointwise("threshold_backward", args[:2], float(args[2]))
    return _chosen(node, target)


def _chosen(node: fx.Node, target: Callable[..., Any] | str) -> Pointwise | None:
    """Comparisons and choices, by the types of what they compare."""
    args = node.args
    if target is aten.where.self:
        return Pointwise("where_f32" if dtype(node) is _F32 else "where_i64", args[:3])
    if target in (aten.ne.Scalar, aten.ne.Tensor, aten.eq.Scalar, aten.eq.Tensor):
        name = "ne" if target in (aten.ne.Scalar, aten.ne.Tensor) else "eq"
        whole = isinstance(args[1], (fx.Node, int))
        return Pointwise(f"{name}_i64", args[:2]) if whole else None
    if target in _COMPARE:
        return Pointwise(f"{_COMPARE[target]}_f32", args[:2])
    return None


def cast(given: torch.dtype, wanted: torch.dtype, source: Any) -> Pointwise | None:
    """A copy from one type to another."""
    name = {
        (_F32, _F32): "copy", (_I64, _I64): "copy_i64", (_BOOL, _BOOL): "copy_bool", (_I64, _F32): "i64_to_f32",
        (_BOOL, _I64): "bool_to_i64", (_BOOL, _F32): "bool_to_f32",
    }.get((given, wanted))  # fmt: skip
    return None if name is None else Pointwise(name, (source,))


def _rest(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument that is given by place or by name, or not at all."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
