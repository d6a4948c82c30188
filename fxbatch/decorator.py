"""`@autobatch`: a forward written for one instance takes a minibatch.

class Model(nn.Module):
    @fxbatch.autobatch
    def forward(self, tree):        # one tree
        ...

model(trees)                        # a list of trees in, results stacked on a new first dimension
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch

from fxbatch.errors import MinibatchError, StaleTraceError
from fxbatch.runtime.engine import Engine, Instance
from fxbatch.runtime.options import Options
from fxbatch.runtime.ready import ReadyMinibatch, TracedInstance, is_traced, traced_items
from fxbatch.runtime.results import nest, stack_real
from fxbatch.torch_private import eval_frame_off, eval_frame_on, hide_from_dynamo
from fxbatch.trace.known_model import known_model
from fxbatch.trace.state import ThreadModes, current_recorder
from fxbatch.trace.traces import merge

F = TypeVar("F", bound=Callable[..., Any])


class _Switch(threading.local):
    disabled = 0


_switch = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Within it decorated callables run one instance at a time, undecorated: the oracle, for comparisons.

    Applies to the current thread; may be nested.
    """
    _switch.disabled += 1
    try:
        yield
    finally:
        _switch.disabled -= 1


class Autobatched:
    """What `@autobatch` knows of one decorated function: its options, and an Engine a module."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        self.fn = fn
        self.options = options
        self.signature = inspect.signature(fn)
        names = list(self.signature.parameters)
        self.is_method = bool(names) and (names[0] == "self" or _defined_in_a_class(fn))
        unknown = [name for name in options.shared if name not in names]
        if unknown:
            raise MinibatchError(
                f"shared={unknown[0]!r}: {fn.__qualname__} has no such argument; it has {', '.join(names)}"
            )
        self._names = [
            p.name
            for p in self.signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ][1 if self.is_method else 0 :]
        self._own = _Engines()
        self._lock = threading.Lock()

    def engine(self, owner: Any) -> Engine:
        """The engine of a module (or of the function itself)."""
        with self._lock:
            engines = self._own
            if owner is not None:
                engines = owner.__dict__.setdefault("_fxbatch_engines", _Engines())
            found = engines.get(self)
            if found is None:
                root = owner if isinstance(owner, torch.nn.Module) else None
                found = engines[self] = Engine(self.options, root)
            return found

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Instance]]:
        """The owner (self, or None) and the arguments of each instance."""
        owner = None
        if self.is_method:
            if not args:
                raise MinibatchError(f"{self.fn.__qualname__} is a method: call it on an object")
            owner, args = args[0], args[1:]
        if len(args) == 1 and not kwargs and isinstance(args[0], (list, tuple)) and not self.options.shared:
            head = () if owner is None else (owner,)  # what most calls are, as what follows does it
            return owner, [((*head, item), {}) for item in args[0]]
        bound = self._bind(owner, args, kwargs)
        lengths: dict[str, int] = {}
        columns: list[tuple[str, str, Any]] = []
        for name, value, place in bound:
            if name in self.options.shared:
                columns.append((place, name, None if value is None else _Same(value)))
                continue
            items = _instances_of(self.fn, name, value)
            lengths[name] = len(items)
            columns.append((place, name, items))
        if not lengths:
            raise MinibatchError(
                f"{self.fn.__qualname__} takes a minibatch: at least one argument with an item an instance"
            )
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise MinibatchError(f"{self.fn.__qualname__}: arguments of different lengths: {listed}")
        count = next(iter(lengths.values()))
        head = () if owner is None else (owner,)
        instances: list[Instance] = []
        for i in range(count):
            positional = [_item(items, i) for place, _, items in columns if place == "positional"]
            named = {name: _item(items, i) for place, name, items in columns if place == "named"}
            instances.append(((*head, *positional), named))
        return owner, instances

    def _bind(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any, str]]:
        names = self._names
        named = [
            (names[i] if i < len(names) else f"argument {i}", a, "positional") for i, a in enumerate(args)
        ]
        return named + [(name, value, "named") for name, value in kwargs.items()]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 + self.is_method and not kwargs and is_traced(args[-1]):
            return self._call_traced(args[0] if self.is_method else None, args[-1])
        owner, instances = self.split(args, kwargs)
        if _switch.disabled or current_recorder() is not None:
            return self.one_by_one(instances)
        return self.engine(owner).call(self.fn, instances, self.options.out)

    def _call_traced(self, owner: Any, batch: Any) -> Any:
        """A minibatch of traces, traced instances, or a ready one."""
        engine = self.engine(owner)
        if _switch.disabled or current_recorder() is not None:
            return self.one_by_one([self._again(owner, item) for item in traced_items(batch)])
        if not isinstance(batch, ReadyMinibatch):
            ready = self.ready(engine, owner, batch)
        elif batch.stale() or batch.engine is not engine:
            ready = self.ready(engine, owner, batch.instances)
        else:
            ready = batch
        return engine.run_ready(ready, self.options.out)

    def ready(self, engine: Engine, owner: Any, batch: Any) -> ReadyMinibatch:
        """A minibatch of traced instances, merged and planned; stale traces are made again."""
        items = traced_items(batch)
        root = owner if isinstance(owner, torch.nn.Module) else None
        now = known_model(engine.table, root).fingerprint
        traces = [x.trace for x in items if x.trace is not None and x.fresh(now)]
        if len(traces) == len(items):
            return ReadyMinibatch.of(engine, items, merge(traces, engine.table, root))
        run = engine.execution()
        return ReadyMinibatch.of(
            engine, items, engine.record(self.fn, [self._again(owner, x) for x in items], run), run
        )

    def _again(self, owner: Any, item: TracedInstance) -> Instance:
        """The arguments of a traced instance, to be run or traced again."""
        if item.args is None:
            raise StaleTraceError(
                "a trace does not fit the model as it is now, or is to be run undecorated, and does not know "
                "its instance: use fxbatch.TracedDataset, which keeps both"
            )
        head = (owner,) if self.is_method else ()
        return ((*head, *item.args), dict(item.shared))

    def one_by_one(self, instances: Sequence[Instance]) -> Any:
        """The undecorated forward in a loop, results put together as the decorated call does."""
        results = [self.fn(*args, **kwargs) for args, kwargs in instances]
        if self.options.out == "stack":
            return stack_real(results)
        return nest(results) if self.options.out == "nested" else results


def _defined_in_a_class(fn: Callable[..., Any]) -> bool:
    """Whether a function was defined in the body of a class: "Model.forward", not "make.<locals>.forward"."""
    parent = getattr(fn, "__qualname__", "").rpartition(".")[0]
    return bool(parent) and not parent.endswith("<locals>")


class _Engines(dict[Autobatched, Engine]):
    """The engines of one object, kept in its __dict__ so that they die with it; a copy begins empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Engines:
        return _Engines()

    def __copy__(self) -> _Engines:
        return _Engines()

    def __reduce__(self) -> Any:
        return (_Engines, ())


class _Same:
    """An argument given once for all instances."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _item(items: Any, i: int) -> Any:
    if items is None:
        return None
    return items.value if isinstance(items, _Same) else items[i]


def _instances_of(fn: Callable[..., Any], name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise MinibatchError(
                f"{fn.__qualname__}: {name} has no dimensions; its first dimension is the instances"
            )
        return value.unbind(0)
    raise MinibatchError(
        f"{fn.__qualname__}: {name} takes a list or tuple with one item an instance, or a tensor whose first "
        f"dimension is the instances, got {type(value).__name__}; for an argument given once for all: "
        f'@fxbatch.autobatch(shared=("{name}",))'
    )


@overload
def autobatch(fn: F) -> F: ...


@overload
def autobatch(**options: Any) -> Callable[[F], F]: ...


def autobatch(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a callable that is written for ONE instance take a minibatch of instances.

    Bare (`@autobatch`) or with options (`@autobatch(schedule="depth")`). Each argument of a call is then a
    list or tuple with one item an instance, or a tensor whose first dimension is the instances; arguments
    named in `shared` are given once for all. The result has the structure of one instance's result, its
    tensors stacked on a new first dimension (`out="stack"`), or is a list (`"list"`), or holds jagged nested
    tensors (`"nested"`). See `fxbatch.runtime.options.Options` for all options.

    Values and gradients equal those of the undecorated callable, one instance at a time.

    Raises OptionError, MinibatchError, ResultError, TraceError.
    Source: Looks et al. 2017 section 2; Neubig et al. 2017 section 3.
    """
    checked = Options.of(**options)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        state = Autobatched(function, checked)

        @functools.wraps(function)
        def batched(*args: Any, **kwargs: Any) -> Any:
            frames, modes = eval_frame_off(), ThreadModes()
            try:
                return state(args, kwargs)
            except BaseException:
                modes.restore()  # an interrupt may have struck between a mode's change and its `with`
                raise
            finally:
                eval_frame_on(frames)

        hide_from_dynamo(batched)
        batched.__fxbatch__ = state  # type: ignore[attr-defined]  # found by trace, explain, ...
        return batched

    return decorate if fn is None else decorate(fn)


def find_autobatched(target: Any) -> tuple[Autobatched, Any]:
    """The decorated callable behind a module, a bound method or a function, and its owner."""
    if isinstance(target, torch.nn.Module):
        fn = getattr(type(target).forward, "__fxbatch__", None)
        if fn is not None:
            return fn, target
        for name in dir(type(target)):
            fn = getattr(getattr(type(target), name, None), "__fxbatch__", None)
            if fn is not None:
                return fn, target
        return Autobatched(type(target).forward, Options()), target
    owner = getattr(target, "__self__", None)
    fn = getattr(target, "__fxbatch__", None)
    if fn is not None:
        return fn, owner
    if callable(target):
        return Autobatched(getattr(target, "__func__", target), Options()), owner
    raise MinibatchError(f"{target!r} is no module and no function")
