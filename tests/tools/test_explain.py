"""`fxbatch explain`: rules, lines, launches, what would help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fxbatch
from tests.tools import target_model
from tests.tools.running import BROKEN, TARGET, run


def test_text_names_operations_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", TARGET)
    assert status == 0
    for word in ("embed", "cell", "target_model.py:", "no order needs fewer", "launches"):
        assert word in out


def test_json_counts_launches(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", TARGET, "--format", "json")
    found = json.loads(out)
    assert found["form"] == "explanation"
    assert found["instances"] == 4
    assert found["launches_after"] < found["launches_before"]
    assert found["steps"] >= found["lower_bound"] > 0


def test_bytes_that_are_copied_read_and_held(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", TARGET, "--format", "json")
    found = json.loads(out)
    assert 0 < found["bytes_gathered"] < found["bytes_read"], "views are read, not copied"
    minibatch = fxbatch.compile_minibatch(*target_model.minibatch())
    arenas = minibatch.plan.arenas
    values = sum(
        int(n) * t.numel * t.dtype.itemsize for n, t in zip(minibatch.plan.capacity, arenas, strict=True)
    )
    assert found["bytes_held"] >= values > 0


def test_what_the_forward_raises_is_status_4(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "explain", BROKEN)
    assert status == 4
    assert "no such tree" in err
    assert "target_model.py:" in err


def test_at_80_columns_nothing_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "explain", TARGET)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    for row in fxbatch.explain(*target_model.minibatch()).operations:
        assert row.operation in out
        assert row.location in out
    assert "embed(i64[]) -> (f32[8])" in out
    assert "why an operation: embed" in out


def test_instances_that_are_tuples_are_the_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    for command in ("explain", "check"):
        status, out, err = run(capsys, command, f"{tmp_path / 'pairs.py'}:minibatch")
        assert (status, err) == (0, ""), out


PAIRS = """
import fxbatch, torch
class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
    @fxbatch.autobatch
    def forward(self, source, target):
        return self.linear(source) * target
def minibatch():
    return Pairs(), [(torch.randn(3), torch.randn(3)) for _ in range(4)]
"""


def test_what_is_kept_of_structures_is_shown() -> None:
    model, instances = target_model.minibatch()
    model(instances)  # a plan is kept where its structure comes again
    found = fxbatch.explain(model, instances)
    assert found.kept["plan"] >= 1 and found.kept_bytes > 0
    (line,) = [line for line in found.details if line.startswith("kept for structures that come again: ")]
    assert " plan 1" in line


def test_verbose_adds_memory_and_products(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (run(capsys, "explain", TARGET, *more)[1] for more in ((), ("--verbose",)))
    assert "memory for values" not in short and "memory for values" in long
    assert "inputs of launches" not in short and "inputs of launches" in long


UNDECORATED = """
import torch
class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
    def forward(self, x):
        print("as it goes")
        return self.linear(x).tanh()
def minibatch():
    print("to begin with")
    return Plain(), list(torch.randn(4, 3))
"""


def test_an_undecorated_model_is_shown_as_it_would_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And what the user's code prints is no part of the results."""
    (tmp_path / "plain.py").write_text(UNDECORATED)
    status, out, err = run(capsys, "explain", f"{tmp_path / 'plain.py'}:minibatch", "--format", "json")
    explanation = json.loads(out)
    assert status == 0
    assert (explanation["launches_before"], explanation["launches_after"]) == (4, 1), (
        "the two are one operation"
    )
    assert "it is not decorated" in explanation["strategy"]
    assert err.startswith("to begin with\n") and "as it goes\n" in err


def test_a_class_is_no_model() -> None:
    with pytest.raises(
        fxbatch.MinibatchError, match="Tree is a class: the model comes first, an object of it"
    ):
        fxbatch.explain(target_model.Tree, [1, 2])
