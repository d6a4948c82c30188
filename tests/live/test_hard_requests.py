"""Requests and models that a server of live batches has to survive: each ends by itself and leaves the others alone."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import greenlet
import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch
from tests.docs.pages import ROOT
from tests.live.long_runs import ENDLESS, Decoder


class Tree(nn.Module):
    """Never waits: a tree is a number, or a pair of trees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.join = nn.Embedding(20, 8), nn.Linear(16, 8)

    def encode(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.embed(torch.tensor(tree))
        return torch.tanh(self.join(torch.cat([self.encode(child) for child in tree])))

    @fxbatch.autobatch
    def forward(self, tree: Any) -> Tensor:
        return self.encode(tree)


class Raising(nn.Module):
    """Raises what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(self, x: Tensor, error: BaseException | None) -> Tensor:
        y = self.out(x)
        if error is not None:
            raise error
        return y


class Lookup(nn.Module):
    """Looks a number up again and again, and waits: the kernel of a phase raises where it is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)

    @fxbatch.autobatch
    def forward(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            if float(self.embed(x).sum()) > 1e9:
                break
        return self.embed(x)


def alone(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return type(model).forward.__wrapped__(model, *args)


def full_tree(depth: int, at: int = 0) -> Any:
    return at % 20 if depth == 0 else (full_tree(depth - 1, 3 * at + 1), full_tree(depth - 1, 7 * at + 2))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may run, as it may outside of tests."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("before", [0, 30])
def test_a_lone_request_that_never_ends_can_be_cancelled(max_batch: int, before: int) -> None:
    """The first one, one that comes alone, and where one runs at a time."""
    server = fxbatch.live(Decoder().eval(), max_batch=max_batch).start()
    for _ in range(before):
        server.submit(torch.randn(8), 3).result(60)
    endless = server.submit(torch.randn(8), ENDLESS)
    until(lambda: server.stats().running == 1)
    assert endless.cancel()
    until(lambda: server.stats().running == 0)
    late = server.submit(torch.randn(8), ENDLESS, timeout=0.05)
    assert isinstance(late.exception(60), fxbatch.DeadlineError)
    server.submit(torch.randn(8), ENDLESS)
    server.stop(drain=False)
    assert server.stats().cancelled == 2


def test_what_ends_more_than_a_request_ends_the_request_alone() -> None:
    """Also StopIteration, which a coroutine can't raise: its request was never answered."""
    ends = StopIteration(), SystemExit(3), KeyboardInterrupt(), greenlet.GreenletExit()
    errors = [None, *ends, ValueError("own"), None]

    async def main() -> list[Any]:
        async with fxbatch.live(Raising().eval()) as ask:
            asked = [ask(torch.ones(4), error) for error in errors]
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    kinds = [type(x) for x in asyncio.run(main())]
    assert kinds == [Tensor, *[fxbatch.InstanceError] * 4, ValueError, Tensor]


def test_what_a_kernel_raises_leaves_those_that_never_end_to_run() -> None:
    """They are not run by the loop, which nobody could end, and others join them afterwards."""
    model = Lookup().eval()
    with fxbatch.live(model, max_batch=8) as server:
        for future in [server.submit(torch.tensor(i), 3) for i in range(4)]:
            future.result(60)
        endless = [server.submit(torch.tensor(i), ENDLESS) for i in range(3)]
        until(lambda: server.stats().running == 3)
        for wrong in (99, -5):
            asked = [server.submit(torch.tensor(x), 2) for x in (1, wrong, 2)]
            with pytest.raises(IndexError):
                asked[1].result(60)
            for x, future in zip((1, 2), asked[::2], strict=True):
                torch.testing.assert_close(future.result(60), alone(model, torch.tensor(x), 2))
        until(lambda: server.stats().running == 3)
        assert not any(future.done() for future in endless)
        assert all(future.cancel() for future in endless)
        until(lambda: server.stats().running == 0)


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_a_callback_that_ends_the_thread_ends_nothing(kind: type[BaseException]) -> None:
    def ends(_: object) -> None:
        raise kind

    with fxbatch.live(Tree().eval()) as server:
        future = server.submit(1)
        future.add_done_callback(ends)
        assert future.result(60).shape == server.submit(2).result(60).shape


class Scaled(nn.Module):
    """A part whose body is one operation, which reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Changing(nn.Module):
    """Has all that somebody may change while requests run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.drop, self.cell = Scaled(), nn.Dropout(0.5), nn.GRUCell(8, 8)
        self.register_buffer("shift", torch.zeros(8))
        self.scale = 1.0

    @fxbatch.autobatch
    def forward(self, h: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            h = self.cell(self.drop(self.part(h)) * self.scale + self.shift, h)
            if float(h.sum()) > 1e9:
                break
        return h


CHANGES: dict[str, Callable[[Changing], object]] = {
    "mode": lambda model: model.eval(),
    "hook": lambda model: model.part.register_forward_hook(lambda _module, _inputs, y: -y),
    "pre-hook": lambda model: model.cell.register_forward_pre_hook(lambda _module, x: (-x[0], x[1])),
    "attribute": lambda model: setattr(model.part, "scale", -2.0),
    "attribute of its own": lambda model: setattr(model, "scale", -2.0),
    "module": lambda model: setattr(model, "part", nn.Linear(8, 8)),
    "buffer, another": lambda model: setattr(model, "shift", torch.ones(8)),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
    "output": lambda _: setattr(sys, "stdout", io.StringIO()),
    "buffer, written to": lambda model: model.shift.add_(1),  # type: ignore[operator]
}


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_changed_while_a_request_runs_counts_for_those_after_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that runs begins anew, and not by the loop, which nobody could end."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # as it is afterwards
    model = Changing().train(name == "mode")
    with fxbatch.live(model, max_batch=4) as server:
        for _ in range(3):
            server.submit(torch.ones(8), 3).result(60)
        endless = server.submit(torch.ones(8), ENDLESS)
        until(lambda: server.stats().running == 1)
        states = torch.randn(3, 8)
        try:
            CHANGES[name](model)
            for h in states:
                torch.testing.assert_close(server.submit(h, 5).result(60), alone(model, h, 5))
        finally:
            torch.set_default_dtype(torch.float32)
        assert not endless.done() and endless.cancel()
        until(lambda: server.stats().running == 0)
        assert server.stats().looped == 0


class Summing(nn.Module):
    """Adds up what differs where an attribute does, and waits after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    @fxbatch.autobatch
    def forward(self, x: Tensor, steps: int) -> Tensor:
        total = torch.zeros(4)
        for _ in range(steps):
            total = total + self.linear(x) * self.scale
            if float(total.sum()) > 1e9:
                break
        return total


def test_a_request_sees_one_value_of_an_attribute() -> None:
    """Also where the forward itself reads it, in each of its steps."""
    model, x = Summing().eval(), torch.ones(4)
    with fxbatch.live(model) as server:
        server.submit(x, 3).result(60)
        running = server.submit(x, 3000)
        until(lambda: server.stats().phases > 20)
        model.scale = -2.0
        assert not running.done()
        torch.testing.assert_close(running.result(60), alone(model, x, 3000), rtol=1e-3, atol=1e-3)


class Numbering(nn.Module):
    """Counts its calls, and never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (self.calls > 0)


@pytest.mark.usefixtures("loops")
def test_what_a_forward_itself_sets_is_no_change_by_others() -> None:
    model = Numbering().eval()
    with fxbatch.live(model) as server:
        for _ in range(3):
            for future in [server.submit(torch.ones(4)) for _ in range(5)]:
                torch.testing.assert_close(future.result(60), model.linear(torch.ones(4)).detach())
        assert (model.calls, server.stats().looped) == (15, 0)


class Counting(nn.Module):
    """Writes to a buffer that its calls read, between its waits."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    @fxbatch.autobatch
    def forward(self, h: Tensor) -> Tensor:
        for _ in range(3):
            h = self.cell(h + 0 * self.seen, h)
            self.seen.add_(float(h.sum()) > 0)  # type: ignore[operator]
        return h


@pytest.mark.usefixtures("loops")
def test_a_forward_that_always_writes_to_its_own_buffers_is_served_by_the_loop() -> None:
    model = Counting().eval()
    with warnings.catch_warnings(record=True) as caught, fxbatch.live(model) as server:
        warnings.simplefilter("always")
        states = [torch.randn(8) for _ in range(6)]
        for h, future in [(h, server.submit(h)) for h in states]:
            torch.testing.assert_close(future.result(60), alone(model, h))
        until(lambda: "by the plain loop" in server.explain())
    assert any(issubclass(w.category, fxbatch.LoopWarning) for w in caught)


class Closing(nn.Module):
    """Never ends, and calls a function as it is ended."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.close = nn.Linear(4, 4), close

    @fxbatch.autobatch
    def forward(self, x: Tensor, steps: int) -> Tensor:
        try:
            for _ in range(steps):
                x = self.linear(x)
                if float(x.sum()) > 1e9:
                    break
        finally:
            if steps == ENDLESS:
                self.close()
        return x


def test_what_forwards_do_as_they_are_ended_may_wait_for_others_that_ask() -> None:
    """Their `finally` blocks run while nothing is locked."""
    asked: list[Any] = []

    def close() -> None:
        thread = threading.Thread(target=lambda: asked.append(server.submit(torch.ones(4), 2)))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    with fxbatch.live(Closing(close).eval()) as server:
        endless = server.submit(torch.ones(4), ENDLESS)
        until(lambda: server.stats().running == 1)
        assert endless.cancel()
        until(lambda: bool(asked))
        assert asked[0].result(60).shape == (4,)


def test_a_future_that_is_held_does_not_hold_its_arguments() -> None:
    with fxbatch.live(Tree().eval()) as server:
        tree = _Pair([1, 2])
        held, future = weakref.ref(tree), server.submit(tree)
        del tree
        future.result(60)
        server.submit(1).result(60)
        gc.collect()
        assert held() is None


class _Pair(list[int]):
    """A tree to which there are weak references."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_no_thread_that_serves() -> None:
    """Asking there is an error, where it waited for good; it may start its own."""
    source = """
import os, torch, fxbatch
from tests.live.long_runs import Decoder

server = fxbatch.live(Decoder().eval()).start()
wanted = server.submit(torch.ones(8), 3).result(60)[0]
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert server.submit(torch.ones(8), 3).result(60)[0] == wanted
else:
    try:
        server.submit(torch.ones(8), 3)
    except fxbatch.StoppedError:
        os._exit(server.start().submit(torch.ones(8), 3).result(60)[0] != wanted)
    os._exit(1)
"""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True, timeout=60)


@pytest.mark.usefixtures("loops")
def test_hooks_on_all_modules_are_heard() -> None:
    """They are recorded by none, so the loop runs: a request was never answered where they came first."""
    heard: list[object] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: heard.append(1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nor does a warning that is an error end the server
            with fxbatch.live(Tree().eval()) as server:
                assert server.submit((1, 2)).result(60).shape == (8,)
                assert server.submit((1, 2)).result(60).shape == (8,)
                assert "by the plain loop: hooks on all modules" in server.explain()
    finally:
        hook.remove()
    assert heard


def test_hooks_on_all_modules_are_an_error_where_all_is_batched() -> None:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with fxbatch.live(Tree().eval()) as server, pytest.raises(fxbatch.TraceError, match="hooks on all"):
            server.submit((1, 2)).result(60)
    finally:
        hook.remove()


def test_a_deadline_comes_before_the_end_of_gathering() -> None:
    with fxbatch.live(Tree().eval(), max_wait=30) as server:
        begun = time.monotonic()
        assert isinstance(server.submit(1, timeout=0.05).exception(20), fxbatch.DeadlineError)
        assert time.monotonic() - begun < 10


def test_requests_are_gathered_until_max_wait_or_max_batch() -> None:
    with fxbatch.live(Tree().eval(), max_wait=0.5, max_batch=8) as server:
        futures = []
        for i in range(5):
            futures.append(server.submit(i))
            time.sleep(0.01)
        assert [future.result(60).shape for future in futures] == [(8,)] * 5
        assert server.stats().batch_sizes == {5: 1} and server.stats().latency(0.01) > 0.4
        begun = time.monotonic()
        for future in [server.submit(i) for i in range(16)]:
            future.result(60)
        assert server.stats().batch_sizes == {5: 1, 8: 2} and time.monotonic() - begun < 0.4


def test_nobody_waits_for_others_that_seldom_come() -> None:
    with fxbatch.live(Tree().eval(), max_wait=0.03) as server:
        times = []
        for _ in range(40):
            begun = time.monotonic()
            server.submit((1, 2)).result(60)
            times.append(time.monotonic() - begun)
            time.sleep(0.03)
        assert min(times[:5]) >= 0.03 > sorted(times[20:])[10]


def test_results_are_of_inference_mode() -> None:
    """Whoever computes them: a recording that ends, one that goes on, the loop."""
    looped = fxbatch.autobatch(adaptive="loop")(lambda x: x * 2)
    with (
        fxbatch.live(Tree().eval()) as tree,
        fxbatch.live(Decoder().eval()) as decoder,
        fxbatch.live(looped) as loop,
    ):
        states = [decoder.submit(torch.ones(8), n) for n in (2, 9, 30)]
        found = [tree.submit((1, 2)).result(60), loop.submit(torch.ones(2)).result(60)]
        found += [future.result(60)[1] for future in states]
    assert all(x.is_inference() and not x.requires_grad for x in found)


def test_parts_of_the_time() -> None:
    layer = nn.Linear(2, 2)

    def busy(x: Tensor) -> Tensor:
        sum(range(40_000))
        return layer(x)

    with fxbatch.live(fxbatch.autobatch(busy)) as server:
        seconds = []
        for _ in range(4):
            for future in [server.submit(torch.ones(2)) for _ in range(64)]:
                future.result(60)
            seconds.append(server.stats().seconds)
    assert all(x >= 0 for x in seconds[-1].values()) and seconds[-1]["kernels"] > 0
    spent = {
        part: seconds[-1][part] - seconds[0][part] for part in seconds[0]
    }  # but for the first, which builds
    assert spent["python"] > 0.5 * sum(spent.values())


class Leaving(nn.Module):
    """Leaves states on its argument, before it waits and after."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    @fxbatch.autobatch
    def forward(self, states: list[Tensor]) -> bool:
        states.append(self.cell(states[0], states[0]))
        positive = bool(states[1].sum() > 0)
        states.append(self.cell(states[1], states[1]))
        return positive


def test_what_forwards_leave_is_real_once_the_server_has_ended() -> None:
    """Draining ends with the last phase, not before it."""
    model, states = Leaving().eval(), [torch.randn(4)]
    with fxbatch.live(model) as server:
        future = server.submit(states)
        future.add_done_callback(
            lambda _: server.stop()
        )  # in the thread that computes, before the last phase
        future.result(60)
    wanted = [states[0]]
    alone(model, wanted)
    for found, w in zip(states, wanted, strict=True):
        torch.testing.assert_close(found + 0, w)


def test_a_server_that_was_stopped_can_be_started_again() -> None:
    server = fxbatch.live(Decoder().eval())
    for _ in range(3):
        future = server.start().submit(torch.ones(8), 3)
        server.stop()
        assert len(future.result(0)[0]) <= 3
        future = server.start().submit(torch.ones(8), ENDLESS)
        server.stop(drain=False)
        assert future.cancelled()
    stopped = server.start().submit(torch.ones(8), 3)
    stopped.add_done_callback(lambda _: server.stop())  # in the thread that computes
    stopped.result(60)
    assert server.start().submit(torch.ones(8), 3).result(60)
    server.stop()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("adaptive", [True, False])
def test_weights_that_are_written_to_all_the_time_are_never_mixed(adaptive: bool) -> None:
    """A request sees the old ones or the new ones, or is an error. Here one tensor is all that differs."""
    tree = full_tree(7)
    cls = type("Written", (Tree,), {"forward": fxbatch.autobatch(adaptive=adaptive)(Tree.encode)})
    model = cls().eval()
    weights = [model.join.weight.detach().clone(), model.join.weight.detach() * -1.5]
    wanted = []
    for weight in weights:
        model.join.weight.data.copy_(weight)
        wanted.append(alone(model, tree))
    over = threading.Event()

    def write() -> None:
        for i in range(10**6):
            if over.wait(0.004):
                return
            with torch.no_grad():
                model.join.weight.copy_(weights[i % 2])

    writer = threading.Thread(target=write)
    with fxbatch.live(model, max_batch=8) as server:
        server.submit(tree).result(60)
        writer.start()
        try:
            for _ in range(15):
                for future in [server.submit(tree) for _ in range(8)]:
                    error = future.exception(60)
                    if error is not None:
                        assert isinstance(error, fxbatch.InPlaceError)
                    else:
                        assert any(torch.allclose(future.result(), w, atol=1e-5) for w in wanted)
        finally:
            over.set()
            writer.join()
        server.submit(tree).result(60)
        assert "by the plain loop" not in server.explain()


@pytest.mark.usefixtures("loops")
def test_a_request_that_never_ends_begins_anew_with_new_weights() -> None:
    """And not by the loop, which nobody could end."""
    model, other = Decoder().eval(), Decoder().eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-1.5)
    with fxbatch.live(model, max_batch=4) as server:
        endless = server.submit(torch.randn(8), ENDLESS)
        until(lambda: server.stats().phases > 5)
        model.load_state_dict(other.state_dict())
        h = torch.randn(8)
        assert server.submit(h, 9).result(60)[0] == alone(other, h, 9)[0]
        assert not endless.done() and endless.cancel()
        until(lambda: server.stats().running == 0)
        assert server.stats().looped == 0


def test_metrics_are_taken_by_prometheus_client() -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    registry = prometheus.CollectorRegistry()
    with fxbatch.live(Decoder().eval(), max_batch=4) as server:
        registry.register(server)
        for future in [server.submit(torch.ones(8), 3) for _ in range(8)]:
            future.result(60)
        assert registry.get_sample_value("fxbatch_done_total") == 8
        assert registry.get_sample_value("fxbatch_batch_size_count") == server.stats().phases
        assert registry.get_sample_value("fxbatch_latency_seconds", {"quantile": "0.95"}) > 0
        assert registry.get_sample_value("fxbatch_seconds_total", {"part": "python"}) is not None
        assert b"fxbatch_running 0.0" in prometheus.generate_latest(registry)


INTERRUPTED = """
import asyncio, signal, torch, fxbatch
from tests.live.long_runs import ENDLESS, Decoder

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell ignores it

async def main():
    async with fxbatch.live(Decoder().eval()) as ask:
        asked = asyncio.create_task(ask(torch.randn(8), ENDLESS))
        while not ask.stats().running:
            await asyncio.sleep(0.01)
        print("READY", flush=True)
        await asked

{run}
"""
RUN = {
    "event loop": "asyncio.run(main())",
    "thread": """
with fxbatch.live(Decoder().eval()) as server:
    future = server.submit(torch.randn(8), ENDLESS)
    print("READY", flush=True)
    future.result()
""",
    "nobody stops it": """
server = fxbatch.live(Decoder().eval()).start()
server.submit(torch.randn(8), ENDLESS)
print("READY", flush=True)
server.submit(torch.randn(8), ENDLESS).result()
""",
}


@pytest.mark.parametrize("how", RUN)
def test_ctrl_c_ends_a_process_that_serves(how: str, tmp_path: Path) -> None:
    source = tmp_path / "serving.py"
    source.write_text(INTERRUPTED.format(run=RUN[how]))
    with subprocess.Popen(
        [sys.executable, source], env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "READY\n"
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # or it would be waited for
    assert "KeyboardInterrupt" in errors and process.returncode != 0
