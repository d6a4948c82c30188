"""`fxbatch diff`: two plans side by side."""

from __future__ import annotations

import json

import pytest

from tests.tools.running import TARGET, run


def test_table_has_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "diff", TARGET, "--a", "schedule=none", "--b", "schedule=agenda")
    assert status == 0
    assert "schedule=none" in out
    steps = next(line.split() for line in out.splitlines() if line.startswith("steps "))
    assert int(steps[1]) > int(steps[2])
    assert int(steps[3]) == int(steps[2]) - int(steps[1])


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("diff", TARGET, "--a", "schedule=depth", "--b", "schedule=none", "--format", "json")
    found = json.loads(run(capsys, *arguments)[1])
    assert found["b"]["steps"] == found["b"]["calls"] == found["a"]["calls"]
    assert found["a"]["steps"] < found["b"]["steps"]


def test_svg_shows_two_timelines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("diff", TARGET, "--a", "schedule=depth", "--b", "schedule=agenda", "--format", "svg")
    _, out, _ = run(capsys, *arguments)
    assert "schedule=depth: " in out
    assert "schedule=agenda: " in out


def test_both_sides_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "diff", TARGET, "--a", "schedule=depth")
    assert status == 2
    assert "--b" in err
    assert run(capsys, "diff", TARGET, "--a", "schedule=odd", "--b", "schedule=depth")[0] == 2
