"""Rewrites of the program: before and after as text, results against brute force, on random programs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given

from fxbatch.ir import Program
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.fold import add_pass_through_calls, pass_through
from fxbatch.passes.select import eliminate_dead
from fxbatch.text import parse_program
from fxbatch.verify import verify_program, verify_schedule
from tests.passes.reference import check_schedule, depths_by_hand, results_by_hand, sources
from tests.programs import F4, ProgramBuilder, chain_program, programs, random_tree, tree_lstm_program

HEAD = """program instances=2
  s0 constant constant() -> (i64[])
  s1 function embed(i64[]) -> (f32[4])
  s2 function cell(f32[4], f32[4]) -> (f32[4])
"""


def check_same_results(program: Program, rewritten: Program) -> None:
    verify_program(rewritten)
    known = [torch.randn(4) for _ in range(program.known)]
    before, after = results_by_hand(program, known), results_by_hand(rewritten, known)
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def test_check_same_results_notices_a_difference() -> None:
    one, other = ProgramBuilder(), ProgramBuilder()
    x, y = one.constant(torch.ones(4)), other.constant(torch.zeros(4))
    with pytest.raises(AssertionError):
        check_same_results(one.program(one.call("f", x)), other.program(other.call("f", y)))


def test_equal_words_are_embedded_once() -> None:
    before = parse_program(
        HEAD
        + """  v0 = s0 constant() = 17 @0
  v1 = s1 embed(v0) @0
  v2 = s0 constant() = 17 @1
  v3 = s1 embed(v2) @1
  v4 = s0 constant() = 18 @1
  v5 = s1 embed(v4) @1
  v6 = s2 cell(v1, v3) @0
  v7 = s2 cell(v3, v3) @1
  v8 = s2 cell(v3, v5) @1
  return v6, v7, v8"""
    )
    assert str(deduplicate(before)) == (
        HEAD
        + """  v0 = s0 constant() = 17 @0
  v1 = s1 embed(v0) @0
  v2 = s0 constant() = 18 @1
  v3 = s1 embed(v2) @1
  v4 = s2 cell(v1, v1) @0
  v5 = s2 cell(v1, v3) @1
  return v4, v4, v5"""
    )


@given(programs())
def test_deduplicate_keeps_results_and_is_idempotent(program: Program) -> None:
    once = deduplicate(program)
    check_same_results(program, once)
    assert deduplicate(once) is once


def test_random_calls_are_never_equal() -> None:
    build = ProgramBuilder()
    x = build.constant(torch.ones(4))
    a, b = build.call("dropout", x, random=True), build.call("dropout", x, random=True)
    program = build.program(a, b)
    assert deduplicate(program) is program


def _constants_left(*payload: Any) -> int:
    build = ProgramBuilder()
    calls = [build.call("f", build.constant(p)) for p in payload]
    return len([c for c in deduplicate(build.program(*calls)).sig if c == 0])


def test_which_constants_are_equal() -> None:
    big, small = torch.zeros(100), torch.zeros(4)
    assert _constants_left(torch.tensor(3), torch.tensor(3), torch.tensor(4)) == 2
    assert _constants_left(small, small.clone()) == 1
    assert _constants_left(big, big) == 1  # one tensor
    assert _constants_left(big, big.clone()) == 2  # large tensors are not compared
    assert _constants_left(small, torch.zeros(4, requires_grad=True)) == 2
    assert _constants_left(torch.tensor(0.0), torch.tensor(-0.0)) == 2  # bits, not equality
    assert _constants_left(torch.tensor(float("nan")), torch.tensor(float("nan"))) == 1
    assert _constants_left(torch.tensor(True), torch.tensor(True)) == 1
    assert _constants_left(2, 2, 3) == 2
    assert _constants_left(0.0, -0.0) == 2
    assert _constants_left(float("nan"), float("nan")) == 1


def test_equal_subtrees_are_computed_once() -> None:
    tree = random_tree(random.Random(0), 10)
    once, twice = tree_lstm_program([tree]), tree_lstm_program([tree, tree, (tree, 3)])
    one, two = deduplicate(once), deduplicate(twice)
    check_same_results(twice, two)
    assert len(two) <= len(one) + 5  # a word with its embedding and leaf, a cell, an `out`


def test_dead_calls_go_but_random_ones_stay() -> None:
    before = parse_program(
        HEAD.replace("instances=2", "instances=1")
        + """  s3 function dropout(f32[4]) -> (f32[4]) random
  v0 = s0 constant() = 1 @0
  v1 = s0 constant() = 2 @0
  v2 = s1 embed(v0) @0
  v3 = s1 embed(v1) @0
  v4 = s2 cell(v3, v3) @0
  v5 = s3 dropout(v2) @0
  v6 = s2 cell(v2, v2) @0
  return v6"""
    )
    assert str(eliminate_dead(before)).splitlines()[5:] == [
        "  v0 = s0 constant() = 1 @0",
        "  v1 = s1 embed(v0) @0",
        "  v2 = s3 dropout(v1) @0",
        "  v3 = s2 cell(v1, v1) @0",
        "  return v3",
    ]


@given(programs())
def test_eliminate_dead_keeps_what_results_need_and_no_more(program: Program) -> None:
    rewritten = eliminate_dead(program)
    check_same_results(program, rewritten)
    before = sources(rewritten)
    live = {int(rewritten.call_of_value[v - program.known]) for v in rewritten.outputs if v >= program.known}
    live |= {c for c, s in enumerate(rewritten.sig) if rewritten.signatures[s].operation.random}
    for call in range(len(rewritten) - 1, -1, -1):
        if call in live:
            live |= set(before[call])
    assert live == set(range(len(rewritten)))
    assert eliminate_dead(rewritten) is rewritten


def test_pass_throughs_carry_values_one_depth_at_a_time() -> None:
    build = ProgramBuilder()
    x = build.constant(torch.tensor(1))
    a = build.call("f", x)
    b = build.call("f", a)
    program = build.program(build.call("g", b, a))
    rewritten, schedule = add_pass_through_calls(program)
    assert str(rewritten).splitlines()[-6:] == [
        "  v0 = s0 constant() = 1 @0",
        "  v1 = s1 f(v0) @0",
        "  v2 = s2 f(v1) @0",
        "  v3 = s4 pass_through(v1) @0",
        "  v4 = s3 g(v2, v3) @0",
        "  return v4",
    ]
    assert schedule.policy == "fold" and len(schedule) == 5
    assert pass_through(F4) is pass_through(F4)


@given(programs())
def test_each_depth_reads_the_depth_before(program: Program) -> None:
    rewritten, schedule = add_pass_through_calls(program)
    check_same_results(program, rewritten)
    verify_schedule(rewritten, schedule)
    check_schedule(rewritten, schedule)
    depth = depths_by_hand(rewritten)
    made = [0] * rewritten.known + [depth[c] for c in rewritten.call_of_value]
    for v, c in zip(rewritten.inputs.tolist(), rewritten.reader.tolist(), strict=True):
        assert made[v] == depth[c] - 1
    assert all(made[v] == max(depth, default=0) for v in rewritten.outputs.tolist())


def test_a_chain_needs_pass_throughs_for_its_word_only() -> None:
    rewritten, schedule = add_pass_through_calls(chain_program(4))
    assert [rewritten.signatures[s].name for s in rewritten.sig].count("pass_through") == 3
    assert len(schedule) == 1 + 4 + 3
