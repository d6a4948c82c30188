"""The commands, as one literal tuple. A command is a file tools/<module>.py and a line here.

Such a module has two functions, and a docstring whose text after the first line is printed below the
options of `fxbatch <name> --help`:

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(options: argparse.Namespace) -> int: ...    # the exit status, see errors.py

It is imported only when its command is used, so that `fxbatch --help` doesn't wait for torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: what it is called, one line of help, and the module of this package that has it."""

    name: str
    summary: str
    module: str

    def load(self) -> ModuleType:
        return importlib.import_module(f".{self.module}", __package__)


COMMANDS = (
    Command("demo", "train a Tree-LSTM on the Stanford Sentiment Treebank", "demo"),
    Command("data", "find and download the data sets of the examples", "data"),
    Command("bench", "measure your own model against its loop, or run the project's benchmarks", "bench"),
    Command("dump", "print one stage of a minibatch: calls, schedule, plan, code", "dump"),
    Command("draw", "draw a minibatch: one HTML page with all stages, or SVG and PNG", "draw"),
    Command("explain", "show calls and launches, what did not batch and why, what would help", "explain"),
    Command("profile", "time a minibatch by phase and by operation", "profile"),
    Command("diff", "compare two plans of one minibatch, side by side", "diff"),
    Command("check", "compare batched values and gradients with the loop", "check"),
    Command("completion", "print a script that completes this command in bash, zsh or fish", "completion"),
)
