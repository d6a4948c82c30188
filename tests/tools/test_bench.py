"""`fxbatch bench TARGET`: the user's model, batched and one by one in turns."""

from __future__ import annotations

import json

import pytest

from tests.tools.running import BROKEN, EMPTY, TARGET, run


def test_both_ways_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "bench", TARGET, "--rounds", 2, "--format", "json")
    found = json.loads(out)
    assert (status, found["form"], found["instances"], found["backward"]) == (0, "bench", 4, True)
    assert len(found["batched_seconds"]) == len(found["one_by_one_seconds"]) == 2
    ratios = [a / b for a, b in zip(found["one_by_one_seconds"], found["batched_seconds"])]
    assert min(ratios) <= found["gain"] <= max(ratios)
    assert found["first_seconds"] > 0


def test_text_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "bench", TARGET, "--rounds", 1, "--no-backward", "--option", "schedule=depth"
    )
    assert status == 0
    assert "4 instances, forward, 1 rounds in turns" in out
    assert "times as fast as one by one" in out


@pytest.mark.parametrize(
    ("arguments", "status"), [([BROKEN], 4), ([EMPTY], 4), ([TARGET, "--rounds", "0"], 2)]
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> None:
    assert run(capsys, "bench", *arguments)[0] == status


def test_without_a_target_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "bench")
    assert (status, out) == (2, "")
    assert "TARGET is missing" in err and "fxbatch bench model.py:minibatch" in err
    status, out, _ = run(capsys, "bench", "--list")
    assert status == 0 and "figures" in out
