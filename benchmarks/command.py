"""The command line of the benchmarks: options in, a report and an exit status out.

run(parser.parse_args(["--quick", "--task", "figures"]), command="python -m benchmarks --quick --task
figures")
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table as RichTable

from benchmarks.compare import compare_runs
from benchmarks.docs_page import DocsError, update_file
from benchmarks.driver import run_tasks
from benchmarks.registry import TASKS
from benchmarks.report import number_text, read_run, seconds_text, tables_of, write_report, write_results
from benchmarks.results import CaseResult, ResultsError, RunResult, Table
from benchmarks.task import Settings, Task
from fxbatch.runtime.strategy import AdaptiveSwitch

EXAMPLES = """\
examples:
  python -m benchmarks --quick                    every task at small size, in under three minutes
  python -m benchmarks --task figures --threads 2
  python -m benchmarks --task looks-table-1 --device cuda
  python -m benchmarks --resume bench-results/2026-01-31T120000
  python -m benchmarks --compare bench-results/2026-01-31T120000
  python -m benchmarks --report results.json      the report of a stored run again, without running
"""


class UsageError(Exception):
    """Wrong usage: one line, and a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks` and of `fxbatch bench`."""
    add = parser.add_argument
    add("--quick", action="store_true", help="every task at small size, in under three minutes")
    add(
        "--task",
        action="append",
        metavar="NAME",
        help="run this task only; may be repeated (--list names them)",
    )
    add("--list", action="store_true", help="list the tasks, and leave")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 (default: %(default)s)")
    add("--threads", type=int, help="threads of torch's CPU operations (default: 2, or 1 on one core)")
    add("--repeats", type=int, help="timed rounds of a case (default: 7, quick: 3)")
    add("--warmup", type=int, help="untimed rounds before them (default: 2, quick: 1)")
    add("--budget", type=float, help="seconds a case; one round is always timed (default: 15, quick: 2)")
    add("--seed", type=int, default=0, help="of models and made-up data (default: %(default)s)")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the real data (default: FXBATCH_DATA, ./data, cache)",
    )
    add("--no-peers", action="store_true", help="leave out packages that are not part of this project")
    add(
        "--dynet",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="a build of DyNet for task `peers`, imported from there; may be repeated (default: the one installed)",
    )
    add("--no-compile", action="store_true", help="leave out competitors under torch.compile")
    add("--json", metavar="FILE", type=Path, help="write the results there too (- is standard output)")
    add("-o", "--output", metavar="DIR", type=Path, help="folder of the report (default: bench-results/DATE)")
    add(
        "--compare",
        metavar="FILE",
        type=Path,
        help="compare with a stored run: its results.json or its folder",
    )
    add(
        "--resume",
        metavar="FILE",
        type=Path,
        help="go on with a run that ended half way: its results.json or its folder",
    )
    add("--docs", metavar="FILE", type=Path, help="put the tables into this page, between its markers")
    add("--report", metavar="FILE", type=Path, help="make the report of a stored run, and run nothing")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks`: exit status 0, 1 where a competitor failed or differs, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure fxbatch against what a user would do instead.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    given = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True, highlight=False)
    try:
        return run(parser.parse_args(given), command=shlex.join(["python", "-m", "benchmarks", *given]))
    except UsageError as error:
        console.print(f"benchmarks: {error}", markup=False)
        if error.hint:
            console.print(f"hint: {error.hint}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("benchmarks: interrupted")
        return 130


def run(options: argparse.Namespace, *, command: str) -> int:
    """Do what the options say. UsageError, DataError; 1 where a competitor failed, else 0."""
    AdaptiveSwitch.on = False  # batching itself is measured, but where a task says otherwise
    output = Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False)
    if options.list:
        _list(output)
        return 0
    earlier = _stored(options.compare) if options.compare else None
    if options.report:
        result = _stored(options.report)
        folder = options.output or options.report.resolve().parent
    else:
        result, folder = _measure(options, command)
    files = write_report(result, folder, earlier=earlier)
    _write_json(result, options.json)
    if options.docs is not None:
        try:
            update_file(options.docs, result)
        except (DocsError, OSError) as error:
            raise UsageError(f"{options.docs}: {error}") from error
    if options.json != Path("-"):
        _show(output, result, earlier)
        output.print(f"report: {files[-1]}", markup=False, soft_wrap=True)
    for failure in result.failures:
        Console(stderr=True, highlight=False).print(f"FAILED {failure}", markup=False, style="bold red")
    return 1 if result.failures else 0


def _measure(options: argparse.Namespace, command: str) -> tuple[RunResult, Path]:
    """The run and its folder, in which results.json is written anew after each task."""
    tasks, settings = choose_tasks(options.task), settings_of(options)
    before = _stored(options.resume) if options.resume else None
    folder = options.output or (options.resume and _folder_of(options.resume))
    notices = Console(stderr=True, highlight=False)

    def folder_of(result: RunResult) -> Path:
        return folder or Path("bench-results") / result.date[:19].replace(":", "")

    def keep(result: RunResult) -> None:
        kept[:] = [write_results(result, folder_of(result))]

    kept: list[Path] = []
    try:
        result = _run(tasks, settings, command, notices, options.json == Path("-"), keep, before)
    except ValueError as error:
        raise UsageError(f"{options.resume}: can't go on with this run: {error}") from error
    except KeyboardInterrupt:
        if kept:
            notices.print(f"the finished tasks are in {kept[0]}; --resume takes it", markup=False)
        raise
    return result, folder_of(result)


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.resolve().parent


def _stored(path: Path) -> RunResult:
    try:
        return read_run(path)
    except (OSError, ResultsError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{path}: no stored run: {error}", "a results.json of an earlier run, or its folder"
        ) from error


def _list(output: Console) -> None:
    table = RichTable("task", "what", box=None, pad_edge=False)
    for task in TASKS:
        table.add_row(task.name, escape(task.title))
    output.print(table)


def choose_tasks(names: Sequence[str] | None) -> list[Task]:
    """The tasks of these names in the registry's order; UsageError for an unknown one."""
    known = [task.name for task in TASKS]
    for name in names or ():
        if name not in known:
            raise UsageError(f"no task {name!r}", f"the tasks are {', '.join(known)}")
    return [task for task in TASKS if not names or task.name in names]


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the options describe; UsageError where the device is not there."""
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise UsageError(f"--device {options.device}: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {options.device}: torch sees no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {options.device}: the benchmarks know cpu and cuda")
    for name in ("threads", "repeats"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UsageError(f"--{name}: at least 1")
    for path in options.dynet:
        if not (path / "dynet.py").is_file():
            raise UsageError(f"--dynet {path}: no dynet.py there")
    quick = options.quick
    return Settings(
        quick=quick,
        device=device,
        threads=options.threads or min(2, os.cpu_count() or 1),
        repeats=options.repeats or (3 if quick else 7),
        warmup=options.warmup if options.warmup is not None else (1 if quick else 2),
        budget=options.budget if options.budget is not None else (2.0 if quick else 15.0),
        seed=options.seed,
        data=options.data,
        peers=not options.no_peers,
        dynet=tuple(path.resolve() for path in options.dynet),
        compiled=not options.no_compile and not quick,
    )


class Bar:
    """A Watcher: a line a task with its case and competitor, and a line a finished case."""

    name = ""

    def __init__(self, progress: Progress, tasks: int) -> None:
        self.progress = progress
        self.all = progress.add_task("benchmarks", total=tasks, case="")
        self.begun = 0

    def task(self, name: str, title: str) -> None:
        self.progress.update(self.all, description=escape(name), completed=self.begun, case="")
        self.begun += 1

    def case(self, name: str) -> None:
        self.name = name
        self.progress.update(self.all, case=escape(name))

    def run(self, contender: str) -> None:
        self.progress.update(self.all, case=escape(f"{self.name}: {contender}"))

    def finished(self, case: CaseResult) -> None:
        times = ", ".join(f"{name} {seconds_text(e.wall.median)}" for name, e in case.entries.items())
        counted = ", ".join(f"{name} {number_text(n)}" for name, n in case.numbers.items())
        self.progress.console.print(f"  {case.name}: {times or counted or 'nothing ran'}", markup=False)

    def failed(self, what: str, reason: str) -> None:
        self.progress.console.print(f"  {what}: FAILED: {reason}", markup=False, style="bold red")

    def skipped(self, what: str, reason: str) -> None:
        self.progress.console.print(f"  {what}: skipped: {reason}", markup=False, style="dim")


def _run(
    tasks: list[Task],
    settings: Settings,
    command: str,
    notices: Console,
    quiet: bool,
    keep: Callable[[RunResult], None],
    before: RunResult | None,
) -> RunResult:
    said = f"{settings.threads} threads, {settings.device}, {settings.repeats} repeats"
    notices.print(f"{said} after {settings.warmup} untimed", markup=False)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[case]}"),
    )  # fmt: skip
    with Progress(*columns, console=notices, transient=True, disable=quiet) as progress:
        bar = Bar(progress, len(tasks))
        return run_tasks(tasks, settings, command=command, watcher=bar, keep=keep, before=before)


def _write_json(result: RunResult, path: Path | None) -> None:
    if path is None:
        return
    text = json.dumps(result.to_json(), indent=1) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def _show(output: Console, result: RunResult, earlier: RunResult | None) -> None:
    for task in result.tasks:
        output.rule(escape(task.title), align="left")
        if task.skipped:
            output.print(f"skipped: {task.skipped}", markup=False)
        for table in task.tables or tables_of(task):
            _show_table(output, table)
    if earlier is not None:
        _show_table(output, compare_runs(earlier, result))


def _show_table(output: Console, table: Table) -> None:
    shown = RichTable(
        *(escape(c) for c in table.columns), title=escape(table.title), title_justify="left", box=None
    )
    for row in table.rows:
        shown.add_row(*(escape(number_text(cell)) for cell in row))
    output.print(shown)
    if table.note:
        output.print(table.note, markup=False, style="dim")
