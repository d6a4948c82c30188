"""The batched graph: few nodes, each a batch of calls, pass-throughs, a gather or a cat.

Comes in: a Program and its Schedule, by `passes/fold.py`. Goes out: a BatchedGraph, which the
rewrites of `passes/fold.py` take and give, and which prints.

    graph = batch_calls(program, schedule)
    print(graph)                               # one line per node and per edge
    graph.graph.nodes["b3"]["node"].calls

The networkx.DiGraph has the attribute `node` on nodes (a Node) and `reads` on edges (a tuple of Read).
Rows are told by the values they hold: `gives[j]` are the values of the rows of output j, `wants[i]` those
of the rows of input i. An edge says which rows of which output go to which places of which input. So
every invariant can be checked by comparing value ids, and every stage is checked by the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fxbatch.ir import Program, TensorSpec
from fxbatch.on_demand import networkx as nx

NodeKind = Literal["known", "batch", "pass", "gather", "cat", "result"]


@dataclass(frozen=True, eq=False)
class Node:
    """A node of the batched graph.

    known: values of earlier phases; batch: calls of one signature, as one launch; pass: identities that
    carry values to the next depth; gather: the rows of one input of a batch; cat: all rows of one tensor
    type at one depth, one after another; result: the rows of one type that results need.
    """

    kind: NodeKind
    depth: int
    types: tuple[TensorSpec, ...]  # of the outputs
    gives: tuple[np.ndarray, ...]  # int64, one row per value, one array per output
    wants: tuple[np.ndarray, ...] = ()  # int64, one array per input
    signature: int = -1  # of a batch
    calls: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of a batch

    @property
    def rows(self) -> int:
        """Rows of an output: calls of a batch, values of the others."""
        return len(self.calls) if self.kind == "batch" else sum(map(len, self.gives))


@dataclass(frozen=True, eq=False)
class Read:
    """Rows that go along an edge: `places` of input `input` hold `rows` of output `output`."""

    output: int
    input: int
    rows: np.ndarray  # int64
    places: np.ndarray  # int64


@dataclass(frozen=True, eq=False)
class BatchedGraph:
    """A stage of the batched graph. The networkx graph is frozen: a rewrite makes a new one."""

    program: Program
    graph: nx.DiGraph
    stage: str

    def __post_init__(self) -> None:
        nx.freeze(self.graph)

    def node(self, name: str) -> Node:
        """The Node of that name."""
        found: Node = self.graph.nodes[name]["node"]
        return found

    def nodes(self, *kinds: NodeKind) -> list[tuple[str, Node]]:
        """Names and nodes in order of execution; of the given kinds, if any are given."""
        found = ((name, self.node(name)) for name in self.graph.nodes)
        return [(name, node) for name, node in found if not kinds or node.kind in kinds]

    def reads(self, name: str) -> Iterator[tuple[str, Read]]:
        """The inputs of a node, and the nodes that they come from."""
        for before, _, reads in self.graph.in_edges(name, data="reads"):
            for read in reads:
                yield before, read

    @property
    def results(self) -> list[tuple[str, Node]]:
        """The result nodes, one a tensor type."""
        return self.nodes("result")

    def labels(self) -> dict[int, tuple[int, int, int]]:
        """Fold's labels: value -> (depth, type, row), of the first cat that has the value."""
        found: dict[int, tuple[int, int, int]] = {}
        for _, node in self.nodes("cat"):
            t = self.program.type_ids[node.types[0]]
            for i, v in enumerate(node.gives[0].tolist()):
                found.setdefault(v, (node.depth, t, i))
        return found

    def node_line(self, name: str) -> str:
        """The line of a node: `b3 depth 2: batch s3 cell x7 -> f32[4], f32[4]`."""
        node = self.node(name)
        what = node.kind
        if node.kind == "batch":
            what = f"batch s{node.signature} {self.program.signatures[node.signature].name}"  # type: ignore[assignment]  # text
        types = ", ".join(map(str, node.types)) or "nothing"
        return f"{name} depth {node.depth}: {what} x{node.rows} -> {types}"

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for _, node in self.nodes():
            counts[node.kind] = counts.get(node.kind, 0) + 1
        head = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        lines = [f"batched graph, {self.stage}: {head}"]
        for name, _ in self.nodes():
            lines.append(f"  {self.node_line(name)}")
            lines += [f"    input {r.input} <- {source_text(before, r)}" for before, r in self.reads(name)]
        return "\n".join(lines)


def source_text(before: str, read: Read) -> str:
    """`b2.0[0:3]` for consecutive rows at consecutive places, else the rows and places."""
    return f"{before}.{read.output}[{rows_text(read.rows)}] at [{rows_text(read.places)}]"


def rows_text(rows: np.ndarray, limit: int = 12) -> str:
    """`4:9` for consecutive rows, else the rows, the first few of them."""
    if len(rows) > 1 and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return f"{rows[0]}:{rows[-1] + 1}"
    shown = ",".join(map(str, rows[:limit].tolist()))
    return shown + (f",... {len(rows)} rows" if len(rows) > limit else "")


class GraphBuilder:
    """Puts a batched graph together: nodes with what they want, connected by who gives it.

    Nodes are added in order of execution. `connect` finds, for each wanted value, the node and row that
    `where` says gives it.
    """

    def __init__(self, program: Program, stage: str) -> None:
        self.program, self.stage = program, stage
        self.graph = nx.DiGraph()
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}
        self.node_of = np.full(program.values, -1, dtype=np.int64)  # that gives the value now
        self.output_of = np.zeros(program.values, dtype=np.int64)
        self.row_of = np.zeros(program.values, dtype=np.int64)

    def add(self, name: str, node: Node, *, give: bool = True, connect: bool = True) -> str:
        """Add a node; connect its inputs to the present givers; with `give`, it gives its values from now."""
        self.numbers[name] = len(self.names)
        self.names.append(name)
        self.graph.add_node(name, node=node)
        if connect:
            for i, wanted in enumerate(node.wants):
                self.connect(name, i, wanted)
        if give:
            self.give(name, node)
        return name

    def give(self, name: str, node: Node) -> None:
        """From now on the node gives its values."""
        for j, values in enumerate(node.gives):
            self.node_of[values] = self.numbers[name]
            self.output_of[values] = j
            self.row_of[values] = np.arange(len(values))

    def read(self, before: str, name: str, reads: tuple[Read, ...]) -> None:
        """Add reads along one edge."""
        have = self.graph.edges[before, name]["reads"] if self.graph.has_edge(before, name) else ()
        self.graph.add_edge(before, name, reads=(*have, *reads))

    def connect(self, name: str, i: int, wanted: np.ndarray) -> None:
        """Read each wanted value from the node that gives it now."""
        key = self.node_of[wanted] * (1 << 20) + self.output_of[wanted]
        for one in np.unique(key).tolist():
            places = np.flatnonzero(key == one)
            assert one >= 0, f"{name} wants values that no node gives"
            read = Read(one % (1 << 20), i, self.row_of[wanted[places]], places)
            self.read(self.names[one >> 20], name, (read,))

    def build(self) -> BatchedGraph:
        return BatchedGraph(self.program, self.graph, self.stage)
