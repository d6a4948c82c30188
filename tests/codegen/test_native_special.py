"""Every native instruction on special numbers against ATen: infinities, NaN, huge ones, subnormal ones, zeros of both
signs, ties, rows of infinities only."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxbatch.codegen.native import extension
from fxbatch.codegen.native_lower import NativeProgram, make_program
from fxbatch.codegen.native_table import LOOPS, ROWS, Loop
from fxbatch.codegen.operation_graphs import add_call
from fxbatch.judge import differences
from tests.codegen.test_native import graph_of, run_native

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built")
NUMBERS = (
    0.0, -0.0, 1.0, -1.0, 0.3, -2.5, math.inf, -math.inf, math.nan, 1e30, -1e30, 3.4e38, -3.4e38, 1e-45, -1e-45,
    1e-38, -1e-38, 88.8, -104.5, 16777217.0,
)  # fmt: skip
INTEGERS = (0, 1, -1, 2**24 + 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**62, -(2**63))
VALUES = {"f": NUMBERS, "i": INTEGERS, "b": (False, True)}
TYPES = {"f": torch.float32, "i": torch.int64, "b": torch.bool}
# Calls with a number besides their operands: its name, and which numbers.
SCALES: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("add", "sub", "rsub"), ("alpha", (1, 0, -3, 2**24 + 1))),
    **dict.fromkeys(("addcmul", "addcdiv"), ("value", (1, 0, -0.5))),
}
# Calls with numbers among their operands: their arguments, of the operands.
ARGUMENTS: dict[str, tuple[Callable[..., tuple[Any, ...]], ...]] = {
    "threshold_backward": tuple(lambda g, x, n=n: (g, x, n) for n in (0, 0.5, math.inf, -math.inf)),
    "elu": (lambda x: (x,), lambda x: (x, 0.5)),
    "elu_backward": tuple(lambda g, x, n=n: (g, n, 1.0, 1.0, False, x) for n in (1.0, 0.5)),
    "leaky_relu": (lambda x: (x,), lambda x: (x, 0.3)),
    "pow": (lambda x: (x, 2), lambda x: (x, 2.0)),
    **dict.fromkeys(
        ("clamp_min.default", "clamp_max.default"),
        tuple(lambda x, y, n=n: (x, n) for n in (0, 0.5, -1e30, math.inf)),
    ),
    "masked_fill": tuple(lambda mask, x, *_, n=n: (x, mask, n) for n in (0.0, -1e9, -math.inf, math.nan)),
    "leaky_relu_backward": (lambda g, x: (g, x, 0.01, False),),
}


def assert_as_eager(given: torch.Tensor, eager: torch.Tensor, *, signs: bool = True) -> None:
    """Each number by itself, so that a huge one excuses nothing; zeros with their signs, but where they depend on the
    order of a sum."""
    assert given.dtype == eager.dtype and given.shape == eager.shape
    a, b = given.reshape(-1), eager.reshape(-1)
    if not a.is_floating_point():
        assert torch.equal(a, b)
        return
    # What is equal bit by bit needs no judge.
    odd = (a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())
    wrong = differences(list(a[odd]), list(b[odd]))
    assert not wrong, [(float(a[odd][i]), float(b[odd][i]), judged.message) for i, judged in wrong.items()][
        :5
    ]
    zeros = (a == 0) & (b == 0) & signs
    assert torch.equal(a[zeros].signbit(), b[zeros].signbit()), "a zero of another sign"


CASES = [
    (loop.name, call) for loop in LOOPS for call in loop.aten
]  # each loop with each of the calls that it is

NUMBERED = [(n, c) for n, c in CASES if c.endswith(".Scalar") and c.partition(".")[0] not in ARGUMENTS]


def loop_of(name: str) -> Loop:
    return next(loop for loop in LOOPS if loop.name == name)


def operands_of(types: str) -> list[torch.Tensor]:
    """All combinations of special values."""
    columns = zip(*itertools.product(*(VALUES[t] for t in types)), strict=True)
    return [torch.tensor(c, dtype=TYPES[t]) for c, t in zip(columns, types, strict=True)]


def check(make: Callable[..., Any], inputs: list[torch.Tensor], name: str) -> None:
    forms = [(*x.shape[1:], x.dtype) for x in inputs]
    module = graph_of(make, *forms)
    native = run_native(module, len(inputs[0]), inputs)
    assert native is not None
    # Torch computes what is left over after its vectors by other code, which may treat NaN otherwise (elu_backward):
    # how many that are depends on the processor.
    more = [torch.cat([x, x[:1].expand(64, *x.shape[1:])]) for x in inputs]
    longer = module(len(more[0]), *more)
    for given, eager, in_vectors in zip(native, module(len(inputs[0]), *inputs), longer, strict=True):
        as_vectors = (given == in_vectors[: len(given)]) | (given.isnan() & in_vectors[: len(given)].isnan())
        assert_as_eager(
            given, torch.where(as_vectors & eager.isnan().logical_xor(given.isnan()), given, eager)
        )


@pytest.mark.parametrize(("name", "call"), [x for x in CASES if x not in NUMBERED], ids=lambda x: x)
def test_loops_of_tensors(name: str, call: str) -> None:
    types = loop_of(name).types.split()[1]
    target, short = operator.attrgetter(call)(aten), call.partition(".")[0]
    key, numbers = SCALES.get(short, ("", (None,)))
    inputs = operands_of(types)
    for number in numbers:
        if type(number) is float and "i" in types:
            continue
        kwargs = {key: number} if key else {}
        for arguments in ARGUMENTS.get(call) or ARGUMENTS.get(short, (lambda *xs: xs,)):
            check(lambda g, *xs: [add_call(g, target, arguments(*xs), kwargs)], inputs, name)  # noqa: B023


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.elu.default, lambda x: (x, 1.0, 1.05)),
        (aten.elu.default, lambda x: (x, 1.0, 1.0, 2.0)),
        (aten.elu_backward.default, lambda x: (x, 1.0, 1.0, 1.0, True, x)),
        (aten.leaky_relu_backward.default, lambda x: (x, x, 0.01, True)),
    ],
)
def test_other_numbers_are_torchs(target: Any, arguments: Callable[..., tuple[Any, ...]]) -> None:
    """`selu` is an elu of other scales: a call of torch, in the program of the others."""
    make = lambda g, x: [add_call(g, target, arguments(x))]  # noqa: E731
    program = make_program(graph_of(make, (torch.float32,)), ())
    assert isinstance(program, NativeProgram)
    assert program.calls == (str(target),)
    check(make, operands_of("f"), "a call")


@pytest.mark.parametrize(("name", "call"), NUMBERED, ids=lambda x: x)
def test_loops_of_tensors_and_numbers(name: str, call: str) -> None:
    types, target = loop_of(name).types.split()[1], operator.attrgetter(call)(aten)
    (x,) = operands_of(types[0])
    for number in VALUES[types[1]]:
        check(lambda g, x: [add_call(g, target, (x, number))], [x], name)  # noqa: B023


def test_casts() -> None:
    for given, wanted in itertools.permutations("fib", 2):
        (x,) = operands_of(given)
        make = lambda g, x: [add_call(g, aten._to_copy.default, (x,), {"dtype": TYPES[wanted]})]  # noqa: B023, E731
        if isinstance(make_program(graph_of(make, (x.dtype,)), ()), NativeProgram):
            check(make, [x], "copy")


def special_rows() -> torch.Tensor:
    """Rows of four: all triples of special numbers and 1; rows of one number."""
    few = (0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 3e38, 1e-45, 88.8)
    rows = [(*r, 1.0) for r in itertools.product(few, repeat=3)] + [(x,) * 4 for x in NUMBERS]
    return torch.tensor(rows)


def pair(g: fx.Graph, call: fx.Node) -> list[fx.Node]:
    return [add_call(g, operator.getitem, (call, i)) for i in (0, 1)]


REDUCTIONS: dict[str, Callable[..., list[Any]]] = {
    "softmax": lambda g, x: [add_call(g, aten._softmax.default, (x, 1, False))],
    "log_softmax": lambda g, x: [add_call(g, aten._log_softmax.default, (x, 1, False))],
    "logsumexp": lambda g, x: [add_call(g, aten.logsumexp.default, (x, [1]))],
    "amax": lambda g, x: [add_call(g, aten.amax.default, (x, [1], keep)) for keep in (False, True)],
    "amin": lambda g, x: [add_call(g, aten.amin.default, (x, [1]))],
    "max": lambda g, x: pair(g, add_call(g, aten.max.dim, (x, 1))),
    "min": lambda g, x: pair(g, add_call(g, aten.min.dim, (x, 1))),
    "argmax": lambda g, x: [add_call(g, aten.argmax.default, (x, 1))],
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_rows(name: str) -> None:
    check(REDUCTIONS[name], [special_rows()], name)


@pytest.mark.parametrize("dims", [(4,), (2, 2)])
def test_sums_of_rows(dims: tuple[int, ...]) -> None:
    """What overflows on the way depends on the order, and ours are added in double."""
    x = special_rows()
    x = x[~((x.abs() > 1e38) & x.isfinite()).any(1)].reshape(-1, *dims)
    check(lambda g, x: [add_call(g, aten.sum.dim_IntList, (x, [-1]))], [x], "sum")


def test_products_of_rows() -> None:
    """Zero times infinity is NaN, wherever it stands in a row; nothing is left out for being zero. What
    overflows on the way depends on the order."""
    x = torch.zeros(64, 33)
    for i, number in enumerate((math.inf, -math.inf, math.nan, 1e36, -1e36, 1e-45)):
        x[i, 5 * i] = number
        x[8 + i, :] = number
        x[16 + i, 32 - i] = number
    for weight in (torch.zeros(33, 20), torch.ones(33, 20), torch.randn(33, 20)):
        module = graph_of(
            lambda g, x, w: [add_call(g, aten.mm.default, (x, w))], (33, torch.float32), shared=(weight,)
        )
        native = run_native(module, 64, [x], (weight,))
        assert native is not None
        assert_as_eager(native[0], x @ weight, signs=False)


def test_every_instruction_is_tried() -> None:
    """A new one has to be added here."""
    tried = {name for name, _ in CASES}
    assert {x.name for x in LOOPS} - tried == {
        "copy", "copy_i64", "copy_bool", "i64_to_f32", "bool_to_i64", "bool_to_f32"
    }  # fmt: skip
    assert [x.name for x in ROWS] == [
        "PRODUCT", "LOOKUP", "SUM_ROWS", "SUM_LAST", "LOG_SOFTMAX", "LOG_SOFTMAX_BACKWARD", "PICK", "PUT",
        "TABLE_GRADIENT", "EXTREME", "PLACE_OF_EXTREME", "LOG_SUM_EXP", "CALL",
    ]  # fmt: skip
