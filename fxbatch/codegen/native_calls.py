"""Which instruction of the native program each pointwise ATen call is: its loop, the order of operands, a number.

pointwise(node)          # Pointwise("div", operands=(x, y), number=0.0) of aten.div.Tensor, or None
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.native_table import FIRST_ROWS, LOOPS, ROWS
from fxbatch.codegen.operation_graphs import dtype, is_cast, is_tensor

aten = torch.ops.aten

CODES = {x.name: code for code, x in enumerate(LOOPS)} | {x.name: FIRST_ROWS + i for i, x in enumerate(ROWS)}
_TYPES = {"f": torch.float32, "i": torch.int64, "b": torch.bool}
_DTYPES = {x.name: tuple(_TYPES[t] for t in x.types.replace(" ", "")) for x in LOOPS}
_LOOPS: dict[object, list[str]] = {}  # that a call may be, by types
for _loop in LOOPS:
    for _call in _loop.aten:
        _LOOPS.setdefault(operator.attrgetter(_call)(aten), []).append(_loop.name)
_CASTS = {
    (given, made): name
    for name, (made, given, *_) in _DTYPES.items()
    if name.startswith("copy") or "_to_" in name
}
# Calls with a number: its name, its position, what it is multiplied by.
_SCALED = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), ("alpha", 2, 1.0)),
    **dict.fromkeys(
        (aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar), ("alpha", 2, -1.0)
    ),
    **dict.fromkeys((aten.addcmul.default, aten.addcdiv.default), ("value", 3, 1.0)),
    aten.threshold_backward.default: ("threshold", 2, 1.0),
}


@dataclass(frozen=True)
class Pointwise:
    """One pointwise instruction: its operands are nodes or numbers."""

    name: str
    operands: tuple[object, ...]
    number: float = 0.0

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the result, then of the operands."""
        return _DTYPES[self.name]


def pointwise(node: fx.Node) -> Pointwise | None:
    """The instruction of a pointwise call, or None."""
    target, args, kwargs, number = node.target, node.args, node.kwargs, 0.0
    if is_cast(node) or target in (aten.clone.default, aten.alias.default):
        return cast(dtype(args[0]), dtype(node), args[0])
    if target in _SCALED:
        name, position, factor = _SCALED[target]
        scale: Any = args[position] if len(args) > position else kwargs.get(name, 1)
        args, kwargs, number = args[:position], {}, factor * float(scale) + 0.0  # not -0.0
        if target in (aten.rsub.Tensor, aten.rsub.Scalar):
            args = (args[1], args[0])
    fitting = (name for name in _LOOPS.get(target, ()) if not kwargs and _fits(_DTYPES[name], node, args))
    return next((Pointwise(name, args, number) for name in fitting), None)


def _fits(kinds: tuple[torch.dtype, ...], node: fx.Node, operands: tuple[object, ...]) -> bool:
    """Whether a loop of these types is the call: what is compared is of the type that it is compared in."""
    if len(operands) != len(kinds) - 1 or dtype(node) != kinds[0]:
        return False
    pairs = list(zip(operands, kinds[1:], strict=True))
    if any(type(x) is float and kind is not torch.float32 for x, kind in pairs):
        return False
    if kinds[0] is not torch.bool:
        return True  # what it gives says in which type it computes
    nodes = [(x, kind) for x, kind in pairs if isinstance(x, fx.Node)]
    return bool(nodes) and all(is_tensor(x) and dtype(x) == kind for x, kind in nodes)


def cast(source_type: torch.dtype, wanted: torch.dtype, source: object) -> Pointwise | None:
    """A copy from one type to another."""
    name = _CASTS.get((source_type, wanted))
    return None if name is None else Pointwise(name, (source,))
