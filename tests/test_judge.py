"""The judge, and each comparison of two ways of computing that goes through it, on wrong data.

The wrong pair is small numbers beside a large one: [1000, 9, -7, 0] for [1000, 1, 2, 3].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.checking import Outcome, judge
from fxbatch.codegen.check import check_autograd, check_graphs
from fxbatch.codegen.inductor import CompileOptions, NotCompilable, compile_graph
from fxbatch.codegen.kernel import emit_kernel
from fxbatch.codegen.operation_graphs import NotBatchable, OperationGraphs, add_call
from fxbatch.judge import DRAWS, Draw, differences, draws, nudged
from fxbatch.ragged.check import check_against_body
from fxbatch.ragged.packed_function import PackedFunction
from tests.codegen.operation_cases import build
from tests.codegen.test_native import compare_with_eager, graph_of
from tests.oracle import assert_same, compare
from tests.ragged.against_loop import difference
from tests.trace.oracle import check_equal

RIGHT = torch.tensor([1000.0, 1.0, 2.0, 3.0])
WRONG = torch.tensor([0.0, 8.0, -9.0, -3.0])  # what is added
HALF = torch.tensor([0.0, 2.0, 0.0, 0.0])


class Scaled(nn.Module):
    """Four numbers of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(RIGHT.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.cos()


def scaled() -> tuple[OperationGraphs, list[torch.Tensor]]:
    """The graphs of its operation, and its weight."""
    module = Scaled()
    graphs, _ = build(module, (torch.randn(4),))
    assert isinstance(graphs, OperationGraphs), graphs
    return graphs, [module.weight.detach()]


def adding(function: Callable[..., Any], wrong: torch.Tensor) -> Callable[..., Any]:
    """A function whose first result is off."""

    def run(*args: Any) -> list[torch.Tensor]:
        first, *rest = function(*args)
        return [first + wrong, *rest]

    return run


# The judge itself


@pytest.mark.parametrize("wrong", [WRONG, HALF])
def test_a_wrong_small_number_beside_a_large_one_differs(wrong: torch.Tensor) -> None:
    exact = RIGHT.double()
    for drawn in ((), [Draw([RIGHT], [exact])], draws(lambda tensors: tensors, [RIGHT])):
        assert "error" in differences([RIGHT + wrong], [RIGHT], drawn)[0].message
        assert not differences([RIGHT.clone()], [RIGHT], drawn)
    with pytest.raises(AssertionError, match="tensor 0: error"):
        compare([RIGHT + wrong], [RIGHT], [exact])
    with pytest.raises(AssertionError, match="tensor 0: error"):
        assert_same([RIGHT + wrong], [RIGHT])


def test_what_is_exact_by_chance_is_drawn_again() -> None:
    """A gradient that is nothing but for rounding: once the loop's rounding is nothing too."""
    truth = torch.zeros(1, dtype=torch.float64)
    loop, batched = torch.zeros(1), torch.tensor([1e-7])
    others = [Draw([torch.tensor([x]), torch.ones(1)], [truth, truth + 1]) for x in (0.0, 3e-8, -2e-8)]
    assert differences([batched, torch.ones(1)], [loop, torch.ones(1)], others[:1])[0].share > 1
    assert not differences([batched, torch.ones(1)], [loop, torch.ones(1)], others)
    far = torch.tensor([2e-7])
    assert (
        "3e-08 in others of its kind"
        in differences([far, torch.ones(1)], [loop, torch.ones(1)], others)[0].message
    )


def test_draws_end_as_soon_as_nothing_differs_and_are_few() -> None:
    asked: list[int] = []

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        asked.append(1)
        return tensors

    assert not differences([RIGHT + 1e-4], [RIGHT], draws(run, [RIGHT])) and not asked
    assert not differences([RIGHT * 1.000003], [RIGHT], [Draw([RIGHT * 1.000001], [RIGHT.double()])])
    assert differences([RIGHT + WRONG], [RIGHT], draws(run, [RIGHT])) and len(asked) == 2 * DRAWS
    asked.clear()
    assert differences([RIGHT * torch.nan], [RIGHT], draws(run, [RIGHT])) and not asked  # no draw can mend it


def test_draws_differ_a_little_in_what_is_floating_point() -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0, torch.inf, torch.nan])
    assert torch.equal(nudged(numbers, 0)[:4], numbers[:4])
    one, other = (nudged(numbers, seed) for seed in (1, 2))
    assert torch.equal(one[[0, 1, 3]], numbers[[0, 1, 3]]) and one[4].isnan()
    assert 0 < abs(one[2] - 1) < 2e-3 and one[2] != other[2]
    assert torch.equal(nudged(torch.arange(3), 1), torch.arange(3))
    assert nudged(torch.ones(2, dtype=torch.bfloat16), 1).unique().numel() == 2


def test_the_float64_run_takes_nothing_in_another_type() -> None:
    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x = tensors[0]
        return [x.float().exp(), x.to(torch.float32).exp(), x.softmax(0, dtype=torch.bfloat16), torch.ones(1)]

    (draw, *_) = draws(run, [RIGHT / 1000])
    assert [t.dtype for t in draw.loop] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert {t.dtype for t in draw.exact} == {torch.float64}
    assert draw.coarsest == torch.finfo(torch.bfloat16).eps


def test_a_float64_loop_has_no_finer_referee() -> None:
    loop = torch.ones(1, dtype=torch.float64)
    assert not differences([loop + 1e-14], [loop], [Draw([loop], [loop])])
    assert differences([loop + 1e-12], [loop], [Draw([loop], [loop])])


def test_outcomes_are_judged_by_several_draws() -> None:
    exact = Outcome([], {"w": torch.zeros(1, dtype=torch.float64), "v": torch.ones(1, dtype=torch.float64)})
    loop = Outcome([], {"w": torch.zeros(1), "v": torch.ones(1)})
    batched = Outcome([], {"w": torch.tensor([1e-7]), "v": torch.ones(1)})
    seeds: list[int] = []

    def draw(seed: int) -> tuple[Outcome, Outcome | None]:
        seeds.append(seed)
        return Outcome([], {"w": torch.tensor([seed * 1.5e-8]), "v": torch.ones(1)}), exact

    assert list(judge(batched, loop, exact).differences) == ["w"]
    assert not judge(batched, loop, exact, draw).differences
    assert seeds == [1, 2]
    batched.gradients["w"] *= 10
    assert list(judge(batched, loop, exact, draw).differences) == ["w"]
    assert seeds == [1, 2, 1, 2, 3]


def test_equal_numbers_need_no_referee() -> None:
    nan = torch.tensor([1.0, float("nan")])

    def asked() -> Iterator[Draw]:
        raise AssertionError("no draw is needed")
        yield

    leaves = [torch.ones(3), torch.tensor([1, 2]), torch.empty(0)]
    assert not differences([x.clone() for x in leaves], leaves, asked())
    assert differences([nan], [torch.tensor([1.0, 2.0])], [])
    assert not differences([nan.clone()], [nan], [])
    assert differences([torch.ones(3).double()], [torch.ones(3)], [])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_of_half_precision_are_compared() -> None:
    z = torch.tensor([1.0 + 2.0j, 3.0]).to(torch.complex32)
    assert not differences([z.clone()], [z], [])
    assert differences([z * 2], [z], [])


# Its callers


@pytest.mark.parametrize("wrong", [WRONG, HALF])
def test_an_operation_of_wrong_values_is_refused(wrong: torch.Tensor) -> None:
    graphs, shared = scaled()
    assert check_graphs(graphs, (True,), (True,), shared).checked
    forward: Any = adding(graphs.forward, wrong)
    with pytest.raises(NotBatchable, match="output 0 differs"):
        check_graphs(dataclasses.replace(graphs, forward=forward), (True,), (True,), shared)


def test_an_operation_of_wrong_gradients_is_refused() -> None:
    graphs, shared = scaled()
    backward: Any = adding(graphs.backward, WRONG)  # type: ignore[arg-type]  # it has one
    with pytest.raises(NotBatchable, match="the gradient of input 0 differs"):
        check_graphs(dataclasses.replace(graphs, backward=backward), (True,), (True,), shared)


def test_gradients_that_autograd_has_otherwise_are_refused() -> None:
    graphs, shared = scaled()
    check_autograd(graphs, shared)
    forward: Any = adding(graphs.forward, WRONG)

    def off(n: int, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return [y + (x - x.detach()) * WRONG for y in graphs.forward(n, x, weight)]

    check_autograd(dataclasses.replace(graphs, forward=forward), shared)  # only gradients are compared
    wrong: Any = off
    with pytest.raises(NotBatchable, match="the gradient of operand 0 by autograd"):
        check_autograd(dataclasses.replace(graphs, forward=wrong), shared)


def test_a_compiled_graph_of_wrong_values_is_refused() -> None:
    def backend(graph: Any, examples: Any) -> Any:
        def run(*args: Any) -> Any:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            before = [x.clone() for x in tensors]
            graph(*args)
            for x, y in zip(tensors, before, strict=True):
                if not torch.equal(x, y):
                    x.add_(WRONG)
            return ()

        return run

    graphs, shared = scaled()
    kernel = emit_kernel(graphs.forward)
    compile_graph(graphs.forward, kernel, CompileOptions("eager"), shared)
    with pytest.raises(NotCompilable, match=r"result 0 at 61 rows differs .* error"):
        compile_graph(graphs.forward, kernel, CompileOptions(backend), shared)


def test_a_packed_function_of_wrong_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(0) * RIGHT]

    instances = [torch.rand(t, 4) + 1 for t in (3, 2, 5)]
    function = PackedFunction.of(body, [instances[0]], ((0,),), [])
    check_against_body(function, [instances], [])
    apart = PackedFunction.apart
    monkeypatch.setattr(PackedFunction, "apart", lambda *args: [[t + WRONG for t in x] for x in apart(*args)])
    with pytest.raises(AssertionError, match="it differs from the loop: output 0: error"):
        check_against_body(function, [instances], [])
    packed = [[body(x)[0] + WRONG for x in instances]]
    rows = [[x] for x in instances]
    assert "output 0: error" in difference(packed, rows, lambda rows, shared: [body(*row) for row in rows])


def test_the_tests_of_native_programs_and_traces_refuse_wrong_values() -> None:
    row = (4, torch.float32)
    module = graph_of(lambda g, x, y: [add_call(g, torch.ops.aten.mul.Tensor, (x, y))], row, row)
    ins = [torch.ones(2, 4), RIGHT.expand(2, 4)]
    compare_with_eager(module, 2, ins, [ins[1].clone()])
    with pytest.raises(AssertionError, match="result 0: error"):
        compare_with_eager(module, 2, ins, [ins[1] + WRONG])
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * RIGHT + (WRONG if len(calls) == 1 else 0.0)

    with pytest.raises(AssertionError, match="tensor 0: error"):
        check_equal(forward, [torch.ones(4)])
