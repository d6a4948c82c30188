"""Put the tables of a run into docs/benchmarks.md, between its markers, with command, machine and date.

In: a full run and the page. Out: the page with the sections of the run's tasks replaced, all else as it was.

    <!-- figures: scale -->
    ...                             # replaced
    <!-- end -->
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from benchmarks.report import machine_lines, number_table, table_markdown
from benchmarks.results import RunResult, TaskResult

# Options that say where results go: they don't change what is measured, and name places on one machine.
OUTPUT_OPTIONS = ("--docs", "--json", "-o", "--output", "--compare", "--data")


class DocsError(ValueError):
    """The page can't take the run's figures."""


def update_page(page: str, run: RunResult) -> str:
    """The page with the run's sections. DocsError for a quick run, or where a task has no markers."""
    if run.settings["quick"]:
        raise DocsError("a quick run says nothing about speed: its figures don't go into the docs")
    run = dataclasses.replace(run, command=measuring_command(run.command))
    for task in run.tasks:
        start = f"<!-- figures: {task.name} -->"
        pattern = re.compile(re.escape(start) + r".*?<!-- end -->", re.DOTALL)
        if not pattern.search(page):
            raise DocsError(f"the page has no section {start} ... <!-- end -->")
        section = "\n\n".join([start, *section_parts(task, run), "<!-- end -->"])
        page = pattern.sub(lambda found, section=section: section, page)
    return page


def measuring_command(command: str) -> str:
    """The command without the options of where results go."""
    words = iter(shlex.split(command))
    kept = []
    for word in words:
        if word in OUTPUT_OPTIONS:
            next(words, None)
        elif word.partition("=")[0] not in OUTPUT_OPTIONS:
            kept.append(word)
    return shlex.join(kept)


def section_parts(task: TaskResult, run: RunResult) -> list[str]:
    """Where and how it was measured, and the task's own tables."""
    parts = ["\n".join(f"* {line}" for line in machine_lines(run))]
    if task.skipped:
        return [*parts, f"Skipped: {task.skipped}"]
    parts += [table_markdown(table) for table in task.tables]
    counted = number_table(task.cases)
    if counted is not None and task.name == "figures":
        parts.append(table_markdown(counted))
    left_out = {f"{name}: {why}" for case in task.cases for name, why in case.skipped.items()}
    failed = [
        f"* FAILED: {case.name}: {name}: {why}" for case in task.cases for name, why in case.failed.items()
    ]
    notes = [f"* left out: {text}" for text in sorted(left_out)] + failed
    return [*parts, "\n".join(notes)] if notes else parts


def update_file(path: Path, run: RunResult) -> None:
    """`update_page` on a file."""
    path.write_text(update_page(path.read_text(encoding="utf-8"), run), encoding="utf-8")
