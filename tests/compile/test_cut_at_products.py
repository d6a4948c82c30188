"""Graphs cut at their products: which stages there are, equal results, and memory that is not allocated anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.codegen import compile_graph as compiling
from fxbatch.codegen.compile_graph import CompiledGraph, CompileOptions, compile_graph
from fxbatch.codegen.cut_at_products import Region, Uncuttable, cut_at_products, is_product
from fxbatch.codegen.fast_pointwise import tanh
from fxbatch.codegen.kernels import Workspace, emit_kernel
from fxbatch.codegen.operation import OperationGraphs
from tests.codegen.operation_cases import build
from tests.oracle import compare


class Cell(nn.Module):
    """Two products one behind the other, one value that both sides of the second read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return torch.sigmoid(self.second(hidden)) * hidden


def graphs_of(
    target: Any, *inputs: torch.Tensor, grad: bool = True
) -> tuple[OperationGraphs, list[torch.Tensor]]:
    built, shared = build(target, inputs, grad=grad)
    assert isinstance(built, OperationGraphs), built
    return built, [t.detach() for t in shared]


def stages(graphs: OperationGraphs) -> list[str]:
    return [str(x) for x in cut_at_products(graphs.forward).stages]


def test_what_is_between_products_is_a_region() -> None:
    graphs, _ = graphs_of(Cell(), torch.randn(5), grad=False)
    assert stages(graphs) == ["addmm", "region of 1 results", "addmm", "region of 1 results"]


def test_a_product_alone_needs_no_compiler() -> None:
    graphs, shared = graphs_of(nn.Linear(3, 4), torch.randn(3), grad=False)
    assert stages(graphs) == ["addmm"]
    compiled = compile_graph(graphs.forward, emit_kernel(graphs.forward), CompileOptions(), shared)
    assert compiled.files == []


def test_a_graph_without_products_is_one_region() -> None:
    graphs, _ = graphs_of(lambda x: torch.tanh(x) * 2, torch.randn(3), grad=False)
    assert stages(graphs) == ["region of 1 results"]


def test_regions_hold_no_product_and_read_what_is_ready() -> None:
    graphs, _ = graphs_of(Cell(), torch.randn(5))
    for module in (graphs.forward, graphs.backward, graphs.parameters):
        assert module is not None
        cut = cut_at_products(module)
        ready = {x.name for x in module.graph.nodes if x.op == "placeholder"}
        for stage in cut.stages:
            if isinstance(stage, Region):
                assert {x.name for x in stage.reads} <= ready
                assert not any(is_product(x) for x in stage.module.graph.nodes)
                ready |= {x.name for x in stage.writes if not isinstance(x, int)}
            else:
                ready.add(stage.node.name)


def test_rows_of_rows_are_not_cut() -> None:
    weight = torch.randn(3, 3)
    graphs, _ = graphs_of(lambda x: torch.tanh(torch.tanh(x.reshape(2, 3)) @ weight).sum(), torch.randn(6))
    with pytest.raises(Uncuttable, match="no tensor of rows"):
        cut_at_products(graphs.forward)


@pytest.fixture(scope="module")
def compiled_cell() -> list[tuple[CompiledGraph, list[torch.Tensor]]]:
    graphs, shared = graphs_of(Cell(), torch.randn(5))
    found = []
    for module in (graphs.forward, graphs.backward, graphs.parameters):
        assert module is not None
        made = compile_graph(
            module, emit_kernel(module), CompileOptions(), shared, returning=module is graphs.parameters
        )
        found.append((made, shared))
    return found


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_results_equal_the_kernels(
    n: int, compiled_cell: list[tuple[CompiledGraph, list[torch.Tensor]]]
) -> None:
    for compiled, shared in compiled_cell:
        assert compiled.cut is not None
        samples, _ = compiled._samples(n, shared)
        ins = samples[0 if compiled.returning else len(compiled.sizes) :]
        nothing: list[torch.Tensor | None] = [None] * len(compiled.sizes)
        for ours, theirs in zip(
            compiled(n, ins, nothing, Workspace()), compiled.kernel(n, ins, nothing, Workspace()), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_results_go_to_given_memory_and_nothing_is_allocated_the_second_time(
    compiled_cell: list[tuple[CompiledGraph, list[torch.Tensor]]],
) -> None:
    compiled, shared = compiled_cell[0]
    samples, _ = compiled._samples(7, shared)
    outs, ins = samples[: len(compiled.sizes)], samples[len(compiled.sizes) :]
    workspace = Workspace()
    made = compiled(7, ins, list(outs), workspace)
    assert [x.data_ptr() for x in made] == [x.data_ptr() for x in outs]
    assert allocations(lambda: compiled(7, ins, list(outs), workspace)) == 0
    assert allocations(lambda: compiled(7, ins, [None] * len(outs), workspace)) == len(outs)


def allocations(work: Callable[[], Any]) -> int:
    """How many tensors' memory is allocated in a piece of work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as p:
            work()
    return sum(1 for e in p.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0)


def test_tuned_products_stay_in_the_compiled_graph() -> None:
    graphs, _ = graphs_of(nn.Linear(3, 4), torch.randn(3), grad=False)
    tuned = CompileOptions(given=(("mode", "max-autotune-no-cudagraphs"),))
    assert compiling._cut(graphs.forward, tuned, random=False) is None
    assert compiling._cut(graphs.forward, CompileOptions(), random=True) is None


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 0.3, 1, 4, 40])
def test_tanh_is_as_exact_as_eager(scale: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(50_000) * scale
    compare([tanh(x)], [torch.tanh(x)], [torch.tanh(x.double())])
    relative = ((tanh(x).double() - torch.tanh(x.double())) / torch.tanh(x.double())).abs().max()
    assert float(relative) < 1.5e-7


def test_tanh_at_the_ends() -> None:
    ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 200.0, -200.0])
    torch.testing.assert_close(tanh(ends), torch.tanh(ends), rtol=0, atol=0, equal_nan=True)
    assert tanh(torch.zeros(2, dtype=torch.float64)) is NotImplemented
