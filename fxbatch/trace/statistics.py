"""Counts of a recording: phases, suspended instances, the lines that asked for values.

recording.statistics.phases[0].instances      # how many were suspended in the first phase
recording.statistics.hint()                   # "" or advice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxbatch.trace.user_line import UserPlace, line_of


@dataclass(frozen=True)
class PhaseStatistics:
    """One batch that suspended instances waited for."""

    calls: int
    instances: int


class Statistics:
    """Counts of one minibatch."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.phases: list[PhaseStatistics] = []
        self.suspensions = 0
        self._places: dict[UserPlace, int] = {}  # where the user's code asked -> how often
        self.values_read = 0
        self.stayed = ""  # why an instance that asked was not left, so that others could not run

    def asked(self, place: UserPlace, values: int) -> None:
        """An instance asked for values at this place of the user's code."""
        self.suspensions += 1
        self.values_read += values
        self._places[place] = self._places.get(place, 0) + 1

    @property
    def lines(self) -> dict[str, int]:
        """The user's lines that asked, and how often."""
        counts: dict[str, int] = {}
        for place, count in self._places.items():
            line = line_of(place)
            counts[line] = counts.get(line, 0) + count
        return counts

    def phase(self, calls: int, suspended: Sequence[int]) -> None:
        """A phase ran `calls` calls for these instances."""
        self.phases.append(PhaseStatistics(calls, len(suspended)))

    def hint(self) -> str:
        """Advice when values are asked for in a way that prevents batching, else ""."""
        if self.instances < 2 or not self.phases:
            return ""
        if self.stayed:
            return (
                f"an instance that asked for a value was not left, as {self.stayed}: values come one by one"
            )
        alone = sum(p.instances == 1 for p in self.phases)
        empty = sum(p.calls == 0 for p in self.phases)
        lines = self.lines
        line = max(lines, key=lambda k: lines[k])
        if empty > len(self.phases) // 2:
            return f"{line} reads values one at a time: read them together with .tolist()"
        if alone > len(self.phases) // 2 and alone > 1:
            return (
                f"{alone} of {len(self.phases)} phases ran for one instance alone: values are "
                "asked for one instance "
                f"at a time ({line})"
            )
        return ""
