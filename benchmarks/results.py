"""The results of a run: plain data that goes to JSON and comes back; the report is made from it alone.

    run = RunResult.from_json(json.loads(path.read_text()))
    run.tasks[0].cases[0].entries["fxbatch"].wall.median               # seconds

`SCHEMA` is the form of the file; `check_schema` raises ResultsError with the place of the first mistake.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = "fxbatch-benchmark"
VERSION = 1


class ResultsError(ValueError):
    """A results file does not have the form that SCHEMA describes."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity: median and quartiles, and the samples themselves."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    samples: tuple[float, ...]

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Of at least one sample; quartiles are interpolated between samples (inclusive method)."""
        if not samples:
            raise ResultsError("a spread needs at least one sample")
        if len(samples) == 1:
            return Spread(samples[0], samples[0], samples[0], tuple(samples))
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(middle, low, high, tuple(samples))

    def scaled(self, factor: float) -> Spread:
        """Every sample times a positive factor."""
        samples = tuple(x * factor for x in self.samples)
        return Spread(self.median * factor, self.low * factor, self.high * factor, samples)


@dataclass(frozen=True)
class Entry:
    """The times of one competitor for one run of a case (one minibatch)."""

    wall: Spread  # seconds
    cpu: Spread  # seconds of processor time, all threads
    device: Spread | None = None  # seconds between CUDA events around the run
    phases: dict[str, Spread] = field(default_factory=dict)  # seconds, where the run names its phases
    resident_bytes: int = 0  # of the process after its last run


@dataclass(frozen=True)
class Ratio:
    """How many times faster `fast` is than `slow`: slow's time / fast's, pair by pair of one round."""

    slow: str
    fast: str
    value: Spread


@dataclass(frozen=True)
class CaseResult:
    """One case of a task: the same work done by several competitors, interleaved."""

    name: str
    parameters: dict[str, Any]
    unit: str  # what a run processes `count` of
    count: int
    entries: dict[str, Entry]
    skipped: dict[str, str]  # competitor -> why
    ratios: list[Ratio]
    checked: dict[str, float]  # competitor -> largest error over the tolerance, at most 1
    numbers: dict[str, float] = field(default_factory=dict)  # what was counted, not timed
    failed: dict[str, str] = field(default_factory=dict)  # competitor -> its error, or where it differs

    def ratio(self, slow: str, fast: str) -> Spread | None:
        """The spread of slow / fast, where both ran."""
        return next((r.value for r in self.ratios if (r.slow, r.fast) == (slow, fast)), None)


@dataclass(frozen=True)
class Table:
    """A table of a report: rows of text, numbers or None (a dash)."""

    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line of a plot, with its quartiles where there are any."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Plot:
    """A plot of a report. kind: `line`, or `bar` with one group a label and one bar a series."""

    title: str
    x: str
    y: str
    series: list[Series]
    kind: str = "line"
    labels: list[str] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class TaskResult:
    """The measurements of one task, and the tables and plots that show them."""

    name: str
    title: str
    explanation: str
    cases: list[CaseResult]
    tables: list[Table]
    plots: list[Plot]
    skipped: str = ""  # why the whole task could not run
    seconds: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """A whole run: what was asked for, where, and what came out."""

    date: str  # ISO 8601, UTC
    command: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    tasks: list[TaskResult]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data; SCHEMA describes it."""
        return {"format": FORMAT, "version": VERSION, **_plain(self)}

    @property
    def failures(self) -> list[str]:
        """One line per competitor that failed: `task, case: competitor: why`."""
        return [
            f"{task.name}, {case.name}: {name}: {why}"
            for task in self.tasks
            for case in task.cases
            for name, why in case.failed.items()
        ]

    @staticmethod
    def from_json(data: Any) -> RunResult:
        """The inverse of `to_json`; ResultsError where the data has another form."""
        check_schema(data)
        return RunResult(
            **{k: data[k] for k in ("date", "command", "settings", "machine", "seconds")},
            tasks=[_task(task) for task in data["tasks"]],
        )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return value


def _spread(data: Any) -> Spread:
    return Spread(data["median"], data["low"], data["high"], tuple(data["samples"]))


def _entry(data: Any) -> Entry:
    return Entry(
        wall=_spread(data["wall"]),
        cpu=_spread(data["cpu"]),
        device=None if data["device"] is None else _spread(data["device"]),
        phases={name: _spread(s) for name, s in data["phases"].items()},
        resident_bytes=data["resident_bytes"],
    )


def _case(data: Any) -> CaseResult:
    return CaseResult(
        **{
            k: data[k]
            for k in ("name", "parameters", "unit", "count", "skipped", "checked", "numbers", "failed")
        },
        entries={name: _entry(e) for name, e in data["entries"].items()},
        ratios=[Ratio(r["slow"], r["fast"], _spread(r["value"])) for r in data["ratios"]],
    )


def _task(data: Any) -> TaskResult:
    return TaskResult(
        **{k: data[k] for k in ("name", "title", "explanation", "skipped", "seconds")},
        cases=[_case(c) for c in data["cases"]],
        tables=[Table(**t) for t in data["tables"]],
        plots=[Plot(**{**p, "series": [Series(**s) for s in p["series"]]}) for p in data["plots"]],
    )


# The form of the file. A dict literal is an object with exactly these keys; [x] is a list of x; ("map", x) an
# object with any keys; a tuple of types is one of them.
_NUMBER = (int, float)
_SPREAD = {"median": _NUMBER, "low": _NUMBER, "high": _NUMBER, "samples": [_NUMBER]}
_ENTRY = {
    "wall": _SPREAD, "cpu": _SPREAD, "device": ("or none", _SPREAD), "phases": ("map", _SPREAD),
    "resident_bytes": int,
}  # fmt: skip
_CASE = {
    "name": str, "parameters": ("map", (str, int, float, bool)), "unit": str, "count": int,
    "entries": ("map", _ENTRY), "skipped": ("map", str), "checked": ("map", _NUMBER),
    "ratios": [{"slow": str, "fast": str, "value": _SPREAD}], "numbers": ("map", ("or none", _NUMBER)),
    "failed": ("map", str),
}  # fmt: skip
_TABLE = {"title": str, "columns": [str], "rows": [[("or none", (str, int, float))]], "note": str}
_SERIES = {"name": str, "x": [_NUMBER], "y": [_NUMBER], "low": [_NUMBER], "high": [_NUMBER]}
_PLOT = {
    "title": str, "x": str, "y": str, "series": [_SERIES], "kind": str, "labels": [str], "log_x": bool,
    "log_y": bool,
}  # fmt: skip
_TASK = {
    "name": str, "title": str, "explanation": str, "cases": [_CASE], "tables": [_TABLE], "plots": [_PLOT],
    "skipped": str, "seconds": _NUMBER,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "format": str, "version": int, "date": str, "command": str, "settings": ("map", object),
    "machine": ("map", object), "tasks": [_TASK], "seconds": _NUMBER,
}  # fmt: skip


def check_schema(data: Any, form: Any = SCHEMA, where: str = "results") -> None:
    """ResultsError, with the place, where `data` does not have the form."""
    if form is SCHEMA and isinstance(data, dict) and data.get("format") != FORMAT:
        raise ResultsError(f"{where}: format is {data.get('format')!r}, expected {FORMAT!r}")
    if form is SCHEMA and isinstance(data, dict) and data.get("version") != VERSION:
        raise ResultsError(f"{where}: version is {data.get('version')!r}, this program reads {VERSION}")
    if isinstance(form, dict):
        if not isinstance(data, dict):
            raise ResultsError(f"{where}: expected an object, got {type(data).__name__}")
        if sorted(data) != sorted(form):
            missing = [k for k in form if k not in data] + [f"not {k}" for k in data if k not in form]
            raise ResultsError(f"{where}: wrong keys: {', '.join(missing)}")
        for key, inner in form.items():
            check_schema(data[key], inner, f"{where}.{key}")
    elif isinstance(form, list):
        if not isinstance(data, list):
            raise ResultsError(f"{where}: expected a list, got {type(data).__name__}")
        for i, item in enumerate(data):
            check_schema(item, form[0], f"{where}[{i}]")
    elif isinstance(form, tuple) and form[0] == "map":
        if not isinstance(data, dict):
            raise ResultsError(f"{where}: expected an object, got {type(data).__name__}")
        for key, item in data.items():
            check_schema(item, form[1], f"{where}.{key}")
    elif isinstance(form, tuple) and form[0] == "or none":
        if data is not None:
            check_schema(data, form[1], where)
    elif not isinstance(data, form) or (isinstance(data, bool) and form in (int, _NUMBER)):
        wanted = form if isinstance(form, tuple) else (form,)
        names = " or ".join(t.__name__ for t in wanted)
        raise ResultsError(f"{where}: expected {names}, got {type(data).__name__}")
