"""All tasks, as one literal tuple, in the order in which they run and stand in the report."""

from __future__ import annotations

from benchmarks.task import Task
from benchmarks.tasks import (
    ablations,
    figures,
    idioms,
    lines_of_code,
    live,
    looks_table_1,
    neubig_figure_2,
    neubig_figure_3,
    neubig_table_1,
    never_slower,
    peers,
    public,
    scale,
    sizes,
)

TASKS: tuple[Task, ...] = (
    figures.TASK,
    peers.TASK,
    public.TASK,
    idioms.TASK,
    looks_table_1.TASK,
    neubig_figure_2.TASK,
    neubig_table_1.TASK,
    neubig_figure_3.TASK,
    scale.TASK,
    sizes.TASK,
    live.TASK,
    never_slower.TASK,
    ablations.TASK,
    lines_of_code.TASK,
)
