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
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from fxbatch.decorator import Autobatched, find_autobatched
from fxbatch.errors import (
    DeadlineError,
    InstanceError,
    LoopWarning,
    OptionError,
    QueueFullError,
    StoppedError,
    TraceError,
)
from fxbatch.on_demand import prometheus_parser
from fxbatch.plain_loop import loop_over
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.packed_route import NOT_PACKED
from fxbatch.runtime.refusals import surroundings
from fxbatch.runtime.results import Results, separate
from fxbatch.runtime.run import Run
from fxbatch.server_stats import Counts, ServerStats
from fxbatch.trace.minibatch import Statistics
from fxbatch.trace.ongoing import WEIGHTS, ChangedError, OngoingRecording

_FOREVER = float("inf")
_MOST_BEGUN = 8  # times that a request begins anew as the model is changed, before that is its error
_GAPS = 32  # arrivals that say how fast requests come
_EVERY = 17  # of so many waits one is looked for in the user's code: loops seldom have 17
_LONGEST_GAP = 4  # a gap between two counts as so many max_wait at most


class _OngoingRun(Run):
    """A run of a server: planning and kernels are timed."""

    counts: Counts

    def launch(self, phase: Phase) -> None:
        self.counts.lap("planning")
        super().launch(phase)
        self.counts.lap("kernels")

    def real(self, results: list[object]) -> list[object]:
        """See OngoingExecution."""
        with torch.inference_mode():
            return separate(Results(results), lambda ids: ids, lambda ids: [*map(self.rows, ids)])


class _Request(Future[Any]):
    """An entry of the queue, and its future: a request for a result, or (`change`) a function to call between them."""

    begun_anew = 0  # times
    phase = 0  # when it has begun
    apart: object = None  # others join it only where theirs is the same

    def __init__(
        self, args: Any, kwargs: Any, timeout: float | None = None, change: Callable[[], Any] | None = None
    ) -> None:
        super().__init__()
        self.args, self.kwargs, self.change, self.arrived = args, kwargs, change, time.perf_counter()
        self.deadline = _FOREVER if timeout is None else self.arrived + timeout
        if change is not None:
            self.apart = self  # nobody's


class Server:
    """A model that answers requests: what `live` gives. Use it in `with` or `async with`, or by `start` and `stop`.

    `submit(...)` gives the future result of one instance, `await server(...)` the result in an event loop.
    `update(change)` calls `change()` between requests, `stats()` counts, `explain()` says how requests are served.

    Arguments:
        target: a decorated model, method or function, as `live` takes it.
        max_batch: how many requests run at a time.
        max_wait: seconds that a request waits for others.
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
        found, self.owner = find_autobatched(target)
        if found.options.mode != "looped":
            raise OptionError(
                f"live batches run programs step by step: mode={found.options.mode!r} makes a module"
            )
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r}: takes a whole number from 1 on")
        if not isinstance(max_wait, (int, float)) or not 0 <= max_wait < _FOREVER:
            raise OptionError(f"max_wait={max_wait!r}: takes seconds, from 0 on")
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        options = replace(found.options, out="list", return_exceptions=True)
        self.decorated = Autobatched(found.fn, options)
        root = self.owner if isinstance(self.owner, torch.nn.Module) else None
        self.engine = Engine(replace(options, return_exceptions=False), root)
        self.engine.table.forward = found.fn
        self._counts, self._waits = Counts(), Statistics(0, every=_EVERY)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ready = threading.Condition()  # holds what follows
        self._queue: deque[_Request] = deque()
        self._takes = self._drains = False
        self._look_at = _FOREVER  # no request is over before, by its deadline or as it was cancelled
        self._arrived, self._gap = 0.0, 0.0  # the last arrival, and a mean of what lies between two
        # Of the thread that computes
        self._recording: OngoingRecording[_Request] | None = None
        self._why_loop = ""
        self._suspicious = 0  # phases after which those that were parted may run with others

    # -- beginning and end ----------------------------------------------------------------------------

    def start(self) -> Server:
        """Take requests from here on, in a thread of its own. Returns the server."""
        with self._starting:
            if not self._is_open:
                if self._thread is not None:
                    self._thread.join()  # it was stopped, or is of the process that this one was forked from
                self._recording, self._queue, self._takes = None, deque(), True
                self._thread = threading.Thread(target=self._serve, name="fxbatch live", daemon=True)
                self._thread.start()
                atexit.register(self.stop, drain=False)
        return self

    @property
    def _is_open(self) -> bool:
        return self._takes and self._thread is not None and self._thread.is_alive()

    def stop(self, drain: bool = True) -> None:
        """Take no more requests, and wait until all that were taken have ended.

        drain: let them come to their end; False: they are cancelled.
        """
        with self._ready:
            self._takes, self._drains = False, drain
            self._ready.notify_all()
        atexit.unregister(self.stop)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop(drain=error is None)

    async def __aenter__(self) -> Server:
        return self.start()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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
        return self._put(_Request(args, kwargs, timeout))

    async def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The result of the forward for one instance, whose arguments these are. From any event loop. See `submit`."""
        return await asyncio.wrap_future(self.submit(*args, timeout=timeout, **kwargs))

    def update(self, change: Callable[[], Any]) -> Future[Any]:
        """The future result of `change()`, which may change the model, such as `model.load_state_dict(state)`.

        It is called when all requests before it have ended, and before any after it begins: each request is answered
        by one model.
        """
        return self._put(_Request((), {}, change=change))

    def _put(self, request: _Request) -> Future[Any]:
        request.add_done_callback(self._note_cancelled)
        with self._ready:
            if not self._is_open:
                raise StoppedError(
                    "the server is not running: start() it, or use it in `with` or `async with`"
                )
            waiting = len(self._queue) + 1
            if request.change is None:
                if waiting > self.max_queue:
                    self._counts.of["refused"] += 1
                    raise QueueFullError(f"{waiting - 1} requests are waiting, as many as max_queue allows")
                self._counts.of["requests"] += 1
                gap = min(request.arrived - self._arrived, _LONGEST_GAP * self.max_wait)
                self._arrived, self._gap = request.arrived, self._gap + (gap - self._gap) / _GAPS
            self._queue.append(request)
            is_first = request.deadline < self._look_at
            self._look_at = min(self._look_at, request.deadline)
            if is_first or waiting == 1 or waiting >= self.max_batch or request.change:
                self._ready.notify_all()  # not for each: to wake the thread that waits for more costs as much as a step
        return request

    def _note_cancelled(self, request: Future[Any]) -> None:
        if request.cancelled():
            with self._ready:
                self._look_at = 0.0
                self._ready.notify_all()

    # -- what is known --------------------------------------------------------------------------------

    def stats(self) -> ServerStats:
        """Counts, times and latencies until now."""
        return self._counts.stats(waiting=len(self._queue), running=len(self._running))

    def collect(self) -> Iterator[Any]:
        """The stats as metrics of the package `prometheus_client`: `prometheus_client.REGISTRY.register(server)`."""
        yield from prometheus_parser.text_string_to_metric_families(self.stats().prometheus())

    def explain(self) -> str:
        """How requests are served, why, and the last phases."""
        how = f"in minibatches of what comes within {self.max_wait:g} s, of up to {self.max_batch}"
        if self._why_loop:
            how = f"one at a time, by the plain loop: {self._why_loop}"
        elif self._waits.suspensions:
            how = f"as they come: a request joins at the next phase; up to {self.max_batch} at a time"
        stats = self.stats()
        lines = [
            f"{self.decorated.name} serves requests {how}",
            f"{stats.done} done, {stats.running} running, {stats.waiting} waiting; {stats.mean_batch:.1f} requests a "
            f"batch; latency {1e3 * stats.latency(0.5):.1f} ms (half), {1e3 * stats.latency(0.99):.1f} ms (99 %)",
        ]
        asked = Counter(self._waits.lines).most_common(4)
        if asked:
            lines.append("waits for values: " + ", ".join(f"{line} (about {n} times)" for line, n in asked))
        return "\n".join([*lines, *self._counts.table()])

    # -- the thread that computes ---------------------------------------------------------------------

    @property
    def _running(self) -> dict[int, _Request]:
        recording = self._recording
        return {} if recording is None else recording.tickets

    def _serve(self) -> None:
        error: BaseException = StoppedError("the server was stopped")
        with torch.no_grad():
            try:
                while (requests := self._take()) is not None:
                    self._step(requests)
            except BaseException as mistake:
                error = mistake
                raise
            finally:
                self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        """Nothing runs any more: what is left is cancelled, or has this error where it is no end that was asked for."""
        with self._ready:
            self._takes, left = False, [*self._running.values(), *self._queue]
            self._queue.clear()
        recording, self._recording = self._recording, None
        try:
            if recording is not None:
                recording.fail()
        finally:
            for request in left:
                if isinstance(error, StoppedError):
                    request.cancel()
                self._answer(request, error)

    def _take(self) -> list[_Request] | None:
        """The requests that begin now; None where the server is to end. Waits where nothing is to be done."""
        with self._ready:
            while (seconds := self._seconds_to_wait()) > 0:
                self._ready.wait(None if seconds == _FOREVER else seconds)
            if not self._takes and not (self._drains and (self._queue or self._recording is not None)):
                return None
            over = self._over()
        for slot in [k for k, x in self._running.items() if x in over]:
            assert self._recording is not None
            self._recording.end(slot)  # users' `finally` blocks run
        for request in over:
            self._answer(request, DeadlineError("the timeout of this request is over"))
        with self._ready:
            return self._next()

    def _seconds_to_wait(self) -> float:
        """How long there is nothing to do, unless something comes."""
        if self._recording is None:
            self._why_loop = self._reason_for_the_loop()
        if self._recording is not None or not self._takes:
            return 0.0
        if not self._queue:
            return _FOREVER
        gathers = not (self._waits.suspensions or self._why_loop or self._queue[0].change)
        if not gathers or self._gap > self.max_wait or len(self._queue) >= self.max_batch:
            return 0.0
        return min(self._queue[0].arrived + self.max_wait, self._look_at) - time.perf_counter()

    def _over(self) -> dict[_Request, None]:
        """Requests that were cancelled, and those whose time is up. They wait no more."""
        now = time.perf_counter()
        if now < self._look_at:
            return {}
        here = [*self._queue, *self._running.values()]
        over = dict.fromkeys(x for x in here if x.cancelled() or x.deadline <= now)
        self._queue = deque(x for x in self._queue if x not in over)
        self._look_at = min((x.deadline for x in here if x not in over), default=_FOREVER)
        return over

    def _next(self) -> list[_Request]:
        """The first requests of the queue, as many as may run with one another and with those that run."""
        begin, running = list[_Request](), self._running
        room = (1 if self._why_loop else self.max_batch) - len(running)
        apart = next((x.apart for x in running.values() if x.apart), None)
        while self._queue and len(begin) < room:
            first = self._queue[0]
            if first.apart is not (apart or first.apart) or (first.change and (running or begin)):
                break
            apart = first.apart
            begin.append(self._queue.popleft())
        return begin

    def _reason_for_the_loop(self) -> str:
        """Why the plain loop serves requests, one at a time; "" where it doesn't."""
        engine = self.engine
        if engine.options.adaptive == "loop":
            return "adaptive='loop'"
        return (surroundings() or engine.refusals.reason(training=engine.training)) if engine.may_loop else ""

    def _step(self, requests: list[_Request]) -> None:
        """Begin these requests, and run one phase, or one minibatch."""
        if requests and (self._why_loop or requests[0].change):
            self._alone(requests[0])
        elif requests or self._recording is not None:
            try:
                self._phase(requests)
            except Exception as error:  # noqa: BLE001 - each request begins anew, or has it
                self._begin_anew(error, requests)

    def _arguments(self, request: _Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (request.args if self.owner is None else (self.owner, *request.args)), request.kwargs

    def _answer(self, request: _Request, result: Any) -> None:
        """Complete a request with the result of its forward, or with an exception."""
        request.args = request.kwargs = None  # its future may be held for long
        how = "expired" if isinstance(result, DeadlineError) else "failed"
        if not request.set_running_or_notify_cancel():
            self._counts.of["cancelled"] += request.change is None
            return
        if not isinstance(result, BaseException):
            how = "done"
            if request.change is None:
                self._counts.latencies.append(time.perf_counter() - request.arrived)
        self._counts.of[how] += request.change is None
        with contextlib.suppress(BaseException):  # of a callback that wants to end more than itself
            if isinstance(result, BaseException):
                request.set_exception(_ended(result))
            else:
                request.set_result(result)

    # -- one at a time ----------------------------------------------------------------------------------

    def _alone(self, request: _Request) -> None:
        """Serve a request by the plain loop, or call a change."""
        self._counts.begin()
        is_change = request.change is not None
        if not is_change and self._why_loop:
            self._say_loop_runs(self._why_loop)
        try:
            with torch.enable_grad() if is_change else torch.inference_mode():
                result = (
                    request.change()
                    if request.change
                    else loop_over(self.decorated.one, [self._arguments(request)])[0]
                )
        except BaseException as error:  # noqa: BLE001 - SystemExit ends its request alone
            result = error
        self._answer(request, result)
        if not is_change:
            self._counts.of["looped"] += 1
            self._counts.lap("whole")
            self._counts.end(1, joined=1, left=1, calls=0)

    def _say_loop_runs(self, reason: str, besides: str = "") -> None:
        if self.engine.options.adaptive != "loop":
            with contextlib.suppress(LoopWarning):  # as an error it would end the server
                self.decorated.say_loop_runs(self.engine, reason, besides)

    # -- together ---------------------------------------------------------------------------------------

    def _phase(self, requests: list[_Request]) -> None:
        """Let these requests join those that run, and run one phase."""
        self._counts.begin()
        if self._recording is None:
            if not self._waits.suspensions and self._packed(requests):
                return
            self._recording = self._new_recording()
        recording, counts = self._recording, self._counts
        for request in requests:
            request.phase = counts.of["phases"]
            recording.begin(request, *self._arguments(request))
        recording.start()
        took_part, calls = len(recording.tickets), recording.recorder.pending
        counts.lap("python")
        if recording.parked:
            recording.run()
            self._deliver(recording.take())
            recording.go_on()
            counts.lap("python")
            self._deliver(recording.take())
            for request in recording.tickets.values():
                if counts.of["phases"] - request.phase > self._suspicious:
                    request.apart = None
        else:
            tickets, closed = recording.close()
            with torch.inference_mode():
                results = self.engine.finish(recording.execution, closed, "list")
            recording.check()
            self._recording = None
            self._deliver([*zip(tickets, results, strict=True)])
        if took_part:
            counts.end(took_part, joined=len(requests), left=took_part - len(self._running), calls=calls)

    def _packed(self, requests: list[_Request]) -> bool:
        """Run requests as one packed graph, where their forward can be; whether it could."""
        with torch.inference_mode():
            instances = [self._arguments(request) for request in requests]
            results: Any = self.engine.packed.call(self.decorated.fn, instances, "list")
        if results is not NOT_PACKED:
            self._counts.lap("whole")
            self._deliver([*zip(requests, results, strict=True)])
            self._counts.end(len(requests), joined=len(requests), left=len(requests), calls=0)
        return results is not NOT_PACKED

    def _new_recording(self) -> OngoingRecording:
        engine = self.engine
        if mode := surroundings():
            raise TraceError(f"{self.decorated.name} can't be batched here: {mode}")
        roots = () if engine.root is None else (engine.root,)
        table = engine.table_for_recording()

        def new_run() -> _OngoingRun:
            run = _OngoingRun(engine, grad=False)
            run.table, run.counts = table, self._counts
            return run

        return OngoingRecording(self.decorated.fn, table, roots, new_run, self.max_batch, self._waits)

    def _deliver(self, results: Sequence[tuple[_Request, object]]) -> None:
        """Hand over results."""
        if results:
            self._counts.lap("planning")
            for request, result in results:
                self._answer(request, result)
            self._counts.lap("results")

    def _begin_anew(self, error: Exception, requests: list[_Request]) -> None:
        """A recording has failed. Where somebody has changed the model, its requests begin anew in another one; where a
        kernel has raised an exception, each apart from the others, the last first, until it belongs to one that is
        alone. Otherwise the loop serves them, and all after them: the forward can't be recorded."""
        recording, self._recording = self._recording, None
        left = dict.fromkeys(requests, True) if recording is None else recording.fail()
        changed = "" if recording is None else recording.change()
        if isinstance(error, ChangedError):
            changed = error.what
        for request in left:
            request.begun_anew += bool(changed)
        too_often = any(request.begun_anew > _MOST_BEGUN for request in left)
        if too_often and changed == WEIGHTS:
            error.add_note(f"fxbatch: {_MOST_BEGUN} times while the request ran: use update()")
        elif too_often:
            changed = ""  # it must be the forward that does it each time
        refused = isinstance(error, TraceError) and not changed
        again = list[_Request]()
        for request, can_begin_anew in left.items():
            if (
                not can_begin_anew
                or (refused and not self.engine.may_loop)
                or (changed and request.begun_anew > _MOST_BEGUN)
            ):
                self._answer(request, error)
            elif changed or (len(left) > 1 and not refused):
                again.append(request)
            else:
                self._alone(request)
        if again and not changed:
            suspects = [request for request in again if request.apart] or again
            self._suspicious = self._counts.of["phases"] - min(request.phase for request in suspects) + 1
            for request in suspects:
                request.apart = request
            again.sort(key=lambda request: (request.apart is None, -request.phase))
        with self._ready:
            if not again:  # it is found
                for request in self._queue:
                    request.apart = None if request.change is None else request
            self._queue.extendleft(reversed(again))
        if refused and self.engine.may_loop:
            self.engine.refuse(str(error))
            self._say_loop_runs(str(error), f"; {len(left)} of its requests had begun, and begin anew")


def _ended(error: BaseException) -> Exception:
    """The exception of a request whose forward wanted to end more than itself, or an iterator's end, which a coroutine
    can't raise."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    ended = InstanceError(f"the forward raised {type(error).__name__}: {error}")
    ended.__cause__ = error
    return ended


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
