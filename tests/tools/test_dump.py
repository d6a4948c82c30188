"""`fxbatch dump`: every stage in every format, files and pipes, errors of one line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from fxbatch.text import parse_program
from tests.tools.running import BAGS, BROKEN, EMPTY, ITEMS, TARGET, run

STAGES = (
    "trace",
    "merged",
    "deduplicated",
    "fused",
    "pass-through",
    "batched",
    "gathered",
    "plan",
    "schedule",
)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_every_format(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    for format_ in ("text", "json", "dot", "svg", "html"):
        status, out, err = run(capsys, "dump", TARGET, "--stage", stage, "--format", format_)
        assert (status, err) == (0, ""), (stage, format_)
        assert "\x1b[" not in out
        if format_ == "json":
            assert json.loads(out)["version"] == 1
        elif format_ == "svg":
            ElementTree.fromstring(out)
        elif format_ == "dot":
            assert out.startswith("digraph")
        elif format_ == "html":
            assert out.startswith("<!DOCTYPE html>")


def test_packed_forward_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes of their own: operators for all instances, types with *, what runs alone and why; without --stage."""
    _, out, _ = run(capsys, "dump", BAGS)
    head, rows, calls, *lines = out.splitlines()
    assert head == "packed Bag.forward(f32[*,4]) -> (f32[3])"
    assert rows.strip().startswith("3 instances: 9 rows, 1 to 5 per instance")
    assert calls.strip().endswith("operators, 1 of them instance by instance")
    assert next(x for x in lines if "aten.linear" in x).split()[2:] == [
        *("f32[*,3]", "packed", "v0,", "linear.weight,", "linear.bias"),
    ]
    assert "alone: it acts along a size of its own" in next(x for x in lines if "aten.mode" in x)
    found = json.loads(run(capsys, "dump", BAGS, "--stage", "packed", "--format", "json")[1])["programs"][0]
    assert found["source"].startswith("def forward(self, z, inputs):\n    pop = inputs.pop(0)")
    assert [s["reason"] for s in found["program"]["signatures"] if s["name"] == "aten.mode"] == [
        "it acts along a size of its own"
    ]
    for format_, start in (("dot", "digraph"), ("html", "<!DOCTYPE html>"), ("svg", "<svg")):
        status, out, err = run(capsys, "dump", BAGS, "--format", format_)
        assert (status, err, out.startswith(start)) == (0, "", True)
        assert "f32[*,3]" in out or format_ != "html"


def test_packed_submodules(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "dump", ITEMS, "--stage", "packed", "inner")
    assert out.startswith("packed inner(f32[*,4]) -> (f32[*,3])\n  4 calls in this minibatch\n")
    for arguments in ((TARGET, "--stage", "packed"), (ITEMS, "--stage", "packed", "outer")):
        status, out, err = run(capsys, "dump", *arguments)
        assert (status, out) == (2, "")
        assert "packed" in err


def test_text_of_merged_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "dump", TARGET, "--stage", "merged")
    assert str(parse_program(out)) == out.rstrip("\n")


def test_trace_is_one_instance(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "dump", TARGET, "--stage", "trace", "--instance", 2, "--format", "json")
    found = json.loads(out)
    assert set(found["calls"]["instance"]) == {2}
    names = [found["signatures"][s]["name"] for s in found["calls"]["signature"]]
    assert names[-1] == "out"
    assert len(found["results"]) == 1


def test_code_and_operation(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "dump", TARGET, "--stage", "code")
    assert status == 0
    assert "kernel(n, " in out
    status, out, _ = run(capsys, "dump", TARGET, "--stage", "operation", "out")
    assert status == 0
    for word in ("body, of one call", "forward, of a batch", "backward, of a batch", "parameter gradients"):
        assert word in out
    _, out, _ = run(capsys, "dump", TARGET, "--stage", "operation", "out", "--format", "json")
    assert set(json.loads(out)["graphs"]) == {"forward", "backward", "parameters"}
    _, out, _ = run(capsys, "dump", TARGET, "--stage", "operation", "out", "--format", "dot")
    assert "cluster_forward" in out


def test_output_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "merged.png"
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib, of the extra `bench`")
    status, out, _ = run(capsys, "dump", TARGET, "--format", "png", "-o", file)
    assert (status, out) == (0, "")
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_options_reach_the_minibatch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("dump", TARGET, "--stage", "schedule", "--option", "schedule=depth")
    _, out, _ = run(capsys, *arguments)
    assert out.startswith("schedule depth")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((TARGET, "--stage", "mergd"), 2, "no stage 'mergd'"),
        ((TARGET, "--stage", "operation", "celll"), 2, "no operation 'celll'"),
        ((TARGET, "--stage", "operation"), 2, "needs a NAME"),
        ((TARGET, "--stage", "trace", "--instance", "9"), 2, "there are 4 instances"),
        ((TARGET, "--option", "schedul=depth"), 2, "schedul"),
        ((TARGET, "-o", "/no/such/folder/x"), 2, "no folder"),
        ((BROKEN,), 4, "no such tree"),
        ((EMPTY,), 4, "no instances"),
    ],
)
def test_errors_are_a_line_and_a_hint(
    arguments: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, "dump", *arguments)
    assert (found, out) == (status, "")
    assert message in err
    assert len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("dump", "draw", "explain", "profile", "diff", "check"):
        status, out, _ = run(capsys, command, "--help")
        assert status == 0
        assert f"  fxbatch {command} " in out


@pytest.mark.parametrize(("stage", "number"), [("trace", 99), ("merged", 1), ("code", 0)])
def test_an_instance_that_there_is_not_or_not_of_a_trace_is_refused(
    capsys: pytest.CaptureFixture[str], stage: str, number: int
) -> None:
    status, out, err = run(capsys, "dump", TARGET, "--stage", stage, "--instance", number)
    assert (status, out) == (2, "")
    assert "--instance" in err


def test_the_target_may_stand_behind_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    for stage in (["plan"], ["operation", "out"], ["merged"]):
        before = run(capsys, "dump", TARGET, "--stage", *stage)
        assert before[0] == 0 and run(capsys, "dump", "--stage", *stage, TARGET) == before
    for arguments in ((), ("--stage", "plan"), ("--stage", "operation", "out")):
        status, _, err = run(capsys, "dump", *arguments)
        assert status == 2 and "TARGET is missing" in err
