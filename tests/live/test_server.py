"""Live batches: each result is the loop's, whatever runs beside it, and whoever else fails, leaves or comes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch
from fxbatch.server import Server
from fxbatch.trace import ongoing
from tests.live import long_runs
from tests.live.long_runs import Decoder


class Tree(nn.Module):
    """Never waits: a tree is a number, or a pair of trees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.join = nn.Embedding(20, 8), nn.Sequential(nn.Linear(16, 8), nn.Tanh())

    @fxbatch.autobatch(adaptive=False)
    def forward(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.embed(torch.tensor(tree))
        return self.join(torch.cat([self.forward_one(child) for child in tree]))

    def forward_one(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.embed(torch.tensor(tree))
        return self.join(torch.cat([self.forward_one(child) for child in tree]))


def requests(n: int, seed: int = 0) -> list[tuple[Tensor, int]]:
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [(torch.randn(8, generator=generator), drawn.choice((2, 5, 9, 14, 30))) for _ in range(n)]


def alone(model: nn.Module, *args: Any) -> Any:
    """What the loop gives for one instance."""
    with torch.no_grad():
        return type(model).forward.__wrapped__(model, *args)


def assert_same(found: tuple[list[int], Tensor], wanted: tuple[list[int], Tensor]) -> None:
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.fixture
def decoder() -> Decoder:
    return Decoder().eval()


def warmed(server: Server, model: nn.Module) -> Server:
    """A server that knows that its forward waits."""
    for x in requests(12, 9):
        server.submit(*x).result(60)
    for future in [server.submit(*x) for x in requests(6, 8)]:
        future.result(60)
    assert "joins at the next phase" in server.explain()
    return server


@pytest.mark.parametrize("fewest", [40, ongoing.FEWEST])
def test_results_are_those_of_the_loop_under_random_arrivals(
    decoder: Decoder, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ongoing, "FEWEST", fewest)
    given, drawn = requests(300), random.Random(1)
    with fxbatch.live(decoder, max_batch=16) as server:
        futures = []
        for x in given:
            futures.append(server.submit(*x))
            if drawn.random() < 0.1:
                time.sleep(0.002)
        for x, future in zip(given, futures, strict=True):
            assert_same(future.result(60), alone(decoder, *x))
    stats = server.stats()
    assert (stats.requests, stats.done, stats.waiting, stats.running) == (300, 300, 0, 0)
    assert stats.mean_batch > 2 and stats.latency(0.5) <= stats.latency(0.99)


def test_a_request_joins_and_leaves_while_others_run(decoder: Decoder) -> None:
    with fxbatch.live(decoder, max_batch=4) as server:
        warmed(server, decoder)
        long = server.submit(torch.full((8,), 0.3), 4000)
        short = [server.submit(torch.randn(8), 2) for _ in range(10)]
        for future in short:
            future.result(60)
        ended_early = not long.done()
        assert len(long.result(60)[0]) == len(alone(decoder, torch.full((8,), 0.3), 4000)[0])
    assert ended_early or len(long.result()[0]) < 200


def test_forwards_that_do_not_wait_are_gathered() -> None:
    model, drawn = Tree().eval(), random.Random(0)

    def tree(depth: int) -> Any:
        return (
            drawn.randrange(20) if depth == 0 or drawn.random() < 0.2 else (tree(depth - 1), tree(depth - 1))
        )

    trees = [tree(5) for _ in range(64)]
    with fxbatch.live(model, max_batch=32, max_wait=0.2) as server:
        futures = [server.submit(x) for x in trees]
        for x, future in zip(trees, futures, strict=True):
            torch.testing.assert_close(future.result(60), alone(model, x), rtol=1e-5, atol=1e-6)
        stats = server.stats()
        assert stats.phases < 8 and max(stats.batch_sizes) == 32
        assert "in minibatches of what comes within" in server.explain()


def test_an_exception_belongs_to_its_own_request(decoder: Decoder) -> None:
    given = [*requests(20), *[(torch.randn(8), 13) for _ in range(20)]]
    random.Random(0).shuffle(given)
    failed = 0
    with fxbatch.live(decoder, max_batch=8) as server:
        futures = [server.submit(*x) for x in given]
        for x, future in zip(given, futures, strict=True):
            try:
                wanted = alone(decoder, *x)
            except ValueError:
                failed += 1
                with pytest.raises(ValueError, match="thirteen"):
                    future.result(60)
            else:
                assert_same(future.result(60), wanted)
    assert failed and server.stats().failed == failed


class Lookup(nn.Module):
    """Waits, then looks up a number that may be out of range: the kernel of a batch raises for all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> tuple[bool, Tensor]:
        positive = bool((self.embed(x % 20)).sum() > 0)
        return positive, self.embed(x) * 2


def test_what_a_kernel_raises_belongs_to_its_own_request() -> None:
    model = Lookup().eval()
    words = [torch.tensor(i) for i in (3, 4, 99, 5, 6, 7, 8, 9)]
    with fxbatch.live(model, max_batch=8) as server:
        for _ in range(4):
            futures = [server.submit(x) for x in words]
            for x, future in zip(words, futures, strict=True):
                if int(x) == 99:
                    with pytest.raises(IndexError):
                        future.result(60)
                else:
                    positive, found = future.result(60)
                    assert positive == alone(model, x)[0]
                    torch.testing.assert_close(found, alone(model, x)[1])


def test_cancelled_and_late_requests_end_at_the_next_phase(decoder: Decoder) -> None:
    with fxbatch.live(decoder, max_batch=4) as server:
        warmed(server, decoder)
        many = [server.submit(torch.full((8,), 0.1 * i), 10**6) for i in range(2)]
        others = [server.submit(*x) for x in requests(12, 4)]
        late = server.submit(torch.randn(8), 10**6, timeout=0.05)
        for x, future in zip(requests(12, 4), others, strict=True):
            assert_same(future.result(60), alone(decoder, *x))
        for future in many:
            future.cancel()
        ended = late.exception(60)
        assert ended is None or isinstance(ended, fxbatch.DeadlineError)
        assert isinstance(fxbatch.DeadlineError(), TimeoutError)
        assert_same(server.submit(*requests(1)[0]).result(60), alone(decoder, *requests(1)[0]))
        assert server.stats().running == 0


class Endless(nn.Module):
    """Runs until somebody ends it, and says that it was ended."""

    ended = 0

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    @fxbatch.autobatch
    def forward(self, h: Tensor, steps: int) -> Tensor:
        try:
            for _ in range(steps):
                h = self.cell(h, h)
                if float(h.sum()) > 1e9:
                    break
        finally:
            Endless.ended += steps > 100
        return h


def endless_server(**options: Any) -> Server:
    server = fxbatch.live(Endless().eval(), **options).start()
    for _ in range(3):
        futures = [server.submit(torch.randn(4), 3) for _ in range(3)]
        for future in futures:
            future.result(60)
    assert "joins at the next phase" in server.explain()
    return server


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_cancelling_ends_a_request_that_runs() -> None:
    server = endless_server(max_batch=4)
    before = Endless.ended
    futures = [server.submit(torch.randn(4), 10**9) for _ in range(2)]
    until(lambda: server.stats().running == 2)
    assert futures[0].cancel()
    until(lambda: server.stats().running == 1)
    assert Endless.ended == before + 1
    late = server.submit(torch.randn(4), 10**9, timeout=0.05)
    assert isinstance(late.exception(60), fxbatch.DeadlineError)
    assert server.submit(torch.ones(4), 2).result(60).shape == (4,)
    server.stop(drain=False)
    assert futures[1].cancelled() and Endless.ended == before + 3
    stats = server.stats()
    assert (stats.cancelled, stats.expired, stats.running) == (2, 1, 0)


def test_the_queue_is_bounded_and_late_requests_leave_it() -> None:
    server = endless_server(max_batch=2, max_queue=3)
    running = [server.submit(torch.randn(4), 10**9) for _ in range(2)]
    until(lambda: server.stats().running == 2)
    waiting = [server.submit(torch.randn(4), 2, timeout=t) for t in (0.05, None, None)]
    with pytest.raises(fxbatch.QueueFullError, match="3 requests are waiting"):
        server.submit(torch.randn(4), 2)
    assert isinstance(waiting[0].exception(60), fxbatch.DeadlineError)
    assert server.stats().refused == 1
    for future in running:
        future.cancel()
    assert all(future.result(60).shape == (4,) for future in waiting[1:])
    server.stop()


def test_stopping_drains_or_cancels(decoder: Decoder) -> None:
    server = fxbatch.live(decoder, max_batch=4).start()
    given = requests(20)
    futures = [server.submit(*x) for x in given]
    server.stop(drain=True)
    for x, future in zip(given, futures, strict=True):
        assert_same(future.result(0), alone(decoder, *x))
    with pytest.raises(fxbatch.StoppedError):
        server.submit(*given[0])
    with pytest.raises(KeyboardInterrupt), endless_server(max_batch=2) as endless:
        running = endless.submit(torch.randn(4), 10**9)
        raise KeyboardInterrupt
    with pytest.raises(CancelledError):
        running.result(0)
    with fxbatch.live(decoder) as again:
        assert_same(again.submit(*given[0]).result(60), alone(decoder, *given[0]))


def test_several_event_loops_ask_one_server(decoder: Decoder) -> None:
    given = requests(60)
    found: dict[int, Any] = {}

    async def ask_all(server: Server, part: range) -> None:
        results = await asyncio.gather(*[server(*given[i]) for i in part])
        found.update(zip(part, results, strict=True))

    with fxbatch.live(decoder, max_batch=8) as server:
        threads = [
            threading.Thread(target=lambda k=k: asyncio.run(ask_all(server, range(k, 60, 3))))
            for k in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, x in enumerate(given):
        assert_same(found[i], alone(decoder, *x))


def test_async_with_and_cancelled_tasks() -> None:
    async def main() -> None:
        async with fxbatch.live(Endless().eval(), max_batch=4) as ask:
            for _ in range(3):
                await asyncio.gather(*[ask(torch.ones(4), 3) for _ in range(3)])
            task = asyncio.create_task(ask(torch.randn(4), 10**9))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await ask(torch.ones(4), 3, timeout=30)).shape == (4,)

    asyncio.run(main())


def test_an_update_of_the_model_is_between_requests(decoder: Decoder) -> None:
    other, given = Decoder().eval(), requests(30)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-1.5)
    before = [alone(decoder, *x) for x in given]
    after = [alone(other, *x) for x in given]
    with fxbatch.live(decoder, max_batch=8) as server:
        first = [server.submit(*x) for x in given]
        updated = server.update(lambda: decoder.load_state_dict(other.state_dict()))
        second = [server.submit(*x) for x in given]
        updated.result(60)
        for found, wanted in zip([*first, *second], [*before, *after], strict=True):
            assert_same(found.result(60), wanted)
        with pytest.raises(ZeroDivisionError):
            server.update(lambda: 1 // 0).result(60)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may run, as it may outside of tests."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)


@pytest.mark.usefixtures("loops")
def test_a_change_without_update_never_mixes_two_models_in_a_request() -> None:
    model = Endless().eval()
    with fxbatch.live(model, max_batch=4) as server:
        for _ in range(3):
            for future in [server.submit(torch.randn(4), 3) for _ in range(3)]:
                future.result(60)
        h = torch.randn(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            future = server.submit(h, 3000)
            until(lambda: server.stats().running == 1 or future.done())
            with torch.no_grad():
                model.cell.weight_hh.mul_(0.5)
            torch.testing.assert_close(future.result(60), alone(model, h, 3000), rtol=1e-4, atol=1e-5)
        assert not server.engine.refusals.reason(training=False)


def replaced(p: Tensor) -> nn.Parameter:
    return nn.Parameter(p.detach() * -1.5)


CHANGES: dict[str, Callable[[Decoder], None]] = {
    "another parameter": lambda model: setattr(model.out, "weight", replaced(model.out.weight)),
    "other memory": lambda model: setattr(model.out.weight, "data", replaced(model.out.weight).data),
    "written to": lambda model: model.out.load_state_dict(
        {**model.out.state_dict(), "weight": replaced(model.out.weight)}
    ),
    "in its dictionary": lambda model: model.out._parameters.update(weight=replaced(model.out.weight)),
}


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fewest", [40, ongoing.FEWEST])
def test_a_change_under_constant_load_is_in_whole_requests(
    name: str, fewest: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording never ends while some request runs; those after the change see it, and none sees both models."""
    monkeypatch.setattr(ongoing, "FEWEST", fewest)
    other = Decoder().eval()
    CHANGES[name](other)
    given = requests(300)
    either = [(alone(decoder, *x), alone(other, *x)) for x in given]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fxbatch.live(decoder, max_batch=8) as server:
            warmed(server, decoder)
            first = [server.submit(*x) for x in given[:150]]
            first[20].result(60)
            CHANGES[name](decoder)
            second = [server.submit(*x) for x in given[150:]]
            found = [future.result(60) for future in (*first, *second)]
    for x, (before, after) in zip(found, either, strict=True):
        assert any(
            x[0] == wanted[0] and torch.allclose(x[1], wanted[1], rtol=1e-4, atol=1e-5)
            for wanted in (before, after)
        )
    for x, (_, after) in zip(found[150:], either[150:], strict=True):
        assert_same(x, after)
    assert not server.engine.refusals.reason(training=False)


def test_requests_that_are_cancelled_at_any_time_leave_others_alone(decoder: Decoder) -> None:
    drawn, given = random.Random(2), requests(400)
    with fxbatch.live(decoder, max_batch=8) as server:
        futures = []
        for x in given:
            futures.append(server.submit(*x))
            if drawn.random() < 0.2:
                drawn.choice(futures[-20:]).cancel()
            if drawn.random() < 0.2:
                time.sleep(0.001)
        for x, future in zip(given, futures, strict=True):
            if not future.cancelled():
                assert_same(future.result(60), alone(decoder, *x))
    stats = server.stats()
    assert (stats.done + stats.cancelled, stats.failed, stats.running) == (400, 0, 0)
    assert stats.cancelled == sum(future.cancelled() for future in futures) > 0


class Counting(nn.Module):
    """Sets an attribute and waits: the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.last: Any = None

    @fxbatch.autobatch
    def forward(self, h: Tensor) -> float:
        self.last = h
        return float(self.cell(h, h).sum())


@pytest.mark.usefixtures("loops")
def test_what_cannot_be_recorded_is_served_by_the_loop() -> None:
    model = Counting().eval()
    given = [torch.randn(4) for _ in range(20)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fxbatch.live(model, max_batch=8) as server:
            for x, future in [(x, server.submit(x)) for x in given]:
                assert future.result(60) == pytest.approx(alone(model, x), rel=1e-5)
            assert "by the plain loop" in server.explain()
    assert any(issubclass(w.category, fxbatch.LoopWarning) for w in caught)


class Writing(nn.Module):
    """Writes to tensors of its own and to one of the request's, and waits between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, 4)

    @fxbatch.autobatch
    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        total = torch.zeros(4)
        for _ in range(3):
            h = self.cell(h, h)
            total += h
            if float(h.sum()) > 3.5:
                break
        out.copy_(total * 2)
        return total


def test_tensors_that_are_written_to_are_plain_afterwards() -> None:
    model = Writing().eval()
    given = [torch.randn(4) for _ in range(24)]
    with fxbatch.live(model, max_batch=4) as server:
        outs = [torch.empty(4) for _ in given]
        futures = [server.submit(h, out) for h, out in zip(given, outs, strict=True)]
        for h, out, future in zip(given, outs, futures, strict=True):
            torch.testing.assert_close(future.result(60), alone(model, h, torch.empty(4)))
            torch.testing.assert_close(out, 2 * future.result())
            assert type(out) is Tensor


@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_is_flat(count: int) -> None:
    long_runs.assert_flat(long_runs.serve(count))


def test_a_recording_that_grows_is_found() -> None:
    grown = [long_runs.Sample(100, 100 * i, 100, 0, 1 << 28) for i in range(100)]
    with pytest.raises(AssertionError):
        long_runs.assert_flat(grown)


def test_stats_as_prometheus_reads_them(decoder: Decoder) -> None:
    with fxbatch.live(decoder, max_batch=4) as server:
        for x in requests(8):
            server.submit(*x).result(60)
        text = server.stats().prometheus()
        assert "fxbatch_requests_total 8.0" in text and "fxbatch_done_total 8.0" in text
        assert 'fxbatch_latency_seconds{quantile="0.95"}' in text
        assert 'fxbatch_batch_size_bucket{le="+Inf"}' in text
        assert "waits for values: long_runs.py" in warmed(server, decoder).explain()


def test_options_are_checked(decoder: Decoder) -> None:
    for options in ({"max_batch": 0}, {"max_queue": 0}, {"max_wait": -1.0}, {"max_batch": 1.5}):
        with pytest.raises(fxbatch.OptionError, match=next(iter(options))):
            fxbatch.live(decoder, **options)  # type: ignore[arg-type]
    with pytest.raises(fxbatch.StoppedError):
        fxbatch.live(decoder).submit(*requests(1)[0])
