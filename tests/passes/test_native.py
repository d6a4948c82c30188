"""The loops in C against their numpy and Python twins, on random programs and on workloads."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from fxbatch.ir import Program
from fxbatch.passes import search_steps as search_module
from fxbatch.passes.batch_by_lookahead import signature_components
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.eliminate_dead import eliminate_dead
from fxbatch.passes.frontier import Frontier, count_signatures, grouped, peaks, source_calls
from fxbatch.passes.lower_bound import chain_below, height, lower_bound, own_chains
from fxbatch.passes.native import Native, checksum, empty_column
from fxbatch.passes.policies import POLICIES
from fxbatch.passes.search_steps import cut_component, search_steps
from fxbatch.passes.survey import survey
from tests.programs import bilstm_program, lattice_program, programs, random_tree, tree_lstm_program

pytestmark = pytest.mark.skipif(Native.loops is None, reason="fxbatch was installed without its C extension")


def both(of: Callable[[], Any]) -> tuple[Any, Any]:
    """What the twins give, and what C gives."""
    loops = Native.loops
    try:
        Native.loops = None
        return of(), (setattr(Native, "loops", loops), of())[1]
    finally:
        Native.loops = loops


def workloads() -> list[Program]:
    """Programs of the kinds that models give."""
    rng = random.Random(3)
    return [
        tree_lstm_program([random_tree(rng, rng.randint(1, 20)) for _ in range(30)]),
        tree_lstm_program([random_tree(rng, 25) for _ in range(120)]),
        bilstm_program([rng.randint(1, 30) for _ in range(20)]),
        lattice_program(rng, [5, 9, 30]),
    ]


def feeding_pairs(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pairs (flat slot, flat output) such that some call reads such an output in such a slot."""
    graph = survey(program).graph
    return graph.slots, graph.outs


def _same(program: Program) -> None:
    copy = dataclasses.replace(program)  # nothing cached
    for got in (
        lambda p: (source_calls(p), Frontier(p).depth, chain_below(Frontier(p)), height(Frontier(p))),
        lambda p: (count_signatures(p), *own_chains(p)),
        feeding_pairs,
        lambda p: (eliminate_dead(p).sig, eliminate_dead(p).inputs, eliminate_dead(p).outputs),
        lambda p: (np.array(lower_bound(p)),),
    ):
        python, c = both(lambda got=got: got(program if Native.loops is None else copy))
        for a, b in zip(python, c, strict=True):
            np.testing.assert_array_equal(a, b)
    for name in ("depth", "agenda", "lookahead"):
        python, c = both(lambda name=name: POLICIES[name](program if Native.loops is None else copy))
        np.testing.assert_array_equal(python.offsets, c.offsets, err_msg=name)
        np.testing.assert_array_equal(python.order, c.order, err_msg=name)


@given(programs())
def test_random_programs(program: Program) -> None:
    with greedy():
        _same(program)


@given(programs(max_calls=60))
def test_searches_of_every_width_are_the_same(program: Program) -> None:
    _same_searches(program)


@pytest.mark.parametrize("seed", range(3))
def test_searches_of_lattices_are_the_same(seed: int) -> None:
    _same_searches(lattice_program(random.Random(seed), [9, 30, 14, 5]))


def _same_searches(program: Program) -> None:
    for part in signature_components(program):
        component, native_component = both(lambda part=part: cut_component(program, np.array(part)))
        for field in dataclasses.fields(component):
            mine, native = (getattr(x, field.name) for x in (component, native_component))
            assert mine.dtype == native.dtype
            np.testing.assert_array_equal(mine, native)
        for width in (1, 2, 7):
            (step, steps), (native_step, native_steps) = both(
                lambda component=component, width=width: search_steps(component, width)
            )
            assert steps == native_steps
            np.testing.assert_array_equal(step, native_step)


@contextlib.contextmanager
def greedy() -> Iterator[None]:
    """Searches of width 1, which is what Python takes."""
    widest, search_module.WIDEST = search_module.WIDEST, 1
    try:
        yield
    finally:
        search_module.WIDEST = widest


@pytest.mark.parametrize("number", range(4))
def test_workloads(number: int) -> None:
    with greedy():
        _same(workloads()[number])


def test_grouped_and_peaks() -> None:
    rng = np.random.default_rng(0)
    for keys, n in ((1, 0), (1, 5), (7, 100), (1000, 300)):
        key = rng.integers(0, keys, n)
        for a, b in zip(*both(lambda key=key, keys=keys: grouped(key, keys)), strict=True):
            np.testing.assert_array_equal(a, b)
        number = rng.integers(1, 50, n).astype(np.int32)
        a, b = both(lambda key=key, keys=keys, number=number: peaks(key.astype(np.int32), number, keys))
        np.testing.assert_array_equal(a, b)


def test_wrong_columns_are_errors() -> None:
    """A number out of range is an IndexError, an array of another type a TypeError."""
    loops, two = Native.loops, np.zeros(2, dtype=np.int64)
    with pytest.raises(IndexError, match="not there"):
        loops.longest_before(np.array([5]), np.array([0]), np.zeros(2, dtype=np.int32))
    with pytest.raises(IndexError):
        loops.source_calls(np.zeros(1, np.int32), np.ones(1, np.int64), np.array([1]), two)
    with pytest.raises(IndexError):
        loops.group(np.array([-1]), two, np.zeros(1, dtype=np.int64))
    kinds, arity = np.array([0, 1], dtype=np.int32), np.array([0, 1])
    for read, room in (
        (7, 2),
        (1, 2),
        (0, 1),
    ):  # no such value, its own, and one call more than there is room for
        calls, sig, readers = np.zeros(room, np.int64), np.zeros(room, np.int32), np.zeros(1, np.int64)
        made = calls, sig, sig.copy(), calls.copy(), np.zeros(room + 1, np.int64), readers
        with pytest.raises(IndexError):
            loops.cut(kinds, two + 1, arity, np.array([read]), two, *made, 0, 1)
    with pytest.raises(IndexError):  # a reader that is recorded before what it reads
        component = np.zeros(2, np.int32), np.zeros(2, np.int32), np.array([0, 1, 2]), np.array([1, 0])
        loops.search(*component, two + 1, two, np.array([0, 1]), two, 1)
    with pytest.raises(TypeError, match="items of 8 bytes, not 4"):
        loops.longest_before(two, two, np.zeros(2, dtype=np.int64)[::1])
    with pytest.raises(TypeError, match="3 arrays"):
        loops.longest_before(two, two)
    frozen = np.zeros(2, dtype=np.int32)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        loops.longest_before(two, two, frozen)


def _columns_of(program: Program) -> tuple[list[Any], ...]:
    constants = [[id(x) for x in payload] for payload in program.constants.values()]
    columns = (program.sig, program.inputs, program.instance, program.outputs)
    return (*(column.tolist() for column in columns), constants)


@given(programs(max_calls=60))
def test_equal_calls_are_merged_alike(program: Program) -> None:
    python, c = both(lambda: deduplicate(dataclasses.replace(program)))
    assert _columns_of(python) == _columns_of(c)


@pytest.mark.parametrize("program", workloads())
def test_equal_calls_of_workloads_are_merged_alike(program: Program) -> None:
    python, c = both(lambda: deduplicate(dataclasses.replace(program)))
    assert _columns_of(python) == _columns_of(c)
    assert len(c) < len(program)


def test_merging_refuses_columns_that_name_what_is_not_there() -> None:
    program = tree_lstm_program([random_tree(random.Random(0), 5)])
    for name, column in (("inputs", program.inputs + 1000), ("outputs", program.outputs - 1000)):
        with pytest.raises(IndexError, match="names a call or a value that is not there"):
            deduplicate(dataclasses.replace(program, **{name: column}))


def test_surveys_and_turns_of_wrong_columns_are_errors() -> None:
    program = tree_lstm_program([random_tree(random.Random(0), 5)])
    for column in ("inputs", "sig"):
        for by in (-1000, 1000):
            wrong = dataclasses.replace(program, **{column: getattr(program, column) + by})
            with pytest.raises(IndexError, match="not there"):
                survey(dataclasses.replace(wrong, sig=wrong.sig.astype(np.int32)))
    found = survey(program)
    for before, members in ((found.before + 99, 0), (found.before, 99), (found.before - 99, 0)):
        with pytest.raises(IndexError, match="not there"):
            turns = found.graph.turns[0] + members, found.graph.turns[1]
            Native.loops.in_turn(program.sig, before, found.longest, *turns, empty_column)


def test_programs_of_many_signatures_are_surveyed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a table of all pairs would be too large, numpy finds those that occur."""
    program = workloads()[0]
    expected = feeding_pairs(program)
    monkeypatch.setattr("fxbatch.passes.survey._DENSE_LIMIT", 1)
    for a, b in zip(feeding_pairs(dataclasses.replace(program)), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_checksums_tell_contents_and_their_order_apart() -> None:
    numbers = np.arange(37, dtype=np.int32)
    found = {checksum(numbers[:n], numbers[n:]) for n in range(37)}
    for place in range(37):
        changed = numbers.copy()
        changed[place] += 1
        found |= {checksum(changed), checksum(changed[::-1].copy())}
    assert len(found) == 3 * 37
    assert checksum(numbers) == checksum(numbers.copy())
