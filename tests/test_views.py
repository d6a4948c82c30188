"""Programs as networkx and fx graphs."""

from __future__ import annotations

import networkx as nx
import torch
from hypothesis import given

from fxbatch.ir import Program
from fxbatch.views import program_to_fx, program_to_networkx
from tests.passes.reference import depths_by_hand, layout, results_by_hand
from tests.programs import ProgramBuilder, programs, tree_lstm_program


def test_networkx_view_of_a_tree() -> None:
    graph = program_to_networkx(tree_lstm_program([(7, 8)]))
    assert isinstance(graph, nx.MultiDiGraph) and nx.is_directed_acyclic_graph(graph)
    cell = graph.nodes[6]
    assert (cell["name"], cell["type"], cell["instance"], cell["depth"]) == ("cell", "f32[4], f32[4]", 0, 3)
    assert cell["outputs"] == (8, 9) and not cell["result"] and graph.nodes[7]["result"]
    assert graph.nodes[0]["signature"].operation.kind == "constant"
    edges = [(a, d["input"], d["output"], d["value"], d["type"]) for a, _, d in graph.in_edges(6, data=True)]
    assert edges == [
        (2, 0, 0, 2, "f32[4]"), (2, 1, 1, 3, "f32[4]"), (5, 2, 0, 6, "f32[4]"), (5, 3, 1, 7, "f32[4]")
    ]  # fmt: skip


@given(programs())
def test_networkx_view_has_every_call_and_every_read(program: Program) -> None:
    graph = program_to_networkx(program)
    assert [n for n in graph if not isinstance(n, tuple)] == list(range(len(program)))
    reads, makes = layout(program)
    for call, depth in enumerate(depths_by_hand(program)):
        assert graph.nodes[call]["depth"] == depth
        assert list(graph.nodes[call]["outputs"]) == makes[call]
        found = sorted((d["input"], d["value"]) for _, _, d in graph.in_edges(call, data=True))
        assert found == list(enumerate(reads[call]))


@given(programs(max_calls=12))
def test_fx_view_computes_the_results(program: Program) -> None:
    known = [torch.randn(4) for _ in range(program.known)]
    found = program_to_fx(program)(*known)
    for a, b in zip(found, results_by_hand(program, known), strict=True):
        assert torch.equal(a, b)


def test_fx_view_names_operations_and_differentiates() -> None:
    build = ProgramBuilder()
    x = torch.ones(4, requires_grad=True)
    module = program_to_fx(build.program(build.call("my.op", build.constant(x))))
    calls = [node for node in module.graph.nodes if node.op == "call_module"]
    assert [node.target for node in calls] == ["my_op"]
    assert calls[0].meta["call"] == 1 and calls[0].meta["signature"].name == "my.op"
    module()[0].sum().backward()
    assert x.grad is not None
