"""Fusion: what becomes one operation, that results and gradients stay, that decisions are kept."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import fxbatch
from fxbatch.ir import Operation, Program, Signature
from fxbatch.passes import fuse as find_blocks
from fxbatch.passes.fuse import Fuser, Stream, Wiring
from fxbatch.passes.schedule import batch_by_lookahead, lower_bound
from fxbatch.verify import verify_program, verify_schedule
from tests.oracle import assert_launches, check_equal
from tests.passes.fusion_models import HIDDEN, Functions
from tests.passes.reference import results_by_hand
from tests.programs import ProgramBuilder, programs, random_tree


def names(program: Program) -> Counter[str]:
    return Counter(program.signatures[s].name for s in program.sig.tolist())


def trees(n: int, leaves: int = 12, seed: int = 0) -> list[object]:
    rng = random.Random(seed)
    return [random_tree(rng, leaves) for _ in range(n)]


def check_same(program: Program, fused: Program) -> None:
    verify_program(fused)
    verify_schedule(fused, batch_by_lookahead(fused))
    known = [torch.randn(4) for _ in range(program.known)]
    pairs = zip(results_by_hand(program, known), results_by_hand(fused, known), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("classify_all", [False, True])
def test_a_tree_lstm_of_bare_functions_becomes_leaf_cell_and_out(classify_all: bool) -> None:
    program = Functions().tree_lstm(trees(16), classify_all)
    fused = Fuser()(program)
    check_same(program, fused)
    assert names(fused) == {
        "constant": 192,
        "fused:embed+linear_x+chunk+sigmoid+tanh+mul": 192,
        "fused:cat+linear_h+chunk+sigmoid+tanh+mul+add": 176,
        "out": 368 if classify_all else 16,
    }
    assert len(batch_by_lookahead(fused)) == lower_bound(fused)


def test_what_does_not_wait_for_the_recurrence_stays_outside_it() -> None:
    program = Functions().tagger([3, 9, 5, 7, 2, 8])
    fused = Fuser()(program)
    check_same(program, fused)
    assert names(fused) == {
        "constant": 34 + 6,
        "fused:embed+linear_x": 34,
        "fused:linear_r+add+chunk+sigmoid+tanh+mul": 34,
        "out": 34,
    }
    assert len(batch_by_lookahead(fused)) == 2 + 1 + 9 + 1  # constants, words, cells, tags


@pytest.mark.parametrize("few", [0, 1000])
def test_where_few_calls_would_go_nothing_is_looked_for(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass runs for each minibatch: an eighth of the calls must go, a quarter of few calls."""
    program = Functions().tagger([3, 9, 5, 7, 2, 8])
    left = len(Fuser()(program)) / len(program)
    monkeypatch.setattr(find_blocks, "FEW", few)
    for share, pays in ((0.9 * (1 - left), True), (1.0, False)):
        monkeypatch.setattr(find_blocks, "LEAST_OF_FEW" if few else "LEAST_SHARE", share)
        monkeypatch.setattr(find_blocks, "LEAST_SHARE" if few else "LEAST_OF_FEW", 1.0 - share)
        fuser = Fuser()
        assert (fuser(program) is not program) is pays
        assert bool(fuser.blocks) is pays


def test_the_first_instances_of_a_large_program_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Functions()
    program = functions.tagger([9, 5, 7, 8, 6, 4])
    whole = names(Fuser()(program))
    monkeypatch.setattr(find_blocks, "SAMPLE", 200)
    assert len(Stream(program).calls) > 400
    assert names(Fuser()(program)) == whole


def test_gradients_stay() -> None:
    functions = Functions()
    program = functions.tree_lstm(trees(8), True)
    weights = list(functions.weights.values())[:3]
    found = []
    for form in (program, Fuser()(program)):
        loss = torch.stack(results_by_hand(form, [])).square().sum()
        found.append(torch.autograd.grad(loss, weights))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_decisions_are_kept_from_minibatch_to_minibatch() -> None:
    functions, fuser = Functions(), Fuser()
    first = fuser(functions.tree_lstm(trees(16), True))
    second = fuser(functions.tree_lstm(trees(1, leaves=2, seed=5), True))
    used = [second.signatures[s] for s in sorted(set(second.sig.tolist()))]
    fused = [s for s in used if s.operation.kind == "graph"]
    assert len(fused) == 2 and all(s in first.signatures for s in fused)
    assert fuser.learned == 1


def test_a_value_that_turns_out_to_be_needed_becomes_an_output() -> None:
    fuser = Fuser()
    program = Functions().tree_lstm(trees(16), False)
    fuser(program)
    gate = next(c for c, s in enumerate(program.sig) if program.signatures[s].name == "sigmoid")
    value = int(program.first_value[gate])
    more = dataclasses.replace(program, outputs=torch.tensor([*program.outputs, value]).numpy())
    check_same(more, fuser(more))


def cells(functions: Functions, same: list[bool], order: list[int] | None = None) -> Program:
    """tanh(a) * sigmoid(b), one an instance; a and b are one value where `same` says so. order: the instances of the
    calls, one after another."""
    build, outputs = ProgramBuilder(len(same)), []
    for k, one in enumerate(same):
        i = k if order is None else order[k]
        a = build.constant(torch.randn(HIDDEN), instance=i)
        b = a if one else build.constant(torch.randn(HIDDEN), instance=i)
        x = functions.call(build, i, "tanh", torch.tanh, a)
        y = functions.call(build, i, "sigmoid", torch.sigmoid, b)
        outputs.append(functions.call(build, i, "mul", torch.mul, x, y))
    return build.program(*outputs)


def test_what_was_one_input_becomes_two_where_it_is_no_more() -> None:
    functions, fuser = Functions(), Fuser()
    inputs = []
    for same in ([True] * 12, [True] * 11 + [False], [True] * 12):
        program = cells(functions, same)
        fused = fuser(program)
        check_same(program, fused)
        signature = next(s for s in fused.signatures if s.operation.kind == "graph")
        inputs.append(len(signature.inputs))
        assert names(fused)[signature.name] == 12 and len(signature.operation.target.members) == 3
    assert inputs == [1, 2, 2]


def test_calls_that_do_not_stand_instance_after_instance_are_left_alone() -> None:
    functions, fuser = Functions(), Fuser()
    assert len(fuser(cells(functions, [True] * 12))) < 12 * 4
    mixed = cells(functions, [True] * 12, order=[*range(6), *reversed(range(6, 12))])
    assert fuser(mixed) is mixed


def test_few_occurrences_are_no_evidence() -> None:
    program = Functions().tagger([find_blocks.MUTUAL - 1])
    assert Fuser()(program) is program


def test_a_refused_operation_is_taken_apart() -> None:
    functions, fuser = Functions(), Fuser()
    program = functions.tagger([9, 9])
    fused = fuser(program)
    fuser.refuse(next(s for s in fused.signatures if s.name.startswith("fused:linear_r")))
    apart = fuser(program)
    check_same(program, apart)
    assert names(apart)["linear_r"] == 18 and names(apart)["fused:embed+linear_x"] == 18


class Cells(torch.nn.Module):
    """Modules and functions in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.cell, self.drop = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Dropout(0.0)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        h = xs[0]
        for x in xs:
            c = torch.tanh(self.cell(h))
            with torch.set_grad_enabled(self.grad):
                g = torch.sigmoid(self.gate(x))
            h = self.drop(g * c + h)
        return h

    grad = True


@pytest.mark.parametrize("training", [True, False])
def test_modules_in_training_and_functions_are_one_operation(training: bool) -> None:
    """That a module trains is no mode of a function; what it does then is a matter of its body."""
    draw = torch.Generator().manual_seed(0)
    model = Cells().train(training)
    batch = [list(torch.randn(n, 4, generator=draw)) for n in (2, 3, 4, 5)]
    model(batch)
    check_equal(model, batch)
    fused = [row.operation for row in fxbatch.explain(model, batch).operations]
    assert any("cell+tanh" in name for name in fused), fused
    assert_launches(model, batch, 1 + 5)  # gates, cells


def test_calls_with_and_without_gradients_stay_apart() -> None:
    model = Cells().eval()
    model.grad = False
    batch = [list(torch.randn(n, 4)) for n in (2, 3, 4, 5)]
    check_equal(model, batch)
    fused = [row.operation for row in fxbatch.explain(model, batch).operations]
    assert not any("cell" in name and "gate" in name for name in fused), fused


class Turned(nn.Module):
    """As attention puts its heads together."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.l(x).transpose(0, 1).contiguous().view(-1) for x in words]).sum(0)


def test_a_view_of_what_was_made_contiguous_runs_before_it_is_built() -> None:
    model, x = Turned(), torch.randn(2, 3)
    check_equal(model, [[x, x + 1], [x] * 5])
    table = Turned.forward.__fxbatch__.engine(model).table  # type: ignore[attr-defined]
    turned, view = (next(s for s in table.signatures if s.name == name) for name in ("transpose", "view"))
    both = Wiring((turned, view), (((-1, 0),), ((0, 0),)), ((1, 0),))
    assert both(x)[0].tolist() == x.t().reshape(-1).tolist()


def test_embeddings_are_not_fused() -> None:
    module = torch.nn.Embedding(3, 4)
    signature = Signature(Operation("embed", "module", module), (), ())
    assert not find_blocks.fusible(signature)


def test_operations_that_run_unbatched_are_left_alone() -> None:
    program = Functions().tagger([9, 9])
    reasons = tuple(dataclasses.replace(s, reason="no") for s in program.signatures)
    program = dataclasses.replace(program, signatures=reasons)
    assert Fuser()(program) is program


def test_shared_operands_are_merged_and_the_body_runs_the_members() -> None:
    fused = Fuser()(Functions().tagger([9, 9]))
    signature = next(s for s in fused.signatures if s.name == "fused:embed+linear_x")
    assert [o.name for o in signature.shared] == ["E", "V"]
    assert [member.name for member in signature.operation.target.members] == ["embed", "linear_x"]


@settings(max_examples=60)
@given(programs(max_calls=60))
def test_random_programs_keep_their_results(program: Program) -> None:
    limits = find_blocks.MUTUAL, find_blocks.CHEAP
    find_blocks.MUTUAL = find_blocks.CHEAP = 1  # fuse on the slightest evidence
    try:
        fuser = Fuser()
        check_same(program, fuser(program))
        check_same(program, fuser(program))
    finally:
        find_blocks.MUTUAL, find_blocks.CHEAP = limits


def test_the_stream_is_in_order_of_instances() -> None:
    program = Functions().tagger([2, 3])
    stream = Stream(program)
    assert stream.ordered and stream.instance.tolist() == sorted(stream.instance.tolist())


def test_blocks_are_recognised_where_other_signatures_stand_beside_them() -> None:
    """Sizes of instances are part of signatures: programs of ever new ones have the same cells."""
    functions, fuser = Functions(), Fuser()
    first = fuser(functions.tree_lstm(trees(16), True))
    for size in range(1, 6):
        with_size = functions.tree_lstm(trees(8, seed=size), True, readout=f"out{size}")
        again = fuser(with_size)
        assert len(again) < len(with_size)
        fused = [s for s in again.signatures if s.operation.kind == "graph"]
        assert fused and all(s in first.signatures for s in fused)
    assert fuser.learned == 1
