"""Sizes as expressions: what a symbolic size is, as a function of columns of integers.

In: sympy expressions over the symbols of a traced body. Out: functions that numpy evaluates for all instances at once.

    columns_function([s0 // 2 + 1], [s0])(np.array([4, 7]))      # [array([3, 4])]
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Size: TypeAlias = int | sympy.Basic  # a number, or an expression where it differs between instances
Shape: TypeAlias = tuple[Size, ...]
Column: TypeAlias = np.ndarray | float  # a number of each instance, or one that all have
ColumnsFunction = Callable[..., list[Column]]


class UnknownExpressionError(Exception):
    """An expression of sizes that has no form over columns."""


def expression(size: object) -> sympy.Expr:
    """The sympy expression of a size: a SymInt, a SymFloat or a number."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        size_expression = without_exact_quotients(sympy.sympify(size.node.expr))
        numbers = size.node.shape_env.numbers
        return size_expression.xreplace(numbers) if numbers else size_expression
    return sympy.Integer(size) if isinstance(size, int) else sympy.Float(size)


def know_numbers(environment: ShapeEnv) -> None:
    """Expressions that guards say are a number (s0 // 2 == 1) are that number wherever they are met: torch itself reads
    one or the other, and a dimension would be the instance's own in one value and fixed in the next."""
    equal = [g.expr.args for g in environment.guards if isinstance(g.expr, sympy.Eq)]
    pairs = [(a, b) if depends(a) else (b, a) for a, b in equal]
    numbers = {without_exact_quotients(a): b for a, b in pairs if depends(a) and not depends(b)}
    environment.numbers = numbers  # type: ignore[attr-defined]  # those of `shape_environment` have them


def without_exact_quotients(e: sympy.Basic) -> sympy.Basic:
    """(s0 * s1) // s0 => s1: what torch leaves of views of three dimensions as a matrix, and back."""
    if not any(type(x).__name__ == "FloorDiv" for x in sympy.preorder_traversal(e)):
        return e
    return e.replace(lambda x: type(x).__name__ == "FloorDiv", _quotient)


def _quotient(e: sympy.Basic) -> sympy.Basic:
    # What is rounded is a size like any other: int(n / 2) ** 2 // int(n / 2).
    names = {x: sympy.Dummy() for x in e.args[0].atoms(sympy.Function) | e.args[1].atoms(sympy.Function)}
    quotient = sympy.cancel(e.args[0].xreplace(names) / e.args[1].xreplace(names))
    exact = quotient.is_polynomial() and all(c.is_Integer for c in quotient.as_coefficients_dict().values())
    return quotient.xreplace({dummy: x for x, dummy in names.items()}) if exact else e


def depends(e: object) -> bool:
    """Whether a size differs between instances."""
    return bool(getattr(e, "free_symbols", None))


# Functions of two columns or more, the first two first, and of one, by the kind of an expression.
_OF_SEVERAL: dict[str, Callable[..., Column]] = {
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "PythonMod": operator.mod, "Mod": operator.mod,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv,
    "PowByNatural": operator.pow, "FloatPow": operator.pow, "Pow": operator.pow,
    "Equality": operator.eq, "Unequality": operator.ne, "StrictLessThan": operator.lt, "LessThan": operator.le,
    "StrictGreaterThan": operator.gt, "GreaterThan": operator.ge,
    "Add": operator.add, "Mul": operator.mul, "And": operator.and_, "Or": operator.or_,
    "Max": np.maximum, "Min": np.minimum,
}  # fmt: skip
_OF_ONE: dict[str, Callable[..., Column]] = {
    "Abs": np.abs, "floor": np.floor, "ceiling": np.ceil, "Not": np.logical_not,
    "OpaqueUnaryFn_sqrt": np.sqrt, "OpaqueUnaryFn_exp": np.exp, "OpaqueUnaryFn_log": np.log,
    "OpaqueUnaryFn_log2": np.log2, "ToFloat": np.float64,
    "CeilToInt": lambda x: np.ceil(x).astype(np.int64), "FloorToInt": lambda x: np.floor(x).astype(np.int64),
    "TruncToInt": lambda x: np.trunc(x).astype(np.int64), "RoundToInt": lambda x: np.rint(x).astype(np.int64),
}  # fmt: skip


def column_of(e: Size, places: Mapping[Size, int]) -> Callable[[Sequence[Column]], Column]:
    """An expression as a function of columns, among which its symbols have these places."""
    if e in places:
        return operator.itemgetter(places[e])
    if (number := _number(e)) is not None:
        return lambda columns: number
    kind, parts = type(e).__name__, [column_of(x, places) for x in e.args]
    if kind == "Pow" and e.args[1].is_Integer and e.args[1].is_negative:  # of integers numpy has none
        exponent = -int(e.args[1])
        return lambda columns: 1.0 / parts[0](columns) ** exponent
    if kind in _OF_SEVERAL and len(parts) > 1:
        of_two = _OF_SEVERAL[kind]
        return lambda columns: functools.reduce(of_two, [part(columns) for part in parts])
    if kind in _OF_ONE and len(parts) == 1:
        of_one = _OF_ONE[kind]
        return lambda columns: of_one(parts[0](columns))
    raise UnknownExpressionError(f"a size {e} ({kind})")


def _number(e: Size) -> float | None:
    """The number that an expression without symbols is."""
    if isinstance(e, (sympy.Integer, int)):
        return int(e)
    if e is sympy.true or e is sympy.false:
        return bool(e)
    return float(e) if isinstance(e, (sympy.Rational, sympy.Float)) or e.is_number else None


def columns_function(expressions: Sequence[Size], symbols: Sequence[sympy.Symbol]) -> ColumnsFunction:
    """`function(*columns)`: the value of each expression for all instances, one list."""
    places = {s: i for i, s in enumerate(symbols)}
    functions = [column_of(e, places) for e in expressions]
    return lambda *columns: [function(columns) for function in functions]
