"""Where each node of an operation graph is written: a result's memory, a slot of the workspace, or a piece.

In: an operation graph. Out: Memory. Results are written where the caller wants them; what only a
concatenation reads is written straight into its place there; dead intermediates' slots are used again.

    memory = assign_memory(graph)
    memory.place[node]     # Place("slot", 2), Place("output", 0), Place("piece", parent=cat, dim=1, ...)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from fxbatch.codegen.clean import constant_value, is_random
from fxbatch.codegen.kernel_calls import honours_strides, is_cast, is_pointwise, is_view, out_call
from fxbatch.codegen.sizes import dtype, is_tensor, shape

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Place:
    """Memory: workspace slot `index`, result `index`, or part of the place of `parent`."""

    kind: Literal["slot", "output", "piece"]
    index: int = 0
    parent: fx.Node | None = None
    dim: int = 0
    start: int = 0
    size: int = 0


@dataclass(frozen=True, eq=False)
class Copy:
    """A piece of a concatenation that is copied (from `source`) or filled (with `fill`)."""

    source: fx.Node
    dim: int
    start: int
    size: int
    fill: float | None


@dataclass
class Memory:
    """What the emitter asks."""

    outputs: list[fx.Node]
    place: dict[fx.Node, Place] = field(default_factory=dict)
    views: dict[fx.Node, fx.Node] = field(default_factory=dict)  # view -> the node whose memory it looks at
    copies: dict[fx.Node, list[Copy]] = field(default_factory=dict)  # of concatenations
    opens: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # concatenations begun before a node
    returned: list[int] = field(default_factory=list)  # results that can't be written to given memory
    direct: dict[int, fx.Node] = field(default_factory=dict)  # result -> node written straight into it
    fresh: dict[int, None] = field(default_factory=dict)  # results that are a call's own new tensor
    hoisted: dict[fx.Node, None] = field(default_factory=dict)  # computed once a run, see `find_hoisted`

    def base(self, node: fx.Node) -> fx.Node:
        """The node whose memory `node` looks at."""
        return self.views.get(node, node)

    def holders(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose memory `node` may look at: a reshape that copies 5 rows may be a view of 1."""
        base = self.base(node)
        if not _may_alias(base):
            return [base]
        return [base, *(x for source in base.all_input_nodes for x in self.holders(source))]

    def root(self, node: fx.Node) -> Place | None:
        """The slot or result behind a node, through views and pieces."""
        place = self.place.get(self.base(node))
        while place is not None and place.parent is not None:
            place = self.place[place.parent]
        return place

    def is_slot(self, node: fx.Node) -> bool:
        """Whether the node lies in the workspace, so that its views are ready made."""
        root = self.root(node)
        return root is not None and root.kind == "slot"

    def is_fill(self, node: fx.Node) -> bool:
        """Whether a constant tensor is only ever filled into concatenations."""
        return constant_value(node) is not None and all(user in self.copies for user in node.users)

    def written_in_place(self, index: int) -> bool:
        return index in self.direct


def assign_memory(graph: fx.Graph) -> Memory:
    """Views, results, pieces of concatenations, then slots by liveness."""
    outputs = list(graph.output_node().args[0])
    memory = Memory(outputs)
    memory.returned = [i for i, x in enumerate(outputs) if not is_tensor(x) or x.meta["values"][0].is_sparse]
    memory.hoisted = find_hoisted(graph)
    layout = _Layouts()
    for node in graph.nodes:
        layout.add(node, memory)
    _place_outputs(memory)
    _place_pieces(graph, memory)
    _place_slots(graph, memory)
    memory.fresh = {i: None for i, x in enumerate(outputs) if i not in memory.returned and _is_new(x, memory)}
    return memory


def _is_new(node: fx.Node, memory: Memory) -> bool:
    """Whether a result is a call's own new tensor, which can be handed out where no memory is given."""
    if node in memory.place or node in memory.views or node in memory.hoisted:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or memory.outputs.count(node) > 1:
        return False
    return (
        all(r.alias_info is None for r in node.target._schema.returns)
        and node.target is not aten.reshape.default
    )


def find_hoisted(graph: fx.Graph) -> dict[fx.Node, None]:
    """What depends on shared operands alone: casts, sums of biases, products with zeros. In graph order.

    Views alone are as cheap to make as to fetch: then nothing is hoisted.
    """
    found: dict[fx.Node, None] = {}
    results = dict.fromkeys(graph.output_node().all_input_nodes)
    launches = False
    for node in graph.nodes:
        if node.op == "placeholder":
            first, second = node.meta["values"]
            same = isinstance(first, torch.Tensor) and first.shape == second.shape
            if same and first.layout is torch.strided:
                found[node] = None
        elif node.op == "get_attr":
            found[node] = None
        elif node.op == "call_function" and not is_random(node) and is_tensor(node):
            inside = all(x in found for x in node.all_input_nodes)
            if inside and node not in results and not _only_filled(node):
                found[node] = None
                launches |= not is_view(node)
    calls = {node: None for node in found if node.op == "call_function"}
    return {node: None for node in calls if not _ends_in(node, calls, results)} if launches else {}


def _only_filled(node: fx.Node) -> bool:
    return constant_value(node) is not None and all(x.target is aten.cat.default for x in node.users)


def _ends_in(node: fx.Node, inside: dict[fx.Node, None], results: dict[fx.Node, None]) -> bool:
    """Whether a result is a view of the node: a result's memory is the caller's."""
    return any(x in results or _ends_in(x, inside, results) for x in node.users if is_view(x))


def _may_alias(node: fx.Node) -> bool:
    view = getattr(node.target, "is_view", False) or getattr(node.target, "__name__", "") == "getitem"
    return node.op == "call_function" and (view or node.target is aten.reshape.default)


class _Layouts:
    """Strides at the first sample size, on the meta device, to know which reshapes are views."""

    def __init__(self) -> None:
        self.like: dict[fx.Node, torch.Tensor] = {}

    def add(self, node: fx.Node, memory: Memory) -> None:
        if node.op == "output" or not is_tensor(node):
            return
        value = node.meta["values"][0]
        fresh = torch.empty(value.shape, dtype=value.dtype, device="meta") if not value.is_sparse else value
        if not is_view(node) or node.args[0] not in self.like:
            self.like[node] = fresh
            return
        source = self.like[node.args[0]]
        try:
            found = _view(node, source)
        except RuntimeError:
            self.like[node] = fresh  # this reshape copies
            return
        self.like[node] = found
        if node in memory.hoisted:
            return
        memory.views[node] = memory.base(node.args[0])


def _view(node: fx.Node, source: torch.Tensor) -> torch.Tensor:
    args = fx.map_arg(node.args[1:], lambda x: x.meta["values"][0])
    if node.target is aten.reshape.default:
        return source.view(args[0])
    return node.target(source, *args, **node.kwargs)


def _writable(node: fx.Node, memory: Memory) -> bool:
    """Whether the node makes a dense tensor of its own by a call."""
    if node.op != "call_function" or node in memory.views or node in memory.hoisted or not is_tensor(node):
        return False
    if node.meta["values"][0].is_sparse or getattr(node.target, "__name__", "") == "getitem":
        return False
    return node.target is aten.cat.default or is_cast(node) or out_call(node.target) is not None


def _place_outputs(memory: Memory) -> None:
    """A result, or what a result is a reshape of, is written straight into the caller's memory."""
    for i, node in enumerate(memory.outputs):
        if i in memory.returned:
            continue
        source: Any = node
        while source in memory.views and source.target is aten.reshape.default:
            source = source.args[0]
        if source in memory.place or not _writable(source, memory):
            continue
        memory.place[source] = Place("output", i)
        memory.direct[i] = source


def _place_pieces(graph: fx.Graph, memory: Memory) -> None:
    """What only a concatenation reads is written into its place there; the rest is copied."""
    for node in reversed(list(graph.nodes)):
        if node.target is not aten.cat.default or not _writable(node, memory):
            continue
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape(node))
        if any(len(shape(x)) != len(shape(node)) or shape(x)[dim][0] for x in node.args[0]):
            continue
        start = 0
        memory.copies[node] = []
        seen: dict[fx.Node, None] = {}
        for piece in node.args[0]:
            size = shape(piece)[dim][1]
            alone = len(piece.users) == 1 and piece not in seen and piece not in memory.place
            seen[piece] = None
            fill = constant_value(piece)
            own = alone and fill is None and dtype(piece) == dtype(node) and _writable(piece, memory)
            if own and honours_strides(piece):
                memory.place[piece] = Place("piece", 0, node, dim, start, size)
            else:
                memory.copies[node].append(Copy(piece, dim, start, size, fill))
            start += size


def _place_slots(graph: fx.Graph, memory: Memory) -> None:
    """Slots for the rest, each free again after the last reader of what it holds."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = _last_uses(graph, memory, order)
    first = _first_writes(graph, memory, order)
    roots = [x for x in graph.nodes if _writable(x, memory) and memory.place.get(x, None) is None]
    roots.sort(key=lambda x: first.get(x, order[x]))
    free: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    busy: list[tuple[int, tuple[torch.dtype, torch.device], int, fx.Node]] = []
    count: dict[tuple[torch.dtype, torch.device], int] = {}
    for node in roots:
        value = node.meta["values"][0]
        key = (value.dtype, value.device)
        begin = first.get(node, order[node])
        still = []
        for end, other, slot, holder in busy:
            dying = end < begin or (end == begin and _in_place(node, holder, memory))
            if dying:
                free.setdefault(other, []).append(slot)
            else:
                still.append((end, other, slot, holder))
        busy = still
        pool = free.setdefault(key, [])
        if pool:
            slot = pool.pop()
        else:
            slot = count.get(key, 0)
            count[key] = slot + 1
        memory.place[node] = Place("slot", slot)
        busy.append((last[node], key, slot, node))
    nodes = list(graph.nodes)
    for node in memory.copies:
        if (start := first.get(node, order[node])) < order[node]:
            memory.opens.setdefault(nodes[start], []).append(node)
    for waiting in memory.opens.values():
        waiting.sort(key=lambda x: -order[x])  # an outer concatenation before those inside it


def _in_place(node: fx.Node, holder: fx.Node, memory: Memory) -> bool:
    """A pointwise call may overwrite an input of its own form that it is the last to read, whole."""
    if not is_pointwise(node) or shape(holder) != shape(node) or dtype(holder) != dtype(node):
        return False
    readers = [x for x in node.all_input_nodes if holder in memory.holders(x)]
    return readers == [holder]


def _last_uses(graph: fx.Graph, memory: Memory, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    last: dict[fx.Node, int] = dict(order)
    for node in graph.nodes:
        for source in node.all_input_nodes:
            for holder in memory.holders(source):
                at: fx.Node | None = holder
                while at is not None:
                    last[at] = max(last.get(at, 0), order[node])
                    place = memory.place.get(at)
                    at = place.parent if place is not None else None
    return last


def _first_writes(graph: fx.Graph, memory: Memory, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """A concatenation's memory is needed from its first piece on."""
    first: dict[fx.Node, int] = {}
    for node in graph.nodes:
        place = memory.place.get(node)
        while place is not None and place.parent is not None:
            first[place.parent] = min(first.get(place.parent, order[place.parent]), order[node])
            place = memory.place.get(place.parent)
    return first
