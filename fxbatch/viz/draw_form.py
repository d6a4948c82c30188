"""Draw any form of the pipeline.

Comes in: a Program, BatchedGraph, Schedule or Plan. Goes out: a Picture.

    draw_form(minibatch.stages["batched"], key, schedule=minibatch.schedule)
"""

from __future__ import annotations

from fxbatch.batched_graph import BatchedGraph
from fxbatch.ir import Plan, Program, Schedule
from fxbatch.viz.draw_batched_graph import draw_batched_graph
from fxbatch.viz.draw_plan import draw_plan
from fxbatch.viz.draw_program import draw_program
from fxbatch.viz.draw_schedule import draw_schedule
from fxbatch.viz.picture import Picture, SignatureKey

Form = Program | BatchedGraph | Schedule | Plan


def draw_form(
    form: Form,
    key: SignatureKey,
    *,
    title: str,
    program: Program | None = None,
    schedule: Schedule | None = None,
) -> Picture:
    """The picture of a form. Schedules and plans need their `program`."""
    if isinstance(form, Program):
        return draw_program(form, key, title=title, schedule=schedule)
    if isinstance(form, BatchedGraph):
        return draw_batched_graph(form, key, title=title, schedule=schedule)
    assert program is not None, f"a {type(form).__name__} is drawn with its program"
    if isinstance(form, Plan):
        return draw_plan(form, program.signatures, key, title=title)
    return draw_schedule(program, form, key, title=title)
