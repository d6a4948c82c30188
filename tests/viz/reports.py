"""Reports of toy programs, for the tests of the page.

report_of(tree_lstm_program([(0, (1, 2))]))
"""

from __future__ import annotations

from fxbatch.ir import Program
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.fold import batch_calls, insert_cats, insert_gathers, insert_pass_throughs
from fxbatch.passes.plan import plan_arenas
from fxbatch.passes.schedule import batch_by_depth
from fxbatch.viz.draw_form import Form
from fxbatch.viz.report import Report, make_report


def forms_of(program: Program) -> dict[str, Form]:
    """All stages, batched by depth."""
    schedule = batch_by_depth(program)
    batched = batch_calls(program, schedule)
    carried = insert_pass_throughs(batched)
    return {
        "merged": program,
        "deduplicated": deduplicate(program),
        "pass-through": carried,
        "batched": batched,
        "gathered": insert_cats(insert_gathers(carried)),
        "plan": plan_arenas(program, schedule, [None] * len(program.signatures)),
    }


TIMES = {"one by one": {"4 instances": 12.0}, "batched": {"trace": 1.0, "forward": 2.0, "backward": 1.0}}


def report_of(program: Program, title: str = "model.py:minibatch") -> Report:
    return make_report(title, forms_of(program), program, batch_by_depth(program), times=TIMES)
