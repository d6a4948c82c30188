"""A row of a stack is what was stacked: models against the loop, and what is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.ir import signature_columns
from fxbatch.passes import unstack_rows as unstack_rows_module
from fxbatch.passes import unstack_sums
from fxbatch.passes.unstack_rows import unstack_rows
from fxbatch.verify import verify_program
from tests.oracle import check_equal
from tests.passes.reference import results_by_hand
from tests.passes.test_unstack_sums import F4, STACKS, function
from tests.programs import ProgramBuilder

ROW = function(torch.Tensor.__getitem__, [STACKS[3].outputs[0]], F4, (fxbatch.ir.Slot("input", 0), -1))


def test_a_program_before_and_after() -> None:
    made = ProgramBuilder(1)
    values = [made.call("f", made.constant(torch.randn(4), instance=0), instance=0) for _ in range(3)]
    row = made.use(ROW, made.use(STACKS[3], *values, instance=0), instance=0)
    program = made.program(made.call("f", row, instance=0))
    after = unstack_rows(program)
    verify_program(after)
    assert {s.name for s in (after.signatures[i] for i in after.sig)} == {"constant", "f"}
    for a, b in zip(results_by_hand(after, []), results_by_hand(program, []), strict=True):
        torch.testing.assert_close(a, b)
    assert unstack_rows(after) is after


def test_what_is_kept_of_signatures_is_apart_for_functions_of_one_name() -> None:
    signatures = (STACKS[3], ROW)
    columns = signature_columns(signatures)
    assert len(unstack_sums._kinds(columns)) == 0 and len(unstack_rows_module._kinds(columns)) == 3


def first_and_last(self: Any, xs: Any) -> Any:
    h = torch.stack([torch.tanh(self.l(x)) for x in xs])
    return self.k(h[0]) + h[-1] * h[1]


def of_rows(self: Any, xs: Any) -> Any:
    h = torch.stack([torch.tanh(self.l(x)) for x in xs])
    again = torch.stack([h[1], h[0]])
    return self.k(again[0]) - again[-1]


def without_gradients(self: Any, xs: Any) -> Any:
    h = [torch.tanh(self.l(x)) for x in xs]
    with torch.no_grad():
        row = torch.stack(h)[0]
    return self.k(row) + h[0]


def as_results(self: Any, xs: Any) -> Any:
    h = torch.stack([torch.tanh(self.l(x)) for x in xs])
    return h[0] + 0, h[1] * 1


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.k, self.code = nn.Linear(4, 4), nn.Linear(4, 4), forward

    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: torch.Tensor) -> Any:
        return self.code(self, xs)


@pytest.mark.parametrize("forward", [first_and_last, of_rows, without_gradients, as_results])
def test_models_equal_the_loop(forward: Callable[..., Any]) -> None:
    check_equal(Model(forward), list(torch.randn(5, 3, 4)))


def test_nothing_is_stacked() -> None:
    names = {
        row.operation for row in fxbatch.explain(Model(first_and_last), list(torch.randn(5, 3, 4))).operations
    }
    assert not any("stack" in name or "getitem" in name or "take_row" in name for name in names)
