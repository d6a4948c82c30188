"""Values that outlive their call: in tensors that the forward wrote to, in attributes, lists and logs.

In: a recording that is done, and the values of its results. Out: what else is held by somebody; with the results of
the run it becomes real tensors.

    left = LeftBehind.of(recorder, results)
    left.values                  # asked for together with the results
    left.give(tensors)           # one a value: the user's objects have their content
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.torch_private import tree_leaves
from fxbatch.trace.objects import has_attributes, values_in
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.values import Value, Written, alias_of

Place = tuple[Any, Any]  # a container, and an index or key of it
Take = Callable[[list[np.ndarray]], list[torch.Tensor]]
Renumber = Callable[[np.ndarray], np.ndarray]  # ids as recorded -> ids in the program that ran

# References to a tensor that was written to which are ours: its record's, and the argument of `getrefcount`.
_OURS = 2
# References to a recorder that is done: from two frames, its run, its method, and the argument of `getrefcount`.
_ITS_OWN = 5
_DEEPEST = 4  # containers within containers that are looked into, on modules and beside their hooks


class LeftBehind:
    """What outlives a call beside its results."""

    def __init__(
        self,
        recorder: RecordedCalls,
        written: Iterable[Written],
        held: Sequence[Value],
        places: Sequence[Place] = (),
    ) -> None:
        self.recorder = recorder
        self.written = list(written)
        self.held = list(held)  # values in attributes, lists, and whatever else
        self.places = list(places)  # lists and dictionaries that hold some, each with the index or key

    @staticmethod
    def of(
        recorder: RecordedCalls,
        results: Sequence[Any] = (),
        known: dict[int, Value] | None = None,
        *,
        held: bool = True,
    ) -> LeftBehind | None:
        """What the user still holds; None where there is nothing. known: the values of results and recorder by id,
        where none is a view; held: look for values that no result has."""
        written: list[Written] = []
        if recorder.written:
            written, recorder.written = list(recorder.written.values()), {}
        kept = [x for x in written if sys.getrefcount(x.tensor) > _OURS]
        values, places = _held(recorder, results, written, known) if held else ([], [])
        return LeftBehind(recorder, kept, values, places) if kept or values else None

    @property
    def values(self) -> list[Value]:
        """What has to be computed."""
        return [x.value for x in self.written] + self.held

    def together(self, take: Take, renumber: Renumber) -> Take:
        """`take` that asks for these values as well, in the same request, and fills what was written to."""

        def both(requests: list[np.ndarray]) -> list[torch.Tensor]:
            by_type: dict[tuple[int, bool], list[Value]] = {}
            for v in self.values:
                by_type.setdefault((v._type, v.requires_grad), []).append(v)
            own = [renumber(np.array([v.id for v in group], dtype=np.int64)) for group in by_type.values()]
            rows = take([*requests, *own])
            found: dict[int, torch.Tensor] = {}
            for group, tensor in zip(by_type.values(), rows[len(requests) :], strict=True):
                parts = tensor.unbind(0) if group[0].requires_grad else tensor.detach().unbind(0)
                found.update(zip([v._value for v in group], parts, strict=True))
            self.give([found[v._value] for v in self.values])
            for container, key in self.places:
                v = container[key]
                container[key] = self.recorder.tensor(v) if type(v) is Value else v
            return rows[: len(requests)]

        return both

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """The call is done: `tensors` are the contents of `values`."""
        for x, content in zip(self.written, tensors, strict=False):
            x.give_back(content)
        self.written = []

    def abandon(self) -> None:
        """The call has failed, or its results aren't wanted: everything is as it was before."""
        for x in self.written:
            x.give_back(None)
        self.written = []


def handing_over(
    values: np.ndarray, holder: Sequence[Value], take: Take, renumber: Renumber, mixed: Callable[[], bool]
) -> Take:
    """`take` after which the values that somebody still holds are the tensors that were taken.

    values: ids of all that is asked for, as they were recorded; holder: values of the recording; mixed: whether some
    constants of a type require gradients and others don't, which the run takes for one.
    """
    if not len(holder):
        return take
    recorder = holder[0]._recorder

    def taking(requests: list[np.ndarray]) -> list[torch.Tensor]:
        rows = take(requests)
        if any(t.requires_grad for t in rows) and mixed():
            before = dict(zip(renumber(values).tolist(), values.tolist(), strict=True))
            wanted = [
                any(recorder.passes_gradient_through(before[n]) for n in request.tolist())
                for request in requests
            ]
            if not recorder.knows_leaves():  # blocks write calls down without them
                wanted = [True] * len(rows)
            rows = [t if flag else t.detach() for t, flag in zip(rows, wanted, strict=True)]
        places: dict[int, tuple[int, int]] = {}
        tensors: dict[int, torch.Tensor] = {}

        def tensor_of(v: Value) -> torch.Tensor | None:
            if not places:
                at = {n: (k, i) for k, request in enumerate(requests) for i, n in enumerate(request.tolist())}
                pairs = zip(values.tolist(), renumber(values).tolist(), strict=True)
                places.update({before: at[n] for before, n in pairs if n in at})
            if v.id in places and v.id not in tensors:
                request, i = places[v.id]
                row = rows[request][i]
                # Asked of the value's recorder: one that is closed over here would be held by what it holds.
                flag = not row.requires_grad or v._recorder.would_require_grad(v)
                tensors[v.id] = row if flag else row.detach()
            return tensors.get(v.id)

        recorder.is_real(tensor_of)
        return rows

    return taking


def _held(
    recorder: RecordedCalls,
    results: Sequence[Any],
    written: Sequence[Written],
    plain: dict[int, Value] | None,
) -> tuple[list[Value], list[Place]]:
    """The values of a recording that somebody else than its results holds.

    Each value refers to its recorder, so that counting says whether there are any; then they are looked for where
    models leave them, and only if some are missing among all objects.
    """
    expected = _ITS_OWN + len(written)
    known, again = _known(recorder, results) if plain is None else (plain, 0)
    for record in written:
        if sys.getrefcount(record.value) <= _OURS:  # nobody but its record has it
            known[id(record.value)] = record.value
    missing = sys.getrefcount(recorder) - expected - len(known) - again
    if missing > recorder.table.unexplained:
        gc.collect(1)  # a function within the forward that calls itself keeps what it refers to in a circle
        missing = sys.getrefcount(recorder) - expected - len(known) - again
    if missing <= recorder.table.unexplained:
        return [], []
    for x in _objects(results):
        known.setdefault(id(x), x)
    found: dict[int, Value] = {}
    places: list[Place] = []
    for module in dict.fromkeys(m for root in recorder.known.roots for m in root.modules()):
        for holder in _beside(module):
            _look_into(holder, recorder, found, places, _DEEPEST)
    found = {number: v for number, v in found.items() if number not in known}
    if len(found) + _made_again(found.values()) < missing:
        for x in gc.get_referrers(recorder):
            if type(x) is Value and id(x) not in known:
                found[id(x)] = x
    if not found:
        recorder.table.unexplained = missing
    return list({v._value: v for v in found.values()}.values()), places if found else []


def _known(recorder: RecordedCalls, results: Sequence[Any]) -> tuple[dict[int, Value], int]:
    """The values of the results and those that the recorder keeps, with what they are views of, by id; and how many of
    them know how to be recorded again, which refers to the recorder."""
    ahead: list[Any] = []
    for result in results:
        if type(result) is Value:
            ahead.append(result)
        elif type(result) in (list, tuple) and all(type(x) is Value for x in result):  # a result a word
            ahead += result
        else:
            ahead += tree_leaves(result)
    ahead = _of(recorder, ahead)
    for kept in (recorder.constants, recorder.foreign.copies, recorder.copies or {}):
        ahead += map(_FIRST, kept.values())
    ahead += recorder.numbers.values()
    ahead += recorder.parameter_rows.values()
    found: dict[int, Value] = {}
    views: list[Value] = []
    while ahead:
        new = dict(zip(map(id, ahead), ahead, strict=True))
        are_linked = map(
            hasattr, new.values(), itertools.repeat("_alias")
        )  # no bytecode a value: there are many
        linked = [v for v in itertools.compress(new.values(), are_linked) if id(v) not in found]
        found.update(new)
        views += linked
        aliases = [a for a in map(alias_of, linked) if a is not None]
        ahead = _of(recorder, [x for a in aliases for x in (a.source, *_leaves_of_call(a.call))])
    return found, _made_again(views)


def _leaves_of_call(call: Any) -> Sequence[Any]:
    """The leaves of a view's call, most of which are rows: (function, (value, index), {})."""
    if call is None:
        return ()
    _, args, kwargs = call
    if not kwargs and all(type(x) is Value or type(x) is int for x in args):
        found: Sequence[Any] = args
        return found
    return tree_leaves(call)


def _of(recorder: RecordedCalls, leaves: Iterable[Any]) -> list[Value]:
    """Those that are values of this recording."""
    return [x for x in leaves if type(x) is Value and x._recorder is recorder]


_FIRST = operator.itemgetter(0)


def _made_again(values: Iterable[Value]) -> int:
    """How many of the values know how to be recorded again."""
    return sum(alias is not None and alias.again is not None for alias in map(alias_of, values))


def _objects(results: Sequence[Any]) -> list[Value]:
    """Values in objects of the user's own classes, which results have as leaves."""
    leaves = [x for result in results for x in tree_leaves(result)]
    return [v for x in leaves if type(x) is not Value and has_attributes(x) for v in values_in(x)]


def _beside(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """The containers that a module holds, its attributes first, and those that its hooks' closures hold."""
    yield {name: x for name, x in vars(module).items() if name not in _TENSORS}, vars(module)
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        code = getattr(hook, "__func__", hook)
        for cell in getattr(code, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield cell.cell_contents, cell.cell_contents
        names = getattr(getattr(code, "__code__", None), "co_names", ())
        given = getattr(code, "__globals__", {})
        yield {name: given[name] for name in names if name in given}, given
        yield getattr(hook, "__self__", None), getattr(hook, "__self__", None)


_TENSORS = frozenset({"_parameters", "_buffers", "_modules", "_fxbatch_engines"})


def _look_into(
    x: tuple[Any, Any], recorder: RecordedCalls, found: dict[int, Value], places: list[Place], depth: int
) -> None:
    """Note the values in a container and in those in it. x: a container, and where its items are to be written."""
    parts, written = x
    if not depth or type(parts) not in (list, tuple, dict, deque):
        return
    for key, part in list(parts.items() if type(parts) is dict else enumerate(parts)):
        if type(part) is Value and part._recorder is recorder:
            found[id(part)] = part
            if written is not None:
                places.append((written, key))
        else:
            _look_into((part, None if type(part) is tuple else part), recorder, found, places, depth - 1)
