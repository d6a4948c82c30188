"""Splitting: the input projection of a recurrent LSTM cell runs once for all time steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbatch.ir import Operation, Program, SharedOperand, Signature, Slot, Template
from fxbatch.passes.batch_by_lookahead import batch_by_lookahead
from fxbatch.passes.split import Splitter, splittable
from fxbatch.verify import verify_program, verify_schedule
from tests.passes.reference import results_by_hand
from tests.programs import F4, ProgramBuilder


def cell_signature(cell: nn.LSTMCell) -> Signature:
    names = tuple(name for name, _ in cell.named_parameters())
    arguments = Template.of(((Slot("input", 0), (Slot("input", 1), Slot("input", 2))), {}))
    shared = tuple(SharedOperand(cell, name) for name in names)
    operation = Operation("lstm", "module", cell)
    return Signature(operation, (F4,) * 3, (F4,) * 2, shared, arguments, None, shared_names=names)


def tagger(signature: Signature, lengths: list[int], feed_back: bool = False) -> Program:
    build, ends = ProgramBuilder(len(lengths)), []
    for instance, n in enumerate(lengths):
        h = c = build.constant(torch.zeros(4), instance=instance)
        for k in range(n):
            word = h if feed_back else build.constant(torch.tensor(k), instance=instance)
            x = build.call("embed", word, instance=instance)
            h, c = build.use(signature, x, h, c, instance=instance)
        ends.append(h)
    return build.program(*ends)


@pytest.mark.parametrize("bias", [True, False])
def test_projections_run_in_one_step_and_results_stay(bias: bool) -> None:
    signature, splitter = cell_signature(nn.LSTMCell(4, 4, bias=bias)), Splitter()
    program = tagger(signature, [2, 5, 3])
    split = splitter(program)
    verify_program(split)
    schedule = batch_by_lookahead(split)
    verify_schedule(split, schedule)
    names = [split.signatures[split.sig[calls[0]]].name for calls in schedule.steps()]
    assert names == ["constant", "constant", "embed", "lstm.input", *["lstm.step"] * 5]
    for a, b in zip(results_by_hand(program, []), results_by_hand(split, []), strict=True):
        torch.testing.assert_close(a, b)
    assert splitter(program).signatures == split.signatures


def test_an_input_from_the_recurrence_is_not_split() -> None:
    program = tagger(cell_signature(nn.LSTMCell(4, 4)), [2, 5], feed_back=True)
    assert Splitter()(program) is program


def test_a_cell_that_does_not_recur_is_not_split() -> None:
    program = tagger(cell_signature(nn.LSTMCell(4, 4)), [1, 1])
    assert Splitter()(program) is program


def test_what_is_splittable() -> None:
    assert splittable(cell_signature(nn.LSTMCell(4, 4)))
    assert not splittable(Signature(Operation("linear", "module", nn.Linear(4, 4)), (F4,), (F4,)))
