"""A user's program under `mypy --strict`: decorated functions take minibatches and give what they really give."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("typed_program.py")


def test_a_users_program_under_mypy_strict() -> None:
    """Its mistakes are found, each where it is, and nothing else is."""
    root = PROGRAM.parents[1]
    options = ["--strict", "--config-file=", "--no-error-summary", f"--cache-dir={root / 'build' / 'mypy'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--follow-imports=silent", str(PROGRAM)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    reported = [int(line) for line in re.findall(r":(\d+): error: ", done.stdout)]
    lines = PROGRAM.read_text().splitlines()
    marked = [i for i, line in enumerate(lines, 1) if line.endswith("  # error")]
    assert reported == marked, done.stdout
    assert len(marked) == 5


def test_the_program_runs_up_to_its_mistakes(tmp_path: Path) -> None:
    """What the types say is so at run time."""
    text = PROGRAM.read_text().partition("model.forward(Tree(1))  # error")[0]
    (tmp_path / "program.py").write_text(text.replace("assert_type(", "print("))
    runpy.run_path(str(tmp_path / "program.py"))
