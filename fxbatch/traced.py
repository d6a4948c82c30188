"""Traces ahead of time: `trace`, `TracedDataset`, `collate`, `prefetch`, and `lazy`.

data = fxbatch.TracedDataset(model, trees)                  # traced once, in this process or in workers
loader = DataLoader(data, batch_size=64, shuffle=True, collate_fn=fxbatch.collate(model), num_workers=2)
for batch in fxbatch.prefetch(model, loader):               # planned while the step before computes
    loss = model(batch).sum()
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from fxbatch.decorator import Autobatched, find_autobatched
from fxbatch.errors import MinibatchError, OptionError
from fxbatch.runtime.autograd import materialise
from fxbatch.runtime.engine import Engine, ReadyMinibatch, TracedInstance
from fxbatch.runtime.options import Options
from fxbatch.trace.minibatch import LazyBatch
from fxbatch.trace.module_state import known_model
from fxbatch.trace.state import entered_modes, modes_now
from fxbatch.trace.traces import Trace, trace_instance


def trace(model: Any, *args: Any) -> Trace:
    """Record ONE instance without running it. A trace prints as text, and can be pickled.

    Arguments:
        model: a module with a decorated method, or a decorated function.
        args: the arguments of one instance, as the undecorated function takes them.

    Errors:
        TraceError: the instance asks for a value, so that it can't be recorded ahead.

    Example:
        >>> trace = fxbatch.trace(model, [1, 2])
        >>> len(trace.signatures)  # two operations, the words and the zeros
        4
        >>> model([trace]).shape
        torch.Size([1, 4])
    """
    autobatched, owner = find_autobatched(model)
    return _trace(autobatched, owner, args, {})


def _trace(autobatched: Autobatched, owner: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    engine = autobatched.engine(owner)
    given = tuple(args) if owner is None else (owner, *args)
    root = owner if isinstance(owner, torch.nn.Module) else None
    return trace_instance(
        autobatched.fn, given, kwargs, engine.table_for_recording(), engine.execution(), root
    )


class TracedDataset(Dataset[TracedInstance]):
    """A data set whose items are traced instances: each is traced at first use, and kept.

    Your Python then runs once per instance, not once per instance and epoch. Items go to the decorated model in lists.
    They can be pickled, so that worker processes of a DataLoader may trace. Instances that can't be traced ahead (they
    branch on values, or draw random numbers) are passed on as they are.

    Arguments:
        model: a module with a decorated method, or a decorated function.
        data: a sequence with one instance per item. A tuple is the arguments of one instance where the forward takes
            several.
        shared: arguments that are given once for all instances, by name.

    Errors:
        MinibatchError: `shared` are not those of the decorator.

    Example:
        >>> data = fxbatch.TracedDataset(model, sentences)
        >>> len(data)
        2
        >>> model([data[0], data[1]]).shape
        torch.Size([2, 4])
    """

    def __init__(self, model: Any, data: Sequence[Any], **shared: Any) -> None:
        self.model = model
        self.data = data
        self.shared = shared
        self._traces: dict[int, TracedInstance] = {}
        autobatched, _ = find_autobatched(model)
        wanted = set(autobatched.options.shared)
        if set(shared) != wanted:
            raise MinibatchError(f"shared arguments {sorted(wanted)} are needed, got {sorted(shared)}")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> TracedInstance:
        if index < 0:
            index += len(self.data)
        if not 0 <= index < len(self.data):
            raise IndexError(f"instance {index} of {len(self.data)}")
        found = self._traces.get(index)
        if found is None or not found.fresh(self._fingerprint(), modes_now()):
            found = self._traces[index] = self._make(self.data[index])
        return found

    def _fingerprint(self) -> tuple[str, ...]:
        autobatched, owner = find_autobatched(self.model)
        root = owner if isinstance(owner, torch.nn.Module) else None
        return known_model(autobatched.engine(owner).table, root).fingerprint

    def _make(self, item: Any) -> TracedInstance:
        autobatched, owner = find_autobatched(self.model)
        args = autobatched.arguments_of(owner, item)
        return TracedInstance.of(args, self.shared, lambda: _trace(autobatched, owner, args, self.shared))


def collate(model: Any) -> Callable[[Sequence[TracedInstance]], list[TracedInstance]]:
    """A `collate_fn` for a DataLoader over a TracedDataset: a list of traced instances.

    The lists go to the decorated model, or to `prefetch`. Without traces `collate_fn=list` is enough.

    Errors:
        MinibatchError: the items are not those of a TracedDataset.

    Example:
        >>> data = fxbatch.TracedDataset(model, sentences)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=fxbatch.collate(model))
        >>> [tuple(model(batch).shape) for batch in loader]
        [(2, 4)]
    """
    if isinstance(model, (list, tuple)):
        raise MinibatchError(
            "fxbatch.collate takes the model: DataLoader(..., collate_fn=fxbatch.collate(model))"
        )
    find_autobatched(model)
    return _Collate()


class _Collate:
    """Picklable, for workers."""

    def __call__(self, items: Sequence[TracedInstance]) -> list[TracedInstance]:
        for item in items:
            if not isinstance(item, TracedInstance):
                raise MinibatchError(
                    f"fxbatch.collate takes items of a TracedDataset, got {type(item).__name__}"
                )
        return list(items)


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_END = object()


def prefetch(model: Any, batches: Iterable[Any], *, ahead: int = 1) -> Iterator[ReadyMinibatch]:
    """Plan the next minibatches in a thread while this one runs.

    Exceptions of `batches` are raised here. A loop that is left early doesn't wait for `batches`.

    Arguments:
        model: a module with a decorated method, or a decorated function.
        batches: lists of traced instances, such as a DataLoader with `collate_fn=fxbatch.collate(model)` gives.
        ahead: how many minibatches to plan ahead.

    Returns:
        One object per minibatch: call the model with it. Its `instances` are the traced instances; `args` of one
        are the arguments that it was traced with.

    Example:
        >>> data = fxbatch.TracedDataset(model, sentences)
        >>> for batch in fxbatch.prefetch(model, [[data[0], data[1]], [data[1]]]):
        ...     print(len(batch.instances), tuple(model(batch).shape))
        2 (2, 4)
        1 (1, 4)
    """
    autobatched, owner = find_autobatched(model)
    engine = autobatched.engine(owner)
    under = modes_now()
    waiting: queue.Queue[Any] = queue.Queue(maxsize=max(ahead, 1))
    stop = threading.Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=0.1)
                return

    asking = threading.Event()  # the thread waits for the source, which may take as long as it likes
    source: list[Iterator[Any]] = []

    def ask() -> Any:
        asking.set()
        try:
            source[:] = source or [iter(batches)]
            return next(source[0], _END)
        finally:
            asking.clear()

    def work() -> None:
        try:
            with entered_modes(under, ()):
                while not stop.is_set() and (batch := ask()) is not _END and not stop.is_set():
                    put(autobatched.ready(engine, owner, batch, ahead=True))
            put(_END)
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            put(_Failure(error))

    thread = threading.Thread(target=work, name="fxbatch-prefetch", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stop.set()
        while thread.is_alive() and not asking.is_set():
            thread.join(0.01)


@contextlib.contextmanager
def lazy(model: Any = None, **options: Any) -> Iterator[LazyBatch]:
    """Batch a loop of your own: in this block calls are recorded, and run in batches when a value is read.

    `.backward()`, `.item()`, or leaving the block runs everything that is pending.

    Arguments:
        model: a module, or several in a list, whose parameters and submodules take part; or None.
        options: those of `autobatch`.

    Errors:
        OptionError: an unknown option, or `check`, for which there are no instances to run again.

    Example:
        >>> layer = nn.Linear(3, 1)
        >>> with fxbatch.lazy(layer):
        ...     losses = [layer(x).square().sum() for x in torch.ones(5, 3)]
        ...     sum(losses).backward()  # runs as one batch
        >>> layer.weight.grad.shape
        torch.Size([1, 3])
    """
    roots = [] if model is None else list(model) if isinstance(model, (list, tuple)) else [model]
    chosen = Options.of(**options)
    if chosen.check:
        raise OptionError("check: a lazy block has no instances to run again; a decorated callable has")
    engine = _lazy_engine(roots, chosen)
    table, run = engine.table_for_recording(), engine.execution(lasting=True)
    with LazyBatch(table, run, functools.partial(materialise, run), roots) as batch:
        yield batch


def _lazy_engine(roots: Sequence[Any], options: Options) -> Engine:
    """One engine a model and options, kept on the model so that a second block finds everything made."""
    if not roots:
        return Engine(options)
    kept = roots[0].__dict__.setdefault("_fxbatch_lazy", _LazyEngines())
    found = kept.get(options)
    if found is None:
        found = kept[options] = Engine(options, roots[0])
    return found


class _LazyEngines(dict[Options, Engine]):
    """The lazy engines of a module; a copy of the module begins empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _LazyEngines:
        return _LazyEngines()

    def __reduce__(self) -> Any:
        return (_LazyEngines, ())
