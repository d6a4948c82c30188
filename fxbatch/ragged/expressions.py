"""Sizes as expressions: what a symbolic size is, as Python source over columns of integers.

In: sympy expressions over the symbols of a traced body. Out: source that numpy evaluates for all instances at once.

    column_source(s0 // 2 + 1, {s0: "s0"})      # "(1 + (s0 // 2))"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Size: TypeAlias = int | sympy.Basic  # a number, or an expression where it differs between instances
Shape: TypeAlias = tuple[Size, ...]
ColumnsFunction = Callable[..., list[np.ndarray | float]]


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


_BINARY = {
    "FloorDiv": "//", "CleanDiv": "//", "PythonMod": "%", "Mod": "%", "IntTrueDiv": "/", "FloatTrueDiv": "/",
    "PowByNatural": "**", "FloatPow": "**", "Pow": "**", "Equality": "==", "Unequality": "!=",
    "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">", "GreaterThan": ">=",
}  # fmt: skip
_MANY = {"Add": "+", "Mul": "*", "And": "&", "Or": "|"}
_CALLS = {
    "Max": "maximum", "Min": "minimum", "Abs": "abs", "floor": "floor", "ceiling": "ceil",
    "OpaqueUnaryFn_sqrt": "sqrt", "OpaqueUnaryFn_exp": "exp", "OpaqueUnaryFn_log": "log",
    "OpaqueUnaryFn_log2": "log2", "ToFloat": "float64",
}  # fmt: skip
_TO_INTEGERS = {"CeilToInt": "ceil", "FloorToInt": "floor", "TruncToInt": "trunc", "RoundToInt": "rint"}


def column_source(e: Size, names: Mapping[Size, str]) -> str:
    """Python source of an expression; the symbols are the columns `names`."""
    if e in names:
        return names[e]
    if isinstance(e, (sympy.Integer, int)):
        return str(int(e))
    if e is sympy.true or e is sympy.false:
        return str(bool(e))
    if isinstance(e, (sympy.Rational, sympy.Float)) or e.is_number:
        return repr(float(e))
    kind = type(e).__name__
    parts = [column_source(x, names) for x in e.args]
    if kind == "Pow" and e.args[1] == sympy.Rational(1, 2):
        return f"np.sqrt({parts[0]})"
    if kind == "Pow" and e.args[1].is_negative:
        return f"(1.0 / {parts[0]} ** {-int(e.args[1])})" if e.args[1].is_Integer else _unknown(e)
    if kind in _BINARY and len(parts) == 2:
        return f"({parts[0]} {_BINARY[kind]} {parts[1]})"
    if kind in _MANY:
        return "(" + f" {_MANY[kind]} ".join(parts) + ")"
    if kind == "Not":
        return f"np.logical_not({parts[0]})"
    if kind in ("Max", "Min"):
        return functools.reduce(lambda a, b: f"np.{_CALLS[kind]}({a}, {b})", parts)
    if kind in _CALLS and len(parts) == 1:
        return f"np.{_CALLS[kind]}({parts[0]})"
    if kind in _TO_INTEGERS and len(parts) == 1:
        return f"np.{_TO_INTEGERS[kind]}({parts[0]}).astype(np.int64)"
    return _unknown(e)


def _unknown(e: object) -> str:
    raise UnknownExpressionError(f"a size {e} ({type(e).__name__})")


def columns_function(expressions: Sequence[Size], symbols: Sequence[sympy.Symbol]) -> ColumnsFunction:
    """`function(*columns)`: the value of each expression for all instances, one list."""
    names = {s: f"s{i}" for i, s in enumerate(symbols)}
    sources = [column_source(e, names) for e in expressions]
    code = f"lambda {', '.join(names.values())}: [{', '.join(sources)}]"
    function: ColumnsFunction = eval(code, {"np": np})  # the source was made above, of sizes only
    return function
