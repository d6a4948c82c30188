"""Completion scripts: what bash offers at a cursor; the other scripts are checked by their own shell."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest
from fxbatch_cli import registry
from fxbatch_cli.completion import bash_script, fish_script, option_values, walk, zsh_script
from fxbatch_cli.dump import ALL_STAGES
from fxbatch_cli.main import build_parser, main


@pytest.fixture(scope="module")
def script() -> str:
    return bash_script(list(walk(build_parser(None), (), option_values())))


def offered(script: str, *words: str) -> list[str]:
    """What bash would offer for the last of `words`: of one with `=` or `:` what stands behind that."""
    line = " ".join(("fxbatch", *words))
    ask = f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; _fxbatch; printf "%s\\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return found.stdout.split()


def test_commands(script: str) -> None:
    assert offered(script, "d")[:2] == ["demo", "data"]
    names = [command.name for command in registry.COMMANDS]
    assert offered(script, "")[: len(names)] == names


def test_subcommands_options_and_choices(script: str) -> None:
    assert offered(script, "data", "")[:3] == ["list", "where", "get"]
    assert offered(script, "data", "where", "s") == ["sst"]
    assert offered(script, "demo", "--ep") == ["--epochs"]
    assert offered(script, "demo", "--epochs", "3", "--res") == ["--resume"]
    assert offered(script, "completion", "z") == ["zsh"]


def test_values_of_options(script: str) -> None:
    assert offered(script, "dump", "--stage", "f") == ["fused"]
    assert {"operation", "plan", "trace"} <= set(offered(script, "dump", "model.py:minibatch", "--stage", ""))
    assert offered(script, "draw", "--stage", "pl") == ["plan"]
    assert {"schedule=lookahead", "schedule=agenda"} < set(offered(script, "explain", "--option", "sched"))
    assert offered(script, "bench", "--option", "schedule=d") == ["depth"]
    assert offered(script, "diff", "--a", "fuse=") == ["True", "False"]
    assert offered(script, "check", "--option", "check=") == [], "a number"


def test_functions_of_a_file(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(
        "def minibatch(trees=8):\n    def within(): ...\ndef _own(): ...\ndef main(): ...\n"
    )
    Path("notes.txt").touch()
    Path("models").mkdir()
    assert offered(script, "explain", "mod") == ["models/", "model.py:"]
    assert offered(script, "dump", "model.py:") == ["minibatch", "main"]
    assert offered(script, "dump", "model.py:mi") == ["minibatch"]
    assert offered(script, "check", "gone.py:") == []
    assert offered(script, "dump", "--stage", "plan", "model.py:ma") == ["main"]
    assert offered(script, "explain", "--arg", "mod") == [], "its value is anything"


def test_choices_of_an_option() -> None:
    parser = argparse.ArgumentParser(prog="fxbatch")
    parser.add_argument("--format", choices=("text", "json"), help='it\'s "quoted" `so` 100%%')
    levels = list(walk(parser, ()))
    assert offered(bash_script(levels), "--format", "j") == ["json"]
    assert "-l format -x -a 'text json' -d 'its quoted so 100%'" in fish_script(levels)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_accepts_it(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    subprocess.run([shell, "-n", str(path)], check=True)


def test_zsh_uses_the_bash_script(script: str) -> None:
    levels = list(walk(build_parser(None), (), option_values()))
    assert zsh_script(levels).startswith("#compdef fxbatch\n")
    assert script in zsh_script(levels)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes_values_and_functions(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def minibatch(trees=8): ...\ndef main(): ...\n")
    levels = list(walk(build_parser(None), (), option_values()))
    (tmp_path / "script").write_text(fish_script(levels))

    def words(line: str) -> list[str]:
        ask = f"source script; complete -C '{line}'"
        done = subprocess.run(["fish", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
        return [x.split("\t")[0] for x in done.stdout.splitlines()]

    assert words("fxbatch dump --stage pl") == ["plan"]
    assert "schedule=depth" in words("fxbatch explain --option sched")
    assert words("fxbatch dump model.py:mi") == ["model.py:minibatch"]
    assert words("fxbatch explain mod") == ["model.py:"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_by_the_same_function(script: str, tmp_path: Path) -> None:
    """What bashcompinit does is set COMP_LINE and the like, and call the function."""
    (tmp_path / "model.py").write_text("def minibatch(trees=8): ...\n")
    levels = list(walk(build_parser(None), (), option_values()))
    (tmp_path / "script").write_text(zsh_script(levels))
    ask = """autoload -U +X compinit && compinit -u -D; source script
        emulate -L ksh; COMP_LINE="fxbatch dump --stage pl"; COMP_POINT=${#COMP_LINE}; _fxbatch
        print -l -- "${COMPREPLY[@]}" """
    done = subprocess.run(["zsh", "-f", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == set(ALL_STAGES), "zsh itself keeps those that begin so"
