"""Building is bounded: so many seconds in a minibatch, no more than batching may save, dearest first. The clock is the
test's own: building an operation takes as long as the test says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.runtime import build_queue as module
from fxbatch.runtime import operation_cache, planner
from fxbatch.runtime.build_queue import AHEAD, FEW, LONGEST, MOST, SELDOM, SHARE, BuildQueue
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.strategy import Choice, Strategy
from fxbatch.stopwatch import building
from tests.clock import Clock
from tests.oracle import check_equal

pytestmark = pytest.mark.usefixtures("clock")


@dataclass
class Late:
    """An operation whose calls have taken so long."""

    seconds: float
    expected: float = 0.0


def test_what_took_longest_call_by_call_is_built_first_and_only_what_has_come_again(clock: Clock) -> None:
    queue, built = BuildQueue(), []

    def put(name: str, seconds: float) -> None:
        def build(_: float) -> None:
            with building():
                clock.time += 0.5
            built.append(name)

        queue.put(name, Late(seconds), build)

    for names in ("abc", "abd"):
        with queue.minibatch(8, loop=1e-6):
            for name in names:
                put(name, {"a": 1.0, "b": 3.0}.get(name, 9.0))  # each takes 0.5 to be built
    queue.earned = -1.0
    assert queue.build() == 0, "nothing is earned yet"
    queue.earn(seconds=0.0, loop=1.0, batched=True)
    queue._ahead = 1e-6
    assert queue.earned == pytest.approx(SHARE) and len(queue) == 2
    assert queue.build() == 1 and built == ["b"] and queue.earned < 0, "one at least; it is paid back"
    queue.earn(seconds=5.0, loop=0.01)
    assert queue.build() == 0, "what takes longer than the loop earns nothing"
    for _ in range(6000):
        queue.earn(seconds=0.01, loop=0.01)
    assert queue.build() == 0, (
        "minibatches that the loop runs earn less: none of them takes much longer than the loop"
    )
    for _ in range(6000):
        queue.earn(seconds=0.01, loop=0.01, batched=True)
    queue._ahead = 1e-6
    queue.build()
    assert built == ["b", "a"] and len(queue) == 0


def test_what_batching_may_save_is_spent_ahead_and_not_all_at_once(clock: Clock) -> None:
    """The loop takes a second; a minibatch 1.5, of which calls that come again, one by one, take 1.25: built, they save
    no more than 0.75, each of AHEAD times."""
    queue, built = BuildQueue(), []
    late = {k: Late(9.0) for k in range(100)}

    def build(_: float = 0.0) -> None:
        with building():
            clock.time += MOST / 2
        built.append(clock.time)

    counts = []
    for _ in range(2):
        with queue.minibatch(FEW, loop=1.0):
            before = len(built)
            clock.time += 1.5
            for k, operation in late.items():
                if queue.may_build(calls=FEW):
                    build()
                else:
                    operation.seconds += 1.25 / len(late)
                    queue.put(k, operation, build)
        counts.append(len(built) - before)
        queue.earn(seconds=1.5 + MOST / 2 * counts[-1], loop=1.0, batched=True)
    assert counts == [2, 0], (
        "the first may spend what the loop takes; what has come once says nothing of the next"
    )
    for operation in late.values():
        operation.seconds += 1.25 / len(late)
    queue.earn(seconds=1.5, loop=1.0, batched=True)
    counts.clear()
    for _ in range(50):
        queue.build()
        counts.append(len(built) - 2)
    assert counts[0] in (2, 3), "MOST after one; the last may go beyond"
    assert counts[-1] == pytest.approx((AHEAD * 0.75 + 2 * (1.0 + SHARE) - 2 * 1.5) / (MOST / 2), abs=2)


def test_a_backward_pass_that_nobody_has_timed_does_not_keep_from_building(clock: Clock) -> None:
    """Half of the loop's second is its backward pass; what is batched takes longer than the loop forward alone."""
    for guessed, ahead in ((0.0, 0.0), (0.5, 0.25 * AHEAD)):
        queue = BuildQueue()
        with queue.minibatch(8, loop=1.0):
            clock.time += 0.75
        queue.earn(seconds=1.25, loop=1.0, batched=True, guessed=guessed)
        queue.earned = -1.0
        with queue.minibatch(8, loop=1.0):
            assert queue.may_build(calls=8) == (ahead > 0.0)


def test_few_instances_may_build_as_much_as_many(clock: Clock) -> None:
    """What one instance at a time may spend is measured by FEW of them: else it would be built after hundreds."""
    for instances, seconds in ((1, FEW), (FEW, FEW), (2 * FEW, 2 * FEW)):
        queue = BuildQueue()
        with queue.minibatch(instances, loop=0.01 * instances):
            assert queue.earned == pytest.approx(0.01 * seconds)
        queue.earn(seconds=0.005 * instances, loop=0.01 * instances, batched=True)
        assert queue._ahead == pytest.approx(AHEAD * 0.005 * seconds)


def test_nothing_is_built_where_recording_alone_takes_longer_than_the_loop(clock: Clock) -> None:
    queue = BuildQueue()
    with queue.minibatch(FEW, loop=1.0):
        assert queue.may_build(calls=FEW)
    queue.earn(seconds=2.5, loop=1.0, batched=True)
    with queue.minibatch(FEW, loop=1.0):
        queue.put("a", Late(1.0), lambda _: None)
    queue.earn(seconds=2.5, loop=1.0, batched=True)
    with queue.minibatch(FEW, loop=1.0):
        assert not queue.may_build(calls=FEW) and not queue.build()


def test_calls_one_by_one_lose_less_the_fewer_they_are() -> None:
    compiled = operation_cache.CompiledOperation.__new__(operation_cache.CompiledOperation)
    compiled.seconds = 0.0
    for n, lost in ((1, 0.5), (3, 0.75), (99, 0.99)):
        before = compiled.seconds
        compiled.count_late(1.0, n)
        assert compiled.seconds - before == pytest.approx(lost)


def test_backward_passes_have_no_time_until_one_was_timed() -> None:
    strategy = Strategy()
    for choice in (strategy.choose(8, grad=True), strategy.choose(8, grad=True)):
        assert choice.timing is not None
        batched = choice.batches and not choice.scouts
        choice.timing.forward, choice.timing.backward = (0.4, 0.0) if batched else (1.0, 2.0)
    each = 8 / choice.timing.instances
    assert strategy.backward_seconds(8, grad=True) is None
    assert strategy.backward_seconds(8, grad=False) is None
    choice.timing.backward = 0.5
    assert strategy.backward_seconds(8, grad=True) == pytest.approx(0.5 * each)


def test_what_is_large_waits_until_its_calls_have_taken_a_part_of_what_it_takes(clock: Clock) -> None:
    queue, large, allowed = BuildQueue(), Late(0.1, expected=1.0), []
    for _ in range(2):
        with queue.minibatch(8, loop=9.0):
            queue.put("large", large, allowed.append)
            queue.put("larger", Late(99.0, expected=2 * LONGEST), allowed.append)
    queue.earn(seconds=0.0, loop=9.0, batched=True)
    assert not queue.build()
    large.seconds = 1.0
    queue.put("large", large, allowed.append)
    assert queue.build() == 1 and allowed == [1.0], "larger ones never are"


def test_what_runs_otherwise_is_built_for_what_it_takes_in_each_minibatch(clock: Clock) -> None:
    """However long it has waited: a packed call of a size that seldom comes is never built, nor anything ahead."""
    queue, built = BuildQueue(), []

    def build(_: float) -> None:
        with building():
            clock.time += 1.0
        built.append(len(built))

    for minibatch in range(100):
        with queue.minibatch(8, loop=9.0):
            if minibatch < 2:
                queue.put("first", Late(9.0), build)
            queue.runs_otherwise("often", 1.02 / SELDOM / AHEAD, build)
            queue.runs_otherwise("seldom", 0.9 / SELDOM / AHEAD, build)
    for seconds, count in ((99.0, 1), (0.0, 2)):
        queue.earn(seconds=seconds, loop=9.0, batched=True)
        queue._ahead = AHEAD * 99.0
        for _ in range(3):
            queue.build()
        assert len(built) == count
        queue.earned = 0.0
        with queue.minibatch(8, loop=9.0):
            queue.runs_otherwise("often", 1.02 / SELDOM / AHEAD, build)
    assert set(queue._waiting) == {"seldom", "often"}


def test_what_few_instances_call_waits_and_is_built_once_it_has_taken_long(clock: Clock) -> None:
    queue, seldom, built = BuildQueue(), Late(0.01), []

    def build(_: float) -> None:
        with building():
            clock.time += 1.0
        built.append(len(built))

    for _ in range(2):
        with queue.minibatch(SELDOM * 8, loop=9.0):
            assert queue.may_build(calls=8) and not queue.may_build(calls=7)
            queue.put("often", Late(1.0), build)
            queue.put("seldom", seldom, build)
    for _ in range(5):
        queue.earn(seconds=0.0, loop=9.0, batched=True)
        queue.build()
    assert len(built) == 1 and not len(queue)
    seldom.seconds = 1.0 / SELDOM
    queue.put("seldom", seldom, build)
    assert len(queue) and queue.build() == 1


def test_what_waits_is_bounded() -> None:
    queue = BuildQueue()
    queue._waiting.most = 10
    for _ in range(2):
        with queue.minibatch(8):
            for k in range(30):
                queue.put(k, Late(0.0), lambda _: None)
    assert len(queue._waiting) <= 10


class Layers(nn.Module):
    """Eight layers of eight sizes, so that nothing is the same operation, and nothing is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3 + i, 4 + i) for i in range(8))

    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        x = torch.zeros(3)
        for word in words:
            x = x + word
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for word in words:
            x = x + self.last(word).sum()
        return x


def data(n: int = 6) -> list[list[torch.Tensor]]:
    return [[torch.randn(3) for _ in range(2 + i)] for i in range(n)]


BUILD = 0.3  # seconds of an operation


@pytest.fixture
def builds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was built, each in BUILD seconds."""
    found: list[str] = []
    build = operation_cache.build_operation

    def slow(signature: Any, **options: Any) -> Any:
        clock.time += BUILD
        found.append(signature.name)
        return build(signature, **options)

    monkeypatch.setattr(operation_cache, "build_operation", slow)
    return found


def decorated(model: nn.Module, **options: Any) -> Any:
    return fxbatch.autobatch(**{"fuse": False, **options})(model.forward)


def test_a_minibatch_builds_for_so_many_seconds(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the loop takes, in the first; what has the most calls comes first, wherever it stands."""
    monkeypatch.setattr(module, "FEW", 1)
    monkeypatch.setattr(Strategy, "loop_seconds", lambda *_, **__: 1.0)
    decorated(Layers())(data())
    assert set(builds) < {"last", "sum", "add"} and len(builds) == 2, "half of it ran as scouts"


def test_the_rest_is_built_over_the_minibatches_that_follow(
    builds: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Strategy, "loop_seconds", lambda *_, **__: 1.0)
    model = Layers()
    f = decorated(model)
    counts = []
    for _ in range(200):
        batch = data()
        found = f(batch)
        torch.testing.assert_close(found, torch.stack([Layers.forward(model, x) for x in batch]))
        found.sum().backward()
        counts.append(len(builds))
    every = len(set(builds))
    engine: Engine = f.__fxbatch__.engine(model)
    assert not len(engine.queue) and len(builds) == counts[-1] > counts[0] + 4
    late = [k for k, (a, b) in enumerate(itertools.pairwise(counts)) if b > a]
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 2 * (
        int(MOST / BUILD) + 1
    )  # in it, and after it
    assert len(late) >= 2 and every > 4
    assert all(not x.is_late for x in engine.operations._entries.values() if x.unbatched is None)


def test_where_the_loop_runs_building_goes_on_and_a_round_follows(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partly built, batching is slower than the loop; what is left is built beside it, and batching is timed again."""
    monkeypatch.setattr(Strategy, "loop_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(module, "MOST", BUILD)
    monkeypatch.setattr(BuildQueue, "_is_worth_building", lambda *_: True)
    model = Layers()
    f = decorated(model)
    engine: Engine = f.__fxbatch__.engine(model)
    for _ in range(2):
        f(data())
    assert len(engine.queue)
    rounds: list[int] = []
    monkeypatch.setattr(Strategy, "look_again", lambda self: rounds.append(len(builds)))
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(False))
    for _ in range(200):
        f(data())
    assert not len(engine.queue) and rounds == [len(builds)]


def test_equal_to_the_loop_while_a_part_is_built(builds: list[str]) -> None:
    class Model(Layers):
        forward = fxbatch.autobatch(Layers.forward)

    model = Model().double()
    for _ in range(2):
        check_equal(model, [[x.double() for x in words] for words in data()])


def test_what_always_batches_builds_all_at_once(builds: list[str]) -> None:
    decorated(Layers(), adaptive=False)(data())
    assert len(builds) > 8
    one = len(builds)
    torch.use_deterministic_algorithms(True)
    try:
        decorated(Layers())(data())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(builds) == 2 * one
    assert not fxbatch.explain(_bound(Layers()), data()).unbatched


def _bound(model: nn.Module) -> nn.Module:
    model.forward = decorated(model)  # type: ignore[method-assign]
    return model


def test_many_new_operations_are_built_by_the_clock_where_it_is_read(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads no clock puts off the building of what comes with more than so many others."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rules = nn.ModuleList(nn.Linear(3, 3) for _ in range(2 * operation_cache.MANY_NEW))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for rule in self.rules:
                x = rule(x) * 0.5
            return x

    words = list(torch.randn(6, 3))
    decorated(Many(), adaptive=False)(words)
    assert not builds
    monkeypatch.setattr(Strategy, "loop_seconds", lambda *_, **__: 1.0)
    decorated(Many())(words)
    assert builds


def test_a_large_operation_is_put_off_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built from the queue, between minibatches, it was not: a recurrent layer of 29 steps took 10 to 20 s."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    minibatch = fxbatch.compile_minibatch(fxbatch.autobatch(lambda x: model(x) * x), list(torch.randn(4, 3)))
    operation = next(x for x in minibatch.operations if x.graphs is not None)
    engine, signature = Engine(minibatch.engine.options, None), operation.signature
    shared = [s.resolve() for s in signature.shared]
    monkeypatch.setattr(planner, "LARGE", 0)
    assert engine.compiled(signature, operation.needs, shared, True, most=planner.LARGE).is_late
    assert engine.compiled(signature, operation.needs, shared, True).graphs is not None


def test_what_serves_all_sizes_is_tried_where_ten_minibatches_could_pay_for_it() -> None:
    queue = BuildQueue()
    assert queue.may_try(60.0), "nothing is bounded outside of a minibatch"
    with queue.minibatch(32, loop=0.01):
        assert queue.may_try(0.1) and not queue.may_try(0.5)
    queue.earn(seconds=0.01, loop=0.01)
    with queue.minibatch(32, loop=0.08):
        assert queue.may_try(0.5)
