"""autobatch(check=N): what differs is an error with instance, operation and figures; all else is as if unchecked."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxbatch
from fxbatch import checking
from fxbatch.checking import Material, Outcome, difference, judge
from fxbatch.runtime import backward
from fxbatch.runtime.run import Run
from tests import models as M
from tests.trust.programs import model, two, vectors

MODES: list[dict[str, Any]] = [{}, {"backward": "autograd"}, {"mode": "unrolled"}]


def two_layers(self: Any, x: Any) -> Any:
    return self.b(torch.tanh(self.a(x)))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many instances each comparison with the loop had."""
    found: list[int] = []

    def counted(batched: Outcome, *rest: Any, **options: Any) -> Any:
        found.append(len(batched.results))
        return judge(batched, *rest, **options)

    monkeypatch.setattr(checking, "judge", counted)
    return found


# The rule, on wrong data


def test_difference_on_wrong_data() -> None:
    exact = torch.linspace(-1, 1, 9, dtype=torch.float64)
    loop = exact.float()
    assert not difference(loop.clone(), loop, exact).message
    assert "error" in difference(loop + 1e-4, loop, exact).message
    assert "error" in difference(loop + 1e-4, loop).message
    assert "float64" in difference(loop.double(), loop, exact).message
    assert "NaN" in difference(torch.full((9,), torch.nan), loop, exact).message
    assert "NaN" in difference(torch.tensor([torch.inf]), torch.tensor([1.0])).message
    assert "sign" in difference(torch.tensor([torch.inf]), torch.tensor([-torch.inf])).message
    assert difference(torch.tensor([1]), torch.tensor([2])).message == "not equal"
    assert difference(None, loop, exact).message == "None"
    assert "not None" in difference(loop, None).message
    assert not difference(None, torch.zeros(2)).message
    assert "[8]" in difference(loop[:8], loop, exact).message
    assert "sparse" in difference(loop.to_sparse(), loop).message
    assert "error" in difference((loop + 1e-4).to_sparse(), loop.to_sparse(), exact).message
    assert not difference(loop.to_sparse(), loop.to_sparse(), exact.to_sparse()).message
    assert "'a', the loop has 'b'" in difference("a", "b").message
    assert "int, the loop has float" in difference(1, 1.0).message
    assert difference(1.5, 1.0).message and not difference(1.0, 1.0).message
    assert not difference(float("nan"), float("nan")).message


def test_the_own_error_of_the_loop_is_capped() -> None:
    """A loop that differs from float64 by much allowed any error; 16 times as much is told."""
    loop = torch.tensor([1.0, 2.0])
    found = difference(16 * loop, loop, loop.double() * 5, largest=2.0)
    assert "the loop's own 8, counted up to 0.00069" in found.message
    assert not difference(
        loop.clone(), loop, loop.double() * 5
    ).message  # the loop itself is the referee then
    assert "no float64 run" in difference(loop * 1.0001, loop).message


def test_a_gradient_that_cancels_is_judged_by_the_largest() -> None:
    """Exactly it is nothing; what float32 makes of it is rounding of numbers of about 1."""
    exact, loop = torch.tensor([1e-18], dtype=torch.float64), torch.tensor([3e-8])
    assert not difference(torch.tensor([-2e-8]), loop, exact, largest=1.0).message
    assert difference(torch.tensor([-2e-6]), loop, exact, largest=1.0).message


def test_a_number_that_is_exact_by_chance_is_judged_by_the_others() -> None:
    exact = Outcome([[torch.ones(1, dtype=torch.float64)] for _ in range(3)])
    loop = Outcome([[torch.ones(1)], [torch.ones(1) + 1e-5], [torch.ones(1) - 1e-5]])
    near, far = (Outcome([[torch.ones(1) + apart]] + loop.results[1:]) for apart in (3e-5, 1e-4))
    assert not judge(near, loop, exact).differences
    assert list(judge(far, loop, exact).differences) == [(0, 0)]


def test_judge_names_what_differs() -> None:
    one = torch.ones(3)
    loop = Outcome([[one, one], [one]], {"w": one, "v": None})
    assert not judge(Outcome([[one, one], [one]], {"w": one, "v": None}), loop).differences
    assert list(judge(Outcome([[one, one + 1], [one]], {"w": one}), loop).differences) == [(0, 1)]
    assert list(judge(Outcome([[one, one], [one, one]], {"w": one}), loop).differences) == [(1, 0)]
    assert list(judge(Outcome([[one, one], [one]], {"w": one, "v": one}), loop).differences) == ["v"]
    assert list(judge(Outcome([[one, one], [one]], {"w": one * 2}), loop).differences) == ["w"]
    assert "1 results, the loop has 2" in str(judge(Outcome([[one, one]]), loop).differences)


# Copies


def test_copies_share_what_is_shared_and_nothing_else() -> None:
    made = M.Tied()
    table = torch.randn(1000, 4)
    rows, hidden = [table[1], table[2]], torch.randn(4, requires_grad=True) * 2
    copied = Material.of(made, [(made, rows[0], hidden), (made, rows[0], rows[1])]).copy()
    assert copied.owner is copied.instances[0][0] is not made
    assert copied.owner.out.weight is copied.owner.embed.weight is not made.embed.weight
    (_, row, h), (_, again, other) = copied.instances
    assert row is again is not rows[0] and torch.equal(row, rows[0]) and torch.equal(other, rows[1])
    assert row.untyped_storage().nbytes() == 16  # not the table
    assert h.is_leaf and h.requires_grad and torch.equal(h, hidden)
    assert copied.wanted["input 0"] is h and copied.wanted["embed.weight"] is copied.owner.embed.weight
    doubled = copied.copy(double=True)
    assert {t.dtype for t in doubled.owner.parameters()} == {torch.float64}
    assert (
        doubled.owner.out.weight is doubled.owner.embed.weight
        and doubled.instances[0][1].dtype is torch.float64
    )
    assert isinstance(doubled.owner.out.weight, nn.Parameter)


def test_a_deep_chain_is_copied() -> None:
    tree = M.Tree(torch.tensor(1))
    for _ in range(3000):
        tree = M.Tree(None, [tree])
    found, copied = 0, Material.of(None, [tree]).copy().instances[0]
    while copied.children:
        copied, found = copied.children[0], found + 1
    assert found == 3000 and copied.word is not tree.word


# What is equal goes on as if unchecked


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("out", ["stack", "list", "nested"])
def test_an_equal_minibatch_goes_on_as_it_does_unchecked(mode: dict[str, Any], out: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.b(torch.tanh(self.a(x)))
        return {"y": y, "n": 3, "none": None} if out == "list" else y

    plain = model(forward, two(), out=out, **mode)
    seen = model(forward, plain._modules, out=out, check=1, check_gradients=True, **mode)
    xs = vectors(4, 4, 4)
    found = []
    for made in (plain, seen):
        torch.manual_seed(3)
        results = made(xs)
        leaves = [r["y"] for r in results] if out == "list" else list(results.unbind())
        sum(((i + 1) * y.sum() for i, y in enumerate(leaves)), start=torch.zeros(())).backward()
        found.append(
            [*(y.detach() for y in leaves), *(t.grad for t in (*made.parameters(), *xs)), torch.rand(3)]
        )
        for t in (*made.parameters(), *xs):
            t.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_one_minibatch_in_n_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(checking, "_compare_with_loop", lambda *_: seen.append(len(calls)))
    made, other = (model(two_layers, two(), check=3) for _ in range(2))
    calls: list[int] = []
    for _ in range(7):
        calls.append(1)
        made(vectors(4, 4))
    assert seen == [1, 4, 7]
    other(vectors(4))  # each model is counted by itself
    assert seen == [1, 4, 7, 7]


def test_state_and_random_numbers_are_those_of_the_call_alone() -> None:
    def forward(self: Any, tree: Any) -> Any:
        self.seen += 1
        tree.noted = self.seen
        self.log.append(float(tree.word[0]))
        return self.a(tree.word) + torch.randn(4) * random.random() * np.random.rand()  # noqa: NPY002

    found = []
    for check in (0, 1):
        made = model(forward, {"a": nn.Linear(4, 4), "seen": 0, "log": []}, check=check)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        xs = [M.Tree(torch.arange(4.0) + i) for i in range(3)]
        made(xs)
        found.append((made.seen, made.log, [x.noted for x in xs], float(torch.rand(())), random.random()))
    assert found[0] == found[1]
    assert found[0][0] == 3


@pytest.mark.parametrize("grad", [True, False])
def test_every_kind_of_call(grad: bool, judged: list[int]) -> None:
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("error")
        options: dict[str, Any] = {"check": 1, "check_gradients": True}
        trees = M.trees(0, [1, 4, 6])
        tree = M.with_options(M.TreeLSTM(), **options)
        tree(trees), tree([])
        data = fxbatch.TracedDataset(tree, trees)
        tree([data[0], data[1]]), tree([data[2], data[0]])
        for batch in fxbatch.prefetch(tree, [[data[0]], [data[1], data[2]]]):
            tree(batch)
        chain = type(
            "Chain",
            (M.Chain,),
            {"forward": fxbatch.autobatch(shared="steps", **options)(M.Chain.forward.__fxbatch__.fn)},
        )()
        chain(torch.randn(2, 3), 3)
        layer = nn.Linear(4, 4)
        fxbatch.autobatch(**options)(lambda x: layer(x).relu())(vectors(4, 4))
        waits = model(lambda self, x: self.a(x) if self.b(x).sum() > 0 else self.b(x), two(), **options)
        waits(vectors(*[4] * 6))
    assert judged == [3, 0, 2, 2, 1, 2, 2, 2, 6]


def test_exceptions_are_compared() -> None:
    def forward(self: Any, x: Any) -> Any:
        if x.shape[0] != 4:
            raise ValueError("no")
        return self.a(x)

    made = model(forward, two(), out="list", return_exceptions=True, check=1)
    assert isinstance(made(vectors(4, 3))[1], ValueError)
    with fxbatch.disabled():
        assert isinstance(made(vectors(4, 3))[1], ValueError)


def test_a_bare_trace_knows_no_instance() -> None:
    made = model(two_layers, two(), check=1)
    with pytest.warns(fxbatch.CheckWarning, match="don't hold their instances"):
        made([fxbatch.trace(made, torch.randn(4))])


def test_autocast_rounds_as_it_does_in_the_loop(judged: list[int]) -> None:
    """What is float32 again was computed in bfloat16: the loop's own error is large, and is what is allowed."""

    def forward(self: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(torch.tanh(self.a(x))).float().exp()

    parts = {"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}
    xs = [torch.randn(64) * 10 for _ in range(6)]
    model(forward, parts, check=1, check_gradients=True)(xs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(lambda self, x: self.b(torch.tanh(self.a(x))).float(), parts, check=1)(xs)
    assert judged == [6, 6, 6, 6]  # with float64 as well


# What differs is an error


def corrupt(monkeypatch: pytest.MonkeyPatch, name: str, instance: int) -> None:
    """The value that an instance gets from the operation of that name is wrong."""
    launch = Run.launch

    def corrupted(self: Run, phase: Any) -> None:
        launch(self, phase)
        program = phase.program
        calls = [c for c in range(len(program)) if name in program.signatures[program.sig[c]].name]
        value = int(program.first_value[calls[instance]])
        arena = self.memory.arena(int(self.value_type[value]))
        arena[int(self.value_row[value])] += 0.5

    monkeypatch.setattr(Run, "launch", corrupted)


def test_a_wrong_value_is_an_error_with_instance_operation_and_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = model(lambda self, x: self.b(self.a(x)), two(), fuse=False, check=1)
    xs = vectors(4, 4, 4)
    made(xs)
    corrupt(monkeypatch, "b", 1)
    with pytest.raises(fxbatch.DifferenceError) as caught:
        made(xs)
    text = str(caught.value)
    assert "instance 1, tensor 0 of its result: error" in text and "instance 2" not in text
    assert "first operation that differs: b(f32[4]) -> (f32[4]), instance 1 (test_checking.py:" in text
    assert "error 0.5, allowed" in text
    assert caught.value.instance == 1 and caught.value.operation == "b(f32[4]) -> (f32[4])"
    monkeypatch.undo()
    made(xs)


def test_a_difference_is_told_with_any_seed_and_with_the_weights_of_functional_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = backward.add_parameter_gradients

    def doubled(*left: Any) -> None:
        add(*left)
        left[-1].update({key: 2 * grad for key, grad in left[-1].items() if grad.shape == (4,)})

    monkeypatch.setattr(backward, "add_parameter_gradients", doubled)
    made = model(lambda self, x: self.a(x), {"a": nn.Linear(4, 4)}, check=1, check_gradients=True)
    weights = {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}
    torch.manual_seed(1 << 40)  # a process that sets none has one as large
    for call in (made, lambda xs: torch.func.functional_call(made, weights, (xs,))):
        with pytest.raises(fxbatch.DifferenceError, match=r"a.bias: error "):
            call(vectors(4, 4))


def test_a_wrong_gradient_is_an_error_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    add = backward.add_parameter_gradients

    def doubled(*left: Any) -> None:
        add(*left)
        found: dict[int, torch.Tensor] = left[-1]
        found.update({key: 2 * grad for key, grad in found.items() if grad.shape == (5,)})

    monkeypatch.setattr(backward, "add_parameter_gradients", doubled)
    parts = {"a": nn.Linear(4, 5)}
    model(lambda self, x: self.a(x), parts, check=1)(vectors(4, 4))
    with pytest.raises(
        fxbatch.DifferenceError, match=r"a.bias: error (.|\n)*a.bias is read by .*a\(f32\[4\]\)"
    ):
        model(lambda self, x: self.a(x), parts, check=1, check_gradients=True)(vectors(4, 4))
    with torch.no_grad():
        model(lambda self, x: self.a(x), parts, check=1, check_gradients=True)(vectors(4, 4))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "change", [lambda r: 16 * r, lambda r: r[:1], lambda r: r.double(), lambda r: (r, r)]
)
def test_a_result_put_together_wrongly_is_an_error(
    mode: dict[str, Any], change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(two_layers, two(), check=1, **mode)
    from_engine = fxbatch.runtime.engine.Engine.assemble
    monkeypatch.setattr(fxbatch.runtime.engine.Engine, "assemble", lambda *a: change(from_engine(*a)))
    with pytest.raises(fxbatch.DifferenceError, match="gives other results than its undecorated loop"):
        made(vectors(4, 4))


def test_a_loop_that_raises_where_batched_does_not() -> None:
    def forward(self: Any, x: Any) -> Any:
        if next(calls) > 1:
            raise ValueError("more than two instances")
        return self.a(x)

    calls = (n for n in itertools.count())  # a generator, which goes on where it was
    with pytest.raises(fxbatch.DifferenceError, match=r"loop of .*forward raises ValueError: more than two"):
        model(forward, two(), check=1)(vectors(4, 4))


# What can't be compared is said to be so


def test_what_the_loop_does_not_repeat_is_told_once() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.a(x) * next(calls), self.b(x)

    calls = (n for n in itertools.count(1))  # a generator, which goes on where it was
    made = model(forward, two(), check=1)
    with pytest.warns(
        fxbatch.CheckWarning, match=r"2 results .*the loop gives something else .*instance 0, tensor 0"
    ):
        made(vectors(4, 4))
    made(vectors(4, 4))


def test_random_numbers_in_another_order_are_told_and_their_types_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.d(self.b(self.d(self.a(x)))), self.readout(x)

    made = model(forward, {**two(), "readout": nn.Linear(4, 4), "d": nn.Dropout(0.5)}, check=1)
    with pytest.warns(fxbatch.CheckWarning, match="depend on random numbers .*in eval"):
        made(vectors(*[4] * 6))
    corrupt(monkeypatch, "readout", 2)
    with pytest.raises(fxbatch.DifferenceError, match="instance 2, tensor 1"):
        made(vectors(*[4] * 6))


def test_what_can_not_be_copied_is_an_error() -> None:
    made = model(two_layers, {**two(), "source": (x for x in range(3))}, check=1)
    with pytest.raises(
        fxbatch.FxbatchError, match=r"can't be copied .*generator.* give what can't be copied a __deepcopy__"
    ):
        made(vectors(4, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": True}, "check=True: takes a whole number"),
        ({"check": -1}, "check=-1"),
        ({"check": 0.5}, "check=0.5"),
        ({"check_gradients": 1, "check": 1}, "takes True or False"),
        ({"check_gradients": True}, "give both"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxbatch.OptionError, match=message):
        fxbatch.autobatch(**options)


def test_a_lazy_block_can_not_be_checked() -> None:
    with pytest.raises(fxbatch.OptionError, match="lazy"), fxbatch.lazy(nn.Linear(2, 2), check=1):
        pass
