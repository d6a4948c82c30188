"""The plain loop as one of the strategies: what is chosen, from counts alone, and that each choice is exact."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxbatch
from benchmarks.ordinary_models import ROWS
from fxbatch.runtime import strategy as module
from fxbatch.runtime.costs import BUILD, STEPS, Counts, Eager, Seen, batched_cost, loop_cost
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.strategy import SCOUTS, AdaptiveSwitch, Strategy
from tests.oracle import check_equal


@pytest.fixture(autouse=True)
def _chooses(_always_batched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(module, "importing", lambda: 0.0)  # whatever other tests have imported


weight = torch.ones(4, 4)


class Chain(nn.Module):
    """A cell over a sequence of vectors: batches well."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.calls = 0
        self.last: Any = None

    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        h = torch.zeros_like(words[0])
        for w in words:
            h = self.cell(w, h)
        return h


class Sizes(nn.Module):
    """A sentence as one tensor: each length makes signatures of its own, so batching does not pay."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = torch.tanh(self.inner(x)).sum(0)
        return self.last + torch.rand(4)


def chains(n: int, length: int = 20) -> list[list[torch.Tensor]]:
    return [[torch.randn(4) for _ in range(length)] for _ in range(n)]


def lengths(n: int) -> list[torch.Tensor]:
    return [torch.randn(3 + i, 3) for i in range(n)]


def decorated(model: nn.Module, **options: Any) -> Any:
    return fxbatch.autobatch(**options)(model.forward)


def engine_of(f: Any, model: nn.Module) -> Engine:
    found: Engine = f.__fxbatch__.engine(model)
    return found


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many instances each recording of the test had."""
    found: list[int] = []
    record = Engine.record

    def counted(self: Engine, fn: Any, instances: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(len(instances))
        return record(self, fn, instances, *args, **kwargs)

    monkeypatch.setattr(Engine, "record", counted)
    return found


# Choices


# Row: how many of ten minibatches ran the loop, and how many were packed; training, inference.
LOOP, PACKED = (10, 0), (0, 10)
CHOICES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    **dict.fromkeys(ROWS, (LOOP, LOOP)),
    "CRF forward": ((1, 0), LOOP),  # one on trial, then batched
    "CRF Viterbi": ((9, 0), LOOP),
    "adaptive computation time": ((0, 0), LOOP),
    "pointer network": ((0, 0), LOOP),
    "tree decoder": ((9, 0), LOOP),  # one on trial
    "floats that differ": ((9, 0), LOOP),
    "greedy autoencoder": ((8, 0), LOOP),  # tried, and not worth it once counted
    "scatter graph network": (PACKED, PACKED),
    "MPNN with edge_index": (PACKED, PACKED),
    "nn.LSTM, new T": (PACKED, PACKED),
    "attention, 9 lengths": (PACKED, PACKED),
    "embed, MLP, mean": (PACKED, PACKED),
    "Conv1d": (PACKED, LOOP),
    "conv2d": ((9, 1), LOOP),  # its convolutions run picture by picture
    "Transformer layer": (PACKED, PACKED),
    "Tree-LSTM": ((0, 0), (0, 0)),
}


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", [name for name in ROWS if name != "beam search"])
def test_builds_launches_and_fallbacks_of_each_row(name: str, grad: bool, batches: list[int]) -> None:
    row, rounds = ROWS[name], 10
    model = row.model()
    f = row.decorate(model)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        for round in range(rounds):
            result = f(*row.batch(round))
            if grad:
                result.sum().backward()
    engine = engine_of(f, model)
    strategy = engine.strategy
    assert strategy is not None
    built = [x for x in engine.operations._entries.values() if x.graphs is not None]
    loops, packed = CHOICES[name][0 if grad else 1]
    assert (strategy.looped(grad=grad), strategy.packed(grad=grad)) == (loops, packed)
    assert len(batches) == rounds - loops - packed
    if not batches:
        assert not built
        assert not len(engine.table.signatures), "nothing was recorded"
    elif loops == 9:
        assert not built and batches == [row.instances], "on trial"
    else:
        assert set(batches) <= {row.instances - SCOUTS, row.instances}
        assert batches.count(row.instances - SCOUTS) <= 2, "some were counted first"
        assert 0 < len(built) <= 30


@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_the_same_data_chooses_the_same_way_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def choices() -> list[bool]:
        torch.manual_seed(0)
        model, found = Chain(), []
        f = decorated(model)
        for n in (1, 2, 40, 3, 16, 40, 1, 40):
            before = model.calls
            with torch.no_grad():
                f(chains(n))
            strategy = engine_of(f, model).strategy
            assert strategy is not None and model.calls == before + n
            found.append(strategy.choose(n, grad=False).how == "batched")
        return found

    first = choices()
    for name in ("time", "perf_counter", "process_time", "monotonic", "thread_time"):
        monkeypatch.setattr(time, name, lambda: 1e9)
    assert choices() == first
    assert True in first and False in first


def test_what_batches_well_is_batched_from_its_first_minibatch_on(batches: list[int]) -> None:
    model = Chain()
    f = decorated(model)
    for _ in range(3):
        f(chains(64))
    assert batches == [64 - SCOUTS, 64, 64]


def test_what_does_not_pay_runs_the_loop(batches: list[int]) -> None:
    f = decorated(Sizes())
    for _ in range(5):
        f(lengths(16))
    assert not batches


def test_a_minibatch_in_doubt_is_recorded_on_trial_and_counts_decide(batches: list[int]) -> None:
    """Scouts take a number of plain data for one that batching waits for; a recording knows better."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros(32)
            for row in x:
                h = torch.tanh(self.up(row) + h) if row.sum() > 0 else torch.relu(self.down(row)) - h
            return h

    model = Branches()
    f = decorated(model)
    engine = engine_of(f, model)
    launched = []
    for round in range(12):
        torch.manual_seed(round)
        rows = [torch.randn(4 + (5 * i + 10) % 16, 32) for i in range(32)]
        result = f(rows)
        expected = torch.stack([model.forward(x) for x in rows])
        torch.testing.assert_close(result, expected)
        result.sum().backward()
        launched.append(sum(x.graphs is not None for x in engine.operations._entries.values()))
    first = launched.index(max(launched))
    assert batches == [32] * len(batches) and len(batches) >= 6
    assert 0 < first < 10 and launched[:first] == [0] * first  # nothing is built for the trial
    assert engine.strategy is not None and 12 - engine.strategy.looped(grad=True) == len(batches)


def test_what_is_estimated_to_pay_once_built_is_counted_before_anything_is_built(batches: list[int]) -> None:
    """Scouts don't see that each instance sets a float of its own, which takes its calls out of C."""

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 2)

        def forward(self, x: torch.Tensor, p: float) -> torch.Tensor:
            self.drop.p = p
            return self.last(self.drop(torch.relu(self.first(x))))

    model = Annealed()
    f = decorated(model)
    engine = engine_of(f, model)
    for round in range(120):
        x, p = torch.randn(32, 32), [0.05 + 0.01 * i + 0.001 * round for i in range(32)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxbatch.LoopWarning)
            f(list(x), p).sum().backward()
    assert batches == [32], "one on trial"
    assert not any(x.graphs for x in engine.operations._entries.values())
    assert engine.strategy is not None and engine.strategy.looped(grad=True) == 119


def test_adaptive_false_and_options_that_say_how_always_batch(batches: list[int]) -> None:
    for options in (
        {"adaptive": False},
        {"schedule": "depth"},
        {"mode": "unrolled"},
        {"backward": "autograd"},
    ):
        batches.clear()
        decorated(Sizes(), **options)(lengths(4))
        assert batches == [4], options
    with pytest.raises(fxbatch.OptionError, match="adaptive=2: takes True or False"):
        fxbatch.autobatch(adaptive=2)


def test_a_minibatch_that_is_checked_is_batched(batches: list[int]) -> None:
    f = decorated(Sizes(), check=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.CheckWarning)
        for _ in range(4):
            f(lengths(4))
    assert batches == [4, 4]


def test_sizes_that_come_again_are_noticed() -> None:
    """Nine lengths: each new at first, and then the same ones in each minibatch."""

    def run(strategy: Strategy, n: int, length: Callable[[int], int]) -> list[bool]:
        found = []
        for k in range(n):
            choice = strategy.choose(1024, grad=False)
            for i in range(choice.scouts):
                with strategy.watched(grad=False).watch():
                    x = torch.ones(length(SCOUTS * k + i), 4)
                    for _ in range(30):
                        x = torch.nn.functional.linear(x, weight)
            found.append("batched" in (choice.how, choice.scouts and strategy.decide(1024, grad=False)))
        return found

    always_new = run(Strategy(), 40, lambda i: 5 + i)
    assert not any(always_new)
    again = run(Strategy(), 40, lambda i: 5 + i % 5)
    assert not any(again[:2]) and again[-1]


def test_one_that_did_not_pay_is_tried_again_after_a_while() -> None:
    strategy = Strategy()
    tried = []
    for k in range(300):
        choice = strategy.choose(1024, grad=False)
        for _ in range(choice.scouts):
            with strategy.watched(grad=False).watch():
                x = torch.ones(4)
                for _ in range(50):
                    x = torch.tanh(x) * 2
        if "batched" in (choice.how, choice.scouts and strategy.decide(1024, grad=False)):
            tried.append(k + 1)
            strategy.ran(Counts(1024, calls=102400, phases=3200, waits=102400), 1024, grad=False)
    assert tried[0] == 1
    assert 2 <= len(tried) <= 4, "seldom, and ever more so"
    assert tried[1] > 50


def test_where_nothing_is_recorded_the_loop_runs(batches: list[int]) -> None:
    """A hidden Markov model computes of its parameters alone: the words choose which."""

    class Markov(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.words = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 7))

        def forward(self, words: list[int]) -> torch.Tensor:
            scores = torch.log_softmax(self.words, 1)[:, words[0]]
            for w in words[1:]:
                before = torch.logsumexp(scores[:, None] + torch.log_softmax(self.steps, 1), 0)
                scores = before + torch.log_softmax(self.words, 1)[:, w]
            return torch.logsumexp(scores, 0)

    model = Markov()
    f = decorated(model)
    for _ in range(8):
        f([[i % 7, (i + 3) % 7, 2] for i in range(32)]).sum().backward()
    assert len(batches) <= 1, "one shows that there is nothing to batch"


class Forces(nn.Module):
    """An energy, and what it changes with: by torch.autograd.grad in the forward, or by torch.func.grad in a part."""

    def __init__(self, transform: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.gradient = Gradient(*self.energy)
        self.transform = transform
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transform:
            return self.gradient(self.energy[1](self.energy[0](x))[:3])
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Gradient(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: nn.Sequential.forward(self, y).sum())(x)


@pytest.mark.parametrize("transform", [False, True])
def test_derivatives_in_the_forward_run_the_loop_and_a_warning_says_why(
    batches: list[int], transform: bool
) -> None:
    model = Forces(transform)
    f = decorated(model)
    x = torch.randn(64, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(module.WARN + 1):
            found = f(x)
    torch.testing.assert_close(found, torch.stack([model.forward(row) for row in x]))
    said = [str(w.message) for w in caught if issubclass(w.category, fxbatch.LoopWarning)]
    assert bool(batches) == transform
    assert any("torch.func.grad in a submodule" in text for text in said) != transform


def test_graphs_are_built_from_a_credit() -> None:
    strategy = Strategy()
    mode = strategy._modes[True]
    mode.credit, strategy.building = 2.5 * BUILD, mode
    kind = fxbatch.trace.table.TensorSpec((2,), torch.float32, torch.device("cpu"))
    signatures = [
        fxbatch.trace.table.Signature(fxbatch.trace.table.Operation(f"op{i}", "function", torch.relu), (kind,), (kind,))
        for i in range(4)
    ]  # fmt: skip
    assert strategy.put_off(signatures, [1, 9, 0, 5]) == {0}, "those with the most calls first"
    assert strategy.put_off(signatures, [1, 9, 0, 5]) == {0}
    mode.credit += BUILD
    assert strategy.put_off(signatures, [1, 9, 0, 5]) == frozenset()
    strategy.building = None
    assert strategy.put_off(signatures, [1, 1, 1, 1]) == frozenset(), "nothing is put off where nobody pays"


def test_what_would_pay_waits_until_its_graphs_are_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LENT", 0.0)
    monkeypatch.setattr(module, "FIRST_CREDIT", 2.0)
    strategy = Strategy()
    found = []
    for _ in range(400):
        choice = strategy.choose(400, grad=False)
        for _ in range(choice.scouts):
            with strategy.watched(grad=False).watch():
                x = torch.ones(4)
                for _ in range(8):
                    x = torch.relu(torch.nn.functional.linear(torch.tanh(x), weight))
        found.append("batched" in (choice.how, choice.scouts and strategy.decide(400, grad=False)))
        if len(found) == 1:
            assert "operations have to be built first" in strategy.describe(400, grad=False)
    first = found.index(True)
    assert 10 < first < 300 and all(found[first:])


def test_what_is_not_built_runs_one_by_one_where_that_pays_all_the_same() -> None:
    strategy = Strategy()
    strategy.choose(400, grad=False)
    with strategy.watched(grad=False).watch():
        x = torch.ones(4)
        for _ in range(8):
            x = torch.relu(torch.nn.functional.linear(torch.tanh(x), weight))
    strategy.decide(400, grad=False)
    mode = strategy._modes[False]
    for late, late_calls, chosen in ((0, 0, "batched"), (1, 60, "batched"), (1, 600, "loop")):
        counts = Counts(400, calls=9600, steps=24, late_steps=late, late=late, late_calls=late_calls)
        strategy.ran(counts, 400, grad=False)
        mode.credit, mode.lent = -BUILD, True
        assert strategy._best(mode, 400, False) == chosen
    assert "1 operation has to be built first" in strategy.describe(400, grad=False)


def test_numbers_of_the_instances_own_tensors_are_no_waits_and_rows_no_kinds_of_their_own() -> None:
    """What a CRF does with its tags: they are there, and a row is looked up by number whatever the length."""
    row, seen = ROWS["CRF forward"], Seen()
    model = row.model()
    for x, tags in zip(*row.batch(0, 4), strict=True):
        with seen.watch():
            model(x, tags)
    assert seen.waits == 0 and seen.phases == 0
    counts = seen.expected(32, grad=True)
    assert counts.phases == 1 and counts.waits == 0
    assert counts.unbatched <= 32  # the layer that each length has to itself


def test_operators_that_run_instance_by_instance_make_packing_dearer() -> None:
    strategy = Strategy()
    with strategy.watched(grad=True).watch():
        x = torch.ones(100, 4)
        for _ in range(5):
            x = torch.tanh(x) * 2
    mode = strategy._modes[True]
    mode.credit = 1e9
    assert strategy.choose(64, grad=True, packs=True).how == "packed"
    strategy.was_packed(64, 5, 0, grad=True)
    assert strategy.choose(64, grad=True, packs=True).how != "packed"
    strategy.was_packed(64, 0, 60, grad=True)
    assert strategy.choose(64, grad=True, packs=True).how != "packed", "most sizes did not fit its form"
    assert "packed" in {strategy.choose(64, grad=True, packs=True).how for _ in range(4)}


def test_what_was_lent_to_packing_in_vain_is_there_for_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "importing", lambda: module.IMPORTING)
    strategy = Strategy()
    choice = strategy.choose(400, grad=False, packs=True)
    for _ in range(choice.scouts):
        with strategy.watched(grad=False).watch():
            x = torch.ones(4)
            for _ in range(8):
                x = torch.relu(torch.nn.functional.linear(torch.tanh(x), weight))
    monkeypatch.setattr(module, "FIRST_CREDIT", 2.0)
    monkeypatch.setattr(module, "LENT", 320.0)
    assert strategy.decide(400, grad=False, packs=True) == "packed"
    assert strategy.not_packed(400, grad=False, tried=True) == "batched"


def test_savings_are_spent_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_CREDIT", 2.0)

    def would_batch(strategy: Strategy) -> bool:
        found = []
        for _ in range(2):
            choice = strategy.choose(400, grad=False)
            for _ in range(choice.scouts):
                with strategy.watched(grad=False).watch():
                    x = torch.ones(4)
                    for _ in range(8):
                        x = torch.relu(torch.nn.functional.linear(torch.tanh(x), weight))
            found.append("batched" in (choice.how, choice.scouts and strategy.decide(400, grad=False)))
        return found[1]

    assert would_batch(Strategy())
    spent = Strategy()
    spent._modes[False].lent = True
    assert not would_batch(spent)


def test_costs_add_up() -> None:
    counts = Counts(64, calls=1000, steps=20, phases=3, waits=64)
    assert batched_cost(counts) < batched_cost(
        Counts(64, calls=1000, steps=20, phases=3, waits=64, grad=True)
    )
    assert batched_cost(counts) < batched_cost(Counts(64, calls=1000, python_steps=20, phases=3, waits=64))
    eager = Eager(calls=10, operators=15)
    assert loop_cost(eager, 64, grad=True) > loop_cost(eager, 64, grad=False) > 0
    assert loop_cost(replace(eager, nodes=9), 64, grad=True) > loop_cost(eager, 64, grad=True)


def test_scouts_count_calls_steps_and_waits() -> None:
    def forward() -> torch.Tensor:
        y = torch.tanh(torch.tanh(x)) + x
        if y.sum() > 0:
            y = y * 2
        torch.nn.functional.linear(x.view(2, 2), y.view(2, 2))
        return y

    seen = Seen()
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        with seen.watch():
            y = forward()
        seen.gave(y)
    assert (seen.calls, seen.waits) == (2 * 10, 2)
    assert (seen.operators, seen.views) == (2 * 8, 2 * 3)  # linear is two calls of ATen, one of them a view
    assert seen.nodes == 2 * 5, (
        "tanh, tanh, add, mul and x, which gets a gradient; nobody asks for the others'"
    )
    expected = seen.expected(100, grad=False)
    assert expected.phases == 2 and expected.waits == 100
    assert expected.python_steps == 0
    assert expected.steps == round(STEPS * 9), (
        "tanh and view twice, the others once; what asks for a number is no step"
    )


# Exactness


def loop(model: nn.Module, data: list[Any]) -> list[Any]:
    return [model.forward(x) for x in data]


@pytest.mark.parametrize("kind, data", [(Sizes, lengths(6)), (Chain, chains(48))])
@pytest.mark.parametrize("out", ["stack", "list", "nested"])
def test_results_gradients_random_numbers_and_state_are_the_loops(
    kind: Any, data: list[Any], out: str
) -> None:
    torch.manual_seed(3)
    data = [
        torch.randn(x.shape) if isinstance(x, torch.Tensor) else [torch.randn(4) for _ in x] for x in data
    ]
    one, other = kind(), kind()
    other.load_state_dict(one.state_dict())
    f = decorated(one, out=out)
    for round in range(3):
        torch.manual_seed(round)
        found = f(data)
        state = torch.get_rng_state()
        torch.manual_seed(round)
        expected = loop(other, data)
        if kind is Sizes:  # by the loop throughout: to the bit
            assert torch.equal(state, torch.get_rng_state())
            assert torch.equal(one.last, other.last)
        rows = list(found.unbind() if out != "list" else found)
        for a, b in zip(rows, expected, strict=True):
            if kind is Sizes:
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b)
        assert one.calls == other.calls == len(data) * (round + 1)
        sum(x.sum() for x in rows).backward()
        sum(x.sum() for x in expected).backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        if kind is Sizes:
            assert torch.equal(a.grad, b.grad)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6 * float(b.grad.abs().max()))


def test_values_and_gradients_of_a_minibatch_of_which_some_ran_in_the_loop(batches: list[int]) -> None:
    class Model(Chain):
        forward = fxbatch.autobatch(Chain.forward)

    data = chains(40)
    check_equal(Model(), data)
    assert batches and batches[0] == 40 - SCOUTS


def test_nothing_is_chosen_for_an_empty_minibatch() -> None:
    assert decorated(Chain(), out="list")([]) == []
    assert decorated(Chain())([]).shape == (0,)


def test_an_error_names_its_instance_and_is_given_back_where_asked() -> None:
    class Fails(Chain):
        def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
            h = super().forward(words)
            if words[0].shape != (4,) or len(words) == 7:
                raise ValueError("seven")
            return h

    for place in (1, 30):
        data = chains(48)
        data[place] = data[place][:7]
        with pytest.raises(ValueError, match="seven") as caught:
            decorated(Fails())(data)
        assert f"fxbatch: in instance {place} of the minibatch" in caught.value.__notes__
        found = decorated(Fails(), out="list", return_exceptions=True)(data)
        assert [i for i, x in enumerate(found) if isinstance(x, ValueError)] == [place]


def test_a_decorated_call_inside_the_loop_is_plain_code() -> None:
    inner = decorated(Sizes())

    class Outer(Sizes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner([x, x]).sum(0)

    f = decorated(Outer())
    for _ in range(2):
        assert f(lengths(4)).shape == (4, 4)
    assert not engine_of(inner, inner.__self__).operations._entries


def test_dispatch_modes_see_the_loops_calls() -> None:
    data = lengths(6)
    model = Sizes()
    f = decorated(model)
    f(data)
    with FlopCounterMode(display=False) as ours:
        f(data)
    with FlopCounterMode(display=False) as theirs:
        loop(model, data)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


def test_instances_that_are_watched_give_what_they_give_unwatched() -> None:
    """In a dispatch mode torch loses that a view is conjugated or negated."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linalg.pinv(x), torch.linalg.eigvals(x[:, :2]) @ x.mH.imag[:2].cfloat()

    xs = [torch.randn(2, 3, dtype=torch.complex64) for _ in range(4)]
    for found, x in zip(fxbatch.autobatch(out="list")(forward)(xs), xs, strict=True):
        for a, b in zip(found, forward(x), strict=True):
            assert torch.equal(a, b)


def test_double_backward_goes_through_the_loop() -> None:
    model = Sizes()
    result = decorated(model)(lengths(4)).sum()
    (first,) = torch.autograd.grad(result, model.inner.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), model.inner.weight)
    assert second.abs().sum() > 0


# What is said


def test_one_warning_says_that_the_loop_runs() -> None:
    f = decorated(Sizes())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * module.WARN):
            f(lengths(4))
    (warning,) = caught
    assert warning.category is fxbatch.LoopWarning
    assert "Sizes.forward: its minibatches run the plain loop" in str(warning.message)
    assert "adaptive=False" in str(warning.message)
    assert warning.filename == __file__


def test_explain_says_what_was_chosen_and_what_would_change_it() -> None:
    model = Sizes()
    model.forward = decorated(model)  # type: ignore[method-assign]
    assert "will choose" in fxbatch.explain(model, lengths(4)).strategy
    model(lengths(16))
    report = fxbatch.explain(model, lengths(16))
    assert report.strategy.startswith("the plain loop: ")
    assert "more instances, sizes that come again or fewer waits" in " ".join(str(report).split())
    good = Chain()
    good.forward = decorated(good)  # type: ignore[method-assign]
    good(chains(64))
    assert fxbatch.explain(good, chains(64)).strategy.startswith("a batch: ")
    assert fxbatch.explain(model, lengths(4), adaptive=False).strategy == ""


@pytest.mark.parametrize(("cost", "how"), [(0.02, "packed"), (1e9, "loop")])
def test_imports_wait_unless_later_minibatches_repay_them(
    monkeypatch: pytest.MonkeyPatch, cost: float, how: str
) -> None:
    monkeypatch.setattr(module, "importing", lambda: cost)  # 0.02 is what less than a hundred save
    strategy = Strategy()
    found: list[str] = []
    weight = torch.ones(64, 64)
    for _ in range(10):
        choice = strategy.choose(64, grad=False, packs=True)
        for _ in range(choice.scouts):
            with strategy.watched(grad=False).watch():
                x = torch.ones(20, 64)
                for _ in range(2):
                    x = torch.relu(torch.nn.functional.linear(x, weight))
                x.mean(0)
        found.append(strategy.decide(64, grad=False, packs=True) if choice.scouts else choice.how)
    assert found[-1] == how
