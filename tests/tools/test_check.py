"""`fxbatch check`: equal is 0; a wrong batched number is 1, with the operation and the instance."""

from __future__ import annotations

import json

import pytest
import torch

from fxbatch.runtime import run as run_module
from fxbatch.runtime.backward import Backward
from tests.tools.running import BROKEN, TARGET, run
from tools.compare import difference


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
        arena = self.arenas[int(self.value_type[value])].tensor
        assert arena is not None
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
    add = Backward._add

    def doubled(self: Backward, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        add(self, tensor, grad * (2 if tensor.shape == (3,) else 1))

    monkeypatch.setattr(Backward, "_add", doubled)
    status, out, _ = run(capsys, "check", TARGET)
    assert status == 1
    assert "gradient of out.bias" in out
    assert "out(f32[8])" in out


def test_what_the_forward_raises_is_status_4(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "check", BROKEN)
    assert status == 4
    assert "no such tree" in err


def test_difference_on_wrong_data() -> None:
    exact = torch.linspace(-1, 1, 9, dtype=torch.float64)
    loop = exact.float()
    assert difference(loop.clone(), loop, exact)[0] == ""
    assert "error" in difference(loop + 1e-4, loop, exact)[0]
    assert "f" in difference(loop.double(), loop, exact)[0]
    assert "NaN" in difference(torch.full((9,), torch.nan), loop, exact)[0]
    assert difference(torch.tensor([1]), torch.tensor([2]), torch.tensor([2]))[0] == "not equal"
    assert "no gradient" in difference(None, loop, exact)[0]
    assert difference(None, torch.zeros(2), torch.zeros(2))[0] == ""
    assert "[8]" in difference(loop[:8], loop, exact)[0]
