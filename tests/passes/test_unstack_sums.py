"""Sums over stacks are additions: programs before and after, and models against the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.ir import Modes, Operation, Program, Signature, Slot, Template, TensorSpec, tensor_spec
from fxbatch.passes.unstack_sums import Unstacker, is_stack
from fxbatch.verify import verify_program
from tests.oracle import check_equal
from tests.passes.reference import results_by_hand
from tests.programs import F4, ProgramBuilder

CPU, MODES = torch.device("cpu"), Modes()


def function(
    target: Any,
    inputs: Sequence[TensorSpec],
    output: TensorSpec,
    args: Any,
    modes: Modes = MODES,
    **kwargs: Any,
) -> Signature:
    name = target.__name__.strip("_")
    return Signature(
        Operation(name, "function", target), tuple(inputs), (output,),
        arguments=Template.of((args, kwargs)), result=Template.of(Slot("output", 0)), modes=modes,
    )  # fmt: skip


def stack(k: int, kind: TensorSpec = F4, *dim: int) -> Signature:
    wide = tensor_spec((k, *kind.shape), kind.dtype, kind.device)
    return function(torch.stack, [kind] * k, wide, ([Slot("input", i) for i in range(k)], *dim))


def reduction(
    k: int, target: Any = torch.Tensor.sum, *, args: Any = (0,), kind: TensorSpec = F4, **more: Any
) -> Signature:
    wide = tensor_spec((k, *kind.shape), kind.dtype, kind.device)
    return function(target, [wide], kind, (Slot("input", 0), *args), **more)


STACKS = {k: stack(k) for k in range(1, 6)}
SUMS = {k: reduction(k) for k in range(1, 6)}
MEANS = {k: reduction(k, torch.mean, args=(), dim=-2) for k in range(1, 6)}


def build(*sizes: int, how: dict[int, Signature] = SUMS) -> Program:
    made, results = ProgramBuilder(len(sizes)), []
    for i, k in enumerate(sizes):
        values = [made.call("f", made.constant(torch.randn(4), instance=i), instance=i) for _ in range(k)]
        results.append(made.use(how[k], made.use(STACKS[k], *values, instance=i), instance=i))
    return made.program(*results)


def calls_of(program: Program) -> list[str]:
    """The calls that are no constants: `v5 = s3 add(v4, v2) @0`."""
    lines = [line.strip() for line in str(program).splitlines()]
    return [line for line in lines if line.startswith("v") and "constant" not in line]


def same_results(before: Program, after: Program) -> None:
    verify_program(after)
    for a, b in zip(results_by_hand(before, []), results_by_hand(after, []), strict=True):
        torch.testing.assert_close(a, b)


def names(program: Program) -> list[str]:
    return [program.signatures[s].name for s in program.sig.tolist()]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 5), (1, 2, 3, 4, 5), (5, 1, 5)])
@pytest.mark.parametrize("how", [SUMS, MEANS], ids=("sum", "mean"))
def test_additions_take_the_place_of_stacks(sizes: tuple[int, ...], how: dict[int, Signature]) -> None:
    program, unstack = build(*sizes, how=how), Unstacker()
    after = unstack(program)
    same_results(program, after)
    assert names(after).count("add") == sum(sizes) - len(sizes)
    assert names(after).count("div") == (len(sizes) if how is MEANS else 0)
    assert not {"stack", "sum", "mean"} & set(names(after))
    assert unstack(program).signatures == after.signatures


def test_before_and_after() -> None:
    made = ProgramBuilder()
    a, b, c = (made.constant(torch.randn(4)) for _ in range(3))
    program = made.program(made.use(SUMS[3], made.use(STACKS[3], a, b, c)))
    assert calls_of(program) == ["v3 = s1 stack(v0, v1, v2) @0", "v4 = s2 sum(v3) @0"]
    assert calls_of(Unstacker()(program)) == ["v3 = s3 add(v0, v1) @0", "v4 = s3 add(v3, v2) @0"]


def test_the_users_own_addition_is_taken() -> None:
    made, plain = ProgramBuilder(), (Slot("input", 0), Slot("input", 1))
    add = function(torch.Tensor.__add__, [F4, F4], F4, plain)
    a, b = made.constant(torch.randn(4)), made.constant(torch.randn(4))
    total = made.use(SUMS[2], made.use(STACKS[2], a, b))
    after = Unstacker()(made.program(made.use(add, total, b)))
    assert [after.signatures[s] for s in after.sig.tolist()][-2:] == [add, add]


def test_sums_of_sums() -> None:
    made = ProgramBuilder()
    values = [made.constant(torch.randn(4)) for _ in range(4)]
    inner = [made.use(SUMS[2], made.use(STACKS[2], *pair)) for pair in (values[:2], values[2:])]
    lone = made.use(SUMS[1], made.use(STACKS[1], inner[0]))
    program = made.program(made.use(SUMS[3], made.use(STACKS[3], *inner, lone)), lone)
    after = Unstacker()(program)
    same_results(program, after)
    assert names(after).count("add") == 4


def test_a_stack_that_somebody_else_reads_stays() -> None:
    made = ProgramBuilder()
    a, b = made.constant(torch.randn(4)), made.constant(torch.randn(4))
    both = made.use(STACKS[2], a, b)
    program = made.program(made.use(SUMS[2], both), both)
    after = Unstacker()(program)
    same_results(program, after)
    assert names(after).count("stack") == names(after).count("add") == 1


BF16 = tensor_spec((4,), torch.bfloat16, CPU)
LEFT = {
    "another dimension": (stack(4), reduction(4, args=(1,))),
    "kept": (stack(2), reduction(2, keepdim=True)),
    "another type": (stack(2), reduction(2, dtype=torch.float32)),
    "narrow": (stack(2, BF16), reduction(2, kind=BF16)),
    "stacked along another": (stack(4, F4, 1), reduction(4)),
    "another mode": (stack(2), reduction(2, modes=Modes(grad=False))),
    "another function": (stack(2), reduction(2, torch.amax)),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_as_it_is(why: str) -> None:
    stacked, reduced = LEFT[why]
    made = ProgramBuilder()
    kind = stacked.inputs[0]
    values = [made.constant(torch.zeros(4, dtype=kind.dtype)) for _ in stacked.inputs]
    program = made.program(made.use(reduced, made.use(stacked, *values)))
    assert Unstacker()(program) is program


def test_what_is_a_stack() -> None:
    assert is_stack(stack(3)) and is_stack(stack(3, F4, -2)) and not is_stack(stack(3, F4, 1))
    turned = function(
        torch.stack, [F4] * 2, tensor_spec((2, 4), F4.dtype, CPU), ([Slot("input", 1), Slot("input", 0)],)
    )
    assert not is_stack(turned)


class Neighbours(nn.Module):
    """Each vector with what `how` makes of the others."""

    def __init__(self, how: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.message, self.out, self.how = nn.Linear(4, 4), nn.Linear(4, 1), how

    @fxbatch.autobatch
    def forward(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        told = [torch.tanh(self.message(x)) for x in vectors]
        states = [self.how(told[: k + 1]) * x for k, x in enumerate(told)]
        return torch.stack([self.out(x).sum() for x in states]).sum()


@pytest.mark.parametrize(
    "how",
    [
        lambda xs: torch.stack(xs).sum(0),
        lambda xs: torch.sum(torch.stack(xs, dim=0), dim=0),
        lambda xs: torch.stack(xs).sum(dim=[0]),
        lambda xs: torch.stack(xs).mean(0),
        lambda xs: torch.mean(torch.stack(xs), dim=(-2,)),
    ],
)
def test_models_of_any_number_of_neighbours_have_one_signature(how: Any) -> None:
    torch.manual_seed(1)  # no result is a small difference of large numbers
    model = Neighbours(how)
    instances = [[torch.randn(4) for _ in range(k)] for k in (1, 2, 3, 5, 7)]
    check_equal(model, instances)
    check_equal(model, instances[:1])
    found = fxbatch.explain(model, instances)
    operations = [row.operation for row in found.operations]
    assert not {"stack", "mean"} & set(operations)
    more = [[torch.randn(4) for _ in range(k)] for k in (4, 6)]
    assert {row.signature for row in fxbatch.explain(model, more).operations} <= {
        row.signature for row in found.operations
    }
