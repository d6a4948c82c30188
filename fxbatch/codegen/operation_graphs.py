"""The graphs that an operation is built into, as the runtime sees them; shapes as functions of the number of rows.

graphs = build_operation(signature, input_needs=needs, shared_needs=shared_needs, shared=shared)
if isinstance(graphs, Unbatched):
    kernel = UnbatchedKernel(signature)      # call by call; graphs.reason says why

Each dimension is `a * n + b`, known from two sample sizes: a node of an operation graph carries `meta["values"]`, its
value at two numbers of rows: tensors on "meta" where the operation is of one device, which its first node tells, fake
ones otherwise. New nodes are made with `add_call`, which computes theirs.

    shape(node)            # ((1, 0), (0, 750)): [n, 750]
    row_type(node)         # f32[750]
    add_call(graph, aten.mul.Tensor, (x, y))
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_arg

from fxbatch.ir import Layout, Signature, TensorSpec, tensor_spec
from fxbatch.torch_private import FakeTensor, tree_leaves


@dataclass(frozen=True, slots=True)
class Ref:
    """A row-wise tensor of an operation, named by where it comes from.

    group: a gathered input group; output: what forward returns; saved: an intermediate that forward
    saves; extra: a tensor that backward makes for the parameter graph.
    """

    kind: Literal["group", "output", "saved", "extra"]
    index: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Flows:
    """The inputs and outputs of an operation's three graphs, and which output of one is an input of another."""

    saved_types: tuple[TensorSpec, ...]
    grad_outputs: tuple[int, ...]
    grad_groups: tuple[int, ...]
    backward_inputs: tuple[Ref, ...]
    extra_types: tuple[TensorSpec, ...]
    parameter_inputs: tuple[Ref, ...]
    grad_shared: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class OperationGraphs(Flows):
    """The three graphs of one signature.

    A group of one input is `[n, *shape]`; a group of several is `[n, members, *shape]`.

    * `forward(n, *groups, *shared) -> (*outputs [n, *shape], *saved)`
    * `backward(n, *grad_outputs, *backward_inputs, *shared) -> (*gradients of grad_groups, *extra)`
    * `parameters(N, *parameter_inputs, *shared) -> gradients of grad_shared`, with the rows of all steps
      of the minibatch one after another; it sums over rows, so once is enough.

    `grad_outputs` are the outputs whose gradients backward takes; a differentiable output that is missing
    there has no path to what needs gradients. `grad_groups` and `grad_shared` have gradients; the others
    of the needed ones have none (None in autograd's terms).
    """

    signature: Signature
    layout: Layout
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    parameters: fx.GraphModule | None
    random: bool = False
    checked: bool = True  # compared with per-row eager on real numbers (never when random)
    # Inputs that eager gives None, where a group or a graph gives zeros.
    without_gradient: tuple[int, ...] = ()

    def group_type(self, group: int) -> TensorSpec:
        """The type of the rows of an input group's members."""
        return self.signature.inputs[self.layout.groups[group][0]]

    def in_parameters(self, group: int) -> bool:
        """Whether the parameter graph reads the rows of a group: then those of all steps lie together."""
        return Ref("group", group) in self.parameter_inputs


@dataclass(frozen=True, slots=True)
class Unbatched:
    """An operation that can't be batched, and why; it runs call by call."""

    reason: str


@dataclass(frozen=True, slots=True)
class Large:
    """An operation whose body is more calls of ATen than are built at once."""

    calls: int


class NotBatchable(Exception):
    """Raised inside codegen, with the reason; `build_operation` turns it into `Unbatched`."""


def ancestors(nodes: Iterable[fx.Node], stops: Container[fx.Node] = ()) -> dict[fx.Node, None]:
    """The nodes and all that they need, as an ordered set; of `stops` not what these need."""
    seen: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            if node not in stops:
                stack.extend(node.all_input_nodes)
    return seen


# -- shapes that depend on the number of rows

aten = torch.ops.aten
Size = tuple[int, int]
Shape = tuple[Size, ...]
_VIEWS = (
    aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default,
    aten.detach.default, aten.diagonal.default,
)  # fmt: skip


def fit(a: int, b: int, sizes: tuple[int, int]) -> Size:
    """The (factor, rest) with `a = factor * sizes[0] + rest` and `b = factor * sizes[1] + rest`."""
    factor, remainder = divmod(b - a, sizes[1] - sizes[0])
    if remainder:
        raise NotBatchable(f"{a} and {b} at {sizes[0]} and {sizes[1]} rows are not linear in the rows")
    return factor, a - factor * sizes[0]


def run_graph(
    module: fx.GraphModule, operands: Sequence[object], by: Callable[[object], Any] = lambda x: x
) -> Any:
    """What a graph gives, node by node, without code that is compiled for it. by: what is called for a target."""
    values: dict[fx.Node, object] = {}
    left, of = iter(operands), values.__getitem__
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(left)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function":
            values[node] = by(node.target)(*map_arg(node.args, of), **map_arg(node.kwargs, of))
    return map_arg(module.graph.output_node().args[0], of)


def rows_node(graph: fx.Graph) -> fx.Node:
    """The placeholder `n`: it is always the first."""
    return next(iter(graph.nodes))


def sample_sizes(graph: fx.Graph) -> tuple[int, int]:
    """The two numbers of rows at which the values of the nodes are known."""
    return rows_node(graph).meta["values"]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["values"][0], torch.Tensor)


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number of rows, or what is made of one."""
    return all(type(x) is int for x in node.meta["values"])


def shape(node: fx.Node) -> Shape:
    """The shape of a tensor node, each dimension as (a, b): a * n + b."""
    first, second = node.meta["values"]
    sizes = sample_sizes(node.graph)
    if first.dim() != second.dim():
        raise NotBatchable(f"{node.target} has different dimensions at {sizes[0]} and {sizes[1]} rows")
    return tuple(fit(x, y, sizes) for x, y in zip(first.shape, second.shape, strict=True))


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its first argument's memory (a reshape may yet have to copy)."""
    return node.op == "call_function" and node.target in _VIEWS


def is_cast(node: fx.Node) -> bool:
    """Whether the node copies its first argument to another dtype: a copy into given memory does that too."""
    if node.op != "call_function" or node.target is not aten._to_copy.default:
        return False
    if not isinstance(node.args[0], fx.Node) or node.kwargs.get("memory_format") is not None:
        return False
    source, value = node.args[0].meta["values"][0], node.meta["values"][0]
    same_device = device_of(node.args[0]) == device_of(node)
    return bool(same_device and source.layout is value.layout is torch.strided)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result needs the same elements of the inputs alone."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def dtype(node: fx.Node) -> torch.dtype:
    return node.meta["values"][0].dtype


def device_of(node: fx.Node) -> torch.device:
    """The device of a tensor's node."""
    device = node.meta["values"][0].device
    return rows_node(node.graph).meta["device"] if device.type == "meta" else device


def row_type(node: fx.Node) -> TensorSpec | None:
    """The type of one row if the node is `[n, ...]` with nothing else that depends on n, else None."""
    if not is_tensor(node):
        return None
    dims = shape(node)
    if not dims or dims[0] != (1, 0) or any(a for a, _ in dims[1:]):
        return None
    value = node.meta["values"][0]
    return tensor_spec(tuple(b for _, b in dims[1:]), value.dtype, device_of(node))


def concatenated(node: fx.Node) -> tuple[int, list[tuple[fx.Node, int, int]]] | None:
    """(dim, [(piece, start, end)]) of a concatenation along a dimension that doesn't depend on n; None for others."""
    if node.target is not aten.cat.default:
        return None
    dims, pieces = shape(node), list(map(shape, node.args[0]))
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    if any(len(piece) != len(dims) or piece[dim][0] for piece in pieces):
        return None
    ends = list(itertools.accumulate((piece[dim][1] for piece in pieces), initial=0))
    return dim, list(zip(node.args[0], ends[:-1], ends[1:], strict=True))


def bytes_per_row(node: fx.Node) -> int:
    first, second = node.meta["values"]
    sizes = sample_sizes(node.graph)
    grown = (second.numel() - first.numel()) // (sizes[1] - sizes[0])
    return max(grown, 1) * first.element_size()


def evaluate(node: fx.Node) -> tuple[Any, Any]:
    """The values of a call at both sample sizes."""
    on_meta = {"device": "meta"} if "device" in rows_node(node.graph).meta and "device" in node.kwargs else {}
    target: Any = node.target
    results = []
    for i in (0, 1):
        pick = lambda x, i=i: x.meta["values"][i]  # noqa: E731
        args, kwargs = map_arg(node.args, pick), map_arg(node.kwargs, pick)
        fakes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        with torch.no_grad(), fakes[0].fake_mode if fakes else contextlib.nullcontext():
            results.append(target(*args, **{**kwargs, **on_meta}))
    return results[0], results[1]


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: Any,
    kwargs: Any | None = None,
    like: fx.Node | None = None,
) -> fx.Node:
    """A new call_function node at the graph's insertion point, with its values: those of `like`, if it is the same."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta["values"] = evaluate(node) if like is None else like.meta["values"]
    return node


def size_argument(graph: fx.Graph, size: Size) -> int | fx.Node:
    """A size as an argument: a plain integer, or nodes that compute `a * n + b`."""
    a, b = size
    if a == 0:
        return b
    node = rows_node(graph)
    if a != 1:
        node = add_call(graph, operator.mul, (node, a))
    if b:
        node = add_call(graph, operator.add, (node, b))
    return node


def shape_argument(graph: fx.Graph, dims: Shape) -> list[int | fx.Node]:
    return [size_argument(graph, size) for size in dims]
