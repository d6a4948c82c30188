"""Batching policies: against brute force on random programs, against the lower bound on workloads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given

from fxbatch.errors import OptionError
from fxbatch.ir import Program
from fxbatch.passes import batch_by_agenda as agenda_module
from fxbatch.passes import batch_by_lookahead as lookahead_module
from fxbatch.passes import lower_bound as bound_module
from fxbatch.passes.batch_by_agenda import batch_by_agenda
from fxbatch.passes.batch_by_depth import batch_by_depth, depths
from fxbatch.passes.batch_by_lookahead import batch_by_lookahead
from fxbatch.passes.frontier import Frontier, stable_argsort
from fxbatch.passes.lower_bound import lower_bound
from fxbatch.passes.native import Native
from fxbatch.passes.policies import CANDIDATES, POLICIES, SCHEDULES, BestPolicy, make_policy
from fxbatch.passes.search_steps import cut_component, search_steps
from tests.passes.reference import check_schedule, depths_by_hand, fewest_steps, lower_bound_by_hand
from tests.programs import (
    ProgramBuilder,
    bilstm_program,
    chain_program,
    lattice_program,
    programs,
    random_tree,
    tree_lstm_program,
)


@given(programs())
def test_every_policy_gives_a_schedule(program: Program) -> None:
    bound = lower_bound_by_hand(program)
    for policy in (*POLICIES.values(), BestPolicy()):
        schedule = policy(program)
        check_schedule(program, schedule)
        assert len(schedule) >= bound


@given(programs())
def test_lower_bound_is_that_of_brute_force(program: Program) -> None:
    assert lower_bound(program) == lower_bound_by_hand(program)


@given(programs())
def test_depths_are_those_of_brute_force(program: Program) -> None:
    assert depths(program).tolist() == depths_by_hand(program)


@given(programs(max_calls=60))
def test_lists_and_arrays_agree(program: Program) -> None:
    frontier = Frontier(program)
    assert frontier._depth_by_call(None).tolist() == frontier._depth_by_frontier().tolist()
    if not len(program):
        return
    a, b = agenda_module._agenda_by_lists(frontier), agenda_module._agenda_by_arrays(frontier)
    assert (a[1], a[0].tolist()) == (b[1], b[0].tolist())
    counted = np.ones(len(program), dtype=bool)
    by_edges = bound_module._chain_by_edges(counted, frontier.source, frontier.target)
    by_arrays = bound_module._chain_by_arrays(frontier, frontier.source, frontier.target, counted)
    assert by_edges.tolist() == by_arrays.tolist()


@given(programs())
def test_lookahead_is_never_worse_than_agenda(program: Program) -> None:
    assert len(batch_by_lookahead(program)) <= len(batch_by_agenda(program))


@given(programs(max_calls=15))
def test_best_schedules_are_between_the_bound_and_lookahead(program: Program) -> None:
    fewest = fewest_steps(program)
    assert lower_bound_by_hand(program) <= fewest <= len(batch_by_lookahead(program))


@pytest.mark.skipif(Native.loops is None, reason="wide searches are for the C extension")
@pytest.mark.parametrize("seed", range(6))
def test_lookahead_finds_the_best_schedule_of_two_lattices_that_no_schedule_reaches_the_bound_of(
    seed: int,
) -> None:
    program = lattice_program(random.Random(seed), [10, 9])
    assert len(batch_by_lookahead(program)) == fewest_steps(program)


def test_the_bound_is_out_of_reach_where_two_signatures_follow_each_other_in_both_orders() -> None:
    """f(g(x)) and g(f(x)): two signatures, one call of each on a path, and yet three steps."""
    build = ProgramBuilder(2)
    a, b = (build.constant(torch.zeros(4), instance=i) for i in range(2))
    fg = build.call("f", build.call("g", a), instance=0)
    gf = build.call("g", build.call("f", b, instance=1), instance=1)
    program = build.program(fg, gf)
    assert lower_bound(program) == 3
    assert fewest_steps(program) == len(batch_by_lookahead(program)) == 4


@pytest.mark.parametrize("instances", [1, 2, 16, 64])
def test_lookahead_reaches_the_lower_bound_on_trees_and_taggers(instances: int) -> None:
    rng = random.Random(instances)
    trees = tree_lstm_program([random_tree(rng, rng.randrange(1, 30)) for _ in range(instances)])
    assert len(batch_by_lookahead(trees)) == lower_bound(trees)
    taggers = bilstm_program([rng.randrange(1, 30) for _ in range(instances)])
    assert len(batch_by_lookahead(taggers)) == lower_bound(taggers)


@pytest.mark.parametrize("seed", range(5))
def test_one_lattice_is_at_most_a_twentieth_above_the_lower_bound(seed: int) -> None:
    program = lattice_program(random.Random(seed), [20])
    assert len(batch_by_lookahead(program)) <= 1.05 * lower_bound(program)


@pytest.mark.parametrize("seed", range(3))
def test_lattices_of_different_lengths_take_few_steps_more_than_a_wide_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    program = lattice_program(rng, [rng.randrange(5, 30) for _ in range(32)])
    (part,) = (part for part in lookahead_module.signature_components(program) if len(part) > 1)
    component = cut_component(program, np.array(part))
    _, greedy = search_steps(component, 1)
    _, wide = search_steps(component, 16)
    others = lower_bound(program) - component.bound
    check_schedule(program, batch_by_lookahead(program))
    assert len(batch_by_lookahead(program)) <= others + greedy
    assert wide <= 0.95 * greedy


def test_wide_programs_are_scheduled_by_arrays_and_reach_the_bound() -> None:
    rng = random.Random(0)
    program = tree_lstm_program([random_tree(rng, 30) for _ in range(150)])
    assert not Frontier(program).narrow
    assert len(batch_by_lookahead(program)) == lower_bound(program)
    for policy in POLICIES.values():
        check_schedule(program, policy(program))


def test_a_deep_chain_needs_no_recursion() -> None:
    program = chain_program(5000)
    for name in CANDIDATES:
        assert len(POLICIES[name](program)) == lower_bound(program) == 5001


def test_empty_programs() -> None:
    program = ProgramBuilder().program()
    for name in (*POLICIES, "best"):
        assert len(make_policy(name)(program)) == 0
    assert lower_bound(program) == 0


def test_agenda_runs_cheap_before_heavy_when_average_depths_are_equal() -> None:
    build = ProgramBuilder()
    x = build.constant()
    heavy = build.call("heavy", x, outputs=2)  # twice the output elements
    cheap = build.call("cheap", x)
    program = build.program(*heavy, cheap)
    names = [program.signatures[program.sig[c[0]]].name for c in batch_by_agenda(program).steps()]
    assert names == ["number", "cheap", "heavy"]


def test_agenda_waits_where_depth_does_not() -> None:
    """Figure 3 of Neubig et al.: the loss of every sequence in one step, whatever their lengths."""
    build = ProgramBuilder(2)
    ends = []
    for i, length in enumerate((2, 4)):
        h = build.constant(instance=i)
        h = build.call("start", h, instance=i)
        for _ in range(length):
            h = build.call("rnn", h, instance=i)
        ends.append(build.call("loss", h, instance=i))
    program = build.program(*ends)
    assert len(batch_by_depth(program)) == 8  # constant, start, rnn 4 times, loss twice
    assert len(batch_by_agenda(program)) == 7 == lower_bound(program)


def test_best_tries_once_a_family_and_keeps_the_winner() -> None:
    rng = random.Random(1)
    build = tree_lstm_program([random_tree(rng, 20) for _ in range(8)])
    best = BestPolicy(capacity=1)
    assert best(build).policy == "lookahead"
    assert (best.hits, best.misses) == (0, 1)
    best(build)
    assert (best.hits, best.misses) == (1, 1)
    best(chain_program(3))
    best(build)  # thrown out by the other family
    assert (best.hits, best.misses) == (1, 3)
    best.clear()
    assert (best.hits, best.misses, len(best.winners)) == (0, 0, 0)


def test_unknown_policy_lists_the_known() -> None:
    with pytest.raises(OptionError, match="schedule: unknown 'greedy'; known are 'depth', 'agenda'"):
        make_policy("greedy")
    assert set(SCHEDULES) == {*POLICIES, "best", "fold"}


@pytest.mark.parametrize("bound", [10, 70_000, 1 << 20])
def test_stable_argsort(bound: int) -> None:
    key = np.random.default_rng(0).integers(0, bound, 5000)
    assert stable_argsort(key, bound).tolist() == np.argsort(key, kind="stable").tolist()
