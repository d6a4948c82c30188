"""A Cut as emitted Python: compiled regions and ATen's products in turn, in memory that is there already.

In: a Cut and its compiled regions. Out: Staged, called as a compiled graph is: `staged([n, *outs, *ins], workspace)`.

    def staged(n, o0, o1, o2, o3, o4, groups_1, groups_2, groups_3, weights_1, weights_2, workspace):
        addmm_default, = workspace.views(self, n)
        addmm(weights_2, groups_1.reshape(n, 300), weights_1.t(), out=addmm_default)
        region0([n, o2, o3, o4, o1, o0, addmm_default, groups_2, groups_3])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.cut_at_products import Cut, Region, product_source
from fxbatch.codegen.kernel_calls import out_call
from fxbatch.codegen.sizes import Shape, shape
from fxbatch.codegen.workspace import Workspace

Run = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class Staged:
    """`staged([n, *outs, *ins], workspace)` writes the results. `make_views`: as of a Kernel, for its workspace."""

    source: str
    run: Callable[..., None]
    make_views: Callable[..., tuple[torch.Tensor, ...]]

    def __call__(self, args: list[Any], workspace: Workspace) -> None:
        self.run(self, workspace, *args)


def emit_staged(module: fx.GraphModule, cut: Cut, regions: Sequence[Run]) -> Staged:
    """Emit a cut graph; `regions` are its compiled regions in order. Raises Uncuttable."""
    places = [x for x in module.graph.nodes if x.op == "placeholder"]
    names: dict[fx.Node, str] = {places[0]: "n", **{x: x.name for x in places[1:]}}
    results = list(module.graph.output_node().args[0])
    scope: dict[str, Any] = {}
    body: list[str] = []
    kept = [x.name for x in cut.kept]
    if kept:
        body.append(f"{''.join(f'{x}, ' for x in kept)}= workspace.views(self, n)")
    names.update((x, x.name) for x in cut.kept)
    for node, i in cut.place.items():
        names[node] = f"o{i}"
        if shape(results[i]) != shape(node):
            names[node] = node.name
            body.append(f"{node.name} = o{i}.view({_sizes(shape(node))})")
    compiled = iter(regions)
    for number, stage in enumerate(cut.stages):
        if isinstance(stage, Region):
            scope[f"region{number}"] = next(compiled)
            outs = [f"o{x}" if isinstance(x, int) else names[x] for x in stage.writes]
            body.append(f"region{number}([{', '.join(['n', *outs, *(names[x] for x in stage.reads)])}])")
        else:
            word, _, function = out_call(stage.node.target)  # type: ignore[misc]  # one of PRODUCTS
            scope[word] = function
            body.append(product_source(stage.node, names, names[stage.node]))
    given = ["n", *(f"o{i}" for i in range(len(results))), *(x.name for x in places[1:])]
    source = "\n    ".join([f"def staged(self, workspace, {', '.join(given)}):", *(body or ["pass"])]) + "\n"
    exec(compile(source, "<fxbatch staged>", "exec"), scope)
    return Staged(source, scope["staged"], _view_maker(cut.kept))


def _sizes(sizes: Shape) -> str:
    return ", ".join("n" if a else str(b) for a, b in sizes)


def _view_maker(kept: Sequence[fx.Node]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Makes the values that are stored, for n rows: each a piece of the workspace of its own."""
    forms = [(x.meta["values"][0].dtype, x.meta["values"][0].device, shape(x)) for x in kept]

    def make_views(n: int, alloc: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(
            alloc(slot, dtype, device, [a * n + b for a, b in sizes])
            for slot, (dtype, device, sizes) in enumerate(forms)
        )

    return make_views
