"""Measure your own model against its loop, or run the project's benchmarks.

examples:
  fxbatch bench model.py:minibatch --arg trees=64    your model
  fxbatch bench model.py:minibatch --no-backward --option schedule=depth
  fxbatch bench --quick                              every task, small
  fxbatch bench --task figures --threads 2           one task (see --list)
  fxbatch bench --task looks-table-1 --device cuda
  fxbatch bench --compare bench-results/2026-01-31T120000

Your model runs batched and one by one, in turns. With --quick, --task,
--compare, --resume or --report the project's own benchmarks run, and write a
report with plots. They are a folder of the source repository, not of the
installed package: `make bench` there runs them all. docs/benchmarks.md explains
the tasks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

from fxbatch.viz.describe import SCHEMA_VERSION

from .bench_target import measure
from .errors import CommandError, Status
from .forms import add_option_argument, parse_options, user_errors
from .run_target import Runnable
from .target import add_target_arguments, load_target
from .terminal import output

CHOSEN = (
    "quick",
    "task",
    "list",
    "compare",
    "resume",
    "report",
)  # what asks for the project's own benchmarks
ROOT = Path(__file__).resolve().parent.parent


def load_benchmarks(root: Path = ROOT) -> ModuleType | None:
    """The command of the repository's benchmarks, None where this is no repository."""
    if not (root / "benchmarks" / "command.py").is_file():
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("your own model")
    add_target_arguments(own, optional=True)
    add_option_argument(own)
    own.add_argument("--rounds", type=int, default=7, metavar="N", help="of both ways (default: 7)")
    own.add_argument("--no-backward", action="store_true", help="forward only, without gradients")
    own.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    benchmarks = load_benchmarks()
    if benchmarks is not None:
        benchmarks.add_arguments(parser)


def run_target(options: argparse.Namespace) -> int:
    """The user's model against its loop."""
    if options.rounds < 1:
        raise CommandError(f"--rounds {options.rounds}: at least 1")
    model, instances = load_target(options.target, options.arg)
    if not len(instances):
        raise CommandError(f"{options.target} returned no instances", status=Status.MODEL)
    target = Runnable.of(model, parse_options(options.option))
    with user_errors(options.target):
        found = measure(target, instances, rounds=options.rounds, backward=not options.no_backward)
    if options.format == "json":
        data = {"schema": "fxbatch", "version": SCHEMA_VERSION, "form": "bench", **found.to_dict()}
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        output().print(found.table())
        output().print(found.line, soft_wrap=True)
    return Status.OK


def run(options: argparse.Namespace) -> int:
    if options.target is not None:
        return run_target(options)
    benchmarks = load_benchmarks()
    if benchmarks is None or not any(getattr(options, name) for name in CHOSEN):
        raise CommandError("TARGET is missing", hint="for example: fxbatch bench model.py:minibatch")
    try:
        status = benchmarks.run(options, command=shlex.join(["fxbatch", *sys.argv[1:]]))
    except benchmarks.UsageError as error:
        raise CommandError(str(error), hint=error.hint) from error
    return Status.DIFFERENCE if status else Status.OK
