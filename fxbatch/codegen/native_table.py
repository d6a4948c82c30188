"""The native operations, each declared once: of this table `setup.py` makes `_native_operations.h`.

    Loop("mul", "a[i] * b[i]", "f ff", ("mul.Tensor", "mul.Scalar"))

Types are of the result, then of the operands: f (float32), i (int64), b (bool), - (no such operand). It imports
nothing, as it is read before the project is installed.
"""

from __future__ import annotations

from typing import NamedTuple

FIRST_ROWS = 64  # codes of loops come before it
ELEMENT_BYTES = {"f": 4, "i": 8, "b": 1, "-": 0}
_C_TYPES = {"f": "float", "i": "int64_t", "b": "uint8_t"}


class Loop(NamedTuple):
    """A pointwise operation: one element of the result, in C, of elements a[i], b[i], c[i] and a number k,
    `number` in double.

    aten: calls that it is where types fit; `native_calls.pointwise` takes a number from their arguments. cost: of an
    element, in additions.
    """

    name: str
    expression: str
    types: str
    aten: tuple[str, ...] = ()
    cost: int = 1


class Rows(NamedTuple):
    """An operation on rows: a case of `run_rows` or `run_product` in `_native_program.c`."""

    name: str
    types: str
    cost: int = 1


_SUMS = ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar")
LOOPS = (
    Loop("copy", "a[i]", "f f"),
    Loop("neg", "-a[i]", "f f", ("neg.default",)),
    Loop("abs", "LOOP(bits_float)(LOOP(float_bits)(a[i]) & 0x7fffffff)", "f f", ("abs.default",)),
    Loop("sigmoid", "1.0f / (1.0f + LOOP(exp1)(-a[i]))", "f f", ("sigmoid.default",), cost=4),
    Loop("tanh", "LOOP(tanh1)(a[i])", "f f", ("tanh.default",), cost=4),
    Loop("relu", "a[i] < 0.0f ? 0.0f : a[i]", "f f", ("relu.default",)),
    Loop("exp", "LOOP(exp1)(a[i])", "f f", ("exp.default",), cost=4),
    Loop("log", "logf(a[i])", "f f", ("log.default",), cost=4),
    Loop("sqrt", "sqrtf(a[i])", "f f", ("sqrt.default",), cost=4),
    Loop("rsqrt", "1.0f / sqrtf(a[i])", "f f", ("rsqrt.default",)),
    Loop("reciprocal", "1.0f / a[i]", "f f", ("reciprocal.default",)),
    Loop("add", "a[i] + k * b[i]", "f ff", _SUMS),
    Loop("mul", "a[i] * b[i]", "f ff", ("mul.Tensor", "mul.Scalar")),
    Loop("div", "a[i] / b[i]", "f ff", ("div.Tensor", "div.Scalar")),
    Loop("sigmoid_backward", "a[i] * (1.0f - b[i]) * b[i]", "f ff", ("sigmoid_backward.default",)),
    Loop("tanh_backward", "a[i] * (1.0f - b[i] * b[i])", "f ff", ("tanh_backward.default",)),
    Loop("threshold_backward", "b[i] <= k ? 0.0f : a[i]", "f ff", ("threshold_backward.default",)),
    Loop("addcmul", "a[i] + k * b[i] * c[i]", "f fff", ("addcmul.default",)),
    Loop("addcdiv", "a[i] + k * b[i] / c[i]", "f fff", ("addcdiv.default",)),
    Loop("where_f32", "a[i] ? b[i] : c[i]", "f bff", ("where.self",)),
    Loop("where_i64", "a[i] ? b[i] : c[i]", "i bii", ("where.self",)),
    Loop("i64_to_f32", "a[i]", "f i"),
    Loop("bool_to_i64", "a[i] != 0", "i b"),
    Loop("bool_to_f32", "a[i] != 0", "f b"),
    Loop("ne_i64", "a[i] != b[i]", "b ii", ("ne.Scalar", "ne.Tensor")),
    Loop("eq_i64", "a[i] == b[i]", "b ii", ("eq.Scalar", "eq.Tensor")),
    Loop("ne_f32", "a[i] != b[i]", "b ff", ("ne.Scalar", "ne.Tensor")),
    Loop("eq_f32", "a[i] == b[i]", "b ff", ("eq.Scalar", "eq.Tensor")),
    Loop("gt_f32", "a[i] > b[i]", "b ff", ("gt.Scalar", "gt.Tensor")),
    Loop("ge_f32", "a[i] >= b[i]", "b ff", ("ge.Scalar", "ge.Tensor")),
    Loop("lt_f32", "a[i] < b[i]", "b ff", ("lt.Scalar", "lt.Tensor")),
    Loop("le_f32", "a[i] <= b[i]", "b ff", ("le.Scalar", "le.Tensor")),
    Loop("lt_i64", "a[i] < b[i]", "b ii", ("lt.Scalar", "lt.Tensor")),
    Loop("add_i64", "a[i] + (int64_t)number * b[i]", "i ii", _SUMS),
    Loop("copy_i64", "a[i]", "i i"),
    Loop("copy_bool", "a[i]", "b b"),
)
ROWS = (
    Rows("PRODUCT", "f fff"),
    Rows("LOOKUP", "f fi"),
    Rows("SUM_ROWS", "f f"),
    Rows("SUM_LAST", "f f"),
    Rows("LOG_SOFTMAX", "f f", cost=8),
    Rows("LOG_SOFTMAX_BACKWARD", "f ff", cost=8),
    Rows("PICK", "f fi"),
    Rows("PUT", "f -if"),
    Rows("TABLE_GRADIENT", "f fi"),
    Rows("EXTREME", "f f"),
    Rows("PLACE_OF_EXTREME", "i f"),
    Rows("LOG_SUM_EXP", "f f", cost=8),
)
assert len(LOOPS) <= FIRST_ROWS


def header() -> str:
    """`_native_operations.h`: codes, types and costs; with LOOP_OF defined, the loops."""
    ends, width = [x.name for x in ROWS], max(len(x.name) for x in LOOPS)
    lines = [
        "/* Made by setup.py of native_table.py. */",
        "#ifndef LOOP_OF",
        f"#define POINTWISE {len(LOOPS)}",
        f"enum {{ {ends[0]} = {FIRST_ROWS}, {', '.join(ends[1:])}, END }};",
        f"#define LOOP_BYTES {', '.join(map(_bytes, LOOPS))}",
        f"#define ROW_BYTES {', '.join(map(_bytes, ROWS))}",
        f"#define LOOP_COSTS {', '.join(str(x.cost) for x in LOOPS)}",
        f"#define ROW_COSTS {', '.join(str(x.cost) for x in ROWS)}",
        f"#define EVERY_LOOP {', '.join(f'LOOP({x.name})' for x in LOOPS)}",
        "#else",
        *(f"LOOP_OF({f'{x.name},':{width + 1}} {_c_types(x.types)}, {x.expression})" for x in LOOPS),
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _bytes(operation: Loop | Rows) -> str:
    return f"{{{', '.join(str(ELEMENT_BYTES[x]) for x in operation.types.replace(' ', ''))}}}"


def _c_types(types: str) -> str:
    """Of the result and three operands: those that there aren't are like the first."""
    result, operands = types.split()
    return ", ".join(_C_TYPES[x] for x in (result + operands).ljust(4, operands[0]))
