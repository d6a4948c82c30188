"""Which instruction of the native program each pointwise ATen call is: its loop, the order of operands, a number.

pointwise(node)          # Pointwise("div", operands=(x, y), number=0.0) of aten.div.Tensor, or None
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

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
_Numbered = Callable[..., tuple[tuple[object, ...], float] | None]
# Calls with numbers among their arguments: the operands and the one number of the loop; None for other numbers.
_NUMBERED: dict[object, _Numbered] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), lambda x, y, alpha=1: ((x, y), alpha)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), lambda x, y, alpha=1: ((x, y), -alpha)),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), lambda x, y, alpha=1: ((y, x), -alpha)),
    **dict.fromkeys(
        (aten.addcmul.default, aten.addcdiv.default), lambda x, a, b, value=1: ((x, a, b), value)
    ),
    aten.threshold_backward.default: lambda gradient, x, threshold: ((gradient, x), threshold),
    aten.elu.default: lambda x, a=1, scale=1, of_input=1: ((x,), a) if scale == of_input == 1 else None,
    aten.elu_backward.default: lambda gradient, a, scale, of_input, of_result, x: (
        ((gradient, x), a) if scale == of_input == 1 and not of_result else None
    ),
    aten.pow.Tensor_Scalar: lambda x, exponent: ((x,), 0) if exponent == 2 else None,
    # Of two zeros it gives the tensor's.
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_max.default), lambda x, bound: ((bound, x), 0)),
    aten.masked_fill.Scalar: lambda x, mask, number: ((mask, number, x), 0),
    aten.leaky_relu.default: lambda x, slope=0.01: ((x,), slope),
    aten.leaky_relu_backward.default: lambda gradient, x, slope, of_result: (
        None if of_result else ((gradient, x), slope)
    ),
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
    operands: tuple[object, ...] = args
    if target in _NUMBERED:
        numbered = _NUMBERED[target](*args, **kwargs)
        if numbered is None:
            return None
        (operands, number), kwargs = numbered, {}
    fitting = (name for name in _LOOPS.get(target, ()) if not kwargs and _fits(_DTYPES[name], node, operands))
    return next((Pointwise(name, operands, float(number) + 0.0) for name in fitting), None)  # not -0.0


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
