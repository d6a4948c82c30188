"""Compare a run with a stored earlier one: which times and which ratios changed by more than their spread.

table = compare_runs(earlier, later)        # a Table, the largest change first
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import CaseResult, RunResult, Spread, Table

NOTABLE = 0.05


@dataclass(frozen=True)
class Change:
    """One quantity in both runs. factor: later / earlier; clear: the quartile ranges do not touch."""

    place: str
    what: str
    earlier: Spread
    later: Spread

    @property
    def factor(self) -> float:
        return self.later.median / self.earlier.median if self.earlier.median else float("inf")

    @property
    def clear(self) -> bool:
        """Whether the change is larger than both spreads and than NOTABLE."""
        apart = self.later.low > self.earlier.high or self.later.high < self.earlier.low
        return apart and abs(self.factor - 1) > NOTABLE


def changes(earlier: RunResult, later: RunResult) -> list[Change]:
    """Entries that both runs measured, in the order of the later one."""
    return list(_changes(earlier, later))


def _changes(earlier: RunResult, later: RunResult) -> Iterator[Change]:
    before = {(t.name, _key(c)): c for t in earlier.tasks for c in t.cases}
    for task in later.tasks:
        for case in task.cases:
            old = before.get((task.name, _key(case)))
            if old is None:
                continue
            place = f"{task.name}: {case.name}"
            for name, entry in case.entries.items():
                if name in old.entries:
                    yield Change(place, f"{name}, seconds", old.entries[name].wall, entry.wall)
            for ratio in case.ratios:
                found = old.ratio(ratio.slow, ratio.fast)
                if found is not None:
                    yield Change(place, f"{ratio.slow} / {ratio.fast}", found, ratio.value)


def _key(case: CaseResult) -> tuple[str, str, int]:
    return case.name, repr(sorted(case.parameters.items())), case.count


def compare_runs(earlier: RunResult, later: RunResult) -> Table:
    """A table of the clear changes, the largest first; its note says what else was compared."""
    found = changes(earlier, later)
    clear = sorted((c for c in found if c.clear), key=lambda c: -abs(c.factor - 1))
    rows: list[list[str | int | float | None]] = [
        [c.place, c.what, c.earlier.median, c.later.median, c.factor] for c in clear
    ]
    note = (
        f"{len(found)} quantities are in both runs, {len(clear)} of them changed clearly: by more than "
        f"{NOTABLE:.0%} and with quartiles apart. Earlier: {_label(earlier)}. Later: {_label(later)}."
    )
    differing = [
        k
        for k in ("processor", "threads", "device", "packages")
        if earlier.machine.get(k) != later.machine.get(k)
    ]
    if differing:
        note += f" The runs differ in {', '.join(differing)}: compare ratios, not seconds."
    return Table(
        "Against the earlier run", ["case", "what", "earlier", "later", "later / earlier"], rows, note
    )


def _label(run: RunResult) -> str:
    return f"{run.date}, commit {run.machine.get('commit') or 'unknown'}"
