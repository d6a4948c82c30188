"""Live batches: requests that come one at a time run beside one another, by any forward written for one instance.

In: a decorated model, and requests from event loops and threads. Out: the result of each, as soon as it is done.

    async with fxbatch.live(model) as ask:
        y = await ask(x)                      # joins at the next phase

    with fxbatch.live(model) as server:
        y = server.submit(x, timeout=0.5).result()

One thread computes. Where a forward waits for values, one recording goes on (`trace/ongoing.py`): a request joins the
others at the next phase, and leaves when it is done. Where it doesn't, what has come within `max_wait` is a minibatch,
run as the decorated call runs it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import greenlet
import torch

from fxbatch.decorator import Autobatched, find_autobatched
from fxbatch.errors import (
    DeadlineError,
    InPlaceError,
    InstanceError,
    OptionError,
    QueueFullError,
    StoppedError,
    TraceError,
)
from fxbatch.ir import Program, Schedule
from fxbatch.on_demand import prometheus_parser
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.operands import resolve_all
from fxbatch.runtime.options import Options
from fxbatch.runtime.packed_route import PackedRoute
from fxbatch.runtime.refusals import surroundings
from fxbatch.runtime.results import Results, separate
from fxbatch.runtime.run import Run
from fxbatch.server_stats import Counts, Laps, PhaseTimes, ServerStats
from fxbatch.trace.minibatch import Execution, Recording
from fxbatch.trace.ongoing import OngoingRecording
from fxbatch.trace.places import versions_now, written_to

_FOREVER = float("inf")


class _ReplacedError(InPlaceError):
    """A parameter or buffer was replaced while requests ran that have read it: they begin anew."""


class _OngoingRun(Run):
    """A run of a server: its kernels are timed, and all phases of a recording read the same parameters."""

    places: dict[tuple[int, str], int]  # where each parameter and buffer lay when it was first read

    def plan_phase(self, program: Program, schedule: Schedule | None, *, last: bool) -> Phase:
        """See Run. _ReplacedError where a parameter or buffer is another than the one that was read before."""
        family, _ = self._family(program)
        for key, now in zip(family.keys, resolve_all(family.operands), strict=True):
            place = now.data_ptr()
            if now is not self.operands[key] or self.places.setdefault(key, place) != place:
                raise _ReplacedError(
                    "a parameter or buffer was replaced while requests ran that have read it"
                )
        return super().plan_phase(program, schedule, last=last)

    def launch(self, phase: Phase) -> None:
        assert isinstance(self.planner, ServerEngine)
        self.planner.laps.lap("planning")
        super().launch(phase)
        self.planner.laps.lap("kernels")


class ServerEngine(Engine):
    """The engine of a server: it knows whether instances wait, and what the parts of a phase take."""

    waits = False  # whether an instance has waited for a value

    def __init__(self, options: Options, root: torch.nn.Module | None, forward: Callable[..., Any]) -> None:
        super().__init__(options, root)
        self.table.forward = forward
        self.packed = PackedRoute(replace(options, return_exceptions=False), root, self.queue.may_build)
        self.laps = Laps()

    def execution(self, before: Execution | None = None) -> Any:
        """The state of a new minibatch, or of a recording that goes on. before: the state until now, whose parameters
        this one reads."""
        run = super().execution()
        if type(run) is not Run:
            return run
        ongoing = _OngoingRun(self, grad=False)
        ongoing.table, ongoing.places = self.table, {}
        if isinstance(before, _OngoingRun):
            ongoing.operands, ongoing.places = before.operands, before.places
        return ongoing

    def record(self, *args: Any, **kwargs: Any) -> Recording:
        recording = super().record(*args, **kwargs)
        self.waits = self.waits or recording.statistics.suspensions > 0
        return recording


@dataclass(slots=True, eq=False)
class _Request:
    """One entry of the queue: a request for a result, or (`change`) a function to call between requests."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    future: Future[Any]
    arrived: float
    deadline: float = _FOREVER
    change: Callable[[], Any] | None = None

    def settle(self, result: Any) -> bool:
        """Hand over a result, or an exception; whether anybody waits for it."""
        try:
            if not self.future.set_running_or_notify_cancel():
                return False
        except InvalidStateError:
            return False
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)
        return True

    def is_over(self, now: float) -> bool:
        """Whether it was cancelled, or its time is up."""
        return self.future.cancelled() or self.deadline <= now


class Server:
    """A model that answers requests: what `live` gives. Use it in `with` or `async with`, or by `start` and `stop`.

    `submit(...)` gives the future result of one instance, `await server(...)` the result in an event loop.
    `update(change)` calls `change()` between requests, `stats()` counts, `explain()` says how requests are served.

    Arguments:
        target: a decorated model, method or function.
        max_batch: how many requests run at a time.
        max_wait: seconds that a request waits for others, where the forward doesn't wait for values.
        max_queue: how many requests may wait to begin.

    Example:
        >>> server = fxbatch.live(model).start()
        >>> futures = [server.submit([1, 2]), server.submit([3])]
        >>> [tuple(future.result().shape) for future in futures]
        [(4,), (4,)]
        >>> server.stop()
        >>> server.stats().done
        2
    """

    def __init__(self, target: Any, *, max_batch: int, max_wait: float, max_queue: int) -> None:
        found, owner = find_autobatched(target)
        if found.options.mode != "looped":
            raise OptionError(
                f"live batches run programs step by step: mode={found.options.mode!r} makes a module"
            )
        for name, value, least in (("max_batch", max_batch, 1), ("max_queue", max_queue, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r}: takes a whole number from {least} on")
        if not isinstance(max_wait, (int, float)) or not 0 <= max_wait < _FOREVER:
            raise OptionError(f"max_wait={max_wait!r}: takes seconds, from 0 on")
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.owner = owner
        self.decorated = Autobatched(found.fn, replace(found.options, out="list", return_exceptions=True))
        root = owner if isinstance(owner, torch.nn.Module) else None
        self.engine = ServerEngine(self.decorated.options, root, found.fn)
        self._always_loops = found.options.adaptive == "loop"
        self._counts = Counts()
        self._queue: deque[_Request] = deque()
        self._ready = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = self._drains = False
        self._earliest = _FOREVER  # no deadline is before it
        self._cancelled = False  # whether some request may have been cancelled
        # Of the thread that computes
        self._running: dict[int, _Request] = {}  # by slot
        self._free = self._all_slots()
        self._recording: OngoingRecording | None = None
        self._lines: dict[str, int] = {}  # of the user's code, that waited

    # -- beginning and end ----------------------------------------------------------------------------

    def start(self) -> Server:
        """Take requests from here on, in a thread of its own. Returns the server."""
        with self._ready:
            if self._thread is not None:
                return self
            self._stopping = False
            self._thread = threading.Thread(target=self._serve, name="fxbatch live", daemon=True)
            self._thread.start()
        atexit.register(_stop_at_exit, weakref.ref(self))
        return self

    def stop(self, drain: bool = True) -> None:
        """Take no more requests, and wait until all that were taken have ended.

        drain: let them come to their end; False: they are cancelled.
        """
        with self._ready:
            thread = self._thread
            self._stopping, self._drains = True, drain
            self._ready.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(drain=error is None)

    async def __aenter__(self) -> Server:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop, error is None)

    # -- asking ---------------------------------------------------------------------------------------

    def submit(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Future[Any]:
        """The future result of the forward for one instance, whose arguments these are. From any thread.

        timeout: seconds from now after which the request is ended with a DeadlineError. The future can be cancelled.
        Both take effect at the next phase.

        Errors:
            QueueFullError: `max_queue` requests are waiting.
            StoppedError: the server is not running.
        """
        now = time.perf_counter()
        deadline = _FOREVER if timeout is None else now + timeout
        return self._put(_Request(args, kwargs, Future(), now, deadline))

    async def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The result of the forward for one instance, whose arguments these are. From any event loop. See `submit`."""
        return await asyncio.wrap_future(self.submit(*args, timeout=timeout, **kwargs))

    def update(self, change: Callable[[], Any]) -> Future[Any]:
        """The future result of `change()`, which may change the model, such as `model.load_state_dict(state)`.

        It is called when all requests before it have ended, and before any after it begins: each request is answered
        by one model.
        """
        return self._put(_Request((), {}, Future(), time.perf_counter(), change=change))

    def _put(self, request: _Request) -> Future[Any]:
        with self._ready:
            if self._thread is None or self._stopping:
                raise StoppedError(
                    "the server is not running: start() it, or use it in `with` or `async with`"
                )
            if request.change is None:
                if len(self._queue) >= self.max_queue:
                    self._counts.of["refused"] += 1
                    raise QueueFullError(
                        f"{len(self._queue)} requests are waiting, as many as max_queue allows"
                    )
                self._counts.of["requests"] += 1
            self._queue.append(request)
            self._earliest = min(self._earliest, request.deadline)
            if len(self._queue) == 1 or len(self._queue) >= self.max_batch or request.change is not None:
                self._ready.notify_all()  # not for each: to wake the thread that waits for more costs as much as a step
        request.future.add_done_callback(self._note_cancelled)
        return request.future

    def _note_cancelled(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._cancelled = True

    # -- what is known --------------------------------------------------------------------------------

    def stats(self) -> ServerStats:
        """Counts, times and latencies until now."""
        return self._counts.stats(waiting=len(self._queue), running=len(self._running))

    def collect(self) -> Iterator[Any]:
        """The stats as metrics of the package `prometheus_client`: `prometheus_client.REGISTRY.register(server)`."""
        yield from prometheus_parser.text_string_to_metric_families(self.stats().prometheus())

    def explain(self) -> str:
        """How requests are served, why, and the last phases."""
        with torch.no_grad():
            reason = self.engine.refusals.reason(training=self.engine.training)
        if self._always_loops or reason:
            how = f"one at a time, by the plain loop: {reason or 'adaptive=' + repr('loop')}"
        elif self.engine.waits:
            how = f"as they come: a request joins at the next phase; up to {self.max_batch} at a time"
        else:
            how = f"in minibatches of what comes within {self.max_wait:g} s, of up to {self.max_batch}"
        stats = self.stats()
        lines = [
            f"{self.decorated.name} serves requests {how}",
            f"{stats.done} done, {stats.running} running, {stats.waiting} waiting; {stats.mean_batch:.1f} requests a "
            f"batch; latency {1e3 * stats.latency(0.5):.1f} ms (half), {1e3 * stats.latency(0.99):.1f} ms (99 %)",
        ]
        if self._lines:
            asked = sorted(self._lines.items(), key=lambda x: -x[1])[:4]
            lines.append("waits for values: " + ", ".join(f"{line} ({n} times)" for line, n in asked))
        return "\n".join([*lines, *self._counts.table()])

    # -- the thread that computes ---------------------------------------------------------------------

    def _serve(self) -> None:
        error: BaseException = StoppedError("the server was stopped")
        try:
            with torch.no_grad():
                while (requests := self._take()) is not None:
                    self._step(requests)
        except BaseException as mistake:
            error = mistake
            raise
        finally:
            self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        """Nothing runs any more: what is left is cancelled, or has this error where it is no end that was asked for."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.fail()
        with self._ready:
            left = [*self._running.values(), *self._queue]
            self._running.clear()
            self._queue.clear()
            self._stopping = True
        self._free = self._all_slots()
        for request in left:
            if isinstance(error, StoppedError):
                request.future.cancel()
            self._answer(request, error)

    def _take(self) -> list[_Request] | None:
        """The requests that begin now; None where the server is to end. Waits where nothing runs."""
        with self._ready:
            if not self._running:
                self._wait()
            if self._stopping and not (self._drains and (self._queue or self._running)):
                return None
            over = self._drop()
            begin: list[_Request] = []
            room = (1 if self._loops else self.max_batch) - len(self._running)
            while self._queue and len(begin) < room:
                if self._queue[0].change is not None and (self._running or begin):
                    break
                begin.append(self._queue.popleft())
                if begin[0].change is not None:
                    break
        for request in over:
            self._answer(request, DeadlineError("the timeout of this request is over"))
        return begin

    def _wait(self) -> None:
        """Wait for a request, and then for those that are to run with it."""
        while not self._queue and not self._stopping:
            self._ready.wait()
        if self.engine.waits or self._loops:
            return
        while not self._stopping and self._queue and len(self._queue) < self.max_batch:
            left = self._queue[0].arrived + self.max_wait - time.perf_counter()
            if left <= 0 or self._queue[0].change is not None:
                return
            self._ready.wait(left)

    def _drop(self) -> list[_Request]:
        """Take out requests that were cancelled, and those whose time is up."""
        now = time.perf_counter()
        if now < self._earliest and not self._cancelled:
            return []
        self._cancelled = False
        over = [request for request in self._queue if request.is_over(now)]
        for request in over:
            self._queue.remove(request)
        for slot, request in list(self._running.items()):
            if request.is_over(now):
                assert self._recording is not None
                self._recording.end(slot)
                over.append(self._leave(slot))
        self._earliest = min((r.deadline for r in (*self._queue, *self._running.values())), default=_FOREVER)
        return over

    @property
    def _loops(self) -> bool:
        """Whether the plain loop serves requests, one at a time."""
        if self._always_loops:
            return True
        return bool(self.engine.may_loop and self.engine.refusals.reason(training=self.engine.training))

    def _step(self, requests: list[_Request]) -> None:
        """Begin these requests, and run one phase, or one minibatch."""
        if requests and requests[0].change is not None:
            self._change(requests[0], requests[0].change)
        elif self._recording is None and self._loops:
            if reason := self.engine.refusals.reason(training=self.engine.training):
                self.decorated.say_loop_runs(self.engine, reason)
            for request in requests:
                self._alone(request)
        elif self._recording is None and not self.engine.waits:
            self._minibatch(requests)
        elif self._recording is not None or requests:
            try:
                self._phase(requests)
            except Exception as error:  # noqa: BLE001 - each request begins anew, or has it
                self._begin_anew(error)

    def _change(self, request: _Request, change: Callable[[], Any]) -> None:
        try:
            with torch.enable_grad():
                request.settle(change())
        except Exception as error:  # noqa: BLE001 - it is the caller's
            request.settle(error)

    # -- forwards that don't wait ---------------------------------------------------------------------

    def _minibatch(self, requests: list[_Request]) -> None:
        """Run requests together to their end."""
        laps = self.engine.laps.begin()
        instances = [(self._arguments(r), r.kwargs) for r in requests]
        try:
            results: list[Any] = self.decorated.run(self.engine, self.owner, instances)
        except TraceError as error:
            results = [error] * len(requests)
        except Exception:  # noqa: BLE001 - it belongs to one of them
            results = [self._by_the_loop(request) for request in requests]
        laps.lap("python")
        for request, result in zip(requests, results, strict=True):
            self._answer(request, result)
        n = len(requests)
        self._counts.phase(PhaseTimes(n, n, n, 0, **laps.end("results")))

    def _alone(self, request: _Request) -> None:
        """Serve a request by the plain loop."""
        self._answer(request, self._by_the_loop(request))

    def _by_the_loop(self, request: _Request) -> Any:
        """What the plain loop gives for a request, or raises."""
        self._counts.of["looped"] += 1
        try:
            return self.decorated.loop([(self._arguments(request), request.kwargs)])[0]
        except BaseException as error:  # noqa: BLE001 - SystemExit ends its request alone
            return _ended(error)

    # -- forwards that wait ---------------------------------------------------------------------------

    def _phase(self, requests: list[_Request]) -> None:
        """Let these requests join those that run, and run one phase."""
        laps = self.engine.laps.begin()
        recording = self._recording = self._recording or self._new_recording()
        before = len(self._running)
        self._deliver([slot for slot in recording.done if not self._has_values(slot)])
        for request in requests:
            slot = self._free.pop()
            self._running[slot] = request
            recording.begin(slot, self._arguments(request), request.kwargs)
        recording.start()
        took_part, calls = len(self._running), recording.recorder.pending
        laps.lap("python")
        if recording.parked:
            recording.advance(lambda: self._deliver(recording.done))
        else:
            self._close()
        seconds, left = laps.end("python"), before + len(requests) - len(self._running)
        if took_part:
            self._counts.phase(PhaseTimes(took_part, len(requests), left, calls, **seconds))

    def _new_recording(self) -> OngoingRecording:
        engine, fn = self.engine, self.decorated.fn
        if mode := surroundings():
            raise TraceError(f"{self.decorated.name} can't be batched here: {mode}")

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except (Exception, greenlet.GreenletExit):
                raise
            except BaseException as error:
                raise _ended(error) from error

        roots = () if engine.root is None else (engine.root,)
        return OngoingRecording(
            forward, engine.table_for_recording(), roots, engine.execution, self.max_batch
        )

    def _has_values(self, slot: int) -> bool:
        """Whether a result has values in it, which have to be computed."""
        assert self._recording is not None
        return slot in self._recording.written or len(Results([self._recording.results[slot]]).values) > 0

    def _deliver(self, slots: Sequence[int]) -> None:
        """Hand over results, for which all has run."""
        recording, laps = self._recording, self.engine.laps
        assert recording is not None and isinstance(recording.execution, Run)
        run = recording.execution
        laps.lap("planning")
        if slots:
            results = separate(
                Results([recording.results[slot] for slot in slots]),
                lambda ids: ids,
                lambda requests: [run.rows(values) for values in requests],
            )
            for slot, result in zip(list(slots), results, strict=True):
                recording.free(slot)
                self._answer(self._leave(slot), result)
        laps.lap("results")

    def _close(self) -> None:
        """Nobody waits: the recording ends as that of a minibatch does."""
        recording = self._recording
        assert recording is not None
        for line, n in recording.statistics.lines.items():
            self._lines[line] = self._lines.get(line, 0) + n
        slots, closed = recording.done, recording.close()
        results = self.engine.finish(recording.execution, closed, "list")  # type: ignore[arg-type]  # a Run
        self._recording = None
        self.engine.laps.lap("planning")
        for slot, result in zip(slots, results, strict=True):
            self._answer(self._leave(slot), result)
        self.engine.laps.lap("results")

    def _all_slots(self) -> list[int]:
        """Every slot, the first one last: it is taken first."""
        return list(range(self.max_batch - 1, -1, -1))

    def _leave(self, slot: int) -> _Request:
        """The request that was in a slot, which is free from here on."""
        self._free.append(slot)
        return self._running.pop(slot)

    def _begin_anew(self, error: Exception) -> None:
        """A recording has failed: its requests are served by the loop, and all after them where it is the forward that
        can't be recorded, and not somebody else who has changed the model."""
        recording, self._recording = self._recording, None
        running, self._running = dict(self._running), {}
        self._free = self._all_slots()
        undone = recording is None or recording.fail()
        refused = isinstance(error, TraceError) and not isinstance(error, _ReplacedError)
        if refused and not self.engine.may_loop:
            for request in running.values():
                self._answer(request, error)
            return
        operands = [] if recording is None else versions_now(recording.recorder.operands)
        for slot, request in running.items():
            if undone and (recording is None or recording.can_begin_anew(slot)):
                self._alone(request)
            else:
                self._answer(request, error)
        if isinstance(error, InPlaceError) and recording is not None and written_to(operands) is None:
            refused = refused and written_to(recording.recorder.operands) is None  # else another thread has
        if refused:
            self.engine.refuse(str(error))
            begun = f"; {len(running)} of its requests had begun, and begin anew"
            self.decorated.say_loop_runs(self.engine, str(error), begun)

    # -- results --------------------------------------------------------------------------------------

    def _arguments(self, request: _Request) -> tuple[Any, ...]:
        return request.args if self.owner is None else (self.owner, *request.args)

    def _answer(self, request: _Request, result: Any) -> None:
        """Completes a request with the result of its forward, or with an exception."""
        how = "expired" if isinstance(result, DeadlineError) else "failed"
        if not request.settle(result):
            how = "cancelled"
        elif not isinstance(result, BaseException):
            how = "done"
            self._counts.latencies.append(time.perf_counter() - request.arrived)
        self._counts.of[how] += 1


def _ended(error: BaseException) -> Exception:
    """The exception of a request whose forward wanted to end more than itself."""
    if isinstance(error, Exception):
        return error
    return InstanceError(f"the forward raised {type(error).__name__}: {error}")


def _stop_at_exit(ref: weakref.ref[Server]) -> None:
    server = ref()
    if server is not None:
        server.stop(drain=False)


def live(target: Any, *, max_batch: int = 64, max_wait: float = 0.002, max_queue: int = 1024) -> Server:
    """Serve a model that is written for ONE instance: requests that come one at a time run as one batch.

    A request joins those that are running at the next phase, and its result is there as soon as it is done. Each result
    is what the undecorated forward gives for that instance alone, rounding aside. Gradients are off.

    Arguments:
        target: a decorated model, method or function, as for `explain`; call `model.eval()` first.
        max_batch: how many requests run at a time.
        max_wait: seconds that a request waits for others, where the forward doesn't wait for values.
        max_queue: how many requests may wait to begin.

    Returns:
        A Server. `async with` gives what to `await`; in threads `submit` gives a `concurrent.futures.Future`.

    Errors:
        OptionError: an option doesn't take this value.
        QueueFullError, StoppedError: `submit` can't take a request.
        DeadlineError: a request's `timeout` is over.

    Example:
        >>> with fxbatch.live(model) as server:
        ...     future = server.submit([1, 2])
        ...     print(future.result().shape)
        torch.Size([4])
    """
    return Server(target, max_batch=max_batch, max_wait=max_wait, max_queue=max_queue)
