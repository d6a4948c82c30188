"""Completion scripts: what bash offers at a cursor; the other scripts are checked by their own shell."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest
from fxbatch_cli import registry
from fxbatch_cli.completion import bash_script, fish_script, walk, zsh_script
from fxbatch_cli.main import build_parser, main


@pytest.fixture(scope="module")
def script() -> str:
    return bash_script(list(walk(build_parser(None), ())))


def offered(script: str, *words: str) -> list[str]:
    """What bash would offer for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in ("fxbatch", *words))
    ask = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _fxbatch; printf "%s\\n" "${{COMPREPLY[@]}}"'
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
    levels = list(walk(build_parser(None), ()))
    assert zsh_script(levels).startswith("#compdef fxbatch\n")
    assert script in zsh_script(levels)
