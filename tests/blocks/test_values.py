"""Every block: values, types, and what compiled blocks give, against Python written out."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch.blocks as fb

S = fb.Scalar
add, sub, mul = (fb.Function(f) for f in (torch.add, torch.sub, torch.mul))


def t(x: Any, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.tensor(x, dtype=dtype)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def subtract() -> fb.Block:
    return fb.Function(torch.sub)


CASES: list[tuple[Any, Any, Any, Any]] = [
    (lambda: S(), 3, t(3.0), []),
    (lambda: S("int64"), 3, t(3, torch.int64), ["int64"]),
    (lambda: S("bool"), True, t(True, torch.bool), ["bool"]),
    (lambda: S("int64"), np.int32(3), t(3, torch.int64), ["int64"]),
    (lambda: fb.Vector(2), (1, 2), t([1.0, 2.0]), 2),
    (lambda: fb.Vector(2), np.array([1, 2]), t([1.0, 2.0]), 2),
    (lambda: fb.Vector(0), [], t([]), 0),
    (lambda: fb.Tensor([2, 1], "float64"), [[1], [2]], t([[1.0], [2.0]], torch.float64), [2, 1, "float64"]),
    (lambda: fb.OneHot(3), 1, t([0.0, 1.0, 0.0]), 3),
    (lambda: fb.OneHot(-1, 2, "int64"), -1, t([1, 0, 0], torch.int64), [3, "int64"]),
    (lambda: fb.OneHotFromList(["x", None]), None, t([0.0, 1.0]), 2),
    (lambda: fb.OneHotFromList(["x"], strict=False), "y", t([0.0]), 1),
    (lambda: fb.FromTensor(np.ones(2)), "whatever", t([1.0, 1.0], torch.float64), [2, "float64"]),
    (lambda: fb.Zeros((2, ["int64"])), None, (t([0.0, 0.0]), t(0, torch.int64)), (2, ["int64"])),
    (lambda: fb.InputTransform(len) >> S(), "abc", t(3.0), []),
    (lambda: fb.Optional(S()), None, t(0.0), []),
    (lambda: fb.Optional(S()), 4, t(4.0), []),
    (lambda: fb.Optional(S(), fb.FromTensor(t(7.0))), None, t(7.0), []),
    (lambda: fb.Optional(fb.Map(S())) >> fb.Sum(), None, t(0.0), []),
    (lambda: fb.Optional(S(), lambda_seven()), None, t(7.0), []),
    (lambda: S() >> fb.Function(lambda x: (x, x + 1)), 1, (t(1.0), t(2.0)), ([], [])),
    (lambda: (S(), (S(), S())) >> fb.Function(lambda a, b: a - b[0] * b[1]), (1, (2, 3)), t(-5.0), []),
    (lambda: S() >> torch.neg >> fb.Identity(), 1, t(-1.0), []),
    (lambda: fb.Record({"b": S(), "a": fb.OneHot(2)}), {"a": 0, "b": 5}, (t([1.0, 0.0]), t(5.0)), (2, [])),
    (lambda: fb.Record(OrderedDict(b=S(), a=S("int64"))), {"a": 0, "b": 5}, (t(5.0), t(0, torch.int64)),
     ([], "int64")),
    (lambda: fb.Record([("b", S()), ("a", S())]), {"a": 0, "b": 5}, (t(5.0), t(0.0)), ([], [])),
    (lambda: fb.Record([S(), fb.Void()]) >> fb.GetItem(0), [5, 6], t(5.0), []),
    (lambda: (S(), S()) >> fb.Record((fb.Function(torch.neg), fb.Identity())), (1, 2), (t(-1.0), t(2.0)), ([], [])),
    (lambda: fb.AllOf(S(), fb.FromTensor(t(2.0))), 1, (t(1.0), t(2.0)), ([], [])),
    (lambda: fb.Pipe(S()), 1, t(1.0), []),
    (lambda: (fb.Vector(1), fb.Vector(2)) >> fb.Concat(), ([1], [2, 3]), t([1.0, 2.0, 3.0]), 3),
    (lambda: (fb.Tensor([2, 1]), fb.Tensor([2, 2])) >> fb.Concat(1), ([[1], [2]], [[3, 4], [5, 6]]),
     t([[1.0, 3, 4], [2, 5, 6]]), [2, 3]),
    (lambda: (fb.Vector(1), (fb.Vector(1), fb.Vector(1))) >> fb.Concat(flatten=True), ([1], ([2], [3])),
     t([1.0, 2.0, 3.0]), 3),
    (lambda: (fb.Vector(2),) >> fb.Concat(), ([1, 2],), t([1.0, 2.0]), 2),
    (lambda: fb.GetItem("k") >> S(), {"k": 2}, t(2.0), []),
    (lambda: (S(), S()) >> fb.GetItem(-1), (1, 2), t(2.0), []),
    (lambda: fb.Map(S()) >> fb.GetItem(1), (1, 2), t(2.0), []),
    (lambda: (S(), S(), S()) >> fb.Slice(start=1), (1, 2, 3), (t(2.0), t(3.0)), ([], [])),
    (lambda: fb.Slice(step=-1) >> fb.GetItem(0) >> S(), (1, 2), t(2.0), []),
    (lambda: (fb.Map(S()), fb.Identity()) >> fb.Nth(), ([1, 2, 3], -1), t(3.0), []),
    (lambda: fb.Length(), "abc", t(3.0), []),
    (lambda: fb.Map(S()) >> fb.Length("int64"), [], t(0, torch.int64), ["int64"]),
    (lambda: (S(), S()) >> fb.Length(), (1, 1), t(2.0), []),
    (lambda: (S(), S()) >> fb.Map(fb.Function(torch.neg)) >> fb.GetItem(1), (1, 2), t(-2.0), []),
    (lambda: fb.Map(S()) >> fb.Fold(subtract(), fb.Zeros([])), [1, 2], t(-3.0), []),
    (lambda: fb.Map(S()) >> fb.Fold(subtract(), t(9.0)), [], t(9.0), []),
    (lambda: fb.Fold(fb.Record((fb.Identity(), S())) >> fb.Function(torch.add), fb.Zeros([])), [1, 2], t(3.0), []),
    (lambda: (S(), S()) >> fb.Fold(subtract(), fb.Zeros([])), (1, 2), t(-3.0), []),
    (lambda: fb.Map(S()) >> fb.Reduce(subtract()), [5, 3, 1], t(1.0), []),
    (lambda: fb.Map(S()) >> fb.Reduce(subtract()), [1, 2, 4, 8, 16, 32, 64], t(83.0), []),
    (lambda: fb.Map(S()) >> fb.Reduce(subtract()), [], t(0.0), []),
    (lambda: fb.Map(S()) >> fb.Reduce(subtract(), t(4.0)), [], t(4.0), []),
    (lambda: fb.Map(S()) >> fb.Reduce(subtract()), [5], t(5.0), []),
    (lambda: (S(), S()) >> fb.Reduce(fb.Function(torch.mul)), (3, 4), t(12.0), []),
    *[(make, [3, -1, 7, 2, 2], t(v), []) for make, v in
      ((lambda: fb.Map(S()) >> fb.Sum(), 13.0), (lambda: fb.Map(S()) >> fb.Min(), -1.0),
       (lambda: fb.Map(S()) >> fb.Max(), 7.0), (lambda: fb.Map(S()) >> fb.Mean(), 2.6))],
    *[(make, [], t(0.0), []) for make in
      (lambda: fb.Map(S()) >> fb.Sum(), lambda: fb.Map(S()) >> fb.Min(), lambda: fb.Map(S()) >> fb.Max(),
       lambda: fb.Map(S()) >> fb.Mean())],
    (lambda: (fb.Vector(2), fb.Vector(2)) >> fb.Mean(), ([1, 2], [3, 4]), t([2.0, 3.0]), 2),
    (lambda: fb.AllOf(fb.Map(S()), fb.Map(S()) >> fb.Max() >> fb.Broadcast()) >> fb.ZipWith(fb.Function(torch.div))
     >> fb.Sum(), [1, 3, 4], t(2.0), []),
    (lambda: fb.AllOf(S() >> fb.Broadcast() >> fb.Map(torch.neg), fb.InputTransform(range) >> fb.Map(S()))
     >> fb.ZipWith(fb.Function(torch.add)) >> fb.Sum(), 3, t(-6.0), []),
    (lambda: fb.Map(S()) >> fb.NGrams(2) >> fb.Map(subtract()) >> fb.Sum(), [9, 5, 4], t(5.0), []),
    (lambda: fb.Map(S()) >> fb.NGrams(4) >> fb.Length(), [9, 5, 4], t(0.0), []),
    (lambda: fb.NGrams(1) >> fb.Length(), "abc", t(3.0), []),
    (lambda: fb.OneOf(fb.GetItem(0), (fb.GetItem(1) >> S(), fb.GetItem(1) >> S() >> torch.neg)), (-1, 3), t(-3.0), []),
    (lambda: fb.OneOf(lambda x: x > 0, {True: fb.Identity(), False: fb.Function(torch.neg)}, pre_block=S()), -2,
     t(2.0), []),
    (lambda: fb.OneOf(len, [(1, fb.Zeros(2)), (2, fb.Vector(2))]), [5], t([0.0, 0.0]), 2),
    (lambda: (S(), S()) >> fb.Function(torch.add) >> fb.Void() >> fb.FromTensor(t(1.0)), (1, 1), t(1.0), []),
    (lambda: fb.Map(S() >> fb.Broadcast() >> fb.Void()) >> fb.Length(), [1], t(1.0), []),
]  # fmt: skip


def lambda_seven() -> fb.Block:
    return fb.Void() >> fb.FromTensor(t(7.0))


@pytest.mark.parametrize("i", range(len(CASES)))
def test_value_type_and_compiled_value(i: int) -> None:
    make, x, expected, kind = CASES[i]
    block = make() if isinstance(make(), fb.Block) else fb.convert_to_block(make())
    assert same(block.eval(x), expected), block.eval(x)
    assert block.output_type == fb.convert_to_type(kind)
    compiled = fb.compile(make())([x, x, x])
    stack = lambda y: torch.stack([y] * 3) if isinstance(y, torch.Tensor) else tuple(map(stack, y))  # noqa: E731
    assert same(compiled, stack(expected)), compiled


def test_sequences_eval_to_lists_and_broadcasts_to_repeat() -> None:
    assert (fb.Map(S())).eval([1, 2], tolist=True) == [1.0, 2.0]
    endless = (S() >> fb.Broadcast()).eval(1)
    assert isinstance(endless, itertools.repeat) and next(endless) == 1
    both = ((fb.Map(S()), fb.Map(S("int64"))) >> fb.Zip()).eval(([1, 2], [3]))
    assert len(both) == 1 and both[0][1].dtype == torch.int64
    assert fb.Void().eval(3) is None and fb.AllOf().eval(3) is None


@pytest.mark.parametrize(
    ("make", "x", "error", "text"),
    [
        (lambda: fb.Vector(2), [1], ValueError, "Vector"),
        (lambda: fb.Vector(2), "ab", ValueError, "Vector"),
        (lambda: S(), [1], ValueError, "Scalar"),
        (lambda: fb.OneHot(2), 2, KeyError, "OneHot"),
        (lambda: fb.OneHot(2), -1, KeyError, "OneHot"),
        (lambda: fb.OneHotFromList(["a"]), "b", KeyError, "'b'"),
        (lambda: fb.GetItem("k") >> S(), {}, KeyError, "k"),
        (lambda: fb.OneOf(lambda x: x, {1: S()}), 2, KeyError, "no case 2"),
        (lambda: fb.Map(S()) >> fb.GetItem(3), [1], IndexError, "index"),
    ],
)
def test_errors_of_instances(make: Any, x: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make().eval(x)
    with pytest.raises(error, match=text):
        fb.compile(make())([x])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: fb.OneHot(3, 3), IndexError),
        (lambda: fb.OneHotFromList([1, 1]), AssertionError),
        (lambda: fb.OneOf(len, {}), ValueError),
        (lambda: fb.RNN(nn.GRUCell(1, 1), fb.Zeros(1), initial_state_from_input=True), ValueError),
        (lambda: fb.FromTensor([1, 2]), TypeError),
        (lambda: fb.Function(3), TypeError),
        (lambda: fb.NGrams(0), TypeError),
        (lambda: fb.FC(0), TypeError),
        (lambda: fb.FC(2, input_keep_prob=1.5), TypeError),
        (lambda: fb.Zeros(fb.PyObjectType()), TypeError),
        (lambda: fb.Vector(2).reads(fb.Vector(2)), AssertionError),
        (lambda: fb.convert_to_block(3), TypeError),
        (lambda: fb.convert_to_block(lambda x: x), TypeError),
        (lambda: fb.OneOf(len, [("a", S()), ("a", S())]), TypeError),
        (lambda: fb.OneOf(len, [([1], S())]), TypeError),
        (lambda: fb.Slice(3), TypeError),
    ],
)
def test_errors_of_construction(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("cell_type", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("lengths", [[0], [3], [0, 1, 5, 2]])
def test_rnn_is_the_loop_over_the_cell(cell_type: Any, lengths: list[int]) -> None:
    cell = cell_type(2, 3)
    block = fb.Map(fb.Vector(2)) >> fb.RNN(cell) >> fb.AllOf(fb.GetItem(0) >> fb.Sum(), fb.GetItem(1))
    data = [torch.randn(n, 2).tolist() for n in lengths]
    sums, states = fb.compile(block)(data)
    for i, xs in enumerate(data):
        h: Any = torch.zeros(3)
        state: Any = (h, h) if cell_type is nn.LSTMCell else h
        total = torch.zeros(3)
        for x in xs:
            state = cell(t(x), state)
            total = total + (state[0] if isinstance(state, tuple) else state)
        torch.testing.assert_close(sums[i], total)
        for got, want in zip(
            states if isinstance(state, tuple) else [states],
            state if isinstance(state, tuple) else [state],
            strict=True,
        ):
            torch.testing.assert_close(got[i], want)


def test_rnn_with_a_state_from_the_input() -> None:
    block = (fb.Map(fb.Vector(2)), fb.Vector(3)) >> fb.RNN(nn.GRUCell(2, 3), initial_state_from_input=True)
    assert block.eval(([], [1, 2, 3]))[1].tolist() == [1, 2, 3]
    started = fb.Map(fb.Vector(2)) >> fb.RNN(nn.GRUCell(2, 3), initial_state=nn.Parameter(torch.ones(3)))
    assert started.eval([])[1].tolist() == [1, 1, 1]
    assert [n for n, _ in started.named_parameters() if "tensor" in n]


def test_layers() -> None:
    x = torch.randn(3)
    fc = fb.FC(4, activation=torch.tanh)
    block = fb.Vector(3) >> fc
    torch.testing.assert_close(block.eval(x), torch.tanh(F.linear(x, fc.weight, fc.bias)))
    normed = fb.FC(4, activation=None, weight_norm=True)
    y = (fb.Vector(3) >> normed).eval(x)
    assert normed.weight is not None and normed.scales is not None
    torch.testing.assert_close(y, (F.normalize(normed.weight, dim=1) @ x) * normed.scales)
    table = torch.randn(5, 2)
    embed = S("int32") >> fb.Embedding(5, 2, initializer=table, trainable=False)
    torch.testing.assert_close(embed.eval(-1), table[4])
    assert not any(p.requires_grad for p in embed.parameters())
    with pytest.raises(ValueError, match="initial weights"):
        fb.Embedding(5, 2, initializer=torch.zeros(2, 5))
    with pytest.raises((IndexError, RuntimeError)):
        (S("int64") >> fb.Embedding(5, 2, mod_inputs=False)).eval(5)


def test_dropout_only_in_training_and_anew_for_each_use() -> None:
    block = (
        fb.Map(fb.Vector(100) >> fb.FC(100, activation=None, input_keep_prob=0.5, output_keep_prob=0.9))
        >> fb.Sum()
    )
    model = fb.compile(block)
    data = [[[1.0] * 100], [[1.0] * 100]]
    a, b = model(data)
    assert not torch.equal(a, b)
    model.eval()
    a, b = model(data)
    assert torch.equal(a, b) and torch.allclose(a, block.eval(data[0]), rtol=1e-5, atol=1e-6)


def test_fractal_net() -> None:
    names: list[str] = []

    def base(name: str) -> fb.Layer:
        names.append(name)
        return fb.FC(4, activation=torch.tanh, name=name)

    net = fb.FractalNet(1, 2, base)
    block = fb.Vector(3) >> net
    x = torch.randn(3)
    b = net.blocks[0]

    def depth_1(f: Any, y: torch.Tensor) -> torch.Tensor:
        return (f.base(y) + f.second.base(f.first.base(y))) / 2

    want = (b.base(x) + depth_1(b.second, depth_1(b.first, x))) / 2
    torch.testing.assert_close(block.eval(x), want)
    assert len(names) == 7 == len(dict.fromkeys(names))
    dropping = fb.compile(fb.Vector(3) >> fb.FractalNet(1, 1, base, drop_path=True, p_local_drop_path=0.0))
    f = dropping.root.parts[1].function.blocks[0]
    y = dropping([x.tolist()] * 40)
    one, two = f.base(x), f.second.base(f.first.base(x))
    picks = [torch.allclose(r, one, atol=1e-6) + 2 * torch.allclose(r, two, atol=1e-6) for r in y]
    assert sorted(dict.fromkeys(picks)) == [1, 2]
    with pytest.raises(TypeError, match="probabilities"):
        fb.FractalNet(1, 1, base, p_drop_base_case=0.6, p_drop_recursive_case=0.6)


def test_lazy_modules_get_their_parameters_when_the_type_is_known() -> None:
    block = fb.Vector(3) >> fb.Function(nn.LazyLinear(2))
    assert [tuple(p.shape) for p in block.parameters()] == [(2, 3), (2,)]


def test_inferring_draws_no_random_numbers_and_changes_no_mode() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
    before = torch.get_rng_state()
    assert (fb.Tensor([4, 3]) >> fb.Function(module)).output_type == fb.TensorType((4, 3))
    assert torch.equal(torch.get_rng_state(), before) and module[1].training
    assert module[1].num_batches_tracked == 0
