"""Reports of toy programs, for the tests of the page.

report_of(tree_lstm_program([(0, (1, 2))]))
"""

from __future__ import annotations

from fxbatch.ir import Program
from fxbatch.passes.batch_by_depth import batch_by_depth
from fxbatch.passes.batch_calls import batch_calls
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.insert_cats import insert_cats
from fxbatch.passes.insert_gathers import insert_gathers
from fxbatch.passes.insert_pass_throughs import insert_pass_throughs
from fxbatch.passes.plan_arenas import plan_arenas
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


def report_of(program: Program, title: str = "model.py:minibatch") -> Report:
    return make_report(title, forms_of(program), program, batch_by_depth(program))
