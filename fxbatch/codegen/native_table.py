"""Declarations for C and Python alike: native operations, and the records and columns of numbers that C reads.

    Loop("mul", "a[i] * b[i]", "f ff", ("mul.Tensor", "mul.Scalar"))
    Operand(base=2, offset=0, stride=450, inner=1)

In: nothing, as it is read before the project is installed. Out: `_native_operations.h`, which `setup.py` writes: a code
an operation, a struct of int64 a record, a number per column. Types of operations are of the result, then of the
operands: f (float32), i (int64), b (bool), - (no such operand).
"""

from enum import IntEnum
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


# -- records of a program: rows of int64

MOST_ROWS = 1 << 20  # programs with more rows run in Python
MOST_BASES = 192


class Memory(IntEnum):
    """Whose memory a base is. BLOCK and APART are found by C."""

    INPUT = 0
    OUTPUT = 1
    OWN = 2
    BLOCK = 3  # of the program's own, only ever used in one block of rows
    APART = 4  # of a product that may be done for many steps at once, or of packed weights; NULL where they are not


class Base(NamedTuple):
    """A piece of memory of `per_row * n + rest` rows."""

    per_row: int
    rest: int
    row_bytes: int
    kind: int  # Memory


class Operand(NamedTuple):
    """Rows of a base, counted in elements."""

    base: int = -1  # -1: a number
    offset: int = 0  # of the first element; a number's bits
    stride: int = 0  # from row to row
    inner: int = 0  # from element to element of a row


class Instruction(NamedTuple):
    """One operation on `per_row * n + rest` rows of `width` elements."""

    code: int
    per_row: int
    rest: int
    width: int
    out: Operand
    a: Operand = Operand()
    b: Operand = Operand()
    c: Operand = Operand()  # of a product: what it is added to, base -1: nothing
    number: int = 0  # the bits of a double
    depth_per_row: int = 0  # of a product; else the rows or columns that an index chooses from
    depth_rest: int = 1
    group: int = -1  # pointwise instructions of one group run fused, -1: not pointwise
    logarithm: int = 0  # of a softmax: whether its logarithm is wanted
    least: int = 0  # of an extreme: whether it is the smallest
    padding: int = 0  # of a table's gradient: the row that gets none
    column: int = 0  # of PUT: elements that one index moves
    replaces: int = 0  # of PUT: whether numbers take the place of others, or are added to them
    views: int = 0  # of CALL: its first view, and how many there are; `number` is which function it calls
    view_count: int = 0
    results: int = 0  # how many of its views, the last ones, it writes to
    apart: int = 0  # found by C: the base of a product that may be done apart, 0: none
    packed: int = 0  # likewise, of weights packed once a run


class Dimension(NamedTuple):
    """`per_row * n + rest` elements that are `stride` apart."""

    per_row: int = 0
    rest: int = 1
    stride: int = 0


MOST_RANK = 6


class View(NamedTuple):
    """A tensor that torch is given, of `rank` of MOST_RANK dimensions."""

    base: int
    offset: int
    type: int  # of DTYPES in native_layouts.py
    rank: int
    dimensions: Dimension  # MOST_RANK of them


class Origin(IntEnum):
    """Where a step finds an input of its program."""

    GROUP = 0
    RESULT = 1
    SAVED = 2


class Source(NamedTuple):
    """An input that is not a shared operand."""

    kind: int = Origin.GROUP
    number: int = 0  # of the group, the output or the saved tensor
    kept: int = -1  # which of the kept groups it is, -1: none
    copied: int = 0  # whether its rows are copied where those of all steps lie together
    size: int = 1  # how many inputs the group has


# -- records of memory, and columns of a plan


class Arena(NamedTuple):
    """Rows of all values of one type."""

    pointer: int
    bytes: int
    row_bytes: int


class Array(NamedTuple):
    """One array besides arenas: a kept or saved group of an operation, or a shared operand."""

    pointer: int
    bytes: int
    in_place: int  # whether a kept group is read where it is in its arena


class Counts(NamedTuple):
    """The row before the arrays of a signature."""

    kept: int
    saved: int
    unused: int = 0


class Place(NamedTuple):
    """An input or result of a program that runs by itself."""

    pointer: int
    bytes: int


class Gather(IntEnum):
    """How a step reads an input: numbers of ir.py."""

    VIEW = 0
    BROADCAST = 1
    INDEX = 2


class Read(IntEnum):
    """How a step reads a gradient: numbers of passes/gradients.py."""

    NOTHING = 0
    READ_VIEW = 1
    READ_INDEX = 2
    READ_SUM = 3


class ForwardColumns(NamedTuple):
    """A plan's steps, gathers and blocks, and where memory is: buffers of int64."""

    signature: object  # a number per step
    rows: object
    offset: object  # of a step's rows among those of its operation
    first_gather: object  # of each step, and the end
    gather_arena: object
    gather_kind: object  # Gather
    gather_start: object
    gather_rows: object
    first_block: object  # of each step, and the end
    block_arena: object
    block_start: object
    indices: object  # of all gathers of kind INDEX, one after another
    arenas: object  # Arena
    pointers: object  # a Counts a signature, then its Arrays
    first_pointer: object  # of each signature, and the end


class BackwardColumns(NamedTuple):
    """The columns that only a backward pass has."""

    first_read: object  # of each step, and the end
    read_kind: object  # Read
    read_start: object
    read_stop: object
    read_bag: object
    read_arena: object
    gradient_indices: object
    bags: object
    gradients: object  # Arena
    first_write: object  # of each step, and the end
    write_arena: object
    write_start: object
    passed: object  # 1 for a step that is passed over


ENUMS = (Memory, Origin, Gather, Read)
RECORDS = (Base, Operand, Instruction, Dimension, View, Source, Arena, Array, Counts, Place)

# -- operations

_SUMS = ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar")
_AT_LEAST = ("maximum.default", "clamp_min.default", "clamp_min.Tensor")
_AT_MOST = ("minimum.default", "clamp_max.default", "clamp_max.Tensor")
LOOPS = (
    Loop("copy", "a[i]", "f f"),
    Loop("neg", "-a[i]", "f f", ("neg.default",)),
    Loop("abs", "LOOP(bits_float)(LOOP(float_bits)(a[i]) & 0x7fffffff)", "f f", ("abs.default",)),
    Loop("sigmoid", "1.0f / (1.0f + LOOP(exp1)(-a[i]))", "f f", ("sigmoid.default",), cost=4),
    Loop("tanh", "LOOP(tanh1)(a[i])", "f f", ("tanh.default",), cost=4),
    Loop("relu", "a[i] < 0.0f ? 0.0f : a[i]", "f f", ("relu.default",)),
    Loop("elu", "a[i] > 0.0f ? a[i] : k * LOOP(expm1_below)(a[i])", "f f", ("elu.default",), cost=4),
    Loop("leaky_relu", "a[i] > 0.0f ? a[i] : a[i] * k", "f f", ("leaky_relu.default",)),
    Loop("exp", "LOOP(exp1)(a[i])", "f f", ("exp.default",), cost=4),
    Loop("log", "logf(a[i])", "f f", ("log.default",), cost=4),
    Loop("sqrt", "sqrtf(a[i])", "f f", ("sqrt.default",), cost=4),
    Loop("rsqrt", "1.0f / sqrtf(a[i])", "f f", ("rsqrt.default",)),
    Loop("reciprocal", "1.0f / a[i]", "f f", ("reciprocal.default",)),
    Loop("add", "a[i] + k * b[i]", "f ff", _SUMS),
    Loop("mul", "a[i] * b[i]", "f ff", ("mul.Tensor", "mul.Scalar")),
    Loop("div", "a[i] / b[i]", "f ff", ("div.Tensor", "div.Scalar")),
    Loop("square", "a[i] * a[i]", "f f", ("pow.Tensor_Scalar",)),
    Loop("maximum", "a[i] > b[i] || a[i] != a[i] ? a[i] : b[i]", "f ff", _AT_LEAST),
    Loop("minimum", "a[i] < b[i] || a[i] != a[i] ? a[i] : b[i]", "f ff", _AT_MOST),
    Loop("sigmoid_backward", "a[i] * (1.0f - b[i]) * b[i]", "f ff", ("sigmoid_backward.default",)),
    Loop("tanh_backward", "a[i] * (1.0f - b[i] * b[i])", "f ff", ("tanh_backward.default",)),
    Loop("threshold_backward", "b[i] <= k ? 0.0f : a[i]", "f ff", ("threshold_backward.default",)),
    Loop(
        "elu_backward",
        "b[i] > 0.0f ? a[i] : a[i] * k * LOOP(exp1)(b[i])",
        "f ff",
        ("elu_backward.default",),
        cost=4,
    ),
    Loop("leaky_relu_backward", "b[i] > 0.0f ? a[i] : a[i] * k", "f ff", ("leaky_relu_backward.default",)),
    Loop("addcmul", "a[i] + k * b[i] * c[i]", "f fff", ("addcmul.default",)),
    Loop("addcdiv", "a[i] + k * b[i] / c[i]", "f fff", ("addcdiv.default",)),
    Loop("where_f32", "a[i] ? b[i] : c[i]", "f bff", ("where.self", "masked_fill.Scalar")),
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
    Rows("CALL", "- ---"),  # a call of torch, on all rows at once
)
assert len(LOOPS) <= FIRST_ROWS


def header() -> str:
    """`_native_operations.h`: codes, types and costs, records and columns; with LOOP_OF defined, the loops."""
    ends, width = [x.name for x in ROWS], max(len(x.name) for x in LOOPS)
    lines = [
        "/* Made by setup.py of native_table.py. */",
        "#ifndef LOOP_OF",
        f"#define POINTWISE {len(LOOPS)}",
        f"#define MOST_ROWS ((int64_t){MOST_ROWS})",
        f"#define MOST_BASES {MOST_BASES}",
        f"#define MOST_RANK {MOST_RANK}",
        f"enum {{ {ends[0]} = {FIRST_ROWS}, {', '.join(ends[1:])}, END }};",
        f"#define LOOP_BYTES {', '.join(map(_bytes, LOOPS))}",
        f"#define ROW_BYTES {', '.join(map(_bytes, ROWS))}",
        f"#define LOOP_COSTS {', '.join(str(x.cost) for x in LOOPS)}",
        f"#define ROW_COSTS {', '.join(str(x.cost) for x in ROWS)}",
        f"#define EVERY_LOOP {', '.join(f'LOOP({x.name})' for x in LOOPS)}",
        *(f"enum {{ {', '.join(x.name for x in kind)} }};" for kind in ENUMS),
        *map(_struct, RECORDS),
        f"enum {{ {_upper(ForwardColumns)}, FORWARD_COLUMNS }};",
        f"enum {{ BEFORE_BACKWARD = FORWARD_COLUMNS - 1, {_upper(BackwardColumns)}, BACKWARD_COLUMNS }};",
        "#else",
        *(f"LOOP_OF({f'{x.name},':{width + 1}} {_c_types(x.types)}, {x.expression})" for x in LOOPS),
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _struct(record: type) -> str:
    fields = (
        f"{'int64_t' if kind is int else kind.__name__} {name}{'[MOST_RANK]' * (kind is Dimension)};"
        for name, kind in record.__annotations__.items()
    )
    return f"typedef struct {{ {' '.join(fields)} }} {record.__name__};"


def _upper(columns: type) -> str:
    return ", ".join(x.upper() for x in columns.__annotations__)


def _bytes(operation: Loop | Rows) -> str:
    return f"{{{', '.join(str(ELEMENT_BYTES[x]) for x in operation.types.replace(' ', ''))}}}"


def _c_types(types: str) -> str:
    """Of the result and three operands: those that there aren't are like the first."""
    result, operands = types.split()
    return ", ".join(_C_TYPES[x] for x in (result + operands).ljust(4, operands[0]))
