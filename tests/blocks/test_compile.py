"""Compiled blocks: equal to block.eval in a loop, values and gradients; modules as PyTorch expects; metrics."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import fxbatch
import fxbatch.blocks as fb

S = fb.Scalar
SCHEDULES = ("agenda", "depth", "fold", "lookahead", "none")


def is_list(x: Any) -> bool:
    return isinstance(x, list)


class Cell(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * n, 2 * n)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gate, new = self.gates(torch.cat([a, b])).chunk(2)
        return torch.sigmoid(gate) * torch.tanh(new) + a * b


def nest_block(n: int = 4) -> fb.Block:
    fwd = fb.ForwardDeclaration(fb.PyObjectType(), n, name="nest")
    leaf = S("int64") >> fb.Embedding(10, n, initializer=nn.init.normal_)
    inner = fb.Map(fwd()) >> fb.AllOf(fb.Reduce(Cell(n)), fb.Mean()) >> fb.Function(torch.add)
    nest = fb.OneOf(is_list, {False: leaf, True: inner})
    fwd.resolve_to(nest)
    return nest >> fb.AllOf(fb.FC(3, activation=None), fb.Identity())


nests = st.recursive(st.integers(0, 9), lambda x: st.lists(x, max_size=4), max_leaves=12)


@functools.cache
def double_nest() -> tuple[fb.Block, fb.CompiledBlock]:
    block = nest_block()
    return block, fb.compile(block).double()


@given(data=st.lists(nests, max_size=6))
@settings(max_examples=10)
def test_random_nests_equal_the_loop_in_values_and_gradients(data: list[Any]) -> None:
    block, model = double_nest()
    got = model(data)
    assert got[0].shape == (len(data), 3) and got[1].shape == (len(data), 4)
    if not data:
        return
    want = [torch.stack(list(x)) for x in zip(*(block.eval(x) for x in data), strict=True)]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    for g, w in zip(
        torch.autograd.grad(sum(x.square().sum() for x in got), parameters, materialize_grads=True),
        torch.autograd.grad(sum(x.square().sum() for x in want), parameters, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


def data_of(n: int) -> list[Any]:
    draw = random.Random(n)

    def make(depth: int) -> Any:
        return [make(depth - 1) for _ in range(draw.randrange(4))] if depth else draw.randrange(10)

    return [make(draw.randrange(4)) for _ in range(n)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_schedules_give_the_same(schedule: str) -> None:
    block = nest_block()
    model = fb.compile(block, schedule=schedule)
    data = data_of(9)
    want = torch.stack([block.eval(x)[0] for x in data])
    torch.testing.assert_close(model(data)[0], want, rtol=1e-5, atol=1e-6)


def test_options_of_the_decorator() -> None:
    block = nest_block()
    data = data_of(4)
    listed = fb.compile(block, out="list")(data)
    assert len(listed) == 4 and listed[2][0].shape == (3,)
    model = fb.compile(block.double(), backward="autograd")
    p = next(model.parameters())
    (g,) = torch.autograd.grad(model(data)[0].square().sum(), p, create_graph=True)
    assert g.square().sum().requires_grad


VECTORS: dict[str, tuple[fb.Block, Any]] = {
    "a layer": (fb.Vector(2) >> fb.FC(3), {}),
    "a sequence": (fb.Map(S() >> fb.Function(torch.exp)) >> fb.Sum(), {}),
    "a metric": (fb.Vector(2) >> fb.AllOf(fb.FC(2), fb.Metric("seen")), {}),
    "a case": (
        fb.OneOf(lambda x: bool(x[0] > 0), {True: fb.Vector(2) >> fb.FC(2), False: fb.Zeros([2])}),
        {"backward": "autograd"},
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_instances_may_be_vectors_of_torch(name: str) -> None:
    block, options = VECTORS[name]
    model = fb.compile(block, adaptive=False, **options)
    xs = [torch.randn(2, requires_grad=True) for _ in range(4)]
    for minibatch in (xs, torch.stack(xs)):
        found = model(minibatch)
        if model.has_metrics:
            output, metrics = found
            found = output[0]
            torch.testing.assert_close(metrics["seen"], torch.stack(xs))
        wanted = torch.stack([block.eval(x)[0][0] if model.has_metrics else block.eval(x) for x in xs])
        torch.testing.assert_close(found, wanted)
        ours, theirs = (
            torch.autograd.grad(y.square().sum(), xs, materialize_grads=True) for y in (found, wanted)
        )
        torch.testing.assert_close(ours, theirs)
    assert model.has_metrics or fxbatch.explain(model, xs).launches_after


def test_disabled_runs_one_by_one() -> None:
    model = fb.compile(nest_block())
    data = data_of(5)
    with fxbatch.disabled():
        want = model(data)
    torch.testing.assert_close(model(data), want)


def test_few_launches() -> None:
    model = fb.compile(fb.Map(S()) >> fb.Sum())
    data = [[1.0] * n for n in range(40)]
    assert model(data).tolist() == list(range(40))
    minibatch = fxbatch.compile_minibatch(model, data)
    assert (
        len(minibatch.schedule) <= 3 + 7 * 2
    )  # constants, then group sizes 2 to 8 at two depths: 780 additions


def test_modes_and_changed_parameters_are_seen() -> None:
    block = fb.Vector(8) >> fb.Function(nn.Dropout(0.5)) >> fb.FC(4)
    model = fb.compile(block)
    x = [[1.0] * 8] * 3
    assert len(torch.unique(model(x), dim=0)) == 3
    model.eval()
    before = model(x)
    torch.testing.assert_close(before[0], block.eval(x[0]))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    torch.testing.assert_close(model(x)[0], block.eval(x[0]))
    assert not torch.allclose(model(x), before)
    with torch.no_grad():
        assert not model(x).requires_grad


def test_functions_that_ask_for_values_and_modules_with_hooks() -> None:
    def sign(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x > 0 else -x

    model = fb.compile(fb.Map(S() >> fb.Function(sign)) >> fb.Sum())
    assert model([[1, -2], [3], []]).tolist() == [4, 6, 0]
    layer, seen = nn.Linear(1, 1), []
    hooked = fb.compile(fb.Vector(1) >> fb.Function(layer))
    hooked([[1.0]])
    layer.register_forward_hook(lambda m, i, o: seen.append(1) or o * 0)
    assert hooked([[1.0], [2.0]]).tolist() == [[0], [0]] and len(seen) >= 1


def test_as_a_module() -> None:
    model = fb.compile(nest_block())
    data = data_of(6)
    want = model(data)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(data), want)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    fresh = fb.compile(nest_block())
    assert not torch.allclose(fresh(data)[0], want[0])
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(data), want)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = [model(data)[0].square().mean()]
    for _ in range(5):
        optimizer.zero_grad()
        loss[-1].backward()
        optimizer.step()
        loss.append(model(data)[0].square().mean())
    assert loss[-1] < loss[0]


def test_empty_minibatches_have_the_types_of_the_root() -> None:
    assert fb.compile(fb.Vector(3, "int64"))([]).shape == (0, 3)
    a, b = fb.compile((S(), fb.Vector(2)))([])
    assert a.shape == (0,) and b.shape == (0, 2)


def test_metrics() -> None:
    c = fb.Composition()
    with c.scope():
        x = S().reads(c.input)
        fb.Metric("twice").reads((fb.Function(lambda v: 2 * v)).reads(x))
        c.output.reads(x)
    model = fb.compile(fb.Map(c) >> fb.Sum())
    total, metrics = model([[1, 2], [], [3]])
    assert total.tolist() == [3, 0, 3] and metrics["twice"].tolist() == [2, 4, 6]
    assert model([[]])[1]["twice"].shape == (0,)
    assert model([])[1]["twice"].shape == (0,)
    labelled = fb.Map((S(), fb.Identity()) >> fb.Metric("m")) >> fb.Void()
    out, values, labels = fb.compile(labelled, metric_labels=True)([[(0, "zero"), (1, "one")], [(2, "two")]])
    assert out is None and values["m"].tolist() == [0, 1, 2] and labels == {"m": ["zero", "one", "two"]}


def test_gradients_through_metrics() -> None:
    layer = fb.FC(2, activation=None)
    model = fb.compile(fb.Map(fb.Vector(3) >> layer >> fb.Metric("y")) >> fb.Void())
    xs = torch.randn(5, 3)
    model([xs[:2].tolist(), [], xs[2:].tolist()])[1]["y"].square().sum().backward()
    assert layer.weight is not None and layer.bias is not None
    want = torch.autograd.grad((xs @ layer.weight.T + layer.bias).square().sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, want, rtol=1e-5, atol=1e-5)


def test_metrics_of_one_name_have_one_type() -> None:
    with pytest.raises(fb.BlockTypeError, match="metric 'm'"):
        fb.compile(fb.AllOf(S() >> fb.Metric("m"), S("int64") >> fb.Metric("m")) >> fb.Void())


def test_a_compiled_block_inside_a_decorated_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nest_block()

        @fxbatch.autobatch
        def forward(self, x: Any) -> Any:
            return self.inner(x)[0] * 2

    model, data = Model(), data_of(5)
    torch.testing.assert_close(model(data), 2 * torch.stack([model.inner.eval(x)[0] for x in data]))


def test_parameters_given_as_tensors_are_trained() -> None:
    start = nn.Parameter(torch.ones(2))
    model = fb.compile(fb.Map(fb.Vector(2)) >> fb.Fold(fb.Function(torch.mul), start))
    model([[[2, 3]], [], [[1, 1], [5, 7]]]).sum().backward()
    assert start.grad is not None and start.grad.tolist() == [8, 11]


def test_an_error_of_an_instance_says_which() -> None:
    model = fb.compile(fb.Map(S()) >> fb.Sum())
    with pytest.raises(ValueError) as caught:
        model([[1], ["x"]])
    assert any("instance 1" in note for note in caught.value.__notes__)
    assert model([[1], [2]]).tolist() == [1, 2]


def test_threads_have_tapes_of_their_own() -> None:
    import threading

    model = fb.compile(fb.Map(S()) >> fb.Sum())
    model([[1]])
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        found[k] = [model([[k] * n for n in range(5)]).tolist() for _ in range(10)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[k] == [[float(k * n) for n in range(5)]] * 10 for k in range(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_instances_traced_ahead_by_a_loader(workers: int) -> None:
    torch.manual_seed(0)
    model = fb.compile(fb.Map(fb.Vector(2) >> fb.FC(3)) >> fb.Sum())
    data = [[[1.0, 2.0], [k, 0.0]] * k for k in (1, 3, 0, 5, 2, 2)]
    loader = DataLoader(
        fxbatch.TracedDataset(model, data),
        batch_size=4,
        num_workers=workers,
        collate_fn=fxbatch.collate(model),
    )
    torch.testing.assert_close(torch.cat([model(minibatch) for minibatch in loader]), model(data))
