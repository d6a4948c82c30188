"""All tasks, as one literal tuple, in the order in which they run and stand in the report."""

from __future__ import annotations

from benchmarks.task import Task
from benchmarks.tasks import figures

TASKS: tuple[Task, ...] = (figures.TASK,)
