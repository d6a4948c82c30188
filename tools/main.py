"""The entry point of `fxbatch`: command line in, exit status out.

main(["demo", "--epochs", "2"])      # 0
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.text import Text

from .errors import STATUS_TEXT, CommandError, Status
from .registry import COMMANDS, Command
from .terminal import notices

LONGEST = 1_000  # characters of an error: half a screen of 80 columns

_EXAMPLES = """\
examples:
  fxbatch explain model.py:minibatch    what batching did to your own model
  fxbatch bench model.py:minibatch      how much it gains here
  fxbatch check model.py:minibatch      whether values and gradients are right
  fxbatch demo                          train a Tree-LSTM
  fxbatch data get sst                  download its treebank first

model.py:minibatch is a function of yours that returns (model, instances).
"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are CommandErrors: one line, a hint, status 2."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message, hint=f"see `{self.prog} --help`")


def build_parser(chosen: Sequence[str] | None) -> Parser:
    """The whole command's parser; only `chosen` commands are imported and get arguments (None: all)."""
    statuses = "\n".join(f"  {int(status):<4}{text}" for status, text in STATUS_TEXT)
    more = "`fxbatch COMMAND --help` shows a command's options and examples."
    parser = Parser(
        prog="fxbatch",
        description="Write a PyTorch model for one instance, and run it on a minibatch.",
        epilog=f"{_EXAMPLES}\nexit statuses:\n{statuses}\n\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="store_true", help="print the versions of fxbatch and torch, and leave"
    )
    parser.add_argument("--traceback", action="store_true", help="on an error, print the whole traceback")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for command in COMMANDS:
        _add_command(commands, command, filled=chosen is None or command.name in chosen)
    return parser


def _add_command(commands: argparse._SubParsersAction[Parser], command: Command, *, filled: bool) -> None:
    if not filled:
        commands.add_parser(command.name, help=command.summary)
        return
    module = command.load()
    text = inspect.cleandoc(module.__doc__ or "")
    summary, _, rest = text.partition("\n")
    sub = commands.add_parser(
        command.name,
        help=command.summary,
        description=summary,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(sub)
    sub.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="on an error, print the whole traceback",
    )
    sub.set_defaults(run=module.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; never raises, except SystemExit for --help."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in given
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes standard output once more when it ends: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.PIPE
    except KeyboardInterrupt:
        notices().print("fxbatch: interrupted")
        return Status.INTERRUPTED
    except CommandError as error:
        return _report(error, str(error), error.hint, error.status, show_traceback)
    except Exception as error:  # noqa: BLE001 - the one place that turns errors into exit statuses
        return _report(error, *_describe(error), show_traceback)


def _run(given: Sequence[str]) -> int:
    command = next((word for word in given if not word.startswith("-")), "")
    names = [c.name for c in COMMANDS]
    if command and command not in names:
        close = difflib.get_close_matches(command, names, n=1)
        raise CommandError(
            f"no command {command!r}",
            hint=f"did you mean `fxbatch {close[0]}`?" if close else f"the commands are {', '.join(names)}",
        )
    parser = build_parser([command])
    options = parser.parse_args(given)
    if options.version:
        print(version_text())
        return Status.OK
    if not options.command:
        parser.print_help()
        return Status.USAGE
    return int(options.run(options))


def version_text() -> str:
    """`fxbatch 0.1.0, torch 2.13.0, Python 3.11.9`, and which extensions there are, without importing torch."""
    torch = importlib.metadata.version("torch")
    python = ".".join(map(str, sys.version_info[:3]))
    package = importlib.util.find_spec("fxbatch")
    (folder,) = (package and package.submodule_search_locations) or ("",)
    extensions = runpy.run_path(str(Path(folder) / "extensions.py"))
    every, missing = extensions["EXTENSIONS"], extensions["missing"]()
    state = f"all {len(every)} compiled"
    if missing:
        some = f"{len(every) - len(missing)} of {len(every)} compiled, not {', '.join(missing)}"
        state = (
            some if len(missing) < len(every) else "none compiled: all runs in Python (docs/dependencies.md)"
        )
    return f"fxbatch {importlib.metadata.version('fxbatch')}, torch {torch}, Python {python}\nextensions: {state}"


def _describe(error: Exception) -> tuple[str, str, Status]:
    """(message, hint, status) of an error that no command expected."""
    errors = importlib.import_module("fxbatch.errors")  # late: it imports torch
    if isinstance(error, errors.DataError):
        missing = isinstance(error, errors.MissingDataError)
        return str(error), "`fxbatch data list` shows what is where" if missing else "", Status.DATA
    if isinstance(error, errors.OptionError):
        return str(error), "", Status.USAGE
    if isinstance(error, errors.FxbatchError):
        return str(error), "--traceback shows where", Status.MODEL
    return (
        f"{type(error).__name__}: {error}",
        "this is a mistake of fxbatch; please report it with the output of --traceback",
        Status.INTERNAL,
    )


def _report(error: Exception, message: str, hint: str, status: Status, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exception(error)
    console = notices()
    line = " ".join(message.split())
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ... ({len(line):,} characters; --traceback shows them)"
    console.print(Text.assemble(("fxbatch: ", "bold red"), line), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("hint: ", "bold"), hint), soft_wrap=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
