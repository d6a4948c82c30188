"""What a function calls on fake tensors, as a list of ATen calls.

In: a function and its tensors. Out: a Tape: the calls in order, their arguments by position, their values.

    tape = record(lambda x, y: [torch.tanh(x) + y], [x, y])
    tape.calls      # placeholder, placeholder, tanh(0), add(2, 1)
    tape.results    # [Result(3)]

It is what `make_fx` sees, at a third of its time: no proxies, no graph, no code, and none of what it imports.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fxbatch.torch_fakes import no_symbols
from fxbatch.torch_private import FakeTensor, LazyGraphModule, QuietDispatchMode, without_autograd

aten = torch.ops.aten
_device = torch.ops.prim.device.default  # asked for three times a call


@dataclass(frozen=True)
class Result:
    """The value of a call, by the call's position."""

    index: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call: `target` is an OpOverload, `operator.getitem`, or "placeholder" and "constant", which call nothing."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any  # fake tensors; of a constant, the tensor itself


@dataclass(frozen=True, eq=False)
class Tape:
    """Calls, placeholders first, and which values the function gave."""

    calls: list[Call]
    results: list[Any]  # a Result, or what the function gave that is no tensor

    @property
    def writes(self) -> list[Any]:
        """The calls' targets that write to memory."""
        return [call.target for call in self.calls if writes(call.target)]

    @property
    def random(self) -> bool:
        """Whether a call draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(x.target, "tags", ()) for x in self.calls)


def writes(target: Any) -> bool:
    """Whether a call writes to memory (squeezing in place moves nothing)."""
    if target in (aten.squeeze_.dim, aten.squeeze_.dims):
        return False
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def record(
    function: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    rules: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> Tape:
    """Run a function on fake tensors. Under FakeTensorMode; what autocast casts is cast anew at each use. rules: what
    is recorded in a call's place, NotImplemented where it is the call after all."""
    recorder = _Recorder(rules)
    for x in tensors:
        recorder.add("placeholder", (), {}, x)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with recorder:
            found = list(function(*tensors))
    finally:
        torch.set_autocast_cache_enabled(cached)
    return Tape(recorder.calls, [recorder.told(x) for x in found])


def run(tape: Tape, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Make the calls of a tape on other tensors."""
    values: dict[int, Any] = dict(enumerate(tensors))
    with no_symbols():
        for i, call in enumerate(tape.calls[len(tensors) :], len(tensors)):
            if call.target == "constant":
                values[i] = call.value
            else:
                values[i] = call.target(*_map(values, call.args), **_map(values, call.kwargs))
    return list(_map(values, tape.results))


def as_graph(tape: Tape) -> fx.GraphModule:
    """The calls as nodes, those that nothing reads left out; `meta["val"]` is a call's value."""
    graph, root = fx.Graph(), torch.nn.Module()
    nodes: dict[int, Any] = {}
    for i, call in enumerate(tape.calls):
        if call.target == "placeholder":
            nodes[i] = graph.placeholder(f"arg{i}_1")
        elif call.target == "constant":
            name = f"_tensor_constant{len(list(root.buffers()))}"
            root.register_buffer(name, call.value)
            nodes[i] = graph.get_attr(name)
        else:
            nodes[i] = graph.call_function(call.target, _map(nodes, call.args), _map(nodes, call.kwargs))
        nodes[i].meta["val"] = call.value
    graph.output(_map(nodes, tape.results))
    graph.eliminate_dead_code()
    return LazyGraphModule(root, graph)


def _map(values: dict[int, Any], tree: Any) -> Any:
    """Arguments with the values of the calls that they name."""
    if isinstance(tree, Result):
        return values[tree.index]
    if isinstance(tree, (list, tuple)):
        return type(tree)([_map(values, x) for x in tree])
    return {k: _map(values, x) for k, x in tree.items()} if isinstance(tree, dict) else tree


class _Recorder(QuietDispatchMode):
    def __init__(self, rules: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.rules = rules
        self.calls: list[Call] = []
        self.known: dict[int, Result] = {}  # by id, of tensors that `kept` keeps
        self.kept: list[torch.Tensor] = []

    def add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Result:
        result = Result(len(self.calls))
        self.calls.append(Call(target, args, kwargs, value))
        if isinstance(value, torch.Tensor):
            self.known[id(value)] = result
            self.kept.append(value)
        return result

    def told(self, x: Any) -> Any:
        """An argument, with tensors by position; one that no call gave is a constant."""
        if isinstance(x, torch.Tensor):
            return self.known.get(id(x)) or self.add("constant", (), {}, x)
        if isinstance(x, (list, tuple)):
            return type(x)([self.told(y) for y in x])
        return {k: self.told(v) for k, v in x.items()} if type(x) is dict else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device:
            (x,) = args
            return x.fake_device if type(x) is FakeTensor else func(x)
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:  # what may be written to is no constant
            func = aten.lift_fresh_copy.default
        rule = self.rules.get(func)
        if rule is not None:
            with self:
                found = rule(*args, **kwargs)
            if found is not NotImplemented:
                return found
        told, named = self.told(args), self.told(kwargs)
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._keep_form(args[0])
        value = func(*args, **kwargs)
        made = self.add(func, told, named, value)
        if isinstance(value, (list, tuple)):
            for i, x in enumerate(value):
                if isinstance(x, torch.Tensor):
                    self.add(operator.getitem, (made, i), {}, x)
        return value

    def _keep_form(self, x: torch.Tensor) -> None:
        """The call whose value is about to change keeps one of the form that it had."""
        known = self.known.get(id(x))
        if known is not None:
            before = self.calls[known.index]
            self.calls[known.index] = replace(before, value=without_autograd(x))
