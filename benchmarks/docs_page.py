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

from benchmarks.report import machine_lines, table_markdown
from benchmarks.results import RunResult, TaskResult

# Options that say where results go: they don't change what is measured, and name places on one machine.
OUTPUT_OPTIONS = ("--docs", "--json", "-o", "--output", "--compare", "--data")

# The page is short: of these tasks it has these tables only, of the others all. The report has everything.
SHOWN = {
    "figures": ("Figures",),
    "looks-table-1": ("State 512, training",),
    "neubig-table-1": ("Sentences a second, training",),
}
# Tasks without a section: `peers` has the batch sizes of figure 3, `sizes` and `never-slower` are told of on pages of
# their own, differences of single options are noise on two cores, and lines of code are not speed.
NOT_ON_THE_PAGE = ("neubig-figure-3", "sizes", "live", "never-slower", "ablations", "lines-of-code")


class DocsError(ValueError):
    """The page can't take the run's figures."""


def update_page(page: str, run: RunResult) -> str:
    """The page with the run's sections. DocsError for a quick run, or where a task has no markers."""
    if run.settings["quick"]:
        raise DocsError("a quick run says nothing about speed: its figures don't go into the docs")
    run = dataclasses.replace(run, command=measuring_command(run.command))
    for task in run.tasks:
        if task.name in NOT_ON_THE_PAGE:
            continue
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
    parts = [f"*{'; '.join(machine_lines(run))}.*"]
    if task.skipped:
        return [*parts, f"Skipped: {task.skipped}"]
    shown = SHOWN.get(task.name)
    parts += [table_markdown(table) for table in task.tables if shown is None or table.title in shown]
    left_out = {f"{name}: {why}" for case in task.cases for name, why in case.skipped.items()}
    if left_out:
        parts.append(f"(left out: {'; '.join(sorted(left_out))})")
    failed = [f"{case.name}: {name}: {why}" for case in task.cases for name, why in case.failed.items()]
    return [*parts, f"FAILED: {'; '.join(failed)}"] if failed else parts


def update_file(path: Path, run: RunResult) -> None:
    """`update_page` on a file."""
    path.write_text(update_page(path.read_text(encoding="utf-8"), run), encoding="utf-8")
