"""Tasks: cases to measure, and the tables and plots of their results.

A task is a file in tasks/ with `TASK = Task(name=..., cases=...)`, and a line in registry.py.

    def cases(settings: Settings) -> Iterator[Case]:
        yield Case("batch 64", {"batch": 64}, unit="tree", count=64, contenders=[...], slow=("one by one",))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.measure import Contender
from benchmarks.results import CaseResult, Plot, Table

Size = TypeVar("Size")


class Skip(Exception):
    """A task or a competitor can't run here; the message says why."""


class Incomplete(Exception):
    """Some of a case's numbers are there, and something failed: `failures` by what."""

    def __init__(self, numbers: dict[str, float], failures: dict[str, str]) -> None:
        super().__init__("; ".join(f"{what}: {why}" for what, why in failures.items()))
        self.numbers, self.failures = numbers, failures


@dataclass(frozen=True)
class Settings:
    """Settings from the command line. quick: every task at small size; budget: seconds a case; dynet: its builds."""

    quick: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int = 1
    repeats: int = 7
    warmup: int = 2
    budget: float = 15.0
    seed: int = 0
    data: Path | None = None
    peers: bool = True
    dynet: tuple[Path, ...] = ()
    compiled: bool = True

    def size(self, full: Size, quick: Size) -> Size:
        """The size of the full run, or that of a quick one."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Case:
    """Several contenders with equal work. `count`: units per run; ratios are taken to those named in `slow`.

    reference: the contender whose outcome the others must equal, the first of those that have one where "".
    numbers: what is counted after the timing (launches, steps over their lower bound), by name.
    """

    name: str
    parameters: dict[str, Any]
    unit: str
    count: int
    contenders: list[Contender]
    slow: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    numbers: Callable[[], dict[str, float]] | None = None
    reference: str = ""
    tolerance: float | None = None


def no_tables(cases: Sequence[CaseResult], settings: Settings) -> list[Table]:
    """For tasks whose cases speak for themselves."""
    return []


def no_plots(cases: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    """For tasks without a plot."""
    return []


@dataclass(frozen=True)
class Task:
    """One of the benchmarks: what it reproduces, its cases, and how its results are shown."""

    name: str
    title: str
    explanation: str
    cases: Callable[[Settings], Iterator[Case]]
    tables: Callable[[Sequence[CaseResult], Settings], list[Table]] = no_tables
    plots: Callable[[Sequence[CaseResult], Settings], list[Plot]] = no_plots
