"""Plans that repeat: what is captured, kept and refused; static memory; and, on CUDA, the graphs themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import CompileWarning
from fxbatch.runtime.cuda_graphs import GraphedPlans, reason_against
from tests.compile.graphed import Captured, engine_of, model_of, on_cuda, tree_of
from tests.models import Tree, TreeLSTM


def check(model: Any, trees: list[Tree]) -> None:
    with torch.no_grad():
        found = model(trees)
        with fxbatch.disabled():
            torch.testing.assert_close(found, model(trees))


def test_the_second_of_a_plan_is_captured_and_the_third_replays_it(graphs: GraphedPlans) -> None:
    model = model_of(graphs)
    for number, (captures, replays) in enumerate([(0, 0), (1, 1), (1, 2), (1, 3)]):
        check(model, [tree_of(1, 10 * number), tree_of(2, 10 * number + 1)])
        assert (graphs.captures, graphs.replays) == (captures, replays)


def test_results_do_not_change_when_the_graph_is_replayed(graphs: GraphedPlans) -> None:
    model = model_of(graphs)
    with torch.no_grad():
        found = [model([tree_of(1, words)]) for words in range(5)]
        kept = [x.clone() for x in found]
        model([tree_of(1, 99)])
    assert graphs.replays == 5 and all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    assert not torch.equal(found[2], found[3])


def test_parameters_of_now_are_read(graphs: GraphedPlans) -> None:
    model = model_of(graphs)
    for number in range(3):
        check(model, [tree_of(1, number)])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    check(model, [tree_of(1, 7)])
    assert graphs.captures == 1
    model.out.weight = nn.Parameter(torch.randn_like(model.out.weight))  # elsewhere: another graph
    for number in range(3):
        check(model, [tree_of(1, number)])
    assert graphs.captures == 2


def test_the_number_of_graphs_is_bounded_and_the_oldest_goes(graphs: GraphedPlans) -> None:
    model = model_of(graphs)
    for shape in (1, 2, 1, 2, 3, 3):
        check(model, [tree_of(shape, shape)])
    assert len(graphs) == 2 and graphs.captures == 3
    check(model, [tree_of(2, 5)])
    assert graphs.captures == 3, "the one used last is kept"
    check(model, [tree_of(1, 5)])
    assert graphs.captures == 3 and graphs.replays == 4, "the first is new again"


def test_a_capture_that_fails_is_tried_once_and_says_why(graphs: GraphedPlans) -> None:
    tried = []

    def failing(work: Callable[[], None]) -> Callable[[], None]:
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs.capture = failing
    model = model_of(graphs)
    check(model, [tree_of(1, 0)])
    with pytest.warns(CompileWarning, match="not permitted when stream is capturing"):
        check(model, [tree_of(1, 1)])
    check(model, [tree_of(1, 2)])
    assert len(tried) == 1 and graphs.replays == 0


def test_random_operations_are_not_graphed(graphs: GraphedPlans) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x) * 2

    model = Noisy()
    with torch.no_grad():
        model(torch.randn(2, 3))
        engine_of(model).cuda_graphs = graphs
        for _ in range(3):
            model(torch.randn(2, 3))
    assert graphs.refused == {"an operation draws random numbers": 3}


def test_the_cpu_is_left_alone() -> None:
    model = TreeLSTM()
    minibatch = fxbatch.compile_minibatch(model, [tree_of(1, 0)], cuda_graphs=True)
    graphs = minibatch.engine.cuda_graphs
    assert graphs is not None
    with torch.no_grad():
        for _ in range(3):
            minibatch()
    assert graphs.captures == 0
    assert graphs.refused == {"not on one cuda device": 4}, "three calls, and one when it was made"
    assert reason_against.__defaults__ == ("cuda",)


@pytest.mark.gpu
def test_graphs_on_cuda_equal_the_loop() -> None:
    model = Captured().cuda()
    for words in range(5):
        check(model, [on_cuda(tree_of(1, words)), on_cuda(tree_of(2, words + 50))])
    graphs = engine_of(model).cuda_graphs
    assert graphs is not None and graphs.captures == 1 and graphs.replays == 4
