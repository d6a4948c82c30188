"""An operation graph cut at its matrix products: what is between them is for a compiler, they stay ATen's.

In: an operation graph `(n, *ins) -> outs`. Out: a Cut: regions `(n, *writes, *reads) -> ()` without products, and
the products, in the order in which they run; each value between two of them lies in memory of its own.

    cut = cut_at_products(graphs.forward)
    [str(x) for x in cut.stages]        # ["addmm", "region of 5 results"]: a Tree-LSTM cell's forward

Inductor calls ATen for a product as well, but allocates its result at each call; 1.5 MB at 512 rows of a Tree-LSTM
cell come fresh from the system each time. Cut, a product writes to a workspace that is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxbatch.codegen.kernel_calls import is_view, out_call, view_text
from fxbatch.codegen.sizes import is_tensor, shape

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class Uncuttable(Exception):
    """The graph has something that can't be kept between two stages; it is compiled whole."""


@dataclass(frozen=True, eq=False)
class Region:
    """`module(n, *writes, *reads) -> ()`: the values `writes`, from the values `reads`, without a product."""

    module: fx.GraphModule
    writes: tuple[fx.Node | int, ...]  # a stored value, or the number of a result that is none
    reads: tuple[fx.Node, ...]

    def __str__(self) -> str:
        return f"region of {len(self.writes)} results"


@dataclass(frozen=True, eq=False)
class Product:
    """One call of ATen's that writes the value `node`."""

    node: fx.Node

    def __str__(self) -> str:
        return out_call(self.node.target)[0]


@dataclass(frozen=True, eq=False)
class Cut:
    """Regions and products in order; `place` says which result a value is written straight into."""

    stages: tuple[Region | Product, ...]
    place: dict[fx.Node, int]
    kept: tuple[fx.Node, ...]  # values that need memory of their own, in order


def cut_at_products(module: fx.GraphModule) -> Cut:
    """Cut a graph. Raises Uncuttable."""
    graph = module.graph
    results = [x for x in graph.output_node().args[0] if isinstance(x, fx.Node)]
    level = levels(graph)
    stored = _stored(graph, level, results)
    place = _places(results, stored)
    copied: dict[int, list[int]] = {}
    for i, node in enumerate(results):
        if i not in place.values():
            copied.setdefault(level[node], []).append(i)
    stages: list[Region | Product] = []
    for at in range(max(level.values()) + 1):
        values = [x for x in stored if level[x] == at and not is_product(x)]
        wanted: list[fx.Node | int] = [*values, *copied.get(at, ())]
        nodes = values + [results[i] for i in copied.get(at, ())]
        if nodes:
            ready = {x for x in stored if level[x] < at or (is_product(x) and level[x] == at)}
            stages.append(_region(module, wanted, nodes, ready))
        stages += [Product(x) for x in stored if is_product(x) and level[x] == at + 1]
    return Cut(tuple(stages), place, tuple(x for x in stored if x not in place))


def is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in PRODUCTS


def levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many products are on the longest path to a node; a product itself counts. A gather is where its reader is."""
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "output":
            before = max((level[x] for x in node.all_input_nodes), default=0)
            level[node] = before + is_product(node)
    for node in filter(is_gather, graph.nodes):
        level[node] = min((level[x] for x in readers(node)), default=level[node])
    return level


def is_gather(node: fx.Node) -> bool:
    """Whether rows are read by an index, both of them inputs: done where it is read, it needs no memory."""
    return node.target is aten._unsafe_index.Tensor and all(
        x.op == "placeholder" for x in node.all_input_nodes
    )


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, views of it looked through."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        elif user.op != "output":
            yield user


def _stored(graph: fx.Graph, level: dict[fx.Node, int], results: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Products, what they read, what is read behind a later product, and results that are computed."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        later = any(is_product(x) or level[x] > level[node] for x in readers(node))
        if is_product(node) or node in results or (later and not _is_number(node)):
            if not _lies_in_rows(node):
                raise Uncuttable(f"{node.name} is no tensor of rows")
            found[node] = None
    return found


def _is_number(node: fx.Node) -> bool:
    return not is_tensor(node) and not isinstance(node.meta["values"][0], (tuple, list))


def _lies_in_rows(node: fx.Node) -> bool:
    """Whether each dimension is fixed or as long as there are rows."""
    if not is_tensor(node) or node.meta["values"][0].layout is not torch.strided:
        return False
    return all(a in (0, 1) and not (a and b) for a, b in shape(node))


def _places(results: Sequence[fx.Node], stored: dict[fx.Node, None]) -> dict[fx.Node, int]:
    """Values that are results, or that a result is a reshape of: they are written straight to its memory."""
    place: dict[fx.Node, int] = {}
    for i, result in enumerate(results):
        node = result
        while node.target is aten.reshape.default and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if node in stored and node not in place:
            place[node] = i
    return place


def _region(
    module: fx.GraphModule, writes: Sequence[fx.Node | int], nodes: Sequence[fx.Node], ready: set[fx.Node]
) -> Region:
    """The graph that computes `nodes` from placeholders and what is ready, and writes them."""
    order = list(module.graph.nodes)
    needed: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += () if node in ready else node.all_input_nodes
    graph = fx.Graph()
    known = {order[0]: graph.placeholder("n")}
    outs = [_placeholder(graph, f"out{i}", node) for i, node in enumerate(nodes)]
    reads = [x for x in order[1:] if x in needed and (x in ready or x.op == "placeholder")]
    known.update((x, _placeholder(graph, x.name, x)) for x in reads)
    for node in order:
        if node in needed and node not in known:
            known[node] = graph.node_copy(node, lambda x: known[x])
    for out, node in zip(outs, nodes, strict=True):
        graph.call_function(aten.copy_.default, (out, known[node]))
    graph.output(())
    graph.lint()
    return Region(fx.GraphModule(module, graph, "Region"), tuple(writes), tuple(reads))


def _placeholder(graph: fx.Graph, name: str, node: fx.Node) -> fx.Node:
    if not _lies_in_rows(node):
        raise Uncuttable(f"{node.name} is no tensor of rows")
    made = graph.placeholder(name)
    value = node.meta["values"][0]
    made.meta.update(sizes=shape(node), kind=(value.dtype, value.device))
    return made


def product_source(node: fx.Node, names: dict[fx.Node, str], out: str) -> str:
    """`addmm(weights_2, x.reshape(n, 300), weights_1.t(), out=t0)`; Uncuttable for what has no such text."""

    def text(value: object) -> str:
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, (int, float, bool)) or value is None:
            return repr(value)
        if not isinstance(value, fx.Node):
            raise Uncuttable(f"{node.name} has the argument {value!r}")
        if value in names:
            return names[value]
        if is_view(value):
            return view_text(value, text(value.args[0]), text, owned=False)
        raise Uncuttable(f"{node.name} reads {value.name}, which is no tensor of rows")

    word, target, _ = out_call(node.target)  # type: ignore[misc]  # one of PRODUCTS
    given = [text(x) for x in node.args] + [f"{key}={text(x)}" for key, x in node.kwargs.items()]
    return f"{word}({', '.join(given)}, {target}={out})"
