"""Which instruction of the native program each pointwise ATen call is: its loop, the order of operands, a number.

pointwise(node)          # Pointwise("div", operands=(x, y), number=0.0) of aten.div.Tensor, or None
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.native_table import FIRST_ROWS, LOOPS, ROWS
from fxbatch.codegen.shapes import dtype, is_cast

aten = torch.ops.aten

CODES = {x.name: code for code, x in enumerate(LOOPS)} | {x.name: FIRST_ROWS + i for i, x in enumerate(ROWS)}
_F32, _I64, _BOOL = torch.float32, torch.int64, torch.bool
_TYPES = {"f": _F32, "i": _I64, "b": _BOOL}
_DTYPES = {x.name: tuple(_TYPES[t] for t in x.types.replace(" ", "")) for x in LOOPS}
_CALLS = {operator.attrgetter(call)(aten): x.name for x in LOOPS for call in x.aten}


@dataclass(frozen=True)
class Pointwise:
    """One pointwise instruction: its operands are nodes or numbers."""

    name: str
    operands: tuple[Any, ...]
    number: float = 0.0

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the result, then of the operands."""
        return _DTYPES[self.name]


def pointwise(node: fx.Node) -> Pointwise | None:
    """The instruction of a pointwise call, or None."""
    target, args, kwargs = node.target, node.args, node.kwargs
    if is_cast(node):
        return cast(dtype(node.args[0]), dtype(node), node.args[0])
    if target in (aten.lt.Scalar, aten.lt.Tensor) and dtype(args[0]) is _I64:
        whole = isinstance(args[1], int) or (isinstance(args[1], fx.Node) and dtype(args[1]) is _I64)
        return Pointwise("lt_i64", args) if whole else None
    if target in _CALLS:
        call = Pointwise(_CALLS[target], args)
        return call if not kwargs and len(args) == len(call.dtypes()) - 1 else None
    if target in (aten.clone.default, aten.alias.default):
        return cast(dtype(node), dtype(node), args[0])
    if target in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar):
        scale = float(_rest(node, 2, "alpha", 1))
        name = "add_i64" if dtype(node) is _I64 and scale in (1.0, -1.0) else "add"
        return Pointwise(name, args[:2], scale if target in (aten.add.Tensor, aten.add.Scalar) else -scale)
    if target in (aten.rsub.Scalar, aten.rsub.Tensor):
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
        if dtype(args[0]) is _F32:
            return Pointwise(f"{name}_f32", args[:2])
        whole = isinstance(args[1], (fx.Node, int))
        return Pointwise(f"{name}_i64", args[:2]) if whole else None
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
