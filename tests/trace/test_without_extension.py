"""What is recorded in Python alone, where fxbatch was installed without a C compiler: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxbatch.trace.state import _fast
from tests.trace.test_fast import text_of_programs

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(_fast is None, reason="this is that process")


def python(*arguments: str) -> str:
    """What Python prints in such a process."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_programs_are_the_same() -> None:
    """What is recorded does not depend on who recorded it."""
    program = "import tests.without_extension, tests.trace.test_fast as t; print(t.text_of_programs())"
    assert python("-c", program).strip() == text_of_programs().strip()


FEW = [f"tests/trace/test_{name}.py" for name in ("minibatch", "record", "rules", "quick")]


@pytest.mark.parametrize(
    "paths", [FEW, pytest.param(["tests/trace"], marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_the_tests_of_the_trace(paths: list[str]) -> None:
    found = python(
        "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.without_extension", *paths
    )
    assert " passed" in found
