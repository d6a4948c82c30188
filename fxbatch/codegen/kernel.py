"""An operation graph as calls of torch that write to given memory: what runs where there is no native program.

In: an operation graph `(n, *ins) -> outs`. Out: a Kernel, for any number of rows. Its body is a graph `(n, *ins, *outs,
*prepared)` of calls, with `out=` where torch's function takes it, whose code torch.fx makes when it runs first; what
depends on shared operands alone is a graph of its own, run once a run.

    kernel = emit_kernel(graphs.forward)
    kernel(n, (*groups, *shared), (h, c, None), workspace)   # h, c are written, the third is made
    print(kernel.source)                       # addmm_default = addmm(weights_2, groups_1, permute_default)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxbatch.codegen.native import extension
from fxbatch.codegen.operation_graphs import device_of, is_cast, is_tensor, is_view, shape
from fxbatch.codegen.simplify import constant_value, is_random, slice_bounds
from fxbatch.torch_private import LazyGraphModule

aten = torch.ops.aten
Form = tuple[tuple[int, ...], torch.dtype, torch.device, torch.layout]

# Functions of torch with the arguments of their ATen namesakes, and `out=`: 0.9 us a call, by torch.ops 2.0.
_TORCH = frozenset((
    "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "erf", "sin", "cos", "reciprocal",
    "log1p", "expm1", "exp2", "log2",
    "mul", "add", "sub", "div", "pow", "maximum", "minimum", "mm", "bmm", "addmm",
    "baddbmm", "addcmul", "addcdiv", "where", "sum", "mean", "amax", "amin", "index_select", "gather", "eq",
    "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clamp", "clamp_min",
    "clamp_max", "sign", "cumsum", "floor", "ceil", "round", "atan2", "fmod", "remainder", "bitwise_and",
    "bitwise_or", "bitwise_not", "prod", "argmax", "argmin", "matmul", "lerp", "floor_divide", "cat",
))  # fmt: skip
_REDUCTIONS = ("sum", "mean", "prod", "amax", "amin")
# The torch functions take a number for a tensor, and then do what these do.
_SCALARS = {
    aten.mul.Scalar: torch.mul, aten.div.Scalar: torch.div, aten.add.Scalar: torch.add,
    aten.sub.Scalar: torch.sub, aten.div.Scalar_mode: torch.div,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Kernel:
    """`kernel(n, ins, outs, workspace) -> list of results`, to be run under `torch.no_grad()`.

    `outs[i]` is contiguous memory that result i is written to, or None: then it is made.
    """

    body: fx.GraphModule  # of n, ins, outs and what was prepared
    preparation: fx.GraphModule | None  # of some inputs: what depends on shared operands alone
    prepared_of: tuple[int, ...]  # which inputs
    forms: tuple[Form, ...]  # of the results for no rows

    @property
    def source(self) -> str:
        """The calls, one a line."""
        source = f"kernel{_lines(self.body.graph)}"
        return source if self.preparation is None else f"{source}\n\nprepare{_lines(self.preparation.graph)}"

    def __call__(
        self, n: int, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None], workspace: Workspace
    ) -> list[torch.Tensor]:
        if n == 0:
            return no_rows(outs, self.forms)
        if self.preparation is None:
            return self.body.forward(n, *ins, *outs)
        shared = tuple([ins[i] for i in self.prepared_of])
        return self.body.forward(n, *ins, *outs, *workspace.prepared(self, shared))


def _lines(graph: fx.Graph) -> str:
    """A graph's inputs, its calls, and what it gives."""
    inputs = [x.name for x in graph.nodes if x.op == "placeholder"]
    calls = [x for x in graph.nodes if x.op in ("call_function", "call_method")]
    lines = [f"{x.name} = {_name(x.target)}({', '.join(_arguments(x))})" for x in calls]
    results = ", ".join(map(_text, graph.output_node().args[0]))
    return "\n    ".join([f"({', '.join(inputs)}):", *lines, f"return {results}\n"])


def _name(target: object) -> str:
    return getattr(target, "__name__", str(target)).split(".")[0].removeprefix("_")


def _arguments(node: fx.Node) -> list[str]:
    return [*map(_text, node.args), *(f"{name}={_text(x)}" for name, x in node.kwargs.items())]


def _text(x: object) -> str:
    return f"[{', '.join(map(_text, x))}]" if isinstance(x, (list, tuple)) else str(x)


class Workspace:
    """What kernels use again from call to call, one workspace per thread.

    workspace.enter_run(memory.shared)
    workspace.prepared(kernel, shared)    # made once a run
    """

    def __init__(self) -> None:
        self.keeps_graphs = False  # whether another backward pass may come
        self._run: object = None
        self._room: Any = None
        self._prepared: dict[Kernel, tuple[tuple[torch.Tensor, ...], list[int], Sequence[torch.Tensor]]] = {}

    def enter_run(self, run: object) -> None:
        """From here on kernels are called for this run; what they prepared for another is forgotten.

        Until it is called, and after `enter_run(None)`, kernels prepare anew at each call.
        """
        if run is not self._run:
            self._run = run
            self._prepared.clear()

    def prepared(self, kernel: Kernel, shared: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        """The tensors that a kernel computes of shared operands alone: once per run, and again after a write to one."""
        assert kernel.preparation is not None
        if self._run is None or any(x.is_inference() for x in shared):
            return kernel.preparation.forward(*shared)
        versions = [x._version for x in shared]
        before = self._prepared.get(kernel)
        if before is not None and before[1] == versions and all(map(operator.is_, before[0], shared)):
            return before[2]
        tensors = kernel.preparation.forward(*shared)
        self._prepared[kernel] = (shared, versions, tensors)
        return tensors

    def native_room(self) -> object:
        """Where native programs of this thread write their intermediates, and on how many threads they run: torch's."""
        if self._room is None:
            self._room = extension.Room()
        self._room.threads = torch.get_num_threads()
        return self._room


def emit_kernel(module: fx.GraphModule) -> Kernel:
    """The kernel of an operation graph."""
    graph, body, preparation = module.graph, fx.Graph(), fx.Graph()
    places = [x for x in graph.nodes if x.op == "placeholder"]
    results: list[fx.Node] = list(graph.output_node().args[0])
    hoisted, read = find_prepared(graph)
    prepared_of = tuple(i for i, x in enumerate(places[1:]) if any(user in hoisted for user in x.users))
    prepared = {places[1 + i]: preparation.placeholder(places[1 + i].name) for i in prepared_of}
    node_of = {x: body.placeholder(x.name) for x in places}
    outs = [body.placeholder(f"o{i}") for i in range(len(results))]
    node_of |= {x: body.placeholder(x.name) for x in read}
    for node in graph.nodes:
        if node in hoisted:
            prepared[node] = _call(preparation, node, prepared)
        elif node.op == "get_attr":
            node_of[node], prepared[node] = body.node_copy(node), preparation.node_copy(node)
        elif node.op == "call_function":
            out = outs[results.index(node)] if node in results and _takes_out(node) else None
            node_of[node] = _call(body, node, node_of, out)
    body.output([_given(body, i, results, node_of, out) for i, out in enumerate(outs)])
    preparation.output([prepared[x] for x in read])
    return Kernel(
        LazyGraphModule(module, body),
        LazyGraphModule(module, preparation) if hoisted else None,
        prepared_of,
        tuple(map(_form, results)),
    )


def call_alone(node: fx.Node, results: Sequence[fx.Node]) -> Callable[[Sequence[object]], object]:
    """One call as a function of the tensors that it reads and the memory that its results are written to, in a row.
    results: the call, or the items of what it gives."""
    graph = fx.Graph()
    node_of = {x: graph.placeholder(x.name) for x in node.all_input_nodes}
    outs = [graph.placeholder(f"o{i}") for i in range(len(results))]
    direct = list(results) == [node] and _torch_function(node) is not None
    node_of[node] = _call(graph, node, node_of, outs[0] if direct else None)
    for out, x in () if direct else zip(outs, results, strict=True):
        source = node_of[x] if x is node else _call(graph, x, node_of)
        graph.call_method("copy_", (out, source))
    graph.output(())
    alone = LazyGraphModule({}, graph)
    return lambda given: alone.forward(*given)


def find_prepared(graph: fx.Graph) -> tuple[dict[fx.Node, None], list[fx.Node]]:
    """The nodes that depend on shared operands alone (casts, sums of biases), and those of them that other nodes read.

    In graph order. Views alone are as cheap to make as to fetch: then nothing is prepared.
    """
    hoisted: dict[fx.Node, None] = {}
    results = dict.fromkeys(graph.output_node().all_input_nodes)
    launches = False
    for node in graph.nodes:
        if node.op == "placeholder":
            first, second = node.meta["values"]
            same = isinstance(first, torch.Tensor) and first.shape == second.shape
            if same and first.layout is torch.strided:
                hoisted[node] = None
        elif node.op == "get_attr":
            hoisted[node] = None
        elif node.op == "call_function" and not is_random(node) and is_tensor(node):
            inside = all(x in hoisted for x in node.all_input_nodes)
            if inside and node not in results and not _only_filled(node) and not _ends_in(node, results):
                hoisted[node] = None
                launches |= not is_view(node)
    calls = {node: None for node in hoisted if node.op == "call_function"} if launches else {}
    return calls, [x for x in calls if any(u not in calls for u in x.users)]


def _only_filled(node: fx.Node) -> bool:
    return constant_value(node) is not None and all(x.target is aten.cat.default for x in node.users)


def _ends_in(node: fx.Node, results: dict[fx.Node, None]) -> bool:
    """Whether a result is a view of the node: a result's memory is the caller's."""
    return any(x in results or _ends_in(x, results) for x in node.users if is_view(x))


# -- calls


def _call(
    graph: fx.Graph, node: fx.Node, node_of: dict[fx.Node, fx.Node], out: fx.Node | None = None
) -> fx.Node:
    """A call of an operation graph as one that writes to `out`; views by methods, which cost less."""
    args, kwargs = map_arg((node.args, node.kwargs), node_of.__getitem__)
    target: Any = _torch_function(node) or node.target
    if target is aten.detach.default:
        return args[0]
    if target is aten.slice.Tensor and (bounds := slice_bounds(node)) is not None:
        dim, start, end = bounds
        return graph.create_node("call_method", "narrow", (args[0], dim, start, end - start), {}, node.name)
    if is_view(node) and target is not aten.slice.Tensor:
        sizes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:]
        word = str(target).split(".")[1]
        return graph.create_node("call_method", word, (args[0], *(sizes or ((),))), {}, node.name)
    if out is not None and is_cast(node):
        target, args, kwargs = _cast_into, (args[0], out, node.meta["values"][0].dtype), {}
    elif out is not None:
        kwargs = {**kwargs, "out": out}
    return graph.create_node("call_function", target, args, kwargs, node.name)


def _takes_out(node: fx.Node) -> bool:
    """Whether a call writes its result to memory that it is given."""
    return is_cast(node) or (is_tensor(node) and _torch_function(node) is not None)


def _given(
    graph: fx.Graph, i: int, results: Sequence[fx.Node], node_of: dict[fx.Node, fx.Node], out: fx.Node
) -> fx.Node:
    """Result i, copied to the memory that is given for it where it isn't written there."""
    node = results[i]
    written = node.op == "call_function" and _takes_out(node) and results.index(node) == i
    if written or not is_tensor(node) or node.meta["values"][0].is_sparse:
        return node_of[node]
    into = _into if _is_new(node) and results.count(node) == 1 else _copy_into
    return graph.create_node("call_function", into, (node_of[node], out), {}, f"result_{i}")


def _cast_into(x: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True) if out is None else out.copy_(x)


def _into(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return x if out is None else out.copy_(x)


def _copy_into(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


def _torch_function(node: fx.Node) -> Callable[..., Any] | None:
    """The function of the torch namespace that is this call, with an `out=`."""
    target = node.target
    if target in _SCALARS:
        return _SCALARS[target]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    word = target._schema.name.removeprefix("aten::")
    outs = [getattr(target.overloadpacket, x)._schema.arguments for x in target.overloadpacket.overloads()]
    plain = [(a.name, str(a.type)) for a in target._schema.arguments]
    begins = node.args[0] if node.args else None
    with_number = isinstance(begins, (int, float)) and word != "pow"
    of_all = word in _REDUCTIONS and "dim" not in dict(plain)
    if with_number or of_all:  # torch's functions take no `out=` there
        return None
    same = any(
        [(a.name, str(a.type)) for a in x if not a.is_out] == plain and len(x) == len(plain) + 1 for x in outs
    )
    return getattr(torch, word) if word in _TORCH and same else None


def _is_new(node: fx.Node) -> bool:
    """Whether a value is its call's own new tensor."""
    target = node.target
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    is_fresh = bool(returns) and all(r.alias_info is None for r in returns)
    return is_fresh and node.op == "call_function" and target is not aten.reshape.default


def _form(node: fx.Node) -> Form:
    value = node.meta["values"][0]
    return tuple(b for _, b in shape(node)), value.dtype, device_of(node), value.layout


def no_rows(outs: Sequence[torch.Tensor | None], forms: Sequence[Form]) -> list[torch.Tensor]:
    """The results for no rows: nothing in each, and sums of nothing are zero."""
    results = []
    for out, (sizes, dtype, device, layout) in zip(outs, forms, strict=True):
        empty_rows = torch.zeros(sizes, dtype=dtype, device=device, layout=layout)
        results.append(empty_rows if out is None else out.zero_())
    return results
