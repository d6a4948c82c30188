"""An operation's per-instance body as an ATen graph, without composites, mutations or Python.

In: a Signature and its shared operands. Out: an fx.GraphModule `(*inputs, *shared) -> (*outputs)`.

    body = trace_body(signature, shared, mode)   # aten.cat, aten.mm, aten.sigmoid, ...
    layout = find_groups(body, signature)        # inputs that it concatenates first thing are one wide row
    body = group_inputs(body, layout, signature) # (*groups, *shared) -> (*outputs)

What a function calls on fake tensors is a tape: what `make_fx` sees, at a third of its time: no proxies, no graph, no
code, and none of what it imports.

    tape = record(lambda x, y: [torch.tanh(x) + y], [x, y])
    tape.calls      # placeholder, placeholder, tanh(0), add(2, 1)
    tape.results    # [Result(3)]
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fxbatch.codegen.decompose import decompositions
from fxbatch.codegen.operation_graphs import NotBatchable
from fxbatch.codegen.simplify import eliminate_dead
from fxbatch.ir import Layout, Signature, TensorSpec
from fxbatch.torch_private import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    QuietDispatchMode,
    native_kernels,
    run_backward,
)
from fxbatch.trace.operations import WithoutMemory, data_of_tensors
from fxbatch.trace.state import entered_modes

aten = torch.ops.aten
_check_errors = aten._linalg_check_errors.default
_device = torch.ops.prim.device.default  # asked for three times a call


@dataclass(frozen=True)
class Result:
    """The value of a call, by the call's position."""

    index: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call: `target` is an OpOverload, `operator.getitem`, or "placeholder" and "constant", which call nothing."""

    target: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]
    value: Any  # fake tensors; of a constant, the tensor itself


@dataclass(frozen=True, eq=False)
class Tape:
    """Calls, placeholders first, and which values the function gave."""

    calls: list[Call]
    results: list[object]  # a Result, or what the function gave that is no tensor

    @property
    def writes(self) -> list[object]:
        """The calls' targets that write to memory."""
        return [call.target for call in self.calls if writes(call.target)]

    @property
    def random(self) -> bool:
        """Whether a call draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(x.target, "tags", ()) for x in self.calls)


def writes(target: object) -> bool:
    """Whether a call writes to memory (squeezing in place moves nothing)."""
    if target in (aten.squeeze_.dim, aten.squeeze_.dims):
        return False
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def record(
    function: Callable[..., Sequence[object]],
    tensors: Sequence[torch.Tensor],
    rules: Mapping[object, Callable[..., object]] = MappingProxyType({}),
) -> Tape:
    """Run a function on fake tensors, under FakeTensorMode, or on tensors on "meta", where what it makes is made too.
    What autocast casts is cast anew at each use. rules: what is recorded in a call's place, NotImplemented where it is
    the call after all."""
    recorder = _Recorder(rules, on_meta=any(x.is_meta for x in tensors))
    for x in tensors:
        recorder.add("placeholder", (), {}, x)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with recorder:
            outputs = list(function(*tensors))
    finally:
        torch.set_autocast_cache_enabled(cached)
    return Tape(recorder.calls, [recorder.told(x) for x in outputs])


def run(tape: Tape, tensors: Sequence[torch.Tensor]) -> list[object]:
    """Make the calls of a tape on other tensors."""
    values: dict[int, object] = dict(enumerate(tensors))
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


def _map(values: dict[int, object], tree: object) -> Any:
    """Arguments with the values of the calls that they name."""
    if isinstance(tree, Result):
        return values[tree.index]
    if isinstance(tree, (list, tuple)):
        return type(tree)([_map(values, x) for x in tree])
    return {k: _map(values, x) for k, x in tree.items()} if isinstance(tree, dict) else tree


class _Recorder(QuietDispatchMode):
    def __init__(self, rules: Mapping[object, Callable[..., object]], *, on_meta: bool) -> None:
        super().__init__()
        self.rules = rules
        self.on_meta = on_meta
        self.calls: list[Call] = []
        self.results: dict[int, Result] = {}  # by id, of `tensors`, which keeps these
        self.tensors: list[torch.Tensor] = []

    def add(
        self, target: object, args: tuple[object, ...], kwargs: dict[str, object], value: object
    ) -> Result:
        result = Result(len(self.calls))
        self.calls.append(Call(target, args, kwargs, value))
        if isinstance(value, torch.Tensor):
            self.results[id(value)] = result
            self.tensors.append(value)
        return result

    def told(self, x: object) -> Any:
        """An argument, with tensors by position; one that no call gave is a constant."""
        if isinstance(x, torch.Tensor):
            return self.results.get(id(x)) or self.add("constant", (), {}, x)
        if isinstance(x, (list, tuple)):
            return type(x)([self.told(y) for y in x])
        return {k: self.told(v) for k, v in x.items()} if type(x) is dict else x

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is _device:
            (x,) = args
            return x.fake_device if type(x) is FakeTensor else func(x)
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:  # what may be written to is no constant
            func = aten.lift_fresh_copy.default
        if func is _check_errors and self._checks(args[0]):
            return None
        rule = self.rules.get(func)
        if rule is not None:
            with self:
                result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        told, named = self.told(args), self.told(kwargs)
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._keep_form(args[0])
        if self.on_meta and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        value = func(*args, **kwargs)
        if func in _NORMS:
            value = _with_statistics(value, args)
        result_of_call = self.add(func, told, named, value)
        if isinstance(value, (list, tuple)):
            for i, x in enumerate(value):
                if isinstance(x, torch.Tensor):
                    self.add(operator.getitem, (result_of_call, i), {}, x)
        return value

    def _checks(self, info: torch.Tensor) -> bool:
        """What gave this `info` raises the error itself: a check that gives nothing would be left out as dead."""
        place = self.results.get(id(info))
        item = None if place is None else self.calls[place.index]
        if item is None or item.target is not operator.getitem or not isinstance(item.args[0], Result):
            return False
        index = item.args[0].index
        call = self.calls[index]
        if all(x.name != "check_errors" for x in call.target._schema.arguments):
            return False
        self.calls[index] = replace(call, kwargs={**call.kwargs, "check_errors": True})
        return True

    def _keep_form(self, x: torch.Tensor) -> None:
        """The call whose value is about to change keeps one of the form that it had."""
        earlier = self.results.get(id(x))
        if earlier is not None:
            before = self.calls[earlier.index]
            self.calls[earlier.index] = replace(before, value=x.detach())


_NORMS = (aten.native_layer_norm.default, aten.native_group_norm.default)


def _with_statistics(normed: tuple[torch.Tensor, ...], args: Sequence[object]) -> tuple[torch.Tensor, ...]:
    """A norm's result and its statistics (mean, deviation), on the CPU of the type of its weights, as the kernel gives
    them: fake ones have the type of x, which autocast makes another."""
    result, *statistics = normed
    weights = [w for w in args[1:] if isinstance(w, torch.Tensor)]
    if weights and result.device.type == "cpu":
        statistics = [s.to(weights[0].dtype) for s in statistics]
    return result, *statistics


# -- a body as a graph


def devices_of(signature: Signature) -> list[str]:
    return list(dict.fromkeys(t.device.type for t in (*signature.inputs, *signature.outputs)))


def fake_rows(mode: FakeTensorMode | None, kind: TensorSpec, *lead: int) -> torch.Tensor:
    """A tensor `[*lead, *shape]` of a tensor type: a fake one, or on "meta" without a mode."""
    with mode or contextlib.nullcontext():
        device = "meta" if mode is None else kind.device
        return torch.empty((*lead, *kind.shape), dtype=kind.dtype, device=device)


def fake_shared(mode: FakeTensorMode | None, shared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the forms of shared operands, likewise."""
    if mode is None:
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in shared]
    return [mode.from_tensor(x.detach()) for x in shared]


class _DetachUnderNoGrad(QuietDispatchMode):
    """Marks what the body computes under `torch.no_grad()` with a detach, which the graph keeps."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: object = (), kwargs: object = None
    ) -> object:
        out = self.call(func, args, kwargs)
        if torch.is_grad_enabled() or func.is_view or func._schema.is_mutable:
            return out
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return aten.detach.default(out)
        return out


class IndexByTensor(TorchFunctionMode):
    """`w[i]` with a 0-dim integer tensor i stays an index: PyTorch would ask for its value. `x.data` is `x.detach()`,
    of which a graph knows where it comes from, and who writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.data = data_of_tensors()
        # Copies that stand for views, but those that are stored: `x[i] += 1`.
        self._rows: list[torch.Tensor] = []

    def lost_writes(self) -> bool:
        """Whether the body has written to a row that a tensor chose: to a copy, and not to what it is a row of."""
        return any(row._version for row in self._rows)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func in self.data:
            return args[0].detach()
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            whole = all(_is_position(x) or x == slice(None) for x in indices)
            if whole and any(map(_is_position, indices)):
                places = [x if isinstance(x, torch.Tensor) else None for x in indices]
                row: torch.Tensor = aten.index.Tensor(args[0], places)
                self._rows.append(row)
                return row
        if func is torch.Tensor.__setitem__:
            self._rows = [row for row in self._rows if row is not args[2]]
        return func(*args, **(kwargs or {}))


class TakenApart(IndexByTensor):
    """And a loss of logits keeps what is small: torch.func would take it apart into log(1 + e)."""

    def __torch_function__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is F.binary_cross_entropy_with_logits and kwargs["size_average"] is kwargs["reduce"] is None:
            return binary_cross_entropy(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, *, weight: torch.Tensor | None, pos_weight: torch.Tensor | None,
    reduction: str, **legacy: object,
) -> torch.Tensor:  # fmt: skip
    """`F.binary_cross_entropy_with_logits` by log1p, as torch computes it."""
    ones = target if pos_weight is None else pos_weight * target
    losses = -(ones * F.logsigmoid(x) + (1 - target) * F.logsigmoid(-x)) * (1 if weight is None else weight)
    return {"mean": losses.mean, "sum": losses.sum, "none": losses.clone}[reduction]()


def _is_position(index: Any) -> bool:
    integral = isinstance(index, torch.Tensor) and not index.is_floating_point() and index.dtype != torch.bool
    return integral and index.dim() == 0


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Without the one kernel that is a whole layer of attention in inference: its parts batch, and it does not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def only_device(signature: Signature, shared: Sequence[torch.Tensor]) -> torch.device | None:
    """The device of all tensors of an operation, of which tensors without memory say all; None where there are several,
    where autocast chooses types by it, and where numbers are drawn, as nothing is compared then."""
    devices = {t.device for t in (*signature.inputs, *signature.outputs)} | {x.device for x in shared}
    dense = all(x.layout is torch.strided for x in shared)
    by_form = dense and not signature.modes.autocast and not signature.operation.random
    return devices.pop() if len(devices) == 1 and by_form else None


def trace_body(
    signature: Signature, shared: Sequence[torch.Tensor], mode: Callable[[], FakeTensorMode]
) -> fx.GraphModule:
    """Trace the body on tensors without memory, or, where these don't say all of it, on fake ones, which take twice as
    long and import torch._dynamo. Raises NotBatchable when it writes to what it was given."""
    if (device := only_device(signature, shared)) is not None:
        with contextlib.suppress(Exception):  # fake tensors say what is wrong, if anything is
            body = _trace_body(signature, shared, None)
            for node in body.graph.nodes:
                node.kwargs = {**node.kwargs, "device": device} if "device" in node.kwargs else node.kwargs
            if not any(x.is_meta for x in body.buffers()):  # numbers that the code says: there they are lost
                return body
    return _trace_body(signature, shared, mode())


def _trace_body(
    signature: Signature, shared: Sequence[torch.Tensor], mode: FakeTensorMode | None
) -> fx.GraphModule:
    inputs = [fake_rows(mode, kind) for kind in signature.inputs]
    count = len(inputs)

    def body(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with entered_modes(signature.modes, devices_of(signature)):
            watch = _DetachUnderNoGrad() if signature.modes.grad else contextlib.nullcontext()
            outside = WithoutMemory() if mode is None else contextlib.nullcontext()
            with watch, TakenApart(), outside, sdpa_kernel(SDPBackend.MATH), native_kernels():
                return signature.run(tensors[:count], tensors[count:])

    fakes = [*inputs, *fake_shared(mode, shared)]
    with without_fast_path(), mode or contextlib.nullcontext():
        tape = record(torch.func.functionalize(body), fakes, decompositions())
        if tape.writes:
            first = tape
            again = torch.func.functionalize(lambda *tensors: run(first, tensors))
            tape = record(again, fakes, decompositions())
    for call in tape.calls:
        if writes(call.target):
            raise NotBatchable(f"it writes to {_named(call.args[0], len(fakes), signature)} ({call.target})")
    return as_graph(tape)


def _named(written: object, operands: int, signature: Signature) -> str:
    """An operand of the body, in words."""
    index = written.index if isinstance(written, Result) else operands
    if index >= operands:
        return "a tensor that it was given"
    first = len(signature.inputs)
    return f"its input {index}" if index < first else f"shared operand {signature.shared[index - first].name}"


# -- groups: inputs that an operation concatenates or stacks first thing are gathered as one wide row
#    cat([in0, in2])  =>  reshape(group0, [2 * d]),  group0: [2, d];   stack([in0, in2])  =>  group0


def find_groups(body: fx.GraphModule, signature: Signature) -> Layout:
    """The layout: members of a group are concatenated or stacked along the first dimension, in order."""
    count = len(signature.inputs)
    position = {node: i for i, node in enumerate(_placeholders(body)[:count])}
    group_of: dict[int, tuple[int, ...]] = {}
    for node in body.graph.nodes:
        if node.target not in (aten.cat.default, aten.stack.default) or _dim(node) != 0:
            continue
        members = tuple(position.get(x, -1) for x in node.args[0])
        if _can_group(members, group_of, signature):
            group_of.update((m, members) for m in members)
    groups = dict.fromkeys(group_of.get(i, (i,)) for i in range(count))
    return Layout(tuple(groups))


def _can_group(members: tuple[int, ...], taken: dict[int, tuple[int, ...]], signature: Signature) -> bool:
    if len(members) < 2 or -1 in members or len(set(members)) < len(members):
        return False
    if any(m in taken for m in members):
        return False
    kinds = {signature.inputs[m] for m in members}
    return len(kinds) == 1


def _dim(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(node.args[0][0].meta["val"].shape) if "val" in node.args[0][0].meta else 1
    return dim % max(rank, 1) if node.target is aten.cat.default else dim


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def group_inputs(body: fx.GraphModule, layout: Layout, signature: Signature) -> fx.GraphModule:
    """The body over groups: members are selected, their concatenation is the group itself."""
    if all(len(group) == 1 for group in layout.groups):
        return body
    graph = fx.Graph()
    olds = _placeholders(body)
    count = len(signature.inputs)
    node_of: dict[fx.Node, fx.Node] = {}
    whole: dict[tuple[fx.Node, ...], fx.Node] = {}
    wides = []
    for g, group in enumerate(layout.groups):
        wides.append(graph.placeholder(f"group{g}"))
        if len(group) == 1:
            node_of[olds[group[0]]] = wides[g]
        else:
            whole[tuple(olds[m] for m in group)] = wides[g]
    for old in olds[count:]:
        node_of[old] = graph.placeholder(old.name)
    for members, wide in whole.items():
        for i, old in enumerate(members):
            node_of[old] = graph.call_function(aten.select.int, (wide, 0, i))
    for node in body.graph.nodes:
        if node.op == "placeholder":
            continue
        members = tuple(node.args[0]) if node.target in (aten.cat.default, aten.stack.default) else ()
        if members in whole and _dim(node) == 0:
            wide = whole[members]
            if node.target is aten.cat.default:
                length, *rest = signature.inputs[olds.index(members[0])].shape
                wide = graph.call_function(aten.view.default, (wide, [len(members) * length, *rest]))
            node_of[node] = wide
        else:
            node_of[node] = graph.node_copy(node, lambda x: node_of[x])
    module = LazyGraphModule(body, graph)
    graph.eliminate_dead_code()
    return module


# -- `nn.Embedding(sparse=True)` keeps its sparse gradient, made once from the rows of the whole minibatch
#    embedding_dense_backward(g, indices, V, padding, False)  =>  embedding_sparse_gradient(g, indices, V, padding)


def embedding_sparse_gradient(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, padding: int
) -> torch.Tensor:
    """The gradient of a table `[rows, width]` as a sparse tensor, uncoalesced, padding left out.

    It is the user's, so it shares no memory with what it is made of: a minibatch's rows, which the next one overwrites.
    """
    flat, values = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding >= 0:
        keep = flat != padding
        flat, values = flat[keep], values[keep]
    else:
        flat, values = flat.clone(), values.clone()
    return rows_of_table((rows, grad.shape[-1]), flat, values)


def rows_of_table(shape: Sequence[int], indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A sparse tensor that is these rows added up."""
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch 2.11 warns where nothing was chosen
        return torch.sparse_coo_tensor(indices.reshape(1, -1), rows, tuple(shape))


def sparse_tables(body: fx.GraphModule, inputs: int) -> tuple[int, ...]:
    """The shared operands that the per-instance body only looks up with `sparse=True`."""
    tables = enumerate(_placeholders(body)[inputs:])
    return tuple(i for i, x in tables if x.users and all(_looks_up(user, x) for user in x.users))


def _looks_up(user: fx.Node, table: fx.Node) -> bool:
    looks_up = user.target is aten.embedding.default and user.args[0] is table
    return looks_up and len(user.args) > 4 and bool(user.args[4])


def look_up_densely(body: fx.GraphModule) -> None:
    """Trace the look-ups as dense ones: the gradients are made sparse afterwards."""
    for node in body.graph.nodes:
        if node.target is aten.embedding.default and len(node.args) > 4:
            node.args = (*node.args[:4], False)
    body.recompile()


def make_sparse(graph: fx.Graph, wanted: list[int]) -> None:
    """Results `wanted` of the parameter graph that are plain embedding gradients become sparse ones."""
    results = list(graph.output_node().args[0])
    for index in wanted:
        dense = results[index]
        if dense.target is not aten.embedding_dense_backward.default or dense.args[4]:
            continue
        with graph.inserting_before(dense):
            node = graph.call_function(embedding_sparse_gradient, tuple(dense.args[:4]))
        shapes = [(x.shape, x.dtype) for x in dense.meta["values"]]
        node.meta["values"] = tuple(torch.empty(n, dtype=kind, layout=torch.sparse_coo) for n, kind in shapes)
        results[index] = node
    graph.output_node().args = (tuple(results),)
    eliminate_dead(graph)


def gradients_of(
    outputs: Sequence[torch.Tensor], starts: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradient of each operand, given those of the outputs; None where it needs none, or no path leads to it."""
    wanted = [x for x in operands if x.requires_grad]
    pairs = [(o, g) for o, g in zip(outputs, starts, strict=True) if o.requires_grad]
    if not wanted or not pairs:
        return [None] * len(operands)
    ends, grads = zip(*pairs, strict=True)
    gradients = iter(run_backward(ends, grads, False, False, tuple(wanted), True, accumulate_grad=False))
    return [next(gradients) if x.requires_grad else None for x in operands]
