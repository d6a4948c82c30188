"""The unrolled module with real operation graphs: values, second derivatives, compile and export."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import nn

import fxbatch
from fxbatch.ir import Operation, Program, SharedOperand, Signature, Slot, Template
from fxbatch.passes.schedule import batch_by_lookahead
from fxbatch.runtime.blocks import Unrolled, emit_unrolled
from fxbatch.runtime.options import Options
from fxbatch.runtime.planner import Planner
from tests import models as M
from tests.passes.reference import results_by_hand
from tests.programs import F4, ProgramBuilder, programs


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([x, h])))


def cell_program(cell: Cell, x: torch.Tensor) -> Program:
    slots = (Slot("input", 0), Slot("input", 1))
    signature = Signature(
        Operation("cell", "module", cell), (F4, F4), (F4,),
        (SharedOperand(cell.linear, "weight"), SharedOperand(cell.linear, "bias")),
        Template.of((slots, {})), Template.of(Slot("output", 0)),
        shared_names=("linear.weight", "linear.bias"),
    )  # fmt: skip
    build = ProgramBuilder(3)
    start, ends = build.constant(x), []
    for i in range(3):
        h = build.constant(torch.full((4,), float(i)), instance=i)
        for _ in range(i + 1):
            h = build.call("f", build.use(signature, start, h, instance=i), instance=i)
        ends.append(h)
    return build.program(*ends)


def unrolled(program: Program) -> Unrolled:
    return emit_unrolled(Planner(Options(mode="unrolled")), program, batch_by_lookahead(program))


def test_values_and_second_derivatives_are_those_of_the_loop() -> None:
    cell, x = Cell(), torch.randn(4, requires_grad=True)
    program = cell_program(cell, x)
    module = unrolled(program)
    wanted = torch.stack(results_by_hand(program, []))
    (found,) = module(module.arguments())
    torch.testing.assert_close(found, wanted)

    def derivatives(out: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x, *cell.parameters()]
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves)
        return [*first, *second]

    for a, b in zip(derivatives(found), derivatives(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gathers_operations_and_cats_are_visible() -> None:
    module = unrolled(cell_program(Cell(), torch.randn(4)))
    names = [node.name for node in module.graph_module.graph.nodes]
    for kind in ("index_select", "cat", "b0_cell"):
        assert any(name.startswith(kind) for name in names), kind
    calls = [node.target for node in module.graph_module.graph.nodes if node.op == "call_module"]
    assert calls == ["s1_cell", "s2_f"] * 3
    assert [operand.name for operand in module.shared] == ["weight", "bias"]


@settings(max_examples=25, deadline=None)
@given(programs(max_calls=12))
def test_any_program_with_values_of_earlier_phases(program: Program) -> None:
    known = [torch.randn(4) for _ in range(program.known)]
    wanted = dict(zip(program.outputs.tolist(), results_by_hand(program, known), strict=True))
    module = unrolled(program)
    rows = [torch.stack([known[v] for v in values.tolist()]) for values in module.early]
    found = module(module.arguments(rows))
    got = {v: t for vs, ts in zip(module.results, found, strict=True) for v, t in zip(vs.tolist(), ts)}
    assert got.keys() == wanted.keys()
    for v, t in wanted.items():
        torch.testing.assert_close(got[v], t)


def test_replaced_parameters_and_payloads_are_used() -> None:
    cell = Cell()
    program = cell_program(cell, torch.randn(4))
    module = unrolled(program)
    cell.linear.weight = nn.Parameter(torch.randn(4, 8))
    (found,) = module(module.arguments())
    torch.testing.assert_close(found, torch.stack(results_by_hand(program, [])))
    other = cell_program(cell, torch.randn(4))
    (found,) = module(module.arguments(payloads=other.constants))
    torch.testing.assert_close(found, torch.stack(results_by_hand(other, [])))


def test_it_exports() -> None:
    program = cell_program(Cell(), torch.randn(4))
    module = unrolled(program)
    wanted, arguments = torch.stack(results_by_hand(program, [])), tuple(module.arguments())
    exported = torch.export.export(module.graph_module, arguments)
    torch.testing.assert_close(exported.module()(*arguments)[0], wanted)


def test_operations_are_batched_under_autograd_too() -> None:
    minibatch = fxbatch.compile_minibatch(M.TreeLSTM(), M.trees(2, [5, 3]), backward="autograd")
    assert minibatch.unrolled is not None
    made = minibatch.engine.operations._entries.values()
    assert len(made) > 4 and [c.reason for c in made if c.reason] == []
