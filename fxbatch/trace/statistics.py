"""Counts of a recording: phases, suspended instances, the lines that asked for values.

recording.statistics.phases[0].instances      # how many were suspended in the first phase
recording.statistics.hint()                   # "" or advice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One batch that suspended instances waited for."""

    calls: int
    instances: int


class Statistics:
    """Counts of one minibatch."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.phases: list[Phase] = []
        self.suspensions = 0
        self.lines: dict[str, int] = {}  # the user's line -> how often it asked
        self.values_read = 0

    def asked(self, line: str, values: int) -> None:
        """An instance asked for values at this line."""
        self.suspensions += 1
        self.values_read += values
        self.lines[line] = self.lines.get(line, 0) + 1

    def phase(self, calls: int, suspended: Sequence[int]) -> None:
        """A phase ran `calls` calls for these instances."""
        self.phases.append(Phase(calls, len(suspended)))

    def hint(self) -> str:
        """Advice when values are asked for in a way that prevents batching, else ""."""
        if self.instances < 2 or not self.phases:
            return ""
        alone = sum(p.instances == 1 for p in self.phases)
        empty = sum(p.calls == 0 for p in self.phases)
        line = max(self.lines, key=lambda k: self.lines[k])
        if empty > len(self.phases) // 2:
            return f"{line} reads values one at a time: read them together with .tolist()"
        if alone > len(self.phases) // 2 and alone > 1:
            return (
                f"{alone} of {len(self.phases)} phases ran for one instance alone: values are "
                "asked for one instance "
                f"at a time ({line})"
            )
        return ""
