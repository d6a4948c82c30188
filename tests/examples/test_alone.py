"""What an example needs besides its file: nothing for those to copy, no data for those that make some."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fxbatch_examples import deep_sets, graph_attention, molecules, tree_lstm

from fxbatch.data.generated import WORTH, generate_molecules

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder that is searched has any data."""
    monkeypatch.delenv("FXBATCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def imported(path: Path) -> set[str]:
    """The packages that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", ["tree_lstm", "distributed"])
def test_files_to_copy_import_nothing_of_ours_but_fxbatch(name: str) -> None:
    assert imported(EXAMPLES / f"{name}.py") <= {"torch", "fxbatch", *sys.stdlib_module_names}


@pytest.mark.parametrize("example", [molecules, deep_sets, graph_attention])
@pytest.mark.usefixtures("no_data")
def test_molecules_are_generated_where_none_are_found(
    example: object, capsys: pytest.CaptureFixture[str]
) -> None:
    error = example.main(["--epochs", "1", "--limit", "40"])  # type: ignore[attr-defined]  # a module
    assert 0 < error < 10
    assert "generated" in capsys.readouterr().out


def test_generated_molecules_follow_their_rule() -> None:
    found = generate_molecules(20)
    assert [m.bonds.tolist() for m in found] == [m.bonds.tolist() for m in generate_molecules(20)]
    for m in found:
        ends = m.atoms[m.bonds.reshape(-1)]
        assert m.targets.item() == pytest.approx(sum(WORTH[z] for z in ends.tolist()), abs=1e-4)
        assert len({tuple(bond) for bond in m.bonds.tolist()}) == len(m.bonds) and m.bonds.max() < len(m)


@pytest.mark.usefixtures("no_data")
def test_the_tree_lstm_trains_batched_as_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--limit", "40", "--hidden", "8", "--epochs", "1"]
    scores = [tree_lstm.main([*options, *more]) for more in ([], ["--disabled"])]
    assert abs(scores[0] - scores[1]) <= 0.1
    assert capsys.readouterr().out.count("epoch 1") == 2


# A process imports torch; each file runs in a fork of it as `python FILE ARGUMENTS` does.
FORKS = """
import os, runpy, sys, torch
for file, *arguments in map(str.split, sys.argv[1:]):
    if not os.fork():
        sys.argv, sys.path[0] = [file, *arguments], os.path.dirname(file)
        runpy.run_path(file, run_name="__main__")
        os._exit(0)
    print("exit", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_files_to_copy_have_help_and_the_distributed_example_alone_says_what_to_type(tmp_path: Path) -> None:
    names = ["tree_lstm", "distributed"]
    for name in names:
        (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    runs = [*(f"{tmp_path / name}.py --help" for name in names), str(EXAMPLES / "distributed.py")]
    out = subprocess.run(
        [sys.executable, "-c", FORKS, *runs], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [text.partition("\n")[0] for text in out.stdout.split("exit ")[1:]] == ["0", "0", "2"], out.stderr
    assert out.stdout.count("usage") == 2
    assert "torchrun --nproc-per-node 2 examples/distributed.py" in out.stderr


def test_kinds_of_generated_molecules_are_learnt() -> None:
    prepared, (kinds, _, targets), _ = molecules.prepare(generate_molecules(30), "cpu")
    assert (len(prepared), targets) == (30, 1) and kinds >= 3
    assert torch.stack([m.target for m in prepared]).std().item() == pytest.approx(1.0, abs=1e-3)
