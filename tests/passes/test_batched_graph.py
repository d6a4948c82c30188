"""The batched graph and its rewrites: text stage by stage, invariants on random programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given

from fxbatch.batched_graph import BatchedGraph
from fxbatch.ir import Program
from fxbatch.passes.fold import (
    batch_calls,
    insert_cats,
    insert_gathers,
    insert_pass_throughs,
)
from fxbatch.passes.schedule import batch_by_agenda, batch_by_depth
from fxbatch.verify import verify_batched_graph
from tests.programs import ProgramBuilder, programs

STAGES: tuple[Callable[[BatchedGraph], BatchedGraph], ...] = (
    insert_pass_throughs,
    insert_gathers,
    insert_cats,
)


def skip_program() -> Program:
    """g reads a value of the depth before and one of two depths before."""
    build = ProgramBuilder()
    x = build.constant(torch.tensor(1))
    a = build.call("f", x)
    return build.program(build.call("g", build.call("f", a), a))


BATCHED = """batched graph, batched: 4 batch, 1 result
  b0 depth 0: batch s0 constant x1 -> i64[]
  b1 depth 1: batch s1 f x1 -> f32[4]
    input 0 <- b0.0[0] at [0]
  b2 depth 2: batch s2 f x1 -> f32[4]
    input 0 <- b1.0[0] at [0]
  b3 depth 3: batch s3 g x1 -> f32[4]
    input 0 <- b2.0[0] at [0]
    input 1 <- b1.0[0] at [0]
  r1 depth 4: result x1 -> f32[4]
    input 0 <- b3.0[0] at [0]"""

CATS = """batched graph, cats inserted: 4 batch, 4 cat, 6 gather, 1 pass, 1 result
  b0 depth 0: batch s0 constant x1 -> i64[]
  c0.0 depth 0: cat x1 -> i64[]
    input 0 <- b0.0[0] at [0]
  g.b1.0 depth 1: gather x1 -> i64[]
    input 0 <- c0.0.0[0] at [0]
  b1 depth 1: batch s1 f x1 -> f32[4]
    input 0 <- g.b1.0.0[0] at [0]
  c1.1 depth 1: cat x1 -> f32[4]
    input 0 <- b1.0[0] at [0]
  g.b2.0 depth 2: gather x1 -> f32[4]
    input 0 <- c1.1.0[0] at [0]
  g.p2.1.0 depth 2: gather x1 -> f32[4]
    input 0 <- c1.1.0[0] at [0]
  b2 depth 2: batch s2 f x1 -> f32[4]
    input 0 <- g.b2.0.0[0] at [0]
  p2.1 depth 2: pass x1 -> f32[4]
    input 0 <- g.p2.1.0.0[0] at [0]
  c2.1 depth 2: cat x2 -> f32[4]
    input 0 <- b2.0[0] at [0]
    input 1 <- p2.1.0[0] at [0]
  g.b3.0 depth 3: gather x1 -> f32[4]
    input 0 <- c2.1.0[0] at [0]
  g.b3.1 depth 3: gather x1 -> f32[4]
    input 0 <- c2.1.0[1] at [0]
  b3 depth 3: batch s3 g x1 -> f32[4]
    input 0 <- g.b3.0.0[0] at [0]
    input 1 <- g.b3.1.0[0] at [0]
  c3.1 depth 3: cat x1 -> f32[4]
    input 0 <- b3.0[0] at [0]
  g.r1.0 depth 4: gather x1 -> f32[4]
    input 0 <- c3.1.0[0] at [0]
  r1 depth 4: result x1 -> f32[4]
    input 0 <- g.r1.0.0[0] at [0]"""


def stages(program: Program) -> list[BatchedGraph]:
    graphs = [batch_calls(program, batch_by_depth(program))]
    for stage in STAGES:
        graphs.append(stage(graphs[-1]))
    return graphs


def test_folds_stages_as_text() -> None:
    batched, passed, gathered, cats = stages(skip_program())
    assert str(batched) == BATCHED
    added = [line for line in str(passed).splitlines() if line not in BATCHED.splitlines()]
    assert added == [
        "batched graph, pass-throughs inserted: 4 batch, 1 pass, 1 result",
        "  p2.1 depth 2: pass x1 -> f32[4]",
        "    input 1 <- p2.1.0[0] at [0]",
    ]
    assert "  g.p2.1.0 depth 2: gather x1 -> f32[4]\n    input 0 <- b1.0[0] at [0]" in str(gathered)
    assert str(cats) == CATS
    assert cats.labels() == {0: (0, 0, 0), 1: (1, 1, 0), 2: (2, 1, 0), 3: (3, 1, 0)}


@given(programs())
def test_each_depth_reads_the_depth_before(program: Program) -> None:
    graph = stages(program)[1]
    for before, after in graph.graph.edges:
        assert graph.node(before).depth == graph.node(after).depth - 1


@given(programs())
def test_gathers_read_cats_only_and_batches_read_gathers_only(program: Program) -> None:
    graph = stages(program)[3]
    allowed = {"gather": "cat", "batch": "gather", "pass": "gather", "result": "gather"}
    for before, after in graph.graph.edges:
        wanted = allowed.get(graph.node(after).kind)
        assert wanted is None or graph.node(before).kind == wanted


@given(programs())
def test_every_stage_is_right_under_every_schedule(program: Program) -> None:
    for policy in (batch_by_depth, batch_by_agenda):
        graph = batch_calls(program, policy(program))
        verify_batched_graph(graph)
        for stage in STAGES:
            graph = stage(graph)
            verify_batched_graph(graph)


def test_rewrites_leave_their_input_alone() -> None:
    graphs = stages(skip_program())
    texts = [str(graph) for graph in graphs]
    for graph, stage in zip(graphs, STAGES, strict=False):
        stage(graph)
    assert [str(graph) for graph in graphs] == texts
    with pytest.raises(Exception, match=r"[Ff]rozen"):
        graphs[0].graph.add_node("x")
