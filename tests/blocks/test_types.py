"""Types: immutable, comparable, printable, shorthand, canonical form."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import fxbatch.blocks as fb
from fxbatch.blocks.types import ResultType

PY, VOID = fb.PyObjectType(), fb.VoidType()
T = fb.TensorType


@pytest.mark.parametrize(
    ("shorthand", "expected"),
    [
        (3, T((3,), "float32")),
        ([], T(())),
        ([16, 16], T((16, 16), "float32")),
        ([3, "int32"], T((3,), "int32")),
        (["bool"], T((), "bool")),
        ("int64", T((), torch.int64)),
        (torch.float64, T((), "float64")),
        (np.dtype("int16"), T((), torch.int16)),
        (torch.Size([2, 5]), T((2, 5))),
        (([], [3, 3, "int64"]), fb.TupleType(T(()), T((3, 3), "int64"))),
        ((), fb.TupleType()),
        ((3, (PY,)), fb.TupleType(T((3,)), fb.TupleType(PY))),
        (PY, PY),
    ],
)
def test_shorthand(shorthand: Any, expected: ResultType) -> None:
    assert fb.convert_to_type(shorthand) == expected


@pytest.mark.parametrize("bad", [None, True, 2.5, "no such dtype", [2.5], [-1], {"a": 3}, [3, "nope"], -1])
def test_what_is_no_type(bad: Any) -> None:
    with pytest.raises(TypeError):
        fb.convert_to_type(bad)


ALL = [
    VOID, PY, T(()), T((2,)), T((2,), "int64"), fb.TupleType(), fb.TupleType(T(()), PY), fb.SequenceType(T(())),
    fb.SequenceType(fb.SequenceType(T((2,)))), fb.BroadcastSequenceType(T(())),
]  # fmt: skip


def test_compare_hash_order_and_pickle() -> None:
    for i, a in enumerate(ALL):
        for j, b in enumerate(ALL):
            assert (a == b) == (i == j) and (a != b) == (i != j)
            assert (a < b) + (b < a) == (i != j)
        assert eval(repr(a), {**vars(fb)}) == a
        assert hash(pickle.loads(pickle.dumps(a))) == hash(a) and pickle.loads(pickle.dumps(a)) == a
    backwards = list(reversed(ALL))
    assert sorted(backwards) == sorted(ALL)


def test_immutable() -> None:
    for t, field in (
        (T((2,)), "shape"),
        (fb.TupleType(T(())), "items"),
        (fb.SequenceType(PY), "element_type"),
    ):
        with pytest.raises((AttributeError, TypeError)):
            setattr(t, field, ())


def test_print() -> None:
    assert str(T((3,), "int32")) == "[3, 'int32']" and repr(T((3,), "int32")) == "TensorType((3,), 'int32')"
    assert str(fb.convert_to_type(([], 2))) == "(['float32'], [2, 'float32'])"


def test_tuple_type_is_a_sequence() -> None:
    t = fb.TupleType([], 2, PY)
    assert len(t) == 3 and t[1] == T((2,)) and t[1:] == fb.TupleType(2, PY) and list(t)[2] == PY
    assert fb.TupleType((T(()), T(()))) == fb.TupleType(T(()), T(()))


def test_canonical_form() -> None:
    assert fb.canonicalize_type((PY, fb.SequenceType(PY))) == PY
    assert fb.canonicalize_type(fb.SequenceType(fb.TupleType(PY, PY))) == PY
    assert fb.canonicalize_type((PY, [])) == fb.TupleType(PY, T(()))
    assert fb.canonicalize_type(()) == fb.TupleType()


def test_sizes_and_terminals() -> None:
    t = fb.convert_to_type(([2, 3], (4, [])))
    assert t.size == 11 and list(t.terminal_types()) == [T((2, 3)), T((4,)), T(())]
    assert fb.SequenceType(T((2,))).size is None and VOID.size == 0 and T((2, 0)).size == 0
