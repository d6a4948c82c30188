"""A forward graph that reads some of its groups from an arena by an index itself: the gather is a compiled prologue.

In: a forward graph `(n, *groups, *shared) -> outs` and which groups. Out: the graph with an arena and an index in the
place of each of them; rows that backward needs are one more result.

    forward(n, hs, cs, weight) -> (h, c)
    gather_inside(forward, [Inside(1)])(n, hs, arena_1, index_1, weight) -> (h, c)     # cs = arena_1[index_1]

A group is read inside where that fuses: no product reads it (ATen's products take rows that lie together), and all
that reads it runs between the same two products, so that it is read once (`groups_to_read_inside`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.compile_graph import (
    ANY_ROWS,
    CompiledGraph,
    CompileOptions,
    NotCompilable,
    compile_graph,
    first_line,
    warn_uncompiled,
)
from fxbatch.codegen.contract import OperationGraphs
from fxbatch.codegen.cut_at_products import is_product, levels, readers
from fxbatch.codegen.kernels import Kernel, Workspace, emit_kernel
from fxbatch.codegen.sizes import is_tensor
from fxbatch.trace.patch import patching

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Inside:
    """A group that is read inside: how many members it has, and where among the kept groups it is, if it is."""

    group: int
    members: int = 1
    kept: int | None = None


def groups_to_read_inside(module: fx.GraphModule, groups: int) -> tuple[int, ...]:
    """The groups that a graph reads in one region and in no product."""
    places = [x for x in module.graph.nodes if x.op == "placeholder"][1 : 1 + groups]
    level, found = levels(module.graph), []
    results = module.graph.output_node().all_input_nodes
    for group, place in enumerate(places):
        reading = list(readers(place))
        one_region = len({level[x] for x in reading}) == 1
        if one_region and is_tensor(place) and place not in results and not any(map(is_product, reading)):
            found.append(group)
    return tuple(found)


def gather_inside(module: fx.GraphModule, inside: Sequence[Inside]) -> fx.GraphModule:
    """The graph that gathers these groups itself; the rows that are kept are results behind its own."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    chosen = {x.group + 1: x for x in inside}  # behind n
    ends: list[tuple[Inside, fx.Node, fx.Node, fx.Node]] = []
    for i, place in enumerate(x for x in module.graph.nodes if x.op == "placeholder"):
        if i in chosen:
            arena, index = graph.placeholder(f"arena_{i - 1}"), graph.placeholder(f"index_{i - 1}")
            arena.meta["values"], index.meta["values"] = _arena_and_index(place, chosen[i].members)
            ends.append((chosen[i], place, arena, index))
        else:
            known[place] = graph.placeholder(place.name)
            known[place].meta = dict(place.meta)
    for _, place, arena, index in ends:
        known[place] = graph.call_function(aten._unsafe_index.Tensor, (arena, [index]))
        known[place].meta = dict(place.meta)
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            known[node] = graph.node_copy(node, lambda x: known[x])
    results = module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    kept = [known[place] for found, place, _, _ in ends if found.kept is not None]
    graph.output((*(known[x] for x in results if isinstance(x, fx.Node)), *kept))
    graph.lint()
    return fx.GraphModule(module, graph, "Gathering")


def _arena_and_index(place: fx.Node, members: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The values of an arena `[any, *row]` and of indices `[n]`, of a group of several `[n, members]`."""
    lead = 1 if members == 1 else 2
    arenas, indices = [], []
    for value in place.meta["values"]:
        with value.fake_mode:
            arenas.append(value.new_empty((ANY_ROWS, *value.shape[lead:])))
            indices.append(torch.empty(value.shape[:lead], dtype=torch.int64, device=value.device))
    return (arenas[0], arenas[1]), (indices[0], indices[1])


@dataclass(eq=False)
class Gathering:
    """`gathering(n, (*groups, *shared), outs, workspace)`: a forward that gathers some groups itself.

    Compiled when it is called first: operations whose rows are always views never need it.
    """

    name: str
    module: fx.GraphModule
    inside: tuple[Inside, ...]
    options: CompileOptions
    compiled: CompiledGraph | None = None
    gave_up: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self, shared: Sequence[torch.Tensor]) -> bool:
        """Whether it may be called; compiles it the first time."""
        if self.compiled is None and not self.gave_up:
            with self._lock:
                if self.compiled is None and not self.gave_up:
                    self._compile([t.detach() for t in shared])
        return self.compiled is not None

    def _compile(self, shared: Sequence[torch.Tensor]) -> None:
        with patching, torch.inference_mode(False):
            module = gather_inside(self.module, self.inside)
            kernel = emit_kernel(module)
        try:
            self.compiled = compile_graph(module, kernel, self.options, shared, name=self.name)
        except Exception as error:  # noqa: BLE001 compilers raise anything; the warning says what
            self.gave_up = True
            reason = str(error) if isinstance(error, NotCompilable) else first_line(error)
            warn_uncompiled(f"{self.name}: a gather", reason)

    def __call__(
        self,
        n: int,
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor | None],
        workspace: Workspace,
    ) -> None:
        assert self.compiled is not None
        self.compiled(n, ins, outs, workspace)


def make_gathering(
    graphs: OperationGraphs, kept: Sequence[int], kernel: Kernel | CompiledGraph
) -> Gathering | None:
    """The gathering forward of an operation; None where nothing is compiled or no gather would fuse."""
    if not isinstance(kernel, CompiledGraph) or kernel.cut is None:
        return None
    groups = graphs.layout.groups
    inside = tuple(
        Inside(g, len(groups[g]), kept.index(g) if g in kept else None)
        for g in groups_to_read_inside(graphs.forward, len(groups))
    )
    return Gathering(kernel.name, graphs.forward, inside, kernel.options) if inside else None
