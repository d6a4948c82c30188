"""The command as a user meets it: help, versions, one-line errors, exit statuses, pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fxbatch_cli import registry
from fxbatch_cli.errors import CommandError, Status
from fxbatch_cli.main import build_parser, main

from fxbatch.errors import DataError, MissingDataError, OptionError, TraceError
from fxbatch.extensions import EXTENSIONS

Captured = pytest.CaptureFixture[str]


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == Status.OK
    out = capsys.readouterr().out
    assert out.startswith("fxbatch ")
    assert "torch 2." in out
    assert f"\nextensions: all {len(EXTENSIONS)} compiled\n" in out


def test_help_lists_every_command_and_exit_status(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for command in registry.COMMANDS:
        assert f"\n    {command.name}" in out
    for status in Status:
        assert f"\n  {int(status)}" in out


@pytest.mark.parametrize("name", [command.name for command in registry.COMMANDS])
def test_every_command_has_help_with_examples(name: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert f"fxbatch {name}" in out.partition("examples:")[2]
    assert "--traceback" in out


def test_every_command_module_is_registered() -> None:
    """A module with `run` and `add_arguments` that nobody can call is a forgotten line in the registry."""
    folder = Path(__file__).resolve().parents[2] / "tools"
    commands = {
        path.stem
        for path in folder.glob("*.py")
        if "\ndef run(" in path.read_text() and "\ndef add_arguments(" in path.read_text()
    }
    assert commands == {command.module for command in registry.COMMANDS}


def test_no_command_prints_help(capsys: Captured) -> None:
    assert main([]) == Status.USAGE
    assert "usage: fxbatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["dmeo"], ["fxbatch: no command 'dmeo'", "hint: did you mean `fxbatch demo`?"]),
        (
            ["data", "lost"],
            ["fxbatch: argument ACTION: invalid choice: 'lost'", "hint: see `fxbatch data --help`"],
        ),
        (
            ["data", "list", "--wide"],
            ["fxbatch: unrecognized arguments: --wide", "hint: see `fxbatch --help`"],
        ),
    ],
)
def test_usage_errors_are_two_lines(arguments: list[str], lines: list[str], capsys: Captured) -> None:
    assert main(arguments) == Status.USAGE
    got = capsys.readouterr()
    assert got.out == ""
    found = got.err.splitlines()
    assert len(found) == 2
    assert found[0].startswith(lines[0])
    assert found[1] == lines[1]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (CommandError("no such thing", hint="try it"), Status.USAGE, "fxbatch: no such thing"),
        (CommandError("gone", status=Status.DATA), Status.DATA, "fxbatch: gone"),
        (DataError("dev.txt:3:1: bad"), Status.DATA, "fxbatch: dev.txt:3:1: bad"),
        (OptionError("no schedule 'x'"), Status.USAGE, "fxbatch: no schedule 'x'"),
        (TraceError("can't\n  record"), Status.MODEL, "fxbatch: can't record"),
        (KeyError("k"), Status.INTERNAL, "fxbatch: KeyError: 'k'"),
        (KeyboardInterrupt(), Status.INTERRUPTED, "fxbatch: interrupted"),
    ],
)
def test_errors_become_statuses(
    error: BaseException, status: Status, line: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> int:
        raise error

    module = registry.COMMANDS[-1].load()
    monkeypatch.setattr(module, "run", fail)
    assert main(["completion", "bash"]) == status
    err = capsys.readouterr().err
    assert err.splitlines()[0] == line
    assert "Traceback" not in err
    if not isinstance(error, KeyboardInterrupt):
        main(["completion", "bash", "--traceback"])
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "hint"),
    [(DataError("x.pt: no checkpoint"), ""), (MissingDataError("no sst"), "hint: `fxbatch data list` shows")],
)
def test_hints_fit_the_fault(
    error: Exception, hint: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr(registry.COMMANDS[-1].load(), "run", fail)
    assert main(["completion", "bash"]) == Status.DATA
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + bool(hint)
    assert lines[-1].startswith(hint)


def test_no_error_is_longer_than_a_screen(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise CommandError("word " * 10_000)

    monkeypatch.setattr(registry.COMMANDS[-1].load(), "run", fail)
    main(["completion", "bash"])
    err = capsys.readouterr().err
    assert len(err) < 80 * 24
    assert "(49,999 characters; --traceback shows them)" in err


def test_brackets_in_messages_are_printed_as_they_are(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> int:
        raise CommandError("cell: input 1 takes f32[4], got f32[red]")

    monkeypatch.setattr(registry.COMMANDS[-1].load(), "run", fail)
    main(["completion", "bash"])
    assert capsys.readouterr().err == "fxbatch: cell: input 1 takes f32[4], got f32[red]\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from fxbatch_cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'fxbatch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "fxbatch", "dmeo"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.splitlines()[0] == "fxbatch: no command 'dmeo'"


@pytest.mark.parametrize(
    ("environment", "red"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
    ids=str,
)
def test_colour_on_demand_only(
    environment: dict[str, str], red: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert main(["dmeo"]) == 2
    found = capsys.readouterr().err
    assert ("\x1b[31" in found or "\x1b[1;31" in found) is red and (bool(environment) or "\x1b[" not in found)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m fxbatch_cli.main completion bash | head -n 1; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    assert lines[0].startswith("# bash completion")
    assert lines[1] in ("0", "141")  # 0 when all of it fitted in the pipe
    assert found.stderr == ""


def test_only_the_chosen_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = registry.Command.load
    monkeypatch.setattr(registry.Command, "load", lambda c: loaded.append(c.name) or load(c))
    build_parser(["data"])
    assert loaded == ["data"]
