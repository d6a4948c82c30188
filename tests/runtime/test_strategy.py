"""The plain loop as one of the strategies: what is chosen by which times, and that each choice is exact. No test reads
the real clock: times are given, or a clock of the test's own stands still but where it is moved."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxbatch
from fxbatch import stopwatch
from fxbatch.runtime import strategy as module
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.strategy import (
    HOPELESS,
    MET,
    PATIENCE,
    REPAID,
    RETIMED,
    SCOUTS,
    TOO_LONG,
    TRIAL,
    Choice,
    Strategy,
    Trial,
)
from fxbatch.stopwatch import Timing, building, count_late
from fxbatch.trace.state import current_recorder
from tests.clock import Clock
from tests.oracle import check_equal

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize(("threads", "clock_read"), [(1, time.thread_time), (4, time.perf_counter)])
def test_on_one_thread_nothing_else_on_the_machine_counts(
    threads: int, clock_read: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert stopwatch._clock.__wrapped__() is clock_read
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # launches return before they are done
    assert stopwatch._clock.__wrapped__() is time.perf_counter


class Chain(nn.Module):
    """A cell over a sequence of vectors. An instance takes the clock a second undecorated, `recorded` where it is
    recorded."""

    def __init__(self, clock: Clock | None = None, recorded: float = 0.125) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.clock, self.recorded = clock, recorded
        self.calls = 0

    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        if self.clock is not None:
            self.clock.time += 1.0 if current_recorder() is None else self.recorded
        h = torch.zeros_like(words[0])
        for w in words:
            h = self.cell(w, h)
        return h


class Sizes(nn.Module):
    """A sentence as one tensor, its last hidden vector as an attribute, and random numbers."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.clock = clock
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = torch.tanh(self.inner(x)).sum(0)
        return self.last + torch.rand(4)


def chains(n: int, length: int = 3) -> list[list[torch.Tensor]]:
    return [[torch.randn(4) for _ in range(length)] for _ in range(n)]


def lengths(n: int) -> list[torch.Tensor]:
    return [torch.randn(3 + i, 3) for i in range(n)]


def decorated(model: nn.Module, **options: Any) -> Any:
    return fxbatch.autobatch(**options)(model.forward)


def strategy_of(f: Any, model: nn.Module) -> Strategy:
    engine: Engine = f.__fxbatch__.engine(model)
    assert engine.strategy is not None
    return engine.strategy


# Choices


class Times:
    """What an instance takes by the loop and batched, forward and backward; what a batched minibatch builds."""

    def __init__(
        self, loop: float, batch: float, *, back: tuple[float, float] = (0.0, 0.0), late: float = 0.0
    ) -> None:
        self.loop, self.batch, self.back, self.late = loop, batch, back, late
        self.building: Iterator[float] = iter(())
        self.spent = 0.0  # from the second minibatch on
        self.begun = False


def run(strategy: Strategy, n: int, times: Times, *, grad: bool = False) -> Choice:
    """One minibatch of n instances that takes as long."""
    choice = strategy.choose(n, grad=grad, spent=times.spent if times.begun else 0.0)
    times.begun = True
    timing = choice.timing
    if timing is not None:
        by_loop = choice.scouts > 0
        timing.forward += timing.instances * (times.loop if by_loop else times.batch)
        timing.backward += timing.instances * times.back[not by_loop]
        timing.building += 0.0 if by_loop else next(times.building, 0.0)
        timing.late += 0.0 if by_loop else timing.instances * times.late
    return choice


def loops(strategy: Strategy, n: int, times: Times, minibatches: int, *, grad: bool = False) -> list[bool]:
    """Of so many minibatches, which ran the loop (all, or the others than the scouts)."""
    return [not run(strategy, n, times, grad=grad).batches for _ in range(minibatches)]


def test_the_first_minibatch_is_batched_but_for_its_scouts() -> None:
    for n, scouts in ((1, 1), (2, 1), (3, 2), (8, 4), (64, SCOUTS), (1000, SCOUTS)):
        choice = Strategy().choose(n, grad=True)
        assert (choice.batches, choice.scouts) == (True, scouts), n
    assert Strategy().choose(0, grad=True) == Choice(True)


@pytest.mark.parametrize("n", [1, 3, 64])
@pytest.mark.parametrize("batch", [0.1, 0.9, 1.0])
def test_what_is_faster_batched_is_always_batched_and_seldom_timed(n: int, batch: float) -> None:
    strategy = Strategy()
    found = [run(strategy, n, Times(1.0, batch)) for _ in range(1000)]
    assert all(choice.batches for choice in found)
    with_scouts = [k for k, choice in enumerate(found, 1) if choice.scouts]
    most = 10 if batch < 0.5 else 30
    assert with_scouts[0] == 1 and 5 < len(with_scouts) < most
    assert sum(choice.timing is not None for choice in found) == 2 * len(with_scouts)


@pytest.mark.parametrize(
    ("alone", "rounds"), [(True, {1.3: 1, 1.1: 2, 1.05: 3}), (False, {1.6: 1, 1.3: 2, 1.2: 3})]
)
def test_how_much_slower_batching_may_be_depends_on_what_the_clock_counts(
    alone: bool, rounds: dict[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thread, or of the wall, on which other work counts."""
    monkeypatch.setattr(stopwatch, "is_alone", lambda: alone)
    for ratio, wanted in rounds.items():
        strategy = Strategy()
        found = [run(strategy, 64, Times(1.0, ratio)) for _ in range(100)]
        last = [choice.batches for choice in found].index(False)
        assert sum(choice.scouts > 0 for choice in found[:last]) == wanted, ratio


@pytest.mark.parametrize(("ratio", "most"), [(1.1, 1.1), (1.3, 1.1), (2.0, 1.2), (5.0, 1.3)])
def test_where_the_loop_is_faster_it_runs_and_finding_out_costs_little(ratio: float, most: float) -> None:
    strategy = Strategy()
    found = loops(strategy, 64, Times(1.0, ratio), 1000)
    assert all(found[-20:]) or ratio < 1.2
    cost = lambda xs: sum(1.0 if x else ratio for x in xs) / len(xs)  # noqa: E731
    assert cost(found[:30]) <= most
    assert cost(found) < 1.04 or ratio < 1.2
    assert strategy.looped(grad=False) >= sum(found)


def test_one_instance_at_a_time_is_not_given_up_for_what_a_first_minibatch_takes() -> None:
    """The first batched one takes 20 times as long as the loop, of 64 instances and of one; what it builds is there
    for the second. Of one, 32 would have to take less."""
    for n, tried in ((64, 1), (32, 1), (1, 2)):
        strategy, times = Strategy(), Times(1.0, 20.0)
        times.building = iter((5.0,))
        assert run(strategy, n, times).batches and run(strategy, n, times).timing is not None
        times.batch = 0.25
        found = loops(strategy, n, times, 20)
        assert found[0] == (tried == 1), n
        assert tried == 1 or not any(found), "found faster in its second minibatch"


def test_it_is_tried_again_ever_more_seldom() -> None:
    found = loops(Strategy(), 64, Times(1.0, 3.0), 4000)
    tried = [k for k, loop in enumerate(found, 1) if not loop]
    assert tried[:2] == [1, 2] and 4 <= len(tried) <= 9
    between = [b - a for a, b in itertools.pairwise(tried[1:])]
    assert between == sorted(between) and between[-1] > 10 * between[0]


def test_trials_of_few_instances_come_again_sooner() -> None:
    """Batching takes four times as long; the less of a minibatch has been tried, the less has that cost."""

    def next_round(begun: int) -> int:
        strategy = Strategy()
        for _ in range(5):
            choice = strategy.choose(64, grad=False)
            if choice.timing is not None:
                by_loop = choice.scouts > 0
                choice.timing.instances = choice.scouts if by_loop else begun
                choice.timing.forward = choice.timing.instances * (1.0 if by_loop else 4.0)
        return int(strategy.describe(64, grad=False).split("again ")[1].split()[0])

    assert 1 < next_round(4) < 8 < next_round(16) < 30 < next_round(48) < 100


def test_data_that_changes_changes_the_choice() -> None:
    strategy = Strategy()
    assert loops(strategy, 64, Times(1.0, 3.0), 50)[-1]
    assert not loops(strategy, 64, Times(1.0, 0.2), 200)[-1]
    assert loops(strategy, 64, Times(1.0, 9.0), 4000)[-1]


def test_each_class_of_sizes_and_each_mode_has_its_own_times() -> None:
    """Thirty minibatches of one to four, in which the loop is faster, say nothing of a hundred of 64."""
    strategy = Strategy()
    for k in range(60):
        run(strategy, 1 + k % 4, Times(1.0, 4.0))
    assert not run(strategy, 1, Times(1.0, 4.0)).batches
    assert not any(loops(strategy, 64, Times(1.0, 0.2), 100))
    assert not any(loops(strategy, 4, Times(1.0, 0.2), 20, grad=True))


def test_backward_counts_where_both_ways_had_one() -> None:
    slow_backward = Times(1.0, 0.8, back=(1.0, 3.0))
    assert loops(Strategy(), 64, slow_backward, 30, grad=True)[-1]
    fast_backward = Times(1.0, 1.6, back=(2.0, 0.1))
    assert not any(loops(Strategy(), 64, fast_backward, 30, grad=True))
    never_for_the_scouts = Times(1.0, 0.8, back=(0.0, 3.0))
    assert not any(loops(Strategy(), 64, never_for_the_scouts, 30, grad=True))


def test_sorted_minibatches_whose_first_instances_are_the_smallest_are_batched() -> None:
    strategy = Strategy()
    looped = 0
    for _ in range(200):
        choice = strategy.choose(64, grad=False)
        if choice.timing is not None:
            whole = choice.scouts in (0, 64)
            each = 0.2 if not whole else 1.0 if choice.scouts else 0.5
            choice.timing.forward += choice.timing.instances * each
        looped += not choice.batches
    assert looped < 12


def test_a_minibatch_for_which_something_was_built_is_timed_again_a_few_times() -> None:
    strategy, times = Strategy(), Times(1.0, 1.9)
    times.building = iter([0.5, 0.5])
    assert [run(strategy, 64, times).scouts for _ in range(3)] == [4, 0, 0]
    times.batch = 0.1  # the fourth, for which nothing was built
    assert not any(loops(strategy, 64, times, 30))
    always = Times(1.0, 1.9)
    always.building = iter([0.5] * 1000)
    found = loops(Strategy(), 64, always, 40)
    assert found[: 3 + RETIMED] == [False] * (2 + RETIMED) + [True]


def test_a_minibatch_that_takes_far_longer_than_the_loop_is_not_timed_again() -> None:
    times = Times(1.0, 50.0)
    times.building = iter([0.5] * 1000)
    assert loops(Strategy(), 64, times, 40) == [False] * 2 + [True] * 38


def test_what_takes_long_as_it_is_not_built_yet_is_timed_again_while_not_too_much_was_spent() -> None:
    ratio = HOPELESS + 1.0
    for late, spent, timed in ((1.5, 0.0, 1 + RETIMED), (1.5, PATIENCE * 64 + 1.0, 1), (0.5, 0.0, 1)):
        times = Times(1.0, ratio, late=late)
        times.spent = spent
        assert loops(Strategy(), 64, times, 30) == [False] * (1 + timed) + [True] * (29 - timed), (
            late,
            spent,
        )
    most = (2 * PATIENCE + REPAID * 0.5) * 64
    for spent, timed in ((most - 1.0, 1 + RETIMED), (most + 1.0, 1)):
        times = Times(1.0, ratio, late=ratio - 0.5)  # half of the loop, once built
        times.spent = spent
        assert loops(Strategy(), 64, times, 30) == [False] * (1 + timed) + [True] * (29 - timed), spent
    assert not any(loops(Strategy(), 64, Times(0.0, ratio, late=ratio + 1.0), 3)), "no time of the loop"
    strategy, times = Strategy(), Times(1.0, ratio, late=1.5)
    assert loops(strategy, 64, times, 3) == [False] * 3
    times.batch, times.late = 0.1, 0.0  # all is built
    assert not any(loops(strategy, 64, times, 30))


def test_what_was_spent_on_other_minibatches_is_not_counted() -> None:
    """A model is trained, and all that was new has cost seconds; then it is evaluated, where the loop takes less."""
    strategy, training, evaluation = Strategy(), Times(1.0, 0.5), Times(0.1, 0.3, late=0.15)
    assert not any(loops(strategy, 64, training, 8, grad=True))
    evaluation.spent, evaluation.begun = 60.0, True
    assert loops(strategy, 64, evaluation, 3 + RETIMED) == [False] * (2 + RETIMED) + [True]


def test_a_few_instances_that_take_longer_than_the_loop_for_all_are_tried_twice() -> None:
    """In the first trial all is new; more instances are begun in each."""

    def trials(seconds: float) -> int:
        strategy = Strategy()
        for number, begun in enumerate((SCOUTS, 2, 8, 32)):
            choice = strategy.choose(64, grad=False)
            timing = choice.timing
            if timing is None or (number and choice.scouts):  # the loop
                return number - 1
            timing.instances, timing.forward = begun, seconds if number else float(begun)
        return 3

    assert trials(TOO_LONG * 64) == 3
    assert trials(TOO_LONG * 64 + 1) == 2


@pytest.mark.parametrize("begun, again", [(21, True), (22, False)])
def test_a_third_of_a_minibatch_that_is_far_slower_than_the_loop_is_tried_once(
    begun: int, again: bool
) -> None:
    """What a few instances take is what each minibatch takes anyway; what a third of them take, the others take too."""
    strategy = Strategy()
    for instances, each in ((SCOUTS, 1.0), (begun, HOPELESS + 0.1)):
        timing = strategy.choose(64, grad=False).timing
        assert timing is not None
        timing.instances, timing.forward = instances, instances * each
    choice = strategy.choose(64, grad=False)
    assert (choice.batches and not choice.scouts) is again


def test_the_first_minibatch_for_which_nothing_is_built_has_caches_to_fill() -> None:
    """One that took longer than the loop is timed once more, before the loop runs for long."""
    strategy = Strategy()
    run(strategy, 64, Times(1.0, 1.0))
    run(strategy, 64, Times(1.0, 1.6))  # slow, as the first of its kind
    assert not any(loops(strategy, 64, Times(1.0, 0.5), 20))
    strategy = Strategy()
    assert loops(strategy, 64, Times(1.0, 1.6), 6) == [False, False, False, True, True, True]


def test_a_round_of_which_a_part_fails_begins_again() -> None:
    strategy = Strategy()
    for _ in range(6):
        choice = strategy.choose(64, grad=False)  # raises: no time is noted
        assert choice.batches and choice.timing is not None
    assert loops(strategy, 64, Times(1.0, 9.0), 10)[-1]


@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_a_decorated_model_is_judged_by_the_clock(clock: Clock, batches: list[int]) -> None:
    fast, slow = Chain(clock), Chain(clock, recorded=3.0)
    for model, looped in ((fast, 0), (slow, 29)):
        batches.clear()
        f = decorated(model)
        data = chains(16)
        for _ in range(40):
            f(data)
        assert strategy_of(f, model).looped(grad=True) >= looped
        # It counts its calls: one instance alone tells that it does not wait.
        assert batches[:3] == [1, 16 - SCOUTS - 1, 16]
        assert len(batches) == 41 if not looped else len(batches) <= 7
    assert "3 instances" not in strategy_of(f, slow).describe(16, grad=True)


def test_building_is_no_part_of_the_time(
    clock: Clock, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def builds(self: Engine, *args: Any, **kwargs: Any) -> Any:
        with building():
            clock.time += 1000.0
        return call(self, *args, **kwargs)

    call = Engine.call
    monkeypatch.setattr(Engine, "call", builds)
    model = Chain(clock)
    f = decorated(model)
    for _ in range(20):
        f(chains(8))
    assert strategy_of(f, model).looped(grad=True) == 0


def test_a_backward_pass_is_timed_whoever_asks_for_it_and_whenever(clock: Clock) -> None:
    class Ticks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            clock.time += ctx.seconds
            count_late(ctx.seconds / 2)
            return gradient, None

    before = Ticks.apply(torch.ones(2, requires_grad=True), 100.0)  # what an encoder gave
    one, other, unused = Timing(1), Timing(1), Timing(1)
    a = one.of(lambda: {"a": [Ticks.apply(Ticks.apply(before, 1.0), 2.0)], "b": "text"})["a"][0]
    b = other.of(lambda: Ticks.apply(before, 4.0) * 2)
    unused.of(lambda: before * 3)
    loss = Ticks.apply(a, 1000.0).sum() + Ticks.apply(b, 10_000.0).sum()
    assert (one.backward, other.backward) == (0.0, 0.0)
    loss.backward(retain_graph=True)
    assert (one.backward, other.backward, unused.backward) == (3.0, 4.0, 0.0)
    loss.backward()
    assert (one.backward, other.backward, unused.backward) == (6.0, 8.0, 0.0)
    assert (one.late, other.late, unused.late) == (3.0, 4.0, 0.0)
    one.forward_of(lambda: count_late(0.25))
    assert one.late == 3.25
    with torch.no_grad():
        Timing(1).of(lambda: before * 2)
    each = Timing(3)
    parts = each.of(lambda: [Ticks.apply(before, 1.0) for _ in range(3)], apart=True)
    torch.stack(parts).sum().backward(retain_graph=True)
    assert each.backward == 3.0
    each.backward = 0.0
    parts[0].sum().backward(retain_graph=True)
    assert each.backward == 3.0, "one of three goes backward: three times its time"


def test_each_result_may_go_backward_by_itself(clock: Clock) -> None:
    """As a user does who calls backward on the loss of each instance."""
    model = Chain(clock)
    f = decorated(model, out="list")
    for _ in range(6):
        for result in f(chains(8)):
            result.sum().backward(retain_graph=True)
    assert strategy_of(f, model).looped(grad=True) == 0


def test_adaptive_false_options_that_say_how_and_deterministic_algorithms_always_batch(
    batches: list[int], clock: Clock
) -> None:
    for options in (
        {"adaptive": False},
        {"schedule": "depth"},
        {"mode": "unrolled"},
        {"backward": "autograd"},
    ):
        batches.clear()
        decorated(Sizes(), **options)(lengths(4))
        assert batches == [4], options
    with pytest.raises(fxbatch.OptionError, match="adaptive=2: takes True, False or 'loop'"):
        fxbatch.autobatch(adaptive=2)
    f = decorated(Chain(clock, recorded=9.0))
    batches.clear()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            f(chains(4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert batches == [4] * 20


def test_a_minibatch_that_is_checked_is_batched(batches: list[int]) -> None:
    f = decorated(Sizes(), check=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.CheckWarning)
        for _ in range(4):
            f(lengths(4))
    assert batches == [4] * 4


def test_what_changes_modules_and_waits_is_recorded_for_one_instance_alone(batches: list[int]) -> None:
    """The first minibatch too is the loop's, but for one instance: each of its waits would be a phase of its own."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.layer(x) + self.last.detach())
            self.last = h
            return h * 2 if float(h.detach().sum()) > 0 else h

    one, other = Keeps(), Keeps()
    other.load_state_dict(one.state_dict())
    f, data = decorated(one), list(torch.randn(12, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        for _ in range(3):
            found, expected = f(data), torch.stack([Keeps.forward(other, x) for x in data])
            torch.testing.assert_close(found, expected)
    assert batches == [1]


# Exactness


def loop(model: nn.Module, data: list[Any]) -> list[Any]:
    return [model.forward(x) for x in data]


class Loops(Strategy):
    """By the loop, from the first minibatch on."""

    def choose(self, instances: int, *, grad: bool, spent: float = 0.0) -> Choice:
        return Choice(False, min(1, instances), Timing(1))


@pytest.mark.parametrize("kind, data", [(Sizes, lengths(6)), (Chain, chains(48))])
@pytest.mark.parametrize("out", ["stack", "list", "nested"])
def test_results_gradients_random_numbers_and_state_are_the_loops(
    kind: Any, data: list[Any], out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes runs the loop throughout, to the bit; Chain is batched after its scouts."""
    if kind is Sizes:
        monkeypatch.setattr(Strategy, "choose", Loops.choose)
    torch.manual_seed(3)
    one, other = kind(), kind()
    other.load_state_dict(one.state_dict())
    f = decorated(one, out=out)
    for round in range(3):
        torch.manual_seed(round)
        found = f(data)
        state = torch.get_rng_state()
        torch.manual_seed(round)
        expected = loop(other, data)
        if kind is Sizes:
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
    assert batches[:2] == [1, 40 - SCOUTS - 1]


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
        data = chains(48, 20)
        data[place] = data[place][:7]
        with pytest.raises(ValueError, match="seven") as caught:
            decorated(Fails())(data)
        assert f"fxbatch: in instance {place} of the minibatch" in caught.value.__notes__
        found = decorated(Fails(), out="list", return_exceptions=True)(data)
        assert [i for i, x in enumerate(found) if isinstance(x, ValueError)] == [place]


def test_a_decorated_call_inside_the_loop_is_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strategy, "choose", Loops.choose)
    inner = decorated(Sizes())

    class Outer(Sizes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner([x, x]).sum(0)

    f = decorated(Outer())
    for _ in range(2):
        assert f(lengths(4)).shape == (4, 4)
    engine: Engine = inner.__fxbatch__.engine(inner.__self__)
    assert not engine.operations._entries


def test_dispatch_modes_see_the_loops_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strategy, "choose", Loops.choose)
    data = lengths(6)
    model = Sizes()
    f = decorated(model)
    f(data)
    with (
        FlopCounterMode(display=False) as ours,
        pytest.warns(fxbatch.LoopWarning, match="a torch dispatch mode"),
    ):
        f(data)
    with FlopCounterMode(display=False) as theirs:
        loop(model, data)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


def test_double_backward_goes_through_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strategy, "choose", Loops.choose)
    model = Sizes()
    result = decorated(model)(lengths(4)).sum()
    (first,) = torch.autograd.grad(result, model.inner.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), model.inner.weight)
    assert second.abs().sum() > 0


# What is said


def test_one_warning_says_that_the_loop_runs_and_why(clock: Clock) -> None:
    f = decorated(Chain(clock, recorded=4.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5 * module.WARN):
            f(chains(4))
    (warning,) = caught
    assert warning.category is fxbatch.LoopWarning
    said = str(warning.message)
    assert "Chain.forward: its minibatches run the plain loop, which is faster: " in said
    assert "1.6e+04 ms batched, 4e+03 ms one by one (4 instances, with gradients)" in said
    assert "adaptive=False" in said
    assert warning.filename == __file__


def test_explain_says_what_was_chosen_and_when_it_is_looked_at_again(clock: Clock) -> None:
    model = Chain(clock, recorded=4.0)
    model.forward = decorated(model)  # type: ignore[method-assign]
    assert "runs where it is faster" in fxbatch.explain(model, chains(4)).strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        for _ in range(12):
            model(chains(4))
    report = fxbatch.explain(model, chains(4))
    assert report.strategy.startswith("the plain loop: ")
    assert "batching is timed again " in " ".join(str(report).split())
    good = Chain(clock)
    good.forward = decorated(good)  # type: ignore[method-assign]
    for _ in range(6):
        good(chains(64))
    assert fxbatch.explain(good, chains(64)).strategy.startswith("a batch: ")
    assert fxbatch.explain(model, chains(4), adaptive=False).strategy == ""


@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_what_is_not_known_to_pay_is_a_trial_of_as_many_instances_as_the_loops_time_allows(
    clock: Clock,
) -> None:
    """Recording takes three times as long as the loop: a part is batched, the loop runs the others, results are in
    order, and each way has had the instances that it was given."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recorded = current_recorder() is not None
            order.append(recorded)
            clock.time += 3.0 if recorded else 1.0
            return self.layer(x)

    order: list[bool] = []
    model, xs = Model(), list(torch.randn(64, 4))
    f, few = decorated(model), math.ceil(TRIAL * 2 * 64 / (3.0 - 1.0))  # backward counts as much as forward
    for scouts in (SCOUTS, 0):
        order.clear()
        y = f(xs)
        torch.testing.assert_close(y, model.layer(torch.stack(xs)))
        assert order == [False] * scouts + [True] * few + [False] * (64 - scouts - few)
        y.sum().backward()
    torch.testing.assert_close(model.layer.bias.grad, torch.full((4,), 128.0))


def test_what_is_met_for_the_first_time_ends_a_trial_as_well(clock: Clock) -> None:
    """Recording an instance takes a hundredth of the loop's time, and a tenth more for what it is the first to call."""
    trial, begun = Trial(1.0, 0.0), 0
    while trial.may_begin(begun):
        begun += 1
        clock.time += 0.01
        with building():
            clock.time += 0.1
    assert trial.begun == begun == math.ceil(MET / 0.11)
    trial, begun = Trial(1.0, 0.0), 0
    while trial.may_begin(begun):
        begun += 1
        clock.time += 0.01
    assert begun in (math.ceil(TRIAL / 0.01), math.ceil(TRIAL / 0.01) + 1)


def test_instances_that_are_begun_as_fast_as_the_loop_runs_them_do_not_end_a_trial(clock: Clock) -> None:
    """The first one takes long, as all is new to it."""
    trial = Trial(1.0, 1 / 64)
    for begun in range(64):
        assert trial.may_begin(begun)
        clock.time += 0.01 if begun else 0.2
    assert trial.begun is None


@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_an_error_behind_a_trial_names_its_instance(clock: Clock) -> None:
    def forward(x: torch.Tensor, number: int) -> torch.Tensor:
        clock.time += 3.0 if current_recorder() is not None else 1.0
        if number == 60:
            raise ValueError("no")
        return torch.tanh(x)

    f = fxbatch.autobatch(forward)
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            f(list(torch.randn(64, 4)), list(range(64)))
        assert any("instance 60" in note for note in caught.value.__notes__)


def test_a_batch_that_pays_is_whole_after_its_trials(clock: Clock, batches: list[int]) -> None:
    model = Chain(clock)
    f = decorated(model)
    for _ in range(8):
        f(chains(16))
    assert batches[-3:] == [16] * 3


@pytest.mark.filterwarnings("ignore::fxbatch.LoopWarning")
def test_a_trial_of_a_later_round_may_take_what_has_been_earned_since_the_one_before(clock: Clock) -> None:
    """A minibatch takes as long for two instances as for all: the two of a trial look as if all took far longer."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        recorded = current_recorder() is not None
        clock.time += 1.0 if not recorded else 0.01 if any(met) else 25.0
        met.append(recorded)
        return torch.tanh(x)

    met: list[bool] = []
    f, batched = fxbatch.autobatch(forward), []
    with torch.no_grad():
        for _ in range(100):
            met.clear()
            f(list(torch.randn(64, 4)))
            batched.append(sum(met))
    assert batched[1] == 2, "a part of the loop's time"
    assert batched[-3:] == [64] * 3, "and yet it is found faster"


def test_a_mistake_inside_fxbatch_runs_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that the loop does not give: it is said, and the loop runs from then on."""

    class Net(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            kind = type("Batched", (Net,), {"forward": fxbatch.autobatch(**options)(Net.forward)})
            self.__class__ = kind

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            return torch.tanh(self.linear(x)).sum()

    monkeypatch.setattr(module.AdaptiveSwitch, "on", True)
    xs, model = list(torch.randn(9, 4)), Net()
    wanted = torch.stack([Net.forward(model, x) for x in xs])
    monkeypatch.delattr("fxbatch.trace.modules._entry")
    with pytest.warns(
        fxbatch.errors.LoopWarning, match=r"a mistake inside fxbatch .please report it.: NameError"
    ):
        torch.testing.assert_close(model(xs), wanted)
    torch.testing.assert_close(model(xs), wanted)
    with pytest.raises(NameError):
        Net(adaptive=False)(xs)
    with pytest.raises(NameError):
        Net(verify=True)(xs)


@pytest.mark.parametrize("wrong", [lambda x: x.no_such_attribute, lambda x: {}[x], lambda x: x.view(3, 5)])
@pytest.mark.filterwarnings("error::fxbatch.errors.LoopWarning")
def test_the_users_own_error_is_raised_as_it_is(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
            h = self.linear(x)
            return wrong(h) if last else h

    monkeypatch.setattr(module.AdaptiveSwitch, "on", True)
    with pytest.raises((AttributeError, KeyError, RuntimeError)):
        Net()(list(torch.randn(9, 4)), [False] * 8 + [True])
