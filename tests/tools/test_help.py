"""`--help` of every command fits a terminal of 80 columns, and its examples are commands that are there."""

from __future__ import annotations

import re
import shlex

import pytest
from fxbatch_cli.main import build_parser, main
from fxbatch_cli.registry import COMMANDS

NAMES = ["", *(command.name for command in COMMANDS)]


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*([name] if name else []), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_longer_than_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_of(name, monkeypatch, capsys).splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("", "completion")])
def test_the_examples_are_understood(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = help_of(name, monkeypatch, capsys).partition("examples:\n")[2].partition("\n\n")[0]
    commands = re.findall(r"^  fxbatch (.*?)(?:   .*)?(?: [|&].*)?$", examples, re.MULTILINE)
    assert commands and all(command.split()[0] == name for command in commands)
    for command in commands:
        build_parser([name]).parse_args(shlex.split(command))
