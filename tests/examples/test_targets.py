"""Each example is a target of the command, by its file and by its installed name, and a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fxbatch_cli.run_target import model_arguments
from fxbatch_cli.target import load_target

from fxbatch.decorator import find_autobatched

ROOT = Path(__file__).resolve().parents[2]
NOT_MODELS = {"__init__", "command", "train_sentiment", "count_lines", "training"}
FILES = [
    path.relative_to(ROOT)
    for folder in (ROOT / "examples", ROOT / "examples/fold")
    for path in sorted(folder.glob("*.py"))
    if path.stem not in NOT_MODELS
]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_it_is_a_target(path: Path) -> None:
    module = ".".join(["fxbatch_examples", *path.with_suffix("").parts[1:]])
    model, instances = load_target(f"{ROOT / path}:minibatch")
    decorated, owner = find_autobatched(model)
    assert len(decorated.split(owner, model_arguments(model, instances), {})) == len(instances) > 1
    assert len(load_target(f"{module}:minibatch")[1]) == len(instances)


def test_scripts_run_from_anywhere(tmp_path: Path) -> None:
    """All in one process: what a script finds on its path is its own folder, as `python FILE` has it."""
    code = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    before, sys.path[0] = sys.path[0], path.rpartition('/')[0]\n"
        "    sys.argv = [path, '--help']\n"
        "    try:\n        runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as left:\n        assert not left.code, path\n"
        "    sys.path[0] = before\n"
    )
    command = [sys.executable, "-c", code, *[str(ROOT / path) for path in FILES]]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": ""}
    )
    assert found.returncode == 0, found.stderr
    usages = [line for line in found.stdout.splitlines() if line.startswith("usage: ")]
    assert [line.split()[1] for line in usages] == [path.name for path in FILES]
