"""`fxbatch check`: equal is 0; a wrong batched number is 1, with the operation and the instance."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fxbatch_cli import terminal
from rich.console import Console

from fxbatch.runtime import autograd
from fxbatch.runtime import run as run_module
from tests.tools.running import BROKEN, TARGET, run
from tools.run_target import Runnable


def test_equal(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", TARGET)
    assert status == 0
    assert out.startswith("equal: 4 instances")
    assert "float64" in out


@pytest.mark.parametrize("schedule", ["depth", "agenda", "none"])
def test_json(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", TARGET, "--format", "json", "--option", f"schedule={schedule}")
    found = json.loads(out)
    assert status == 0
    assert found["equal"]
    assert found["gradients"] == 5
    assert found["worst"] <= 1


def test_random_models_are_checked_in_eval(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "check", TARGET, "--arg", "dropout=0.5")
    assert status == 0
    assert "eval()" in err


def test_a_wrong_value_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launch = run_module.Run.launch

    def corrupted(self: run_module.Run, phase: object) -> None:
        launch(self, phase)  # type: ignore[arg-type]  # a Phase
        program = phase.program  # type: ignore[attr-defined]
        call = next(c for c in range(len(program)) if program.signatures[program.sig[c]].name == "out")
        value = int(program.first_value[call])
        arena = self.memory.arena(int(self.value_type[value]))
        arena[int(self.value_row[value])] += 0.5

    monkeypatch.setattr(run_module.Run, "launch", corrupted)
    status, out, _ = run(capsys, "check", TARGET)
    assert status == 1
    first = next(line for line in out.splitlines() if line.startswith("first:"))
    assert "out(f32[8])" in first
    assert "instance 0" in first
    assert "target_model.py:" in first


def test_a_wrong_gradient_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_backward = autograd.run_backward

    def doubled(*args: Any) -> dict[int, torch.Tensor]:
        found = run_backward(*args)
        return {key: grad * (2 if grad.shape == (3,) else 1) for key, grad in found.items()}

    monkeypatch.setattr(autograd, "run_backward", doubled)
    status, out, _ = run(capsys, "check", TARGET)
    assert status == 1
    assert "gradient of out.bias" in out
    assert "out(f32[8])" in out


def test_what_the_forward_raises_is_status_4(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "check", BROKEN)
    assert status == 4
    assert "no such tree" in err


STATES = f"{Path(__file__).with_name('states.py')}"


def test_a_model_that_counts_is_compared_from_the_same_state(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", f"{STATES}:counted")
    assert status == 0
    assert out.startswith("equal")
    assert "the same model runs again (instance 0, tensor 0 of its result)" in out


def test_a_global_is_as_it_was_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", f"{STATES}:counted_outside")
    assert status == 0
    assert "the same model runs again (instance 0, tensor 0 of its result)" in out


def test_what_the_loop_does_not_repeat_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", f"{STATES}:drawn_from_the_system")
    assert status == 1
    # By chance two draws of the loop are close to each other, and the batched one is not: that is different as well.
    assert "not comparable: the loop gives something else when it runs again" in out
    status, out, _ = run(capsys, "check", f"{STATES}:drawn_from_the_system", "--format", "json")
    assert status == 1
    assert not json.loads(out)["equal"] and json.loads(out)["unrepeatable"]


def test_what_differs_the_second_time_only_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batched, calls = Runnable.batched, []

    def wrong(self: Runnable, instances: Sequence[Any]) -> list[Any]:
        results = batched(self, instances)
        if len(instances) == 1:  # the loop
            return results
        calls.append(1)
        return results if len(calls) % 2 else [16 * x for x in results]

    monkeypatch.setattr(Runnable, "batched", wrong)
    status, out, _ = run(capsys, "check", TARGET)
    assert status == 1
    assert "instance 3, tensor 0 of its result, the second time: error" in out


def test_a_model_that_can_not_be_copied_is_status_4(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "check", f"{STATES}:locked")
    assert status == 4
    assert "can't be copied" in err and "__deepcopy__" in err


def test_the_first_example_of_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table has sparse gradients."""
    monkeypatch.delenv("FXBATCH_DATA", raising=False)  # generated trees have few words
    target = Path(__file__).parents[2] / "examples" / "tree_lstm.py"
    small = [x for name in ("trees=8", "hidden=8", "embedding=8") for x in ("--arg", name)]
    status, out, _ = run(capsys, "check", f"{target}:minibatch", *small)
    assert status == 0
    assert out.startswith("equal: 8 instances, 16 values, 9 gradients; referee: float64")


def test_a_terminal_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(terminal, "notices", lambda: console)
    assert list(terminal.counted([1, 2, 3], 3, "one by one")) == [1, 2, 3]
    with terminal.doing("7 instances, batched"):
        pass
    assert "one by one" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    assert "7 instances, batched" in screen.getvalue()


def test_a_pipe_sees_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", TARGET)[2] == ""
