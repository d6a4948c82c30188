"""Equal calls where nobody said whether to merge them: when it is done, that nothing else changes, what is told."""

from __future__ import annotations

import random
import struct

import pytest
import torch

import fxbatch
from fxbatch.errors import OptionError
from fxbatch.ir import Program
from fxbatch.passes.deduplicate import deduplicate, deduplicate_large
from fxbatch.runtime.options import Options, deduplication
from tests import models as M
from tests.oracle import check_equal
from tests.passes.test_rewrites import check_same_results
from tests.programs import ProgramBuilder

SIZES = [random.Random(8).randint(8, 20) for _ in range(40)]


def words_program(*words: int) -> Program:
    """An embedding a word and a sum of each two: which are equal is a matter of the words alone."""
    build = ProgramBuilder()
    embedded = [build.call("embed", build.constant(torch.tensor(word))) for word in words]
    return build.program(
        *(build.call("add", a, b) for a, b in zip(embedded[::2], embedded[1::2], strict=True))
    )


def test_few_calls_and_few_equal_ones_are_left_alone() -> None:
    small, different = words_program(*[1, 2] * 40), words_program(*range(600))
    assert deduplicate_large(small) is small and len(deduplicate(small)) < len(small)
    assert deduplicate_large(different) is different
    seldom = words_program(*range(580), *range(20))
    assert deduplicate_large(seldom) is seldom and len(deduplicate(seldom)) < len(seldom)
    often = words_program(*range(100), *range(500))
    check_same_results(often, deduplicate_large(often))
    # 500 words with their embeddings, and 300 pairs of words, of which 50 come twice
    assert len(deduplicate_large(often)) == 500 * 2 + 250


def test_numbers_are_compared_by_their_bits() -> None:
    (other,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))
    for payload, left in (((float("nan"), float("nan")), 1), ((float("nan"), other), 2), ((1, True), 2)):
        build = ProgramBuilder()
        program = build.program(*(build.call("f", build.constant(x)) for x in payload))
        assert len(deduplicate(program)) == 2 * left


def test_tensors_that_need_gradients_are_equal_to_themselves_alone() -> None:
    leaf, plain = torch.ones(4, requires_grad=True), torch.ones(4)
    build = ProgramBuilder()
    program = build.program(
        *(
            build.call("f", build.constant(t))
            for t in (leaf, plain, leaf, leaf.detach().clone(), plain.clone())
        )
    )
    assert len(deduplicate(program)) == 4
    kept = [t for payload in deduplicate(program).constants.values() for t in payload]
    assert [t.requires_grad for t in kept] == [True, False]


@pytest.mark.parametrize("way", [{}, {"backward": "autograd"}], ids=str)
def test_a_minibatch_that_repeats_itself_equals_the_loop(way: dict) -> None:
    model, trees = M.TreeLSTM(), M.trees(2, SIZES)
    trees += trees[:10]
    told = fxbatch.explain(M.with_options(model, **way), trees)
    assert told.deduplicated > 500
    assert f"deduplicated: {told.deduplicated} calls" in str(told)
    check_equal(M.with_options(model, **way), trees)


def test_equal_instances_get_results_of_their_own() -> None:
    model = M.with_options(M.TreeLSTM(), out="list")
    trees = M.trees(2, SIZES)
    assert fxbatch.explain(model, trees + trees[:5]).deduplicated
    with torch.no_grad():
        found = model(trees + trees[:5])
        before = found[len(trees)].clone()
        found[0].zero_()
    assert torch.equal(found[len(trees)], before) and before.abs().sum() > 0


def test_where_auto_stays_away() -> None:
    assert deduplication(Options()) == ["deduplicate_large"]
    assert deduplication(Options(deduplicate=True)) == ["deduplicate"]
    assert deduplication(Options(deduplicate=False)) == []
    for other in ({"mode": "unrolled"}, {"schedule": "fold"}, {"schedule": "none"}):
        assert deduplication(Options.of(**other)) == []
        assert deduplication(Options.of(**other, deduplicate=True)) == ["deduplicate"]


@pytest.mark.parametrize("value", ["always", None, 1, ("auto",)])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match=r"deduplicate=.*: takes True, False or 'auto'"):
        Options.of(deduplicate=value)
