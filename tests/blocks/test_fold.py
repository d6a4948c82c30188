"""What TensorFlow Fold takes, gives and refuses, sentence by sentence, where a rewrite could easily differ."""

from __future__ import annotations

import enum
import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxbatch.blocks as fb

S, T, PY, VOID = fb.Scalar, fb.TensorType, fb.PyObjectType(), fb.VoidType()
V = fb.Vector


def add() -> fb.Block:
    return fb.Function(torch.add)


def is_tuple(x: Any) -> bool:
    return isinstance(x, tuple)


# -- scalars in Concat


def test_concat_takes_scalars_as_vectors_of_one() -> None:
    assert ((S(), V(2)) >> fb.Concat()).eval((1, [2, 3]), tolist=True) == [1, 2, 3]
    assert ((S(), S()) >> fb.Concat()).output_type == T((2,))
    assert ((S(),) >> fb.Concat()).eval((5,), tolist=True) == [5]
    nested = ((S(), S()), (V(1), S())) >> fb.Concat(flatten=True)
    assert fb.compile(nested)([((1, 2), ([3], 4))] * 2).tolist() == [[1, 2, 3, 4]] * 2
    assert ((S(), V(2)) >> fb.Concat(-1)).eval((1, [2, 3]), tolist=True) == [1, 2, 3]
    w = nn.Parameter(torch.tensor(2.0))
    model = fb.compile(fb.AllOf(S() >> fb.Function(lambda x: x), fb.FromTensor(w)) >> fb.Concat())
    model([3.0, 4.0]).sum().backward()
    assert w.grad == 2


# -- types are inferred when they are known, and not before


def test_sums_of_a_recursion_without_declared_types() -> None:
    f = fb.ForwardDeclaration()
    pair = fb.Record((f(), f())) >> fb.Sum()
    f.resolve_to(fb.OneOf(is_tuple, {False: S(), True: pair}))
    assert fb.compile(f())([((1, 2), 3), 4]).tolist() == [6, 4]


@pytest.mark.parametrize("reduction", [fb.Sum, fb.Min, fb.Max, fb.Mean])
def test_a_known_output_says_nothing_about_the_kind_of_input(reduction: Any) -> None:
    for before in (fb.Map(S()), (S(), S())):
        block = reduction().set_output_type([])
        assert block.input_type is None
        assert (before >> block).output_type == T(())


def test_typed_combine_blocks_take_tuples_and_sequences() -> None:
    typed = lambda: add().set_input_type(([], []))  # noqa: E731
    for before, x in ((fb.Map(S()), [3, 4]), ((S(), S()), (3, 4))):
        assert (before >> fb.Fold(typed(), fb.Zeros([]))).eval(x) == 7
        assert (before >> fb.Reduce(typed())).eval(x) == 7
        assert (before >> fb.Fold(fb.Sum(), fb.Zeros([]))).eval(x) == 7
    assert fb.Fold((fb.Identity(), S()) >> fb.Sum(), fb.Zeros([])).eval((2, 3)) == 5
    cell = nn.GRUCell(1, 2)
    rows = ((V(1), V(1)) >> fb.RNN(cell)).eval(([1], [2]))
    listed = (fb.Map(V(1)) >> fb.RNN(cell)).eval([[1], [2]])
    assert torch.equal(rows[1], listed[1]) and len(rows[0]) == 2
    own = (V(1), V(1)) >> fb.RNN(fb.Function(lambda x, s: (x, x + s)).set_input_type((1, 1)))
    assert own.eval(([1], [2]), tolist=True) == ([[1], [2]], [3])
    with pytest.raises(fb.BlockTypeError, match="elements of"):
        fb.Map(V(2)) >> fb.RNN(cell)
    with pytest.raises(fb.BlockTypeError, match="one type"):
        (V(1), S()) >> fb.RNN(cell)


# -- types


def test_shorthand_in_tuples_of_one() -> None:
    assert fb.convert_to_type(((3, 4),)) == fb.TupleType(fb.TupleType(T((3,)), T((4,))))
    assert fb.convert_to_type(((),)) == fb.TupleType(fb.TupleType()) != fb.TupleType()
    assert fb.convert_to_type((torch.Size([3, 4]),)) == fb.TupleType(T((3, 4)))
    assert fb.convert_to_type((((3,),),))[0][0][0] == T((3,))
    for shorthand in (3, [], [2, "int64"], "int64", torch.Size([2]), (3, 4), ()):
        one = fb.convert_to_type(shorthand)
        for n in range(4):
            assert fb.convert_to_type((shorthand,) * n) == fb.TupleType((one,) * n) == fb.TupleType([one] * n)
    declared = fb.ForwardDeclaration(PY, ((3, 4),))
    assert declared.output_type == fb.TupleType(fb.TupleType(3, 4))
    assert fb.Identity().set_output_type(((3, 4),)).input_type == fb.TupleType(fb.TupleType(3, 4))


def test_tuple_types_of_iterables() -> None:
    types = [T(()), PY, fb.TupleType()]
    made = [
        fb.TupleType(*types), fb.TupleType(types), fb.TupleType(tuple(types)), fb.TupleType(t for t in types),
        fb.TupleType(iter(types)), fb.TupleType(deque(types)), fb.TupleType(dict.fromkeys(types)),
    ]  # fmt: skip
    assert made == [made[0]] * len(made) and made[0].items == tuple(types)
    assert fb.TupleType([]) == fb.TupleType(()) == fb.TupleType(iter(())) == fb.TupleType()
    assert fb.TupleType(T(())).items == (T(()),) and fb.TupleType(fb.TupleType()).items == (fb.TupleType(),)


def test_tuple_type_is_a_sequence_and_a_broadcast_a_sequence_type() -> None:
    t = fb.TupleType([], 2, [])
    assert isinstance(t, Sequence) and T((2,)) in t and t.index(T((2,))) == 1 and t.count(T(())) == 2
    assert list(reversed(t))[1] == T((2,)) and tuple(t) != t and hash(t) == hash(fb.TupleType([], 2, []))
    b = fb.BroadcastSequenceType([])
    assert isinstance(b, fb.SequenceType) and b != fb.SequenceType([]) and repr(b).startswith("Broadcast")


def test_flatten_and_unflatten() -> None:
    t = fb.convert_to_type(([], 2, ([], PY), VOID, ((),)))
    value = (1, [2, 3], (4, "x"), None, ((),))
    seen: list[Any] = []
    t.for_each_terminal(lambda kind, leaf: seen.append((kind, leaf)), value)
    assert seen == [(T(()), 1), (T((2,)), [2, 3]), (T(()), 4), (PY, "x")]
    assert t.flatten(value) == [1, [2, 3], 4, "x"] and t.unflatten(iter([1, [2, 3], 4, "x"]), None) == value
    assert [k for k, _ in seen] == list(t.terminal_types())
    rows = fb.SequenceType((fb.SequenceType(([], [])), []))
    value = [([(1, 2), (3, 4)], 5), ([], 6)]
    assert rows.flatten(value) == [1, 2, 3, 4, 5, 6] and rows.unflatten(rows.flatten(value), value) == value
    endless = fb.BroadcastSequenceType(fb.SequenceType([]))
    assert endless.flatten(itertools.repeat([1, 2])) == [1, 2]
    back = endless.unflatten(iter([1, 2]), itertools.repeat([0, 0]))
    assert isinstance(back, itertools.repeat) and next(back) == [1, 2]
    assert VOID.flatten(None) == [] and VOID.unflatten(iter(())) is None and T(()).flatten(7) == [7]
    with pytest.raises(TypeError, match="shaped_like"):
        rows.unflatten([1])
    with pytest.raises(ValueError):
        t.flatten((1, 2))


def test_a_tensor_type_as_an_array() -> None:
    t = T((1, 2), "int32")
    assert np.zeros_like(t).tolist() == [[0, 0]] and np.zeros_like(t).dtype == np.int32
    assert np.ones_like(t).tolist() == [[1, 1]] and np.array(T((), "bool")).dtype == np.bool_
    with pytest.raises(TypeError, match="bfloat16"):
        np.zeros_like(T((), "bfloat16"))


def test_kinds_of_types() -> None:
    block = fb.Identity().set_input_type_classes(fb.TupleType, PY.__class__)
    with pytest.raises(fb.BlockTypeError, match="bad input type TensorType"):
        block.set_input_type([])
    assert block.set_input_type(([], [])).output_type == fb.TupleType([], [])
    with pytest.raises(fb.BlockTypeError, match=r"bad input type SequenceType for .*Function"):
        add().set_input_type_classes(fb.SequenceType)
    assert add().set_input_type_classes(fb.SequenceType, fb.TupleType).set_input_type(([], [])) is not None
    with pytest.raises(fb.BlockTypeError, match="expected TupleType"):
        add().set_input_type_classes(fb.TupleType).set_input_type([])
    with pytest.raises(fb.BlockTypeError, match="bad output type"):
        S().set_output_type_classes(fb.TupleType)
    assert S().set_output_type_classes(fb.TensorType, fb.TupleType).output_type == T(())
    with pytest.raises(fb.BlockTypeError, match="classes"):
        S().set_input_type_classes(PY)
    narrowed = fb.Map(fb.Identity()).set_input_type_classes(fb.BroadcastSequenceType)
    with pytest.raises(fb.BlockTypeError, match="expected BroadcastSequenceType"):
        narrowed.set_input_type(fb.SequenceType([]))


# -- the order of Reduce


def pairwise(f: Any, x: list[Any]) -> Any:
    while len(x) > 1:
        x = [f(*x[i : i + 2]) if i + 1 < len(x) else x[i] for i in range(0, len(x), 2)]
    return x[0]


def test_reduce_combines_neighbours_and_carries_the_odd_one() -> None:
    block = fb.Map(S("float64")) >> fb.Reduce(fb.Function(lambda a, b: a - 2 * b))
    assert (fb.Map(S()) >> fb.Reduce(fb.Function(torch.sub))).eval([1, 2, 3]) == -4
    data = [[float(3 * i % 7) for i in range(n)] for n in range(1, 20)]
    want = [pairwise(lambda a, b: a - 2 * b, x) for x in data]
    assert fb.compile(block)(data).tolist() == want == [block.eval(x).item() for x in data]


# -- slices


def test_slices_of_tuples_sequences_and_objects() -> None:
    three = (S(), S("int64"), S())
    assert (three >> fb.GetItem(slice(1, None))).output_type == fb.TupleType("int64", [])
    assert (three >> fb.GetItem(slice(None, None, -1))).eval((1, 2, 3), tolist=True) == (3, 2, 1)
    assert (fb.Map(S()) >> fb.GetItem(slice(1, None))).eval([1, 2, 3], tolist=True) == [2, 3]
    assert fb.GetItem(slice(1, 3)).eval("abcd") == "bc"
    assert (three >> fb.GetItem(slice(5, None)) >> fb.Length()).eval((1, 2, 3)) == 0
    assert isinstance(fb.Slice(start=1), fb.GetItem)
    assert (three >> fb.GetItem(np.int64(1))).output_type == T((), "int64")
    for key in (slice(1, None), 0):
        with pytest.raises(fb.BlockTypeError, match="infinite"):
            S() >> fb.Broadcast() >> fb.GetItem(key)
    with pytest.raises(fb.BlockTypeError, match="infinite"):
        S() >> fb.Broadcast() >> fb.Length()


def test_slices_of_outputs_in_a_composition() -> None:
    c = fb.Composition()
    with c.scope():
        rest = c.input[1:]
        total = fb.Function(torch.mul).reads(rest)
        same = fb.Function(torch.mul).reads(c.input[1:])
        c.output.reads(c.input[0], total, same, c.input[1:][0], c.input[::-1])
    block = (S(), S(), S()) >> c
    assert block.eval((2, 3, 5), tolist=True) == (2, 15, 15, 3, (5, 3, 2))
    assert [x[0].item() for x in fb.compile(block)([(2, 3, 5)])[:3]] == [2, 15, 15]
    parts = fb.Composition()
    with parts.scope():
        five = fb.AllOf(*[fb.FromTensor(np.array(float(i))) for i in range(5)]).reads()
        parts.output.reads(add().reads(five[1:-1:2]))
    assert parts.eval(None) == 4 and parts.input_type == VOID
    unpacked = fb.Composition()
    with unpacked.scope():
        pair = fb.Record((S(), S(), S())).reads(unpacked.input)
        a, b = pair[1:]
        unpacked.output.reads(fb.Function(torch.sub).reads(a, b), fb.Void().reads(pair[0]))
    assert unpacked.eval((9, 5, 3), tolist=True) == (2, None)


def test_slices_as_keys_of_records() -> None:
    block = fb.Record([(0, S()), (slice(1, 3), V(2))])
    assert block.eval([1, 2, 3], tolist=True) == (1, [2, 3])
    assert fb.compile(block)([[1, 2, 3]] * 2)[1].tolist() == [[2, 3]] * 2
    of_tuple = (S(), S(), S()) >> fb.Record([(slice(1, 3), fb.Concat()), (0, fb.Identity())])
    assert of_tuple.eval((1, 2, 3), tolist=True) == ([2, 3], 1)
    assert sorted(n for n, _ in block.named_modules() if n) == ["0", "1:3"]


# -- records in compositions, and keys


def test_outputs_of_a_record_by_key() -> None:
    for named in ({"b": S(), "a": V(1)}, OrderedDict(b=S(), a=V(1)), [("b", S()), ("a", V(1))]):
        c = fb.Composition()
        with c.scope():
            record = fb.Record(named).reads(c.input)
            c.output.reads(record["a"], record["b"])
        assert c.eval({"a": [1], "b": 2}, tolist=True) == ([1], 2)
    positions = fb.Record((S(), V(1)))
    c = fb.Composition()
    with c.scope():
        positions.reads(c.input)
        c.output.reads(positions[-1], positions[0])
    assert c.eval((1, [2]), tolist=True) == ([2], 1)
    swapped = fb.Record([(1, S()), (0, V(1))])
    c = fb.Composition()
    with c.scope():
        swapped.reads(c.input)
        c.output.reads(swapped[0], swapped[1])
    assert c.eval(([1], 2), tolist=True) == ([1], 2)
    with pytest.raises(ValueError, match="'z'"):
        fb.Record({"a": S()})["z"]
    with pytest.raises(ValueError):
        positions[2]
    wired = fb.Composition([first := fb.Record({"a": S(), "b": S()}), plus := add()])
    wired.connect(wired.input, first)
    wired.connect((first["a"], first["b"]), plus)
    wired.connect(plus, wired.output)
    assert wired.eval({"a": 1, "b": 5}) == 6


class Kind(enum.Enum):
    LEAF = 1
    NODE = 2


@pytest.mark.parametrize(
    ("key_fn", "keys", "inputs"),
    [
        (type, (int, str), (5, "5")),
        (lambda x: (x > 0, "sign"), ((True, "sign"), (False, "sign")), (1, -1)),
        (lambda x: Kind.LEAF if x > 0 else Kind.NODE, (Kind.LEAF, Kind.NODE), (1, -1)),
        (lambda x: None if x > 0 else "no", (None, "no"), (1, -1)),
        (lambda x: 1 if x > 0 else "1", (1, "1"), (1, -1)),
        (lambda x: torch.float32 if x > 0 else len, (torch.float32, len), (1, -1)),
        (lambda x: frozenset([x > 0]), (frozenset([True]), frozenset([False])), (1, -1)),
        (lambda x: 1.5 if x > 0 else b"x", (1.5, b"x"), (1, -1)),
    ],
)
def test_any_keys_for_cases(key_fn: Any, keys: tuple[Any, Any], inputs: tuple[Any, Any]) -> None:
    for make in (
        dict,
        OrderedDict,
        list,
        lambda pairs: [list(p) for p in pairs],
        lambda p: dict(reversed(p)),
    ):
        cases = make([(keys[0], S()), (keys[1], S() >> torch.neg)])
        block = fb.OneOf(key_fn, cases)
        want = [float(inputs[0]), -float(inputs[1])]
        assert [block.eval(x).item() for x in inputs] == want == fb.compile(block)(list(inputs)).tolist()
        assert repr(block)


def test_records_whose_keys_have_no_order() -> None:
    block = fb.Record({"b": S(), None: V(1), 3: S("int64")})
    assert block.eval({None: [1], 3: 2, "b": 3}, tolist=True) == (3, [1], 2)
    assert fb.Record({int: S(), str: V(1)}).eval({str: [1], int: 2}, tolist=True) == (2, [1])
    assert fb.Record({(2, "x"): S(), (1, "y"): V(1)}).eval({(2, "x"): 2, (1, "y"): [1]}, tolist=True) == (
        [1],
        2,
    )
    twice = fb.Record([("a", S()), ("a", fb.OneHot(2))])
    assert twice.eval({"a": 1}, tolist=True) == (1, [0, 1])


def test_records_of_pairs_on_tuples() -> None:
    block = (S(), S()) >> fb.Record([(0, fb.Function(torch.neg)), (1, fb.Identity())])
    assert block.eval((1, 2), tolist=True) == (-1, 2)
    with pytest.raises(RuntimeError, match="no order") as caught:
        (S(), S()) >> fb.Record({"a": fb.Identity(), "b": fb.Identity()})
    assert isinstance(caught.value, fb.BlockTypeError) and isinstance(caught.value, fb.UnorderedRecordError)
    with pytest.raises(RuntimeError):
        (S(), S()) >> fb.Record({0: fb.Identity(), 1: fb.Identity()})
    with pytest.raises(fb.BlockTypeError):
        (S(), S()) >> fb.Record([("a", fb.Identity()), ("b", fb.Identity())])


# -- Map over tuples, conversion, broadcasts


def test_map_over_a_tuple_is_a_sequence() -> None:
    block = (S(), S()) >> fb.Map(fb.Function(torch.neg))
    assert block.output_type == fb.SequenceType([]) and block.eval((3, 4), tolist=True) == [-3, -4]
    cases = fb.OneOf(is_tuple, {True: (S(), S()) >> fb.Map(fb.Identity()), False: fb.Map(S())}) >> fb.Sum()
    assert fb.compile(cases)([(1, 2), [3, 4, 5]]).tolist() == [3, 12]
    with pytest.raises(fb.BlockTypeError, match="non-empty"):
        fb.Slice(stop=0).set_input_type(([], [])) >> fb.Map(fb.Identity())


@pytest.mark.parametrize(
    ("block", "x", "want"),
    [
        (S("int32"), "3", 3), (S("int32"), 3.7, 3), (S("int64"), -3.7, -3), (S(), "2.5", 2.5), (S("bool"), 2, True),
        (S(), True, 1.0), (S("int32"), b"7", 7), (S(), np.array(4), 4.0), (V(2, "int64"), ["1", "2"], [1, 2]),
        (V(2), (np.float64(1), 2), [1, 2]), (fb.Tensor([2, 1]), [["1"], [2]], [[1], [2]]), (V(3), range(3), [0, 1, 2]),
        (S("bfloat16"), "1.5", 1.5), (V(2, "bfloat16"), [1, 2], [1, 2]), (S("uint8"), 255, 255), (S(), 2**70, 2.0**70),
        (V(2), [torch.tensor(1.0), torch.tensor(2.0)], [1, 2]), (S("complex64"), 1j, 1j), (S("float16"), 1, 1),
    ],
)  # fmt: skip
def test_objects_are_converted_as_numpy_does(block: fb.Block, x: Any, want: Any) -> None:
    assert block.eval(x, tolist=True) == want
    assert fb.compile(block)([x, x]).tolist() == [want, want]


@pytest.mark.parametrize(
    ("block", "x"),
    [(S(), "x"), (S("int32"), "3.5"), (S("uint8"), -1), (S("int8"), 300), (V(2), "ab"), (V(2, "int32"), "12"),
     (S("int64"), 2**70), (V(2), [1, [2]]), (S(), 10**400), (S("int32"), float("nan")), (V(2), [1, 2, 3])],
)  # fmt: skip
def test_objects_that_are_no_such_array(block: fb.Block, x: Any) -> None:
    for run in (block.eval, lambda y: fb.compile(block)([y])):
        with pytest.raises(ValueError, match=r"Scalar|Vector"):
            run(x)


def test_arrays_that_can_not_be_written_to_are_no_warning() -> None:
    x = np.ones(2, np.float32)
    x.flags.writeable = False
    assert V(2).eval(x, tolist=True) == [1, 1]


def test_ngrams_over_a_broadcast() -> None:
    block = S() >> fb.Broadcast() >> fb.NGrams(2)
    assert block.output_type == fb.BroadcastSequenceType(([], []))
    value = block.eval(42)
    assert isinstance(value, itertools.repeat) and next(value) == (42, 42)
    zipped = fb.AllOf(fb.InputTransform(range) >> fb.Map(S()), block) >> fb.Zip() >> fb.Length()
    assert fb.compile(zipped)([3, 0]).tolist() == [3, 0]


def test_lists_in_broadcasts_and_objects_as_they_are() -> None:
    value = fb.AllOf(S() >> fb.Broadcast(), fb.Identity()).eval(1, tolist=True)
    assert isinstance(value[0], itertools.repeat) and next(value[0]) == 1.0 and type(next(value[0])) is float
    nested = (fb.Map(S() >> fb.Broadcast())).eval([1, 2], tolist=True)
    assert [next(x) for x in nested] == [1.0, 2.0] and type(next(nested[0])) is float
    pair = (V(2) >> fb.AllOf(fb.Identity(), fb.Broadcast()) >> fb.AllOf(fb.GetItem(1), fb.GetItem(0))).eval(
        [1, 2]
    )
    assert torch.equal(next(pair[0]), pair[1])
    t = torch.ones(())  # in a Python object, which stays itself
    assert fb.Identity().eval([t], tolist=True)[0] is t


# -- errors when a block is built


@pytest.mark.parametrize(
    "make",
    [
        lambda: fb.OneOf(S(), {1: S(), 2: S()}),
        lambda: fb.OneOf(42, (S(),)),
        lambda: fb.Optional(S(), S()),
        lambda: fb.Optional(S(), (S(), fb.Zeros([])) >> fb.GetItem(1)),
        lambda: fb.Fold(add(), S()),
        lambda: fb.Fold(add(), fb.Function(torch.neg)),
        lambda: fb.Reduce(add(), S()),
        lambda: fb.Reduce(add(), fb.Map(S()) >> fb.Sum()),
        lambda: fb.RNN(nn.GRUCell(1, 2), initial_state=S()),
        lambda: fb.RNN(nn.GRUCell(1, 2), initial_state=V(2)),
        lambda: fb.Map(fb.Identity()).set_output_type(VOID),
        lambda: fb.Record((fb.Identity(),)).set_output_type(VOID),
        lambda: fb.RNN(nn.GRUCell(1, 2)).set_output_type(VOID),
        lambda: fb.Broadcast().set_output_type(VOID),
        lambda: fb.Zip().set_output_type(VOID),
        lambda: fb.NGrams(2).set_output_type(VOID),
        lambda: fb.AllOf(fb.Identity(), fb.Identity()).set_output_type(VOID),
        lambda: add().set_output_type(VOID),
        lambda: fb.Sum().set_output_type(VOID),
        lambda: fb.Concat().set_output_type(VOID),
        lambda: fb.Pipe(fb.Identity(), fb.Map(fb.Identity())).set_output_type(VOID),
        lambda: S().set_output_type(VOID),
        lambda: fb.FromTensor(torch.ones(1)).set_input_type([]),
        lambda: fb.Function(lambda: torch.ones(1)).set_input_type(()),
        lambda: fb.Function(torch.neg).set_output_type(((), ())),
        lambda: fb.Broadcast().set_input_type(PY),
        lambda: fb.Zeros((fb.BroadcastSequenceType([]), [])),
        lambda: fb.Zeros(fb.SequenceType((PY, []))),
        lambda: fb.convert_to_block(fb.ForwardDeclaration(PY, [])),
        lambda: fb.Reduce(add()).set_input_type(PY),
        lambda: fb.Identity() >> fb.Record((fb.Identity(),) * 2) >> fb.Identity().set_input_type(([], [], [])),
    ],
)  # fmt: skip
def test_refused_when_built(make: Any) -> None:
    with pytest.raises(fb.BlockTypeError):
        make()


def test_two_readings_of_what_takes_one_thing() -> None:
    c = fb.Composition()
    with c.scope(), pytest.raises(fb.BlockTypeError, match="Embedding"):
        fb.Function(fb.Embedding(3, 2)).reads(c.input, S().reads(c.input))
    c = fb.Composition()
    with c.scope(), pytest.raises(fb.BlockTypeError, match="2 items"):
        add().set_input_type(([], [])).reads(c.input, c.input, c.input)


# -- compositions


def test_a_composition_wired_in_two_scopes() -> None:
    c = fb.Composition()
    with c.scope():
        x = S().reads(c.input)
    assert c.output_type is None or c.output_type == VOID
    with c.scope():
        c.output.reads(fb.Function(torch.neg).reads(x))
    assert c.output_type == T(()) and fb.compile(c)([1, 2]).tolist() == [-1, -2]
    late = fb.Composition()
    with late.scope():
        x = S().reads(late.input)
        y = fb.Function(torch.neg).reads(x)
        late.output.reads(x)
    with late.scope():
        fb.Metric("y").reads(y)
    assert late.eval(3, tolist=True) == (3, {"y": [-3]})
    constant = fb.Composition()
    with constant.scope():
        one = fb.FromTensor(torch.ones(())).reads()
    with constant.scope():
        constant.output.reads(add().reads(one, S().reads(constant.input)))
    assert constant.input_type == PY and constant.eval(2) == 3


def test_a_composition_is_wired_on_after_it_ran_and_inside_another() -> None:
    c = fb.Composition()
    with c.scope():
        x = S().reads(c.input)
        c.output.reads(x)
    outer = fb.Map(c) >> fb.Sum()
    assert outer.eval([1, 2]) == 3
    with c.scope():
        fb.Metric("x").reads(x)
    assert outer.eval([1, 2], tolist=True) == (3, {"x": [1, 2]})
    first = fb.Composition()
    with first.scope():
        s = S().reads(first.input)
        second = fb.Composition().reads(s)
        with second.scope():
            second.output.reads(
                fb.Function(torch.neg).reads(second.input), fb.Function(torch.square).reads(second.input)
            )
        first.output.reads(add().reads(second))
    assert first.eval(3) == 6


def test_compositions_by_connect() -> None:
    s, f, g, h = S(), fb.Function(torch.neg), fb.Function(torch.square), add()
    c = fb.Composition([h, g, s, f])
    for a, b in ((c.input, s), (s, f), (s, g), ((f, g), h), ((h,), c.output)):
        c.connect(a, b)
    assert c.eval(3) == 6
    with pytest.raises(ValueError, match="already connected"):
        c.connect(c.input, s)
    with pytest.raises(TypeError, match="already connected"):
        c.connect(s, c.output)
    for wrong in ((c.output, S()), (S(), c.input), (fb.Composition().input, S())):
        with pytest.raises(ValueError):
            c.connect(*wrong)
    loop = fb.Composition([f2 := fb.Function(torch.neg), g2 := fb.Function(torch.neg)])
    loop.connect(f2, g2)
    loop.connect(g2, loop.output)
    loop.connect(g2, f2)
    with pytest.raises(ValueError, match="cycle"):
        loop.eval(1)
    with pytest.raises(TypeError, match="cycle"):
        fb.compile(loop)


def test_metrics_of_an_instance_come_in_the_order_in_which_the_output_reads() -> None:
    def seen(name: str, value: float) -> fb.Block:
        return fb.Function(lambda x: x + value) >> fb.AllOf(fb.Metric("m"), fb.Identity()) >> fb.GetItem(1)

    c = fb.Composition()
    with c.scope():
        x = S().reads(c.input)
        a, b, unread = (seen("m", v).reads(x) for v in (100, 200, 300))
        (fb.Identity() >> fb.Metric("m")).reads(unread)
        d = seen("m", 400).reads(a)
        c.output.reads(b, d)
    assert c.eval(0)[1]["m"].tolist() == [200, 100, 500, 300, 300]
    model = fb.compile(c)
    assert model([0, 1])[1]["m"].tolist() == [200, 100, 500, 300, 300, 201, 101, 501, 301, 301]
    sums = fb.Map(S() >> fb.AllOf(fb.Metric("b"), fb.Metric("a"), fb.Identity()) >> fb.GetItem(2))
    reduced = sums >> fb.Reduce(add() >> fb.AllOf(fb.Metric("sum"), fb.Identity()) >> fb.GetItem(1))
    out, metrics = fb.compile(reduced)([[1, 2, 3, 4, 5]])
    assert (
        metrics["sum"].tolist() == [3, 7, 10, 15] and list(metrics) == ["a", "b", "sum"] and out.item() == 15
    )


def test_a_long_composition() -> None:
    c = fb.Composition()
    with c.scope():
        x: Any = S().reads(c.input)
        for _ in range(1200):
            x = fb.Identity().reads(x)
        c.output.reads(x)
    assert c.eval(1) == 1


# -- layers


def test_layers_know_what_they_give_before_they_are_composed() -> None:
    assert fb.FC(4).output_type == T((4,)) and fb.Embedding(5, 3).output_type == T((3,))
    assert fb.FC(4).double().output_type == T((4,), "float64")
    table = torch.zeros(5, 3, dtype=torch.float64)
    assert fb.Embedding(5, 3, initializer=table).output_type == T((3,), "float64")
    assert (S("int64") >> fb.Embedding(5, 3)).output_type == T((3,))
    assert (V(2, "float64") >> fb.FC(4)).output_type == T((4,), "float64")


def test_what_only_a_layer_implies_is_known_when_a_block_runs() -> None:
    cell = fb.Composition()
    with cell.scope():
        h = fb.FC(3, activation=torch.tanh).reads(fb.Concat().reads(cell.input[0], cell.input[1]))
        cell.output.reads(h, h)
    outputs, state = (fb.Map(V(2)) >> fb.RNN(cell)).eval([[1, 2], [3, 4]])
    assert len(outputs) == 2 and torch.equal(outputs[1], state) and state.shape == (3,)
    doubled = fb.Composition().double()
    layer = fb.FC(3)
    with doubled.scope():
        h = layer.reads(fb.Concat().reads(doubled.input[0], doubled.input[1]))
        doubled.output.reads(h, h)
    assert (
        fb.compile(fb.Map(V(2)) >> fb.RNN(doubled) >> fb.GetItem(1)).double()([[[1, 2]]]).dtype
        == torch.float64
    )


def test_cells_made_when_the_size_of_their_input_is_known() -> None:
    for kind in (nn.GRUCell, nn.RNNCell, nn.LSTMCell):
        for cell in (
            fb.ScopedLayer(kind, hidden_size=4),
            fb.ScopedLayer(functools.partial(kind, hidden_size=4)),
        ):
            before = torch.get_rng_state()
            assert not list(cell.parameters()) and torch.equal(before, torch.get_rng_state())
            block = fb.Map(V(3)) >> fb.RNN(cell) >> fb.GetItem(1)
            assert isinstance(cell.module, kind) and cell.module.input_size == 3
            assert cell.output_size == 4 and cell.state_size == ((4, 4) if kind is nn.LSTMCell else 4)
            fb.compile(block)([[[1, 2, 3]], []])
    linear = fb.ScopedLayer(lambda n: nn.Linear(n, 2))
    assert (V(5) >> linear).output_type == T((2,)) and linear.state_size is None
    wide = fb.Map(V(3, "float64")) >> fb.RNN(fb.ScopedLayer(nn.GRUCell, hidden_size=4).double())
    assert wide.output_type[1] == T((4,), "float64")
    with pytest.raises(fb.BlockTypeError):
        fb.ScopedLayer(3)
    with pytest.raises(fb.BlockTypeError, match="size of the input"):
        fb.Map(S()) >> fb.RNN(fb.ScopedLayer(nn.GRUCell, hidden_size=4))


class Own(nn.Module):
    """A cell with a state of two vectors."""

    output_size = 2
    state_size = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 2)

    def forward(self, x: Any, state: Any) -> Any:
        a, b = state
        out = self.mix(torch.cat([x, a, b]))
        return out, (out, b + 1)


def test_own_cells() -> None:
    layer = fb.ScopedLayer(Own())
    assert layer.state_size == (2, 3) and layer.output_size == 2
    assert layer.output_type == fb.TupleType(2, (2, 3))
    outputs, (a, b) = (fb.Map(V(1)) >> fb.RNN(layer)).eval([[1], [2]])
    assert torch.equal(outputs[1], a) and b.tolist() == [2, 2, 2]
    assert fb.ScopedLayer(nn.Linear(2, 2)).state_size is None
    assert fb.ScopedLayer(nn.LSTMCell(2, 3)).state_size == (3, 3)
    assert fb.ScopedLayer(Own().double()).output_type == fb.TupleType(
        [2, "float64"], ([2, "float64"], [3, "float64"])
    )


# -- running


def test_minibatches_of_any_iterable() -> None:
    model = fb.compile(fb.InputTransform(float) >> S())
    want = [0.0, 1.0, 2.0]
    for data in (
        range(3),
        (i for i in range(3)),
        iter([0, 1, 2]),
        deque([0, 1, 2]),
        np.arange(3),
        map(int, "012"),
    ):
        assert model(data).tolist() == want
    assert model(range(0)).shape == (0,) and model(iter(())).shape == (0,)
    metrics = fb.compile(fb.Map(S() >> fb.Metric("x")) >> fb.Void())
    assert metrics(range(n) for n in range(3))[1]["x"].tolist() == [0, 0, 1]
    assert fb.compile(S(), out="list")(iter([])) == [] and fb.compile(S(), out="list")(range(2)) == [0, 1]
    with pytest.raises(ValueError):
        model("012")


def test_the_function_of_a_function() -> None:
    layer = fb.FC(2)
    assert fb.Function(torch.add).tf_fn is torch.add and fb.Function(layer).tf_fn is layer
