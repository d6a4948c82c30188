"""A run's results to a report: markdown, one HTML page without network, and the JSON it was made from.

    write_report(run, Path("bench-results/2026-01-31T120000"), earlier=None)
    # .../results.json, report.md, report.html, plots/*.svg

All text comes from the results alone, so that a stored results.json gives the same report again.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare import compare_runs
from benchmarks.plots import draw_svg
from benchmarks.results import CaseResult, RunResult, Spread, Table, TaskResult

Cell = str | int | float | None


def write_report(run: RunResult, folder: Path, *, earlier: RunResult | None = None) -> list[Path]:
    """Write results.json, report.md, report.html and the plots into `folder`; the files written."""
    written = [write_results(run, folder)]
    (folder / "plots").mkdir(exist_ok=True)
    files: dict[str, str] = {}
    drawn: dict[str, str] = {}
    for task in run.tasks:
        for plot in task.plots:
            svg = draw_svg(plot)
            if svg:
                drawn[f"plots/{plot_name(task, plot.title)}"] = svg
    files.update(drawn)
    files["report.md"] = to_markdown(run, earlier=earlier, plots=list(drawn))
    files["report.html"] = to_html(run, earlier=earlier, plots=drawn)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*written, *(folder / name for name in files)]


def write_results(run: RunResult, folder: Path) -> Path:
    """Write results.json into `folder`, whole or not at all; the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path, unfinished = folder / "results.json", folder / "results.json.part"
    unfinished.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def plot_name(task: TaskResult, title: str) -> str:
    """The file name of a plot: the task's name and the title in small letters and dashes."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f"{task.name}-{words}.svg"


def read_run(path: Path) -> RunResult:
    """A stored run from a results.json, or from a folder that has one. ResultsError where malformed."""
    file = path / "results.json" if path.is_dir() else path
    return RunResult.from_json(json.loads(file.read_text(encoding="utf-8")))


# -- numbers -----------------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 µs`: three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def number_text(value: Cell) -> str:
    """A cell of a table: floats with three digits, thousands with commas, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ratio_text(spread: Spread) -> str:
    """`12.3x (11.8-12.9)`: the median and the quartiles."""
    return f"{spread.median:.3g}x ({spread.low:.3g}-{spread.high:.3g})"


# -- tables ------------------------------------------------------------------------------------------------


def case_table(cases: list[CaseResult]) -> Table:
    """All cases of a task, one row a competitor: time, throughput, processor time, ratios."""
    slow = list(dict.fromkeys(r.slow for case in cases for r in case.ratios))
    on_device = any(e.device is not None for case in cases for e in case.entries.values())
    columns = ["case", "competitor", "time a run (quartiles)", "runs", "a second", "CPU time"]
    columns += ["device time"] if on_device else []
    columns += [f"faster than {name}" for name in slow]
    rows: list[list[Cell]] = []
    for case in cases:
        for i, (name, entry) in enumerate(case.entries.items()):
            spread = entry.wall
            time = f"{seconds_text(spread.median)} ({seconds_text(spread.low)} - {seconds_text(spread.high)})"
            rate = f"{number_text(case.count / spread.median if spread.median else None)} {case.unit}s"
            row: list[Cell] = [case.name if i == 0 else "", name, time, len(spread.samples), rate]
            row.append(seconds_text(entry.cpu.median))
            if on_device:
                row.append(seconds_text(entry.device.median) if entry.device else None)
            found = [case.ratio(base, name) for base in slow]
            rows.append(row + [ratio_text(r) if r else None for r in found])
        left_out = {n: f"skipped: {why}" for n, why in case.skipped.items()}
        left_out |= {n: f"FAILED: {why}" for n, why in case.failed.items()}
        for name, reason in left_out.items():
            rows.append(["" if case.entries else case.name, name, reason] + [None] * (len(columns) - 3))
    return Table("Every measurement", columns, rows)


def number_table(cases: list[CaseResult]) -> Table | None:
    """A table of counts: one row per case, one column per number."""
    names = list(dict.fromkeys(name for case in cases for name in case.numbers))
    if not names:
        return None
    rows: list[list[Cell]] = [
        [case.name, *(case.numbers.get(n) for n in names)] for case in cases if case.numbers
    ]
    return Table("Counted", ["case", *names], rows)


def phase_table(cases: list[CaseResult]) -> Table | None:
    """Where runs named their phases: milliseconds of each."""
    names = list(dict.fromkeys(p for case in cases for e in case.entries.values() for p in e.phases))
    if not names:
        return None
    rows: list[list[Cell]] = []
    for case in cases:
        for name, entry in case.entries.items():
            if entry.phases:
                found = [entry.phases.get(p) for p in names]
                rows.append([case.name, name, *(s.median * 1e3 if s else None for s in found)])
    return Table("Phases, ms a run", ["case", "competitor", *names], rows)


def tables_of(task: TaskResult) -> list[Table]:
    """The task's own tables first, then everything that was measured and counted."""
    more = [case_table(task.cases) if any(c.entries or c.skipped or c.failed for c in task.cases) else None]
    more += [phase_table(task.cases), number_table(task.cases)]
    return [*task.tables, *(t for t in more if t is not None)]


# -- markdown ----------------------------------------------------------------------------------------------


def table_markdown(table: Table) -> str:
    """A table in markdown, with its title and its note."""
    lines = [f"**{table.title}**", "", _row(table.columns), "|" + "---|" * len(table.columns)]
    lines += [_row([number_text(cell) for cell in row]) for row in table.rows]
    if table.note:
        lines += ["", table.note]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine_lines(run: RunResult) -> Iterator[str]:
    """Command, date, machine and versions of a run, one line each."""
    m = run.machine
    where = f"{m['processor']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB"
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if version)
    load = m.get("load_average") or [0.0]
    yield f"Command: `{run.command}`"
    yield f"Date: {run.date}, {run.seconds:.0f} s; commit {m.get('commit') or 'unknown'}"
    yield f"Machine: {where}; {m['system']}; load average at the start {load[0]}"
    yield f"Device: {m['device']}" + (f" ({m['gpu']}, CUDA {m['cuda']})" if "gpu" in m else "")
    yield f"Threads: {m['threads']}; {m['vector_instructions']}, BLAS {m['blas']}"
    yield f"Versions: Python {m['python']}, {packages}"
    s = run.settings
    yield (
        f"Settings: {'quick (small sizes; the figures say nothing about speed)' if s['quick'] else 'full'}, "
        f"{s['repeats']} repeats after {s['warmup']} untimed, at most {s['budget']} s a case, seed "
        f"{s['seed']}"
    )


def to_markdown(run: RunResult, *, earlier: RunResult | None = None, plots: list[str] | None = None) -> str:
    """The report as markdown; `plots` are the files that were drawn."""
    parts = ["# fxbatch benchmarks", "\n".join(f"* {line}" for line in machine_lines(run))]
    if run.failures:
        parts.append("**Failed**\n\n" + "\n".join(f"* {failure}" for failure in run.failures))
    if earlier is not None:
        parts.append(table_markdown(compare_runs(earlier, run)))
    for task in run.tasks:
        parts += [f"## {task.title}", task.explanation.strip()]
        if task.skipped:
            parts.append(f"Skipped: {task.skipped}")
        parts += [table_markdown(table) for table in tables_of(task)]
        for plot in task.plots:
            name = f"plots/{plot_name(task, plot.title)}"
            if name in (plots or []):
                parts.append(f"![{plot.title}]({name})")
    return "\n\n".join(parts) + "\n"


# -- HTML --------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-size: 13px; }
table { display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
td, th { padding: .15rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
td, th { white-space: nowrap; }
th { background: var(--soft); }
td:first-child, th:first-child, td:nth-child(2) { text-align: left; }
figure { margin: 1rem 0; background: white; display: inline-block; border-radius: 6px; }
p.note { max-width: 50rem; }
nav a { margin-right: 1rem; }
code { background: var(--soft); padding: 0 .2rem; }
"""


def to_html(run: RunResult, *, earlier: RunResult | None = None, plots: dict[str, str] | None = None) -> str:
    """The report as one HTML page; the plots are in it, and everything else is escaped."""
    parts = ["<h1>fxbatch benchmarks</h1>"]
    parts.append("<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in machine_lines(run)) + "</ul>")
    links = [f'<a href="#{html.escape(t.name)}">{html.escape(t.title)}</a>' for t in run.tasks]
    parts.append(f"<nav>{' '.join(links)}</nav>")
    if run.failures:
        parts.append("<ul>" + "".join(f"<li><b>Failed</b> {_inline(f)}</li>" for f in run.failures) + "</ul>")
    if earlier is not None:
        parts.append(table_html(compare_runs(earlier, run)))
    for task in run.tasks:
        parts.append(f'<h2 id="{html.escape(task.name)}">{html.escape(task.title)}</h2>')
        parts += [f"<p class=note>{_inline(p)}</p>" for p in task.explanation.strip().split("\n\n")]
        if task.skipped:
            parts.append(f"<p class=note>Skipped: {html.escape(task.skipped)}</p>")
        for plot in task.plots:
            svg = (plots or {}).get(f"plots/{plot_name(task, plot.title)}")
            if svg:
                parts.append(f"<figure>{svg}</figure>")
        parts += [table_html(table) for table in tables_of(task)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>fxbatch benchmarks</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def table_html(table: Table) -> str:
    """A table as HTML, escaped."""
    head = "".join(f"<th>{html.escape(c)}</th>" for c in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(number_text(c))}</td>" for c in row) + "</tr>"
        for row in table.rows
    )
    note = f"<p class=note>{_inline(table.note)}</p>" if table.note else ""
    return f"<table><caption>{html.escape(table.title)}</caption><tr>{head}</tr>{rows}</table>{note}"
