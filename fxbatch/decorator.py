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
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Concatenate, Literal, Unpack, overload

import torch

from fxbatch import stopwatch
from fxbatch.batched_types import (
    A,
    Batched,
    BatchedFunction,
    Listed,
    ListedWithExceptions,
    P,
    R,
    S,
    Stacked,
)
from fxbatch.checking import CheckedCall, checked, warn_once
from fxbatch.errors import LoopWarning, MinibatchError, OptionError, StaleTraceError, TraceError
from fxbatch.instances import instances_of, is_minibatch
from fxbatch.mistakes import outside
from fxbatch.plain_loop import disabled, loop_over, plain_columns, undecorated
from fxbatch.runtime.argument_objects import Instance, TensorColumns
from fxbatch.runtime.engine import Engine, ReadyMinibatch, TracedInstance, is_traced, traced_items
from fxbatch.runtime.options import Batching, Options, signature
from fxbatch.runtime.packed_route import NOT_PACKED
from fxbatch.runtime.refusals import surroundings, unheard_mode
from fxbatch.runtime.results import gather
from fxbatch.runtime.run import Run
from fxbatch.runtime.strategy import Choice, Strategy, Trial
from fxbatch.torch_private import (
    dispatch_mode_count,
    eval_frame_off,
    eval_frame_on,
    hide_from_dynamo,
    inside_functorch,
    let_dynamo_read_torch,
    saved_tensors_are_packed,
)
from fxbatch.trace.module_changes import ModuleState
from fxbatch.trace.module_state import known_model
from fxbatch.trace.state import ThreadModes, modes_now
from fxbatch.trace.traces import merge


class InstanceArguments(tuple[Any, ...]):
    """All arguments of one instance, optional ones too, where a tuple might be an instance itself."""


class Autobatched:
    """One decorated function: its options, and one Engine per module.

    Its callables take the owner first: the object that a method is called on, None for a function.
    """

    decorates = True  # False: made to look at a function that is not decorated

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        self.fn = fn
        self.one = self._alone if options.return_exceptions else fn  # what the loop calls
        self.name = getattr(fn, "__qualname__", type(fn).__name__)
        self.options = options
        self.signature = inspect.signature(fn)
        parameters = list(self.signature.parameters.values())
        names = list(self.signature.parameters)
        unknown = [name for name in options.shared if name not in names]
        if unknown:
            raise MinibatchError(
                f"shared={unknown[0]!r}: {self.name} has no such argument; it has {', '.join(names)}"
            )
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._positional = [p.name for p in positional]
        first = self._positional[0] if self._positional else ""
        self._always_owned = first == "self"
        self._never_owned = not first or first in options.shared
        self._in_a_class = _defined_in_a_class(fn)
        self._takes_one: dict[bool, bool] = {}  # by whether there is an owner
        self._in_columns: set[int] = set()  # how many arguments, each a minibatch, calls of a method have had
        self._taken: set[tuple[Any, ...]] = set()  # numbers of arguments and names that the forward takes
        self._own = _Engines()
        self._lock = threading.Lock()
        self._may_settle = self._always_owned and not options.check and not options.return_exceptions

    def __reduce__(self) -> tuple[Any, ...]:
        """Classes that are pickled by value (a main program's, by Ray) have their decorated methods with them."""
        return Autobatched, (self.fn, self.options)

    def split_owner(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The object that a method is called on, or None, and the other arguments.

        A first argument called `self` is one, and so is a module, whatever the name of the argument; in a
        function that was defined in a class, whatever is no minibatch (else it is a static method).
        """
        if self._always_owned:
            if not args:
                raise MinibatchError(f"{self.name} is a method: call it on an object")
            return args[0], args[1:]
        if args and not self._never_owned:
            first = args[0]
            if isinstance(first, torch.nn.Module) or (self._in_a_class and not is_minibatch(first)):
                return first, args[1:]
        return None, args

    def names(self, owner: Any) -> list[str]:
        """Names of the positional arguments, without that of the owner."""
        return self._positional if owner is None else self._positional[1:]

    def engine(self, owner: Any) -> Engine:
        """The engine of a module (or of the function itself)."""
        known = getattr(owner, "__dict__", None)
        found = known.get("_fxbatch_engines", _NONE).get(self) if type(known) is dict else None
        if found is not None:
            return found
        with self._lock:
            engines = self._own
            if isinstance(getattr(owner, "__dict__", None), dict):  # a class has none that can be written
                engines = owner.__dict__.setdefault("_fxbatch_engines", _Engines())
            found = engines.get(self)
            if found is None:
                root = owner if isinstance(owner, torch.nn.Module) else None
                found = engines[self] = Engine(self.options, root)
                found.table.forward = self.fn
            return found

    def arguments_of(self, owner: Any, item: Any) -> tuple[Any, ...]:
        """The arguments of one instance of a data set: a tuple's items where several are required."""
        if isinstance(item, InstanceArguments):
            return tuple(item)
        names = self.names(owner)
        required = [
            name
            for name in names
            if name not in self.options.shared
            and self.signature.parameters[name].default is inspect.Parameter.empty
        ]
        return tuple(item) if len(required) > 1 and isinstance(item, (tuple, list)) else (item,)

    def split(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Instance]:
        """The arguments of each instance."""
        head = () if owner is None else (owner,)
        known = not kwargs and len(args) in self._in_columns
        if known and (columns := TensorColumns.of(head, args)) is not None:
            return columns
        found = self._split(head, args, kwargs)
        if (
            not known
            and head
            and not kwargs
            and args
            and not set(self._positional) & set(self.options.shared)
        ):
            self._in_columns.add(len(args))  # a method that takes so many arguments
        return found

    def _split(self, head: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Instance]:
        owner = head[0] if head else None
        takes_one = self._takes_one.get(owner is None)
        if takes_one is None:
            takes_one = self._takes_one[owner is None] = self._one_is_enough(owner)
        if takes_one and len(args) == 1 and not kwargs and type(args[0]) in (list, tuple):
            return [
                ((*head, item), _NO_NAMES) for item in args[0]
            ]  # what most calls are, as what follows does
        self._check_arguments(head, args, kwargs)
        names = self.names(owner)
        positional = [(names[i] if i < len(names) else f"argument {i}", x) for i, x in enumerate(args)]
        columns = [self._column(name, value) for name, value in positional]
        named = {name: self._column(name, value) for name, value in kwargs.items()}
        lengths = {
            name: len(column)
            for name, column in [*zip([n for n, _ in positional], columns), *named.items()]
            if not isinstance(column, _Same)
        }
        if not lengths:
            raise MinibatchError(
                f"{self.name} takes a minibatch: at least one argument with one item per instance"
            )
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise MinibatchError(f"{self.name}: arguments of different lengths: {listed}")
        if not named and not any(type(column) is _Same for column in columns):
            return [((*head, *row), _NO_NAMES) for row in zip(*columns, strict=True)]
        return [
            ((*head, *[column[i] for column in columns]), {name: column[i] for name, column in named.items()})
            for i in range(next(iter(lengths.values())))
        ]

    def _one_is_enough(self, owner: Any) -> bool:
        """Whether the minibatch alone is all that a call has to give."""
        names = self.names(owner)
        others = [
            p
            for name, p in self.signature.parameters.items()
            if name in names[1:] or p.kind is p.KEYWORD_ONLY
        ]
        return (
            bool(names)
            and names[0] not in self.options.shared
            and not any(p.default is p.empty for p in others)
        )

    def _check_arguments(self, head: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """MinibatchError where the forward does not take these arguments."""
        given = (len(head) + len(args), *kwargs)
        if given in self._taken:
            return
        try:
            self.signature.bind(*head, *args, **kwargs)
            self._taken.add(given)
        except TypeError as error:
            columns = len(args) == 1 and type(args[0]) in (list, tuple) and len(args[0]) > 1
            hint = "; a batch of columns, as DataLoader makes it, is given as *batch" if columns else ""
            raise MinibatchError(f"{self.name}{self.signature}: {error}{hint}") from None

    def _column(self, name: str, value: Any) -> Sequence[Any] | _Same:
        """An argument as its items, one an instance; None, and what is shared, is the same for all."""
        if value is None or name in self.options.shared:
            return _Same(value)
        return instances_of(value, f"{self.name}: {name}", name)

    def __call__(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs and is_traced(args[0]):
            return self._call_traced(owner, args[0])
        alone = undecorated()
        if alone and self._is_super(owner):
            return self.fn(owner, *args, **kwargs)  # for the instance at hand
        instances = self.split(owner, args, kwargs)
        if alone:
            return self.one_by_one(instances)
        if self.options.adaptive == "loop":
            return self.put_together(loop_over(self.one, instances))
        return self.run(self.engine(owner), owner, instances)

    def run(self, engine: Engine, owner: Any, instances: Sequence[Instance]) -> Any:
        """The result of a call for these instances, batched or by the loop."""
        if not engine.may_loop:
            if mode := unheard_mode():
                raise TraceError(f"{self.name} can't be batched here: {mode}")
        elif reason := surroundings() or engine.refusals.reason(training=engine.training):
            self.say_loop_runs(engine, reason)
            return self.put_together(loop_over(self.one, instances))
        if self._is_checked(engine):
            try:
                listed, run = list(instances), engine.execution()
                return self._checked(
                    engine,
                    owner,
                    listed,
                    run,
                    lambda: engine.call(self.fn, listed, self.options.out, run=run),
                )
            except TraceError as error:
                return self.put_together(self._by_loop(engine, error, instances))
        strategy = engine.strategy
        if (
            strategy is not None and not saved_tensors_are_packed()
        ):  # a checkpoint runs it twice, and compares
            return self._chosen(engine, strategy, instances)
        return self._batched(engine, instances, self.options.out)

    def settled_instances(self, args: tuple[Any, ...]) -> Iterable[Instance] | None:
        """The instances of a call whose strategy has settled on the loop for minibatches like this one; None where it
        has not, or where anything is unusual. The short way of what `__call__` does then, as code that is out of the
        caches costs 80 ns an opcode."""
        owner = args[0] if self._may_settle and args else None
        if not isinstance(owner, torch.nn.Module):
            return None
        engine = owner.__dict__.get("_fxbatch_engines", _NONE).get(self)
        strategy = None if engine is None else engine.strategy
        if (
            strategy is None
            or not strategy.warned
            or len(engine.queue)
            or len(args) - 1 not in self._in_columns
        ):
            return None
        if undecorated() or dispatch_mode_count() or inside_functorch() or saved_tensors_are_packed():
            return None
        columns = plain_columns(args[1:])
        if not columns or is_traced(columns[0]):
            return None
        if not strategy.is_quiet(len(columns[0]), grad=torch.is_grad_enabled()):
            return None
        return zip(zip(repeat(owner), *columns), repeat(_NO_NAMES))  # the owner is one

    def _batched(
        self,
        engine: Engine,
        instances: Sequence[Instance],
        out: str,
        *,
        first: int = 0,
        trial: Trial | None = None,
    ) -> Any:
        """The results of instances in one batch; by the loop where they can't be recorded. first: the number of the
        first of them in the minibatch. trial: how many of them are batched, the loop runs the others."""
        try:
            packed = engine.packed.call(self.fn, instances, out)
            if packed is not NOT_PACKED:
                return packed
            result = engine.call(self.fn, list(instances), out, first=first, trial=trial)
        except TraceError as error:
            results = self._by_loop(engine, error, instances, first)
            return results if out == "list" else self.put_together(results)
        return self._with_others(result, instances, trial, out, first)

    def _with_others(
        self, result: Any, instances: Sequence[Instance], trial: Trial | None, out: str, first: int = 0
    ) -> Any:
        """The result of a trial with those of the instances that it did not begin, by the loop."""
        if trial is None or trial.begun is None:
            return result
        results = [*result, *loop_over(self.one, instances[trial.begun :], first=first + trial.begun)]
        return results if out == "list" else self.put_together(results)

    def _by_loop(
        self, engine: Engine, error: TraceError, instances: Sequence[Instance], first: int = 0
    ) -> list[Any]:
        """The results of the loop for a minibatch that can't be recorded. An error of an operation is one that the
        forward catches, if the loop does not raise it, and else the user's own, after which all is as it was."""
        if not error.of_operation:
            self._refuse(engine, error)
        results = loop_over(self.one, instances, first=first)
        if error.of_operation:
            self._refuse(engine, error)
        return results

    def _refuse(self, engine: Engine, error: TraceError) -> None:
        """A minibatch can't be recorded: the loop runs it, and those like it. The error, where all are to be batched or
        modules are not what they were."""
        if not engine.may_loop:
            raise error
        reason = str(error)
        engine.refuse(reason)
        if not error.again:
            raise error
        begun = f"; {error.begun} of its instances had begun, and begin anew" if error.begun else ""
        self.say_loop_runs(engine, reason, begun)

    def say_loop_runs(self, engine: Engine, reason: str, besides: str = "") -> None:
        """Warn once of the reason."""
        if engine.refusals.is_new(reason):
            text = f"{self.name}: its minibatches run the plain loop: {reason}{besides}"
            warnings.warn(text, LoopWarning, stacklevel=outside())

    def _batched_with_reasons(
        self, engine: Engine, instances: Sequence[Instance], trial: Trial | None
    ) -> tuple[Any, Callable[[], list[str]]]:
        """`_batched` without what a trial leaves to the loop, and what gives the reasons why it took as long as it
        did."""
        try:
            packed = engine.packed.call(self.fn, instances, self.options.out)
            if packed is not NOT_PACKED:
                return packed, list
            return engine.call_with_reasons(self.fn, list(instances), self.options.out, trial)
        except TraceError as error:
            results = self._by_loop(engine, error, instances)
        if trial is not None:
            trial.begun = None
        return self.put_together(results), list

    def _chosen(self, engine: Engine, strategy: Strategy, instances: Sequence[Instance]) -> Any:
        """A minibatch as the strategy says: batched, by the plain loop, or its first instances, the scouts, by the loop
        and the others otherwise."""
        grad, count = torch.is_grad_enabled(), len(instances)
        choice = strategy.choose(count, grad=grad, spent=-engine.queue.earned)
        if choice.batches:
            let_dynamo_read_torch()  # seconds, once a process: of neither way
        begun = stopwatch.now()
        loop = strategy.loop_seconds(count, grad=grad, backward=True)
        result, batched = self._as_chosen(engine, strategy, choice, instances, loop)
        if choice.timing is not None:
            loop = strategy.loop_seconds(count, grad=grad, backward=True)
        seconds, guessed = stopwatch.now() - begun if batched else loop, 0.0
        if batched and grad:
            of_loop, share = loop - strategy.loop_seconds(count, grad=grad), batched / count
            timed = strategy.backward_seconds(count, grad=grad)
            backward = share * (of_loop if timed is None else timed)
            guessed = backward if timed is None else 0.0
            seconds += backward + (1 - share) * of_loop
        engine.queue.earn(seconds=seconds, loop=loop, batched=batched > 0, guessed=guessed)
        if engine.queue and engine.build_waiting() and not engine.queue:
            strategy.look_again()
        return result

    def _as_chosen(
        self, engine: Engine, strategy: Strategy, choice: Choice, instances: Sequence[Any], loop: float
    ) -> tuple[Any, int]:
        """The result, and how many instances were batched. loop: seconds that the loop takes, as far as is known."""
        grad, count = torch.is_grad_enabled(), len(instances)
        if choice.batches and not choice.scouts:
            with engine.queue.minibatch(count, loop=loop):
                if choice.timing is None:
                    return self._batched(engine, instances, self.options.out), count
                trial = strategy.trial(count, grad=grad)
                result, reasons = choice.timing.of(
                    lambda: self._batched_with_reasons(engine, instances, trial)
                )
            strategy.reasons = "; ".join(reasons())
            if trial is not None and trial.begun is not None:
                choice.timing.instances = trial.begun
            result = self._with_others(result, instances, trial, self.options.out)
            return result, choice.timing.instances
        scouts, rest, unchanged = instances[: choice.scouts], instances[choice.scouts :], None
        if choice.scouts and not engine.changes and engine.root is not None:
            unchanged = ModuleState(engine.root.modules())
        if choice.timing is None:
            results = loop_over(self.one, scouts)
        else:
            results = choice.timing.of(lambda: loop_over(self.one, scouts), apart=True)
        batched, batches = 0, choice.batches and bool(rest)
        if unchanged is not None:
            engine.changes = unchanged.first_change()
            if reason := unchanged.written_unseen():
                engine.refuse(reason)
                self.say_loop_runs(engine, reason)
                batches = False
        if batches and unchanged is not None and engine.changes:  # one alone tells whether it waits, too
            with engine.queue.minibatch(1):
                results += self._batched(engine, rest[:1], "list", first=len(results))
            rest = rest[1:]
            batches = bool(rest) and not engine.refusals.reason(training=engine.training)
        if batches:
            loop = strategy.loop_seconds(count, grad=grad, backward=True)
            with engine.queue.minibatch(len(rest), loop=loop * len(rest) / count):
                trial = strategy.trial(count, grad=grad)
                results += self._batched(engine, rest, "list", first=len(results), trial=trial)
            batched = len(rest) if trial is None or trial.begun is None else trial.begun
        else:
            results += loop_over(self.one, rest, first=len(results))
        if text := strategy.warning(count, grad=grad):
            warnings.warn(f"{self.name}: {text}", LoopWarning, stacklevel=outside())
        return self.put_together(results), batched

    def _is_super(self, owner: Any) -> bool:
        """Whether a decorated method of a derived class, which stands for this one on `owner`, is among the callers.

        `super().forward(x)` is then called for one instance, as undecorated code would.
        """
        codes = set()
        for cls in type(owner).__mro__:
            method = getattr(cls.__dict__.get(getattr(self.fn, "__name__", "")), "__fxbatch__", None)
            if method is not None and method.fn is self.fn:
                break
            if method is not None:
                codes.add(inspect.unwrap(method.fn).__code__)  # below @beartype and its like
        frame = sys._getframe(2) if codes else None
        while frame is not None:
            code = frame.f_code
            if code in codes and frame.f_locals.get(code.co_varnames[0]) is owner:
                return True
            frame = frame.f_back
        return False

    def _call_traced(self, owner: Any, batch: Any) -> Any:
        """A minibatch of traces, traced instances, or a ready one."""
        engine = self.engine(owner)
        if undecorated():
            return self.one_by_one([self._again(owner, item) for item in traced_items(batch)])
        if not isinstance(batch, ReadyMinibatch):
            ready = self.ready(engine, owner, batch)
        elif batch.stale() or batch.engine is not engine:
            ready = self.ready(engine, owner, batch.instances)
        else:
            ready = batch
        if self._is_checked(engine):
            if any(item.args is None for item in ready.instances):
                warn_once(
                    engine, self.name, "bare traces don't hold their instances: not compared with the loop"
                )
                return ready(self.options.out)
            again = [self._again(owner, item) for item in ready.instances]
            return self._checked(engine, owner, again, ready.run, lambda: ready(self.options.out))
        return ready(self.options.out)

    def _is_checked(self, engine: Engine) -> bool:
        """Whether this minibatch is the one in N."""
        # Not in a checkpoint, which runs the call twice and counts what either saves.
        if not self.options.check or inside_functorch() or saved_tensors_are_packed():
            return False
        engine.calls += 1
        return (engine.calls - 1) % self.options.check == 0

    def _checked(
        self,
        engine: Engine,
        owner: Any,
        instances: Sequence[Instance],
        run: Run,
        batched: Callable[[], Any],
    ) -> Any:
        """run: the one that gives the results of `batched`."""

        def undecorated(instances: Sequence[Instance]) -> Any:
            with disabled():
                return self.one_by_one(instances)

        return checked(CheckedCall(engine, self.fn, self.name, owner, instances, run, batched, undecorated))

    def ready(self, engine: Engine, owner: Any, batch: Any, *, ahead: bool = False) -> ReadyMinibatch:
        """A minibatch of traced instances, merged and planned; stale traces are made again."""
        items = traced_items(batch)
        root = owner if isinstance(owner, torch.nn.Module) else None
        now, modes = known_model(engine.table, root).fingerprint, modes_now()
        traces = [x.trace for x in items if x.trace is not None and x.fresh(now, modes)]
        if len(traces) == len(items):
            return ReadyMinibatch.of(engine, items, merge(traces, engine.table_for_recording(), root))
        run = engine.execution()
        return ReadyMinibatch.of(
            engine,
            items,
            engine.record(self.fn, [self._again(owner, x) for x in items], run, ahead=ahead),
            run,
        )

    def _again(self, owner: Any, item: TracedInstance) -> Instance:
        """The arguments of a traced instance, to be run or traced again."""
        if item.args is None:
            raise StaleTraceError(
                "a trace does not fit the model as it is now, or is to be run undecorated, and does not know "
                "its instance: use fxbatch.TracedDataset, which keeps both"
            )
        head = () if owner is None else (owner,)
        return ((*head, *item.args), dict(item.shared))

    def one_by_one(self, instances: Sequence[Instance]) -> Any:
        """The undecorated forward in a loop, results put together as the decorated call does."""
        return self.put_together([self._alone(*args, **kwargs) for args, kwargs in instances])

    def put_together(self, results: list[Any]) -> Any:
        """Results of the instances, real tensors in them, as the decorated call gives them."""
        return gather(results, self.options.out)

    def _alone(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.fn(*args, **kwargs)
        except Exception as error:
            if not self.options.return_exceptions:
                raise
            return error


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


_NO_NAMES: dict[str, Any] = {}
_NONE = _Engines()  # of objects that have none yet


class _Same:
    """An argument given once: the same item for each instance."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, i: int) -> Any:
        return self.value


class BoundAutobatched:
    """The decorated method of one object, as `autobatch(model.forward)` returns it.

    Copying and pickling the object copies this with it, bound to the copy.
    """

    def __init__(self, owner: Any, function: Callable[..., Any], options: Options) -> None:
        self.__self__ = owner
        self.__func__ = decorate(function, options)
        functools.update_wrapper(self, self.__func__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> Any:
        state = self.__func__.__fxbatch__
        found = getattr(type(self.__self__), state.fn.__name__, None)  # a name that pickle finds again
        function = found if getattr(found, "__fxbatch__", None) is not None else state.fn
        return (BoundAutobatched, (self.__self__, function, state.options))


def decorate(function: Any, options: Options) -> Any:
    """The function, method, static or class method that takes minibatches; OptionError for what can't."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorate(function.__func__, options))
    _check_decorated(function)
    if inspect.ismethod(function) or isinstance(function, BoundAutobatched):
        return BoundAutobatched(function.__self__, function.__func__, options)
    if hasattr(function, "__fxbatch__"):  # decorated already: these options instead
        function = function.__fxbatch__.fn
    state = Autobatched(function, options)

    @functools.wraps(function)
    def batched(*args: Any, **kwargs: Any) -> Any:
        frames, modes = eval_frame_off(), None
        try:
            if not kwargs and (instances := state.settled_instances(args)) is not None:
                return state.put_together(loop_over(function, instances))
            modes = ThreadModes()
            owner, given = state.split_owner(args)
            return state(owner, given, kwargs)
        except BaseException:
            if modes is not None:
                modes.restore()  # an interrupt may have struck between a mode's change and its `with`
            raise
        finally:
            eval_frame_on(frames)

    hide_from_dynamo(batched)
    batched.__fxbatch__ = state  # type: ignore[attr-defined]  # found by trace, explain, ...
    return batched


def _check_decorated(function: Any) -> None:
    """OptionError, which says where `@autobatch` belongs, for what is no function of one instance."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, type):
        raise OptionError(f"@fxbatch.autobatch on the class {name}: put it on its `def forward(self, ...)`")
    if isinstance(function, torch.nn.Module):
        raise OptionError(
            f"autobatch of a module ({name}): write model.forward = fxbatch.autobatch(model.forward), or put "
            "@fxbatch.autobatch on `def forward` of its class"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise OptionError(
            f"@fxbatch.autobatch on the async function {name}: write it without async and await; instances "
            "that branch on values wait for each other without"
        )
    if inspect.isgeneratorfunction(function):
        raise OptionError(
            f"@fxbatch.autobatch on the generator {name}: collect what it yields in a list, and return that"
        )
    if not callable(function):
        raise OptionError(f"@fxbatch.autobatch takes a function, got {name}; options go by name")


@overload
def autobatch(  # type: ignore[overload-overlap]  # a result that is a number is an object, too
    fn: Callable[Concatenate[S, A, P], float], /
) -> Batched[S, A, P, float, torch.Tensor]: ...


@overload
def autobatch(  # type: ignore[overload-overlap]  # see above
    fn: Callable[Concatenate[A, P], float], /
) -> BatchedFunction[A, P, float, torch.Tensor]: ...


@overload
def autobatch(fn: Callable[Concatenate[S, A, P], R], /) -> Batched[S, A, P, R, R]: ...


@overload
def autobatch(fn: Callable[Concatenate[A, P], R], /) -> BatchedFunction[A, P, R, R]: ...


@overload
def autobatch(  # type: ignore[overload-overlap]  # the last one takes others
    *, out: Literal["list"], return_exceptions: Literal[True], **options: Unpack[Batching]
) -> ListedWithExceptions: ...


@overload
def autobatch(  # type: ignore[overload-overlap]  # see above
    *, out: Literal["list"], return_exceptions: Literal[False] = False, **options: Unpack[Batching]
) -> Listed: ...


@overload
def autobatch(
    *,
    out: Literal["stack", "list", "nested"] = "stack",
    return_exceptions: bool = False,
    **options: Unpack[Batching],
) -> Stacked: ...


def autobatch(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function that is written for ONE instance take a minibatch of instances.

    Use it bare (`@fxbatch.autobatch`) or with options (`@fxbatch.autobatch(out="list")`), on the `forward` or any other
    method of a module, or on a function. `model.forward = fxbatch.autobatch(model.forward)` decorates one object.

    Each argument of a call is then a minibatch: a list, a tuple or another container with one item per instance, or a
    tensor whose first dimension is the instances. None stays None for all instances. Values and gradients equal those
    of the undecorated function, one instance at a time.

    What goes in and comes out:
        shared: names of arguments that are given once, for all instances.
        out: "stack": the result has the structure of one instance's result, its tensors stacked on a new first
            dimension. "list": a list with one result per instance. "nested": jagged nested tensors, where sizes differ.
        return_exceptions: put the exception of an instance in its place in the list (with out="list") instead of
            raising it.

    How calls are batched:
        schedule: the order of launches. "lookahead" needs fewest; "agenda" is DyNet's; "depth"; "fold" is TensorFlow
            Fold's; "none" runs one call per launch.
        deduplicate: run equal calls on equal inputs once, across instances. "auto": in large minibatches where enough
            calls are equal.
        fuse: make one operation of calls that always occur together, when that removes at least 1/8 of all calls.

    How it runs:
        adaptive: run the plain loop where it is faster, by the clock, and where the forward can't be batched exactly.
            False: always batch, as with torch.use_deterministic_algorithms(True). Options that say how to batch
            (schedule, mode, backward, compile, verify) always batch, too. "loop": always the plain loop.
        backward: "compiled": gradient code of each operation, built once. "autograd": torch's own, slower, for double
            backward and forward-mode derivatives.
        mode: "looped": one module runs any minibatch. "unrolled": an fx.GraphModule for each structure.
        native: on the CPU, run in C what can be.
        compile: compile operations by torch.compile: True ("inductor"), the name of a backend, a backend, or "auto"
            (Inductor, for what can't run in C).
        compile_options: for torch.compile: `mode`, `options`, Inductor's settings by name.
        check: N: run the first minibatch, and then one in N, undecorated as well, on copies, and compare. A
            difference raises DifferenceError.
        check_gradients: compare gradients as well.
        verify: check every internal form after every rewrite. Slow; for finding a mistake of fxbatch.
        batch_norm: "minibatch": BatchNorm layers in training normalise over the rows of all instances, once per
            minibatch. "refuse": that can't be batched exactly, so the plain loop runs.
        plain: you state that the forward's Python does the same for every instance, sizes apart, and keeps nothing.
            It is packed then (docs/sizes.md), though its source doesn't show that it may be, as with models of the
            transformers library. `check` finds where it is not so.

    Errors:
        OptionError: an unknown option, or a value that an option does not take.
        MinibatchError: a call's arguments are not minibatches of one length.
        ResultError: the results can't be stacked or nested.
        TraceError: with adaptive=False, the forward does something that can't be batched exactly. By default the loop
            runs instead, and a LoopWarning names the line.

    Example:
        >>> class Reader(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.cell = nn.Embedding(10, 4), nn.GRUCell(4, 4)
        ...
        ...     @fxbatch.autobatch
        ...     def forward(self, words):  # one sentence: a list of numbers
        ...         state = torch.zeros(4)
        ...         for word in words:
        ...             state = self.cell(self.embed(torch.tensor(word)), state)
        ...         return state
        >>> model = Reader()
        >>> model([[1, 2, 3], [4]]).shape  # a list of sentences
        torch.Size([2, 4])

    Sources: Looks et al. 2017, section 2; Neubig et al. 2017, section 3.
    """
    chosen = Options.of(**options)
    return (lambda function: decorate(function, chosen)) if fn is None else decorate(fn, chosen)


autobatch.__signature__ = signature()  # type: ignore[attr-defined]  # what `help` and the reference show


def find_autobatched(target: Any) -> tuple[Autobatched, Any]:
    """The decorated callable behind a module, a bound method or a function, and its owner."""
    if isinstance(target, type):
        raise MinibatchError(f"{target.__name__} is a class: the model comes first, an object of it")
    if isinstance(target, torch.nn.Module):
        own = [x for x in vars(target).values() if isinstance(x, BoundAutobatched)]
        names = ["forward", *dir(type(target))]
        for x in [target.forward, *own, *[getattr(type(target), name, None) for name in names]]:
            fn = getattr(x, "__fxbatch__", None)
            if fn is not None:
                return fn, target
        return _undecorated_one(type(target).forward, target), target
    owner = getattr(target, "__self__", None)
    fn = getattr(target, "__fxbatch__", None)
    if fn is not None:
        return fn, owner
    if callable(target):
        return _undecorated_one(getattr(target, "__func__", target), owner), owner
    raise MinibatchError(
        f"expected a decorated module, method or function, got {type(target).__name__}: the model comes first"
    )


def _undecorated_one(fn: Callable[..., Any], owner: Any) -> Autobatched:
    """`Autobatched(fn)` with default options: that of the owner, where it has an engine of one already."""
    known: _Engines = getattr(owner, "__dict__", {}).get("_fxbatch_engines", _Engines())
    plain = Options()
    found = next((a for a in list(known) if a.fn is fn and a.options == plain), None)
    if found is None:
        found = Autobatched(fn, plain)
        found.decorates = False
    return found
