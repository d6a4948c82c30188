"""Batching policies: against brute force on random programs, against the lower bound on workloads."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given

import fxbatch
from fxbatch.errors import OptionError
from fxbatch.ir import Program
from fxbatch.passes.schedule import (
    POLICIES,
    SCHEDULES,
    batch_by_agenda,
    batch_by_depth,
    batch_by_lookahead,
    depths,
    lower_bound,
    make_policy,
)
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
    for policy in POLICIES.values():
        schedule = policy(program)
        check_schedule(program, schedule)
        assert len(schedule) >= bound


@given(programs())
def test_lower_bound_is_that_of_brute_force(program: Program) -> None:
    assert lower_bound(program) == lower_bound_by_hand(program)


@given(programs())
def test_depths_are_those_of_brute_force(program: Program) -> None:
    assert depths(program).tolist() == depths_by_hand(program)


@given(programs())
def test_lookahead_is_never_worse_than_agenda(program: Program) -> None:
    assert len(batch_by_lookahead(program)) <= len(batch_by_agenda(program))


@given(programs(max_calls=15))
def test_best_schedules_are_between_the_bound_and_lookahead(program: Program) -> None:
    fewest = fewest_steps(program)
    assert lower_bound_by_hand(program) <= fewest <= len(batch_by_lookahead(program))


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


def test_directions_of_a_layer_run_one_after_another() -> None:
    """All layers of a tagger are one component by their `cat`; weights stay in the cache from step to step."""
    program = bilstm_program([9, 4, 6])
    schedule = batch_by_lookahead(program)
    first = schedule.order[schedule.offsets[:-1]]
    names = [program.signatures[program.sig[call]].name for call in first]
    changes = [a for a, b in itertools.pairwise(names) if a != b]
    assert all(changes.count(name) == 1 for name in ("ahead0", "back0", "ahead1", "back1"))


@pytest.mark.parametrize("seed", range(5))
def test_one_lattice_is_at_most_a_twentieth_above_the_lower_bound(seed: int) -> None:
    program = lattice_program(random.Random(seed), [20])
    assert len(batch_by_lookahead(program)) <= 1.05 * lower_bound(program)


def test_wide_programs_reach_the_bound() -> None:
    rng = random.Random(0)
    program = tree_lstm_program([random_tree(rng, 30) for _ in range(150)])
    assert len(batch_by_lookahead(program)) == lower_bound(program)
    for policy in POLICIES.values():
        check_schedule(program, policy(program))


def test_a_deep_chain_needs_no_recursion() -> None:
    program = chain_program(5000)
    for name in ("depth", "agenda", "lookahead"):
        assert len(POLICIES[name](program)) == lower_bound(program) == 5001


def test_empty_programs() -> None:
    program = ProgramBuilder().program()
    for name in POLICIES:
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


def test_agenda_asks_nothing_of_parameters_that_are_gone() -> None:
    layer = torch.nn.Linear(3, 3)
    model = fxbatch.autobatch(schedule="agenda")(layer.forward)
    for _ in range(2):
        assert model(list(torch.randn(2, 3))).shape == (2, 3)
        layer.bias = None


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


def test_unknown_policy_lists_the_known() -> None:
    with pytest.raises(OptionError, match="schedule: unknown 'greedy'; known are 'depth', 'agenda'"):
        make_policy("greedy")
    assert set(SCHEDULES) == {*POLICIES, "fold"}
