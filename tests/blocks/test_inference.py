"""Inference in both directions, and every mismatch an error at build time that names both blocks and types."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch.blocks as fb
from fxbatch.errors import FxbatchError

S, T, PY = fb.Scalar, fb.TensorType, fb.PyObjectType()


def test_forwards_and_backwards_through_pipes() -> None:
    identity, void = fb.Identity(), fb.Void()
    block = identity >> S() >> fb.Identity() >> void
    assert identity.input_type == identity.output_type == PY == block.input_type
    assert void.input_type == T(()) and block.output_type == fb.VoidType()
    length = fb.Length()
    assert length.input_type is None and length.output_type == T(())
    _ = fb.Map(S()) >> length
    assert length.input_type == fb.SequenceType(T(()))


def test_zeros_take_the_type_that_is_expected_of_them() -> None:
    zeros = fb.Zeros()
    _ = fb.OneOf(len, (S(), zeros))
    assert zeros.output_type == T(())
    other = fb.Zeros()
    _ = other >> fb.Identity().set_input_type([4, "int64"])
    assert other.output_type == T((4,), "int64")


def test_through_map_fold_reduce_rnn_zip_broadcast() -> None:
    inner = fb.Identity()
    assert (fb.Map(fb.Vector(2)) >> fb.Map(inner)).output_type == fb.SequenceType(T((2,)))
    assert inner.input_type == T((2,))
    start = fb.Zeros()
    fold = fb.Fold(fb.Function(torch.add).set_input_type((2, 2)), start)
    assert start.output_type == T((2,)) == fold.output_type and fold.input_type is None
    rnn = fb.RNN(nn.LSTMCell(2, 3))
    assert rnn.input_type is None  # a sequence, or a tuple
    assert rnn.output_type == fb.TupleType(fb.SequenceType(T((3,))), (3, 3))
    assert fb.Broadcast().set_input_type([]).output_type == fb.BroadcastSequenceType(T(()))
    assert (S() >> fb.Broadcast() >> fb.Map(fb.Identity())).output_type == (fb.BroadcastSequenceType(T(())))
    zipped = fb.Zip().set_input_type((fb.SequenceType([]), fb.BroadcastSequenceType(2), PY))
    assert zipped.output_type == fb.SequenceType(fb.TupleType([], 2, PY))


def test_python_objects_stay_python_objects() -> None:
    assert fb.Map(fb.InputTransform(str.lower)).output_type == PY
    assert fb.Record((fb.Identity(), fb.Identity())).set_input_type(PY).output_type == PY
    assert (fb.InputTransform(list) >> fb.NGrams(2)).output_type == PY


def test_declared_types() -> None:
    function = fb.Function(lambda x: x, infer_output_type=False).set_input_type(2).set_output_type(2)
    assert (fb.Vector(2) >> function).output_type == T((2,))
    fb.Length().set_input_type(fb.SequenceType([]))
    with pytest.raises(fb.BlockTypeError, match=r"bad input type VoidType\(\) for Length\(\): expected"):
        fb.Length().set_input_type(fb.VoidType())
    with pytest.raises(fb.BlockTypeError, match="Length"):
        _ = fb.Map(S()) >> fb.Length().set_input_type(PY)
    with pytest.raises(fb.BlockTypeError):
        S().set_output_type("int64")


MISMATCHES: list[tuple[Any, list[str]]] = [
    (lambda: fb.Vector(3) >> S(), ["Scalar() takes PyObjectType()", "Vector(3) gives TensorType((3,), 'float32')"]),
    (lambda: fb.Vector(3) >> fb.FC(2) >> fb.Embedding(3, 4), ["Embedding(3, 4)", "integer scalar", "FC(2)", "(2,)"]),
    (lambda: S("int64") >> fb.FC(2), ["FC(2)", "floating point vector", "TensorType((), 'int64')", "Scalar"]),
    (lambda: fb.Map(fb.Vector(3)) >> fb.RNN(nn.GRUCell(4, 2)),
     ["RNN(", "elements of TensorType((4,), 'float32')", "Map(Vector(3))", "SequenceType(TensorType((3,)"]),
    (lambda: (S(), fb.Map(S())) >> fb.Function(torch.add), ["Function(add)", "(Scalar(), Map(Scalar()))", "Sequence"]),
    (lambda: (fb.Vector(2), fb.Vector(3)) >> fb.Function(torch.add),
     ["Function(add)", "can't be applied to", "(Vector(2), Vector(3))", "size"]),
    (lambda: fb.Vector(3) >> fb.Function(lambda x: "text"), ["gives str", "no tensor", "Vector(3)"]),
    (lambda: S() >> fb.Concat(), ["Concat()", "TensorType((), 'float32')", "Scalar()", "TupleType"]),
    (lambda: (S(), S()) >> fb.Concat(1), ["Concat(concat_dim=1)", "no dimension 1"]),
    (lambda: (S(), fb.Tensor([2, 2])) >> fb.Concat(), ["Concat()", "(2, 2)", "TensorType(()"]),
    (lambda: (S(), fb.Map(S())) >> fb.Concat(flatten=True), ["Concat(", "SequenceType"]),
    (lambda: (S(), fb.Void()) >> fb.Concat(flatten=True), ["Concat(", "VoidType()"]),
    (lambda: (fb.Vector(1), (fb.Vector(1),)) >> fb.Concat(), ["flatten=True"]),
    (lambda: (fb.Tensor([1, 2]), fb.Tensor([1, 3])) >> fb.Concat(), ["TensorType((1, 2)", "TensorType((1, 3)"]),
    (lambda: (S(), S()) >> fb.GetItem(2), ["GetItem(2)", "no item 2", "(Scalar(), Scalar())"]),
    (lambda: S() >> fb.Map(fb.Identity()), ["Map(Identity())", "Scalar()", "SequenceType"]),
    (lambda: (S(), fb.Vector(2)) >> fb.Map(fb.Identity()), ["one type", "TupleType"]),
    (lambda: fb.OneOf(len, (S(), fb.Vector(2))), ["Vector(2)", "Scalar()", "(2,)", "()"]),
    (lambda: fb.Optional(S(), fb.FromTensor(torch.ones(2))), ["FromTensor", "Scalar()", "(2,)"]),
    (lambda: fb.Map(S()) >> fb.Fold(fb.Function(torch.add), fb.Zeros("int64")) >> fb.FC(2), ["int64", "float"]),
    (lambda: fb.Map(fb.Vector(2)) >> fb.Reduce(fb.Function(torch.dot)), ["Reduce", "(2,)", "()"]),
    (lambda: fb.Map(fb.InputTransform(len)) >> fb.Sum(), ["Sum()", "PyObjectType()", "Map(InputTransform(len))"]),
    (lambda: fb.Map(S("int64")) >> fb.Mean(), ["Mean()", "floating", "Map("]),
    (lambda: fb.Map(S() >> fb.Broadcast()) >> fb.Sum(), ["Sum()", "BroadcastSequenceType"]),
    (lambda: (S(), S()) >> fb.Zip(), ["Zip()", "sequence", "(Scalar(), Scalar())"]),
    (lambda: (S(), S()) >> fb.Nth(), ["Nth()", "(Scalar(), Scalar())"]),
    (lambda: (S(), S()) >> fb.Metric("m"), ["Metric('m')", "(TensorType, PyObjectType)"]),
    (lambda: fb.Map(S()) >> fb.Metric("m"), ["Metric('m')", "SequenceType", "Map(Scalar())"]),
    (lambda: (S(), S()) >> fb.Record({"a": fb.Identity()}), ["{'a': Identity()}", "no order", "(Scalar(), Scalar())"]),
    (lambda: (S(), S()) >> fb.Record({"a": S()}), ["takes PyObjectType()", "(Scalar(), Scalar()) gives"]),
    (lambda: (S(), S()) >> fb.Record((fb.Identity(),)), ["1 items", "got 2"]),
    (lambda: S() >> fb.InputTransform(len), ["InputTransform(len) takes PyObjectType()", "Scalar() gives"]),
    (lambda: (S(), S()) >> fb.OneOf(len, (fb.Identity(),)), ["InputTransform(len)", "PyObjectType()", "TupleType"]),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(MISMATCHES)))
def test_a_mismatch_names_both_blocks_both_types_and_the_place(i: int) -> None:
    make, parts = MISMATCHES[i]
    with pytest.raises(fb.BlockTypeError) as caught:
        make()
    text = str(caught.value)
    for part in parts:
        assert part in text, text
    assert "test_inference.py:" in text, text
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, FxbatchError)


def test_where_in_a_deep_expression() -> None:
    with pytest.raises(fb.BlockTypeError) as caught:
        fb.Record({"left": fb.Map(fb.Vector(3) >> fb.FC(4) >> fb.Identity()) >> fb.RNN(nn.GRUCell(5, 2))})
    text = str(caught.value)
    marked = [(a, b) for a, b in zip(text.splitlines(), text.splitlines()[1:], strict=False) if "^^^" in b]
    assert marked, text
    line, carets = marked[0]
    spans = [line[m.start() : m.end()] for m in re.finditer(r"\^+", carets)]
    assert spans == ["Map(Vector(3) >> FC(4) >> Identity())", "RNN(ScopedLayer(GRUCell(5, 2)))"]
    assert "at Pipe[1]" in text
    layer = fb.FC(2)
    shared = fb.Record((fb.Vector(3) >> layer, fb.Vector(3)))
    assert shared.output_type is not None
    with pytest.raises(fb.BlockTypeError, match=r"FC\(2\)"):
        fb.Vector(4) >> layer


def composition_of_square() -> fb.Composition:
    c = fb.Composition()
    with c.scope():
        x = fb.Vector(3).reads(c.input)
        square = fb.Function(torch.mul).reads(x, x)
        ten = fb.FromTensor(10 * torch.ones(3))
        c.output.reads(fb.Function(torch.add).reads(square, fb.Function(torch.mul).reads(ten, x)))
    return c


def test_composition() -> None:
    c = composition_of_square()
    assert c.input_type == PY and c.output_type == T((3,))
    assert c.eval([1, 2, 3]).tolist() == [11, 24, 39]
    assert "reads" in repr(c)
    assert fb.compile(c)([[1, 2, 3], [0, 0, 1]]).tolist() == [[11, 24, 39], [0, 0, 11]]


def test_composition_of_tuples_items_nested_and_unpacked() -> None:
    c = fb.Composition()
    with c.scope():
        pair = fb.Record((S(), (S(), S()))).reads(c.input)
        a, rest = pair
        c.output.reads((rest[1], a), rest[0])
    assert c.output_type == fb.TupleType(([], []), [])
    assert c.eval((1, (2, 3)), tolist=True) == ((3.0, 1.0), 2.0)
    with pytest.raises(fb.BlockTypeError, match="unpacked"):
        iter(S())


def test_composition_infers_backwards_from_its_readers() -> None:
    c = fb.Composition()
    with c.scope():
        c.output.reads(fb.FC(2).set_input_type(3).reads(c.input))
    assert c.input_type == T((3,))


def test_composition_without_input_or_with_metrics_only() -> None:
    c = fb.Composition()
    with c.scope():
        c.output.reads(fb.FromTensor(torch.ones(1)))
    assert c.input_type == fb.VoidType() and c.eval(None).tolist() == [1]
    m = fb.Composition()
    with m.scope():
        fb.Metric("x").reads(S().reads(m.input))
    assert m.output_type == fb.VoidType() and m.eval(4)[1]["x"].tolist() == [4]


def test_composition_errors() -> None:
    c = fb.Composition()
    with c.scope():
        S().reads(c.input)
    with pytest.raises(fb.BlockTypeError, match="unused output"):
        c.eval(1)
    c = fb.Composition()
    with pytest.raises(fb.BlockTypeError, match="cycle") as cycle, c.scope():
        f, g = fb.Function(torch.add), fb.Function(torch.neg)
        f.reads(c.input, g)
        g.reads(f)
        c.output.reads(f)
    assert isinstance(cycle.value, ValueError)
    c = fb.Composition()
    with c.scope():
        c.output.reads(fb.Function(torch.neg))
    with pytest.raises(fb.BlockTypeError, match="reads nothing"):
        fb.compile(c)
    with pytest.raises(fb.BlockTypeError, match="no output"):
        fb.Composition().eval(1)
    c = fb.Composition()
    with pytest.raises(fb.BlockValueError, match="already connected"), c.scope():
        x = S().reads(c.input)
        x.reads(c.input)
    c = fb.Composition()
    with pytest.raises(fb.BlockValueError, match="output can't be read"), c.scope():
        S().reads(c.output)
    with pytest.raises(fb.BlockValueError, match="input can't read"), c.scope():
        c.input.reads(S())
    with pytest.raises(fb.BlockValueError, match="another composition"), c.scope():
        S().reads(fb.Composition().input)
    c = fb.Composition()
    with pytest.raises(fb.BlockTypeError, match=r"(?s)takes PyObjectType\(\).*Vector\(2\) gives"), c.scope():
        S().reads(fb.Vector(2).reads(c.input))
    with pytest.raises(AssertionError, match="scope"):
        S().reads(S())


def test_forward_declarations() -> None:
    fwd = fb.ForwardDeclaration(PY, [], name="nest")
    with pytest.raises(fb.BlockTypeError, match="never resolved"):
        fb.compile(fwd() >> fb.Identity())
    with pytest.raises(fb.BlockTypeError):
        fwd.resolve_to(fb.Vector(2))
    fwd = fb.ForwardDeclaration(name="nest")
    nest = fb.OneOf(lambda x: isinstance(x, list), (S(), fb.Map(fwd()) >> fb.Sum()))
    fwd.resolve_to(nest)
    assert fwd().input_type == PY and fwd().output_type == T(())
    assert fb.compile(nest)([[1, [2, 3], []], 4, [[]]]).tolist() == [6, 4, 0]
    with pytest.raises(fb.BlockTypeError, match="already resolved"):
        fwd.resolve_to(S())


def test_a_declared_block_outside_of_the_root_is_trained_too() -> None:
    fwd = fb.ForwardDeclaration(PY, 2)
    fwd.resolve_to(fb.Vector(3) >> fb.FC(2))
    model = fb.compile(fwd() >> fb.FC(1))
    assert sum(p.numel() for p in model.parameters()) == 8 + 3
    model(torch.ones(2, 3).tolist()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.double()([[1, 2, 3]]).dtype == torch.float64


def test_the_root_of_a_compiled_block() -> None:
    for wrong in (fb.Map(S()), fb.InputTransform(len), (S(), fb.Map(S())), S() >> fb.Broadcast(), fb.Void()):
        with pytest.raises(fb.BlockTypeError, match="compiled block"):
            fb.compile(wrong)
    with pytest.raises(fb.BlockTypeError, match="unknown"):
        fb.compile(fb.Function(torch.add, infer_output_type=False).set_input_type(([], [])))
    with pytest.raises(FxbatchError, match="unknown option"):
        fb.compile(S(), schedul="depth")
