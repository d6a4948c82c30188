"""The pipeline: order, records, verification of results, notes on exceptions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from fxbatch.errors import OptionError, VerifyError
from fxbatch.ir import Program
from fxbatch.passes.pipeline import PASSES, Pipeline
from tests.passes.fusion_models import Functions
from tests.passes.test_rewrites import check_same_results
from tests.programs import programs, tree_lstm_program


@given(programs())
def test_all_passes_together_keep_results(program: Program) -> None:
    pipeline = Pipeline([name for name, _, _ in PASSES], verify=True)
    check_same_results(program, pipeline(program))


def test_records_say_what_each_pass_did() -> None:
    program = Functions().tagger([9, 9])
    pipeline = Pipeline({"deduplicate", "fuse"})
    after = pipeline(program)
    fuse, deduplicate = pipeline.records
    assert (fuse.name, fuse.before, deduplicate.name, deduplicate.after) == (
        "fuse",
        len(program),
        "deduplicate",
        len(after),
    )
    assert fuse.after == deduplicate.before > deduplicate.after
    constants = [sum(p.signatures[s].operation.kind == "constant" for s in p.sig) for p in (program, after)]
    assert fuse.constants == 0 and deduplicate.constants == constants[0] - constants[1] > 0
    assert fuse.seconds > 0


def test_the_result_of_a_pass_is_verified_and_the_pass_named() -> None:
    pipeline = Pipeline({"eliminate_dead"}, verify=True)
    pipeline.passes["eliminate_dead"] = lambda p: dataclasses.replace(p, instances=0, instance=p.instance + 7)
    with pytest.raises(VerifyError, match="instance 7 does not exist") as caught:
        pipeline(tree_lstm_program([(1, 2)]))
    assert caught.value.__notes__ == ["in pass eliminate_dead, on a program of 8 calls"]


def test_unknown_passes_list_the_known() -> None:
    with pytest.raises(
        OptionError,
        match="unknown pass 'fusee'; known are eliminate_dead, unstack_rows, unstack_sums, fuse, deduplicate",
    ):
        Pipeline({"fusee"})
