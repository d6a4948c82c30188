"""`fxbatch profile`: phases, operations, a trace whose steps tell operation and batch size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.running import TARGET, run


def test_phases_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "profile", TARGET, "--repeat", 2, "--format", "json")
    assert status == 0
    found = json.loads(out)
    # The same minibatch again: its schedule is found with its plan.
    for phase in ("trace", "merge", "plan", "constants", "forward", "backward", "parameter gradients"):
        assert found["phases"][phase] > 0, phase
    for phase in ("call", "autograd", "zero gradients"):  # what would be "other"
        assert found["phases"][phase] > 0, phase
    assert sum(found["phases"].values()) == pytest.approx(found["milliseconds"], rel=0.02)
    parts = {(row["operation"], row["part"]) for row in found["operations"]}
    assert {("out", "forward"), ("out", "backward"), ("out", "parameter gradients")} <= parts
    embed = [row for row in found["operations"] if row["operation"] == "embed" and row["part"] == "forward"]
    assert [row["calls"] for row in embed] in ([11.0], [])  # fused with what reads it, or alone


def test_table_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    status, out, _ = run(capsys, "profile", TARGET, "--repeat", 1, "--trace", file)
    assert status == 0
    assert "parameter gradients" in out
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any(str(name).startswith("out x") for name in names)
    assert {"trace", "plan", "forward"} <= names


def test_afterwards_nothing_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    from fxbatch_cli.stopwatch import PARTS

    before = [getattr(owner, name) for owner, name, _ in PARTS]
    run(capsys, "profile", TARGET, "--repeat", 1, "--no-backward")
    assert [getattr(owner, name) for owner, name, _ in PARTS] == before
    for owner, name, _ in PARTS:  # what was inherited is again
        assert all(
            vars(owner).get(name, owner) is not getattr(base, name, None)
            for base in getattr(owner, "__mro__", ())[1:-1]
        )
