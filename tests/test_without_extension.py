"""fxbatch as it is without any extension, where it was installed without a C compiler: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxbatch.trace.state import _fast
from tests.trace.test_fast import text_of_programs

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(_fast is None, reason="this is that process")


def python(*arguments: str, **variables: str) -> str:
    """What Python prints in such a process."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FEW = [
    *[f"tests/trace/test_{name}.py" for name in ("minibatch", "record", "rules", "quick")],
    "tests/runtime/test_backward.py",
    "tests/ragged/test_packed_forward.py",
]


@pytest.mark.parametrize(
    "paths",
    [FEW, pytest.param(["tests/trace", "tests/ragged", "tests/examples"], marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_tests_pass(paths: list[str]) -> None:
    output = python(
        "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.without_extension", *paths
    )
    assert " passed" in output


def test_what_is_written_in_c_runs_beside_sources() -> None:
    output = python(
        "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.without_extension",
        "tests/runtime/test_products_apart.py", WITH_C="1",
    )  # fmt: skip
    assert " passed" in output


TRAINING = """
import tests.without_extension, sys, torch
from fxbatch.runtime.strategy import AdaptiveSwitch
from examples.tree_lstm import minibatch
from tests.oracle import check_equal
from tests.trace.test_fast import text_of_programs
AdaptiveSwitch.on = False
model, trees = minibatch()
check_equal(model.eval(), trees)
print([n for n, m in sys.modules.items() if n.startswith("fxbatch") and str(m.__file__).endswith(".so")])
AdaptiveSwitch.on = True
print(text_of_programs())
"""


def test_batched_training_has_the_gradients_of_the_loop_and_programs_are_the_same() -> None:
    """What is recorded does not depend on who recorded it. One process: importing torch takes the longest."""
    compiled, _, programs = python("-c", TRAINING).partition("\n")
    assert compiled == "[]"
    assert programs.strip() == text_of_programs().strip()
