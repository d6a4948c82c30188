"""Promises that belong to no other test: determinism, data without code, escaped pages."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch

import fxbatch
from tests import models as M
from tests.oracle import run
from tests.ordinary.states import sources
from tests.trust import test_hard_cases
from tests.trust.programs import model, vectors

ROOT = Path(__file__).resolve().parents[2]


def test_runs_are_equal_bit_by_bit() -> None:
    made, trees = M.TreeLSTM(), M.trees(0, [3, 9, 14, 1])
    first = run(made, [trees])
    for _ in range(3):
        again = run(made, [trees])
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, again, strict=True))


def _missing(text: str) -> list[str]:
    """What a text of promises names that does not exist: files, tests, cases of tests/ordinary/states.py."""
    last, missing, cases = "", [], sources()
    for path, name, case in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?(?:\[([^\]`]+)\])?`", text):
        last = path or last
        if path and not (ROOT / path).is_file():
            missing.append(path)
        elif name and f"def {name}(" not in (ROOT / last).read_text():
            missing.append(f"{last}::{name}")
        if case and case not in cases:
            missing.append(f"[{case}]")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    return missing + [row for row in rows if "tests/" not in row and "`[" not in row]


def test_every_test_that_a_promise_names_exists() -> None:
    promises, versions = (ROOT / "docs" / "promises.md").read_text().split("## Supported versions")
    assert _missing(promises) == []
    assert "PyTorch" in versions


def test_a_promise_without_its_test_is_found() -> None:
    wrong = (
        "| a | `tests/nothing.py` |\n| b | `tests/oracle.py::nothing` |\n| c | `[nothing]` |\n| d | soon |"
    )
    assert _missing(wrong) == ["tests/nothing.py", "tests/oracle.py::nothing", "[nothing]", "| d | soon |"]


def test_every_hard_case_has_its_test() -> None:
    folder = Path(__file__).parent
    listed = re.findall(r"\btest_\w+", str(test_hard_cases.__doc__))
    written = re.findall(r"^def (test_\w+)", "\n".join(f.read_text() for f in folder.glob("test_*.py")), re.M)
    assert len(listed) > 40 and not set(listed) - set(written) - {"test_every_hard_case_has_its_test"}


def test_no_loader_runs_code_from_data() -> None:
    """`torch.load` and `np.load` say so in each call; pickle is used for the user's own functions only."""
    for path in sorted([*(ROOT / "fxbatch").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        source = path.read_text()
        for call in re.findall(r"torch\.load\([^)]*\)", source):
            assert "weights_only=True" in call, f"{path.name}: {call}"
        for call in re.findall(r"np\.load\([^)]*\)", source):
            assert "allow_pickle=False" in call, f"{path.name}: {call}"
        assert "pickle.load" not in source or path.name == "traces.py", path.name
        assert not re.search(r"\b(yaml\.load|marshal\.load|shelve\.open)\b", source), path.name


def test_values_are_never_pickled() -> None:
    def forward(self: object, x: torch.Tensor) -> torch.Tensor:
        pickle.dumps(self.a(x))  # type: ignore[attr-defined]
        return x

    with pytest.raises(fxbatch.TraceError, match="pickled"):
        model(forward, {"a": torch.nn.Linear(4, 4)})(vectors(4, grad=False))
