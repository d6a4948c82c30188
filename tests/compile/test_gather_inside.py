"""Gathers as the prologue of compiled graphs: where they fuse, what is still gathered outside, equal results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.codegen import gather_inside as gathers
from fxbatch.codegen.compile_graph import CompiledGraph, CompileOptions, compile_graph
from fxbatch.codegen.gather_inside import Gathering, Inside, groups_to_read_inside, make_gathering
from fxbatch.codegen.kernels import emit_kernel
from fxbatch.codegen.looped import Scratch, emit_forward_step, group_type
from fxbatch.codegen.operation import OperationGraphs
from fxbatch.codegen.workspace import Workspace
from fxbatch.errors import CompileWarning
from fxbatch.ir import BROADCAST, INDEX, VIEW
from fxbatch.torch_private import TorchDispatchMode
from tests.codegen.operation_cases import build
from tests.compile.test_compiled_operations import decorated, operations_of, trees_of

aten = torch.ops.aten


class Cell(nn.Module):
    """A product of x and y, concatenated; z meets what comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([x, y], -1))) * z


def graphs_of(target: Any, inputs: int, *, grad: bool) -> tuple[OperationGraphs, list[torch.Tensor]]:
    built, shared = build(target, [torch.randn(5) for _ in range(inputs)], grad=grad)
    assert isinstance(built, OperationGraphs), built
    return built, [t.detach() for t in shared]


def inside_of(target: Any, inputs: int) -> list[tuple[int, ...]]:
    """The members of the groups that are read inside."""
    graphs, _ = graphs_of(target, inputs, grad=False)
    found = groups_to_read_inside(graphs.forward, len(graphs.layout.groups))
    return [graphs.layout.groups[g] for g in found]


def test_what_no_product_reads_is_read_inside() -> None:
    assert inside_of(Cell(), 3) == [(2,)]
    assert inside_of(lambda x, y: torch.tanh(x) * y, 2) == [(0,), (1,)]


def test_what_several_regions_read_is_gathered_once_before() -> None:
    weight = torch.randn(5, 5)
    assert inside_of(lambda x: torch.tanh(torch.tanh(x) @ weight) * x, 1) == []
    assert inside_of(lambda x, y: torch.tanh(torch.tanh(x) @ weight) * y, 2) == [(0,), (1,)]


@pytest.fixture(scope="module", params=[False, True], ids=["inference", "training"])
def compiled(request: pytest.FixtureRequest) -> tuple[OperationGraphs, list[torch.Tensor], CompiledGraph]:
    graphs, shared = graphs_of(Cell(), 3, grad=request.param)
    kernel = emit_kernel(graphs.forward)
    return graphs, shared, compile_graph(graphs.forward, kernel, CompileOptions(), shared)


def kept_of(graphs: OperationGraphs) -> tuple[int, ...]:
    refs = (*graphs.backward_inputs, *graphs.parameter_inputs)
    return tuple(sorted({r.index for r in refs if r.kind == "group"}))


class Gathers(TorchDispatchMode):
    """Counts gathers that are launches of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return self.found["aten.index_select"] + self.found["aten.index"] + self.found["aten._unsafe_index"]


@pytest.mark.parametrize("n", [1, 6])
def test_a_step_gathers_outside_only_what_a_product_reads(
    compiled: tuple[OperationGraphs, list[torch.Tensor], CompiledGraph], n: int
) -> None:
    graphs, shared, graph = compiled
    kept = kept_of(graphs)
    gathering = make_gathering(graphs, kept, graph)
    assert gathering is not None and [x.group for x in gathering.inside] == [1]
    step, source = emit_forward_step(graphs, kept, graph, gathering)
    plain, _ = emit_forward_step(graphs, kept, graph)
    assert "gathering.ready(shared)" in source
    arena = torch.randn(9, 5)
    pairs, rows = torch.randint(9, (2 * n,)), torch.randint(9, (n,))
    wide = (INDEX, arena, pairs)
    for last, gathered in (
        ((INDEX, arena, rows), 1),
        ((VIEW, arena[:n], None), 1),
        ((BROADCAST, arena[:1], None), 1),
    ):
        results = []
        for run in (step, plain):
            outs, kept_rows, saved = memory_of(graphs, kept, n)
            scratch = Scratch([group_type(graphs, g) for g in range(2)])
            arguments = (n, [wide, last], outs, kept_rows, saved, shared, scratch, Workspace())
            with torch.no_grad():
                run(*arguments)
                with Gathers() as counted:
                    run(*arguments)
            read = [x for (flat, x), g in zip(kept_rows, kept, strict=True) if g == 0 or last[0] == INDEX]
            results.append((counted.count, [*outs, *saved, *read]))
        (ours, found), (theirs, wanted) = results
        assert ours == gathered and theirs == (2 if last[0] == INDEX else 1)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def memory_of(graphs: OperationGraphs, kept: tuple[int, ...], n: int) -> tuple[Any, Any, Any]:
    """Rows for results, kept groups (flat, and as they are read) and what is saved."""
    kept_rows = []
    for g in kept:
        members = len(graphs.layout.groups[g])
        flat = torch.zeros(n * members, 5)
        kept_rows.append((flat, flat.view(n, members, 5) if members > 1 else flat))
    saved = [torch.zeros(n, *t.shape) for t in graphs.saved_types]
    return [torch.zeros(n, 5)], kept_rows, saved


def test_a_gather_that_cannot_be_compiled_is_done_outside_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, **options: Any) -> CompiledGraph:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gathers, "compile_graph", broken)
    graphs, shared = graphs_of(Cell(), 3, grad=False)
    gathering = Gathering("cell: forward", graphs.forward, (Inside(1),), CompileOptions())
    with pytest.warns(
        CompileWarning, match="cell: forward: a gather runs uncompiled: RuntimeError: no such kernel"
    ):
        assert not gathering.ready(shared)
    assert not gathering.ready(shared), "tried once"


def outside(model: Any, batch: Any) -> tuple[int, Any]:
    """How many gathers are launches of their own in a step, and its result."""
    with Gathers() as counted, torch.no_grad():
        found = model(batch)
    return counted.count, found


def test_a_model_gathers_less_outside_and_keeps_its_values() -> None:
    model = decorated(compile=True)
    trees = trees_of(12)
    data = fxbatch.TracedDataset(model, trees)
    collate = fxbatch.collate(model)
    with torch.no_grad():
        ready = [collate([data[i] for i in range(len(data))]) for _ in range(3)]
        model(ready[0])  # compiles
    operations = operations_of(model)
    inside = [x for x in operations if x.gathering is not None and x.gathering.compiled is not None]
    assert inside, "the cell's memories meet no product"
    assert all(x.gathering is None or not x.gathering.gave_up for x in operations)
    with_prologue, found = outside(model, ready[1])
    for operation in inside:
        assert operation.gathering is not None
        operation.gathering.compiled, operation.gathering.gave_up = None, True
    without, wanted = outside(model, ready[2])
    torch.testing.assert_close(found, wanted)
    assert with_prologue < without
    with fxbatch.disabled(), torch.no_grad():
        torch.testing.assert_close(found, model(trees), rtol=1e-4, atol=1e-5)
