"""Measure fxbatch against what a user would do instead, and write a report with plots.

examples:
  fxbatch bench --quick                      every task at small size, in under three minutes
  fxbatch bench --task figures --threads 2   one task (--list names them)
  fxbatch bench --task looks-table-1 --device cuda
  fxbatch bench --compare bench-results/2026-01-31T120000

The benchmarks are a folder of the source repository, not of the installed package: run this command from an
editable install (`make venv`), or `python -m benchmarks` in the repository. docs/benchmarks.md explains the
tasks.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

from .errors import CommandError, Status

ROOT = Path(__file__).resolve().parent.parent


def load_benchmarks(root: Path = ROOT) -> ModuleType | None:
    """The command of the repository's benchmarks, None where this is no repository."""
    if not (root / "benchmarks" / "command.py").is_file():
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = load_benchmarks()
    if benchmarks is not None:
        benchmarks.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    benchmarks = load_benchmarks()
    if benchmarks is None:
        raise CommandError(
            "the benchmarks are not part of the installed package",
            hint="clone the repository and run `make bench` there",
        )
    try:
        status = benchmarks.run(options, command=shlex.join(["fxbatch", *sys.argv[1:]]))
    except benchmarks.UsageError as error:
        raise CommandError(str(error), hint=error.hint) from error
    return Status.DIFFERENCE if status else Status.OK
