"""All that a page shows: the pictures of all stages, the timeline, counts and the signatures' rows.

Comes in: the forms of one minibatch, by name. Goes out: a Report, which `page_of` writes.

    report = make_report("tree_lstm.py:minibatch", {"merged": program, "batched": graph, "plan": plan},
                         program, schedule)
    Path("page.html").write_text(page_of(report))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxbatch.batched_graph import BatchedGraph
from fxbatch.ir import INDEX, Plan, Program, Schedule
from fxbatch.passes.schedule import lower_bound
from fxbatch.viz.draw_form import Form, draw_form
from fxbatch.viz.draw_program import draw_instances
from fxbatch.viz.draw_schedule import draw_schedule
from fxbatch.viz.draw_source import draw_source, read_sources
from fxbatch.viz.draw_times import draw_times
from fxbatch.viz.picture import Picture, SignatureKey, is_constant

CAPTIONS = {
    "trace": "Each instance alone, as its forward ran: one box per call, from leaves (left) to results (right).",
    "merged": "The calls of all instances in one graph. Calls of one colour and depth can run together.",
    "deduplicated": "Equal calls on equal inputs are one call, across instances.",
    "fused": "Calls that always occur together are one operation.",
    "pass-through": "Values are carried on by calls that change nothing, so that depth d + 1 reads depth d only.",
    "batched": "One box per step: all calls that one launch runs. Its height grows with the batch.",
    "gathered": "Gathers collect the rows that a step reads, cats put the outputs of a depth together.",
    "packed": "One box per operator, which runs once for all instances. * is a size that differs between them.",
    "source": "Your lines: calls → launches. Calls of one signature stand at the line that made the first of them.",
    "time": "Milliseconds of one minibatch, forward and backward: the loop above, the batch and its parts below.",
    "plan": "Memory: one row per tensor type, one block per output of a step. Contiguous rows are read in place.",
}

FOLDS = ("pass-through", "gathered")  # graphs of Fold's algorithm, which other schedules don't run
# What the numbers at the top say, on hover.
EXPLAINED = {
    "calls": "what the forwards called, of all instances: so many launches one by one",
    "steps": "batched launches: calls of one signature that run at once",
    "calls per step": "calls over steps: the mean size of a batch",
    "lower bound": "no order of launches needs fewer steps: the longest chain of calls of each signature, summed",
    "schedule": "the policy that put the calls into steps",
    "gathers elided": "inputs of steps that are read where they lie, and not copied together first",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One tab of the page. ran: whether it is of what ran, and not only there to be compared with."""

    name: str
    caption: str
    picture: Picture
    rows: tuple[Row, ...]  # of the legend, while it is shown
    ran: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """A signature in the legend: how often it is called and, where steps are known, launched."""

    signature: int
    calls: int
    steps: int = 0
    largest: int = 0


@dataclass(frozen=True, eq=False)
class Report:
    """All that a page shows; positions are in the pictures, colours in the key."""

    title: str
    key: SignatureKey
    stages: tuple[Stage, ...]
    timeline: Picture
    counts: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def make_report(
    title: str,
    forms: Mapping[str, Form],
    program: Program,
    schedule: Schedule,
    *,
    instances: Sequence[int] | None = None,
    times: Mapping[str, Mapping[str, float]] | None = None,
) -> Report:
    """Draw every form; `program` is the one that `schedule` runs, `instances` those drawn one by one, `times` the
    milliseconds of each way and part.

    The tab `trace` draws the calls of `forms["merged"]` instance by instance.
    """
    key = SignatureKey()
    for form in forms.values():
        key.extend(_program_of(form, program).signatures)
    key.extend(program.signatures)
    stages = []
    merged = forms.get("merged")
    if isinstance(merged, Program):
        same = schedule if merged is program else None
        picture = draw_instances(merged, key, instances=instances, schedule=same)
        stages.append(Stage("trace", CAPTIONS["trace"], picture, _call_rows(merged, key)))
    for name, form in forms.items():
        same = schedule if _program_of(form, program) is program else None
        picture = draw_form(form, key, title=name, program=program, schedule=same)
        ran = name not in FOLDS or schedule.policy == "fold"
        caption = CAPTIONS.get(name.partition(" ")[0], "")
        if not ran:
            caption = (
                f"This did not run (the schedule is {schedule.policy}). TensorFlow Fold's way: {caption}"
            )
        stages.append(Stage(name, caption, picture, _rows_of(form, program, schedule, key), ran))
    rows = signature_rows(program, schedule, key)
    if sources := read_sources(program):
        picture = draw_source(program, schedule, key, sources)
        stages.append(Stage("source", CAPTIONS["source"], picture, rows))
    if times:
        stages.append(Stage("time", CAPTIONS["time"], draw_times(times), rows))
    plan = next((f for f in forms.values() if isinstance(f, Plan)), None)
    return Report(
        title,
        key,
        tuple(stages),
        draw_schedule(program, schedule, key),
        _counts(program, schedule, plan),
        rows,
    )


def _program_of(form: Form, program: Program) -> Program:
    if isinstance(form, Program):
        return form
    return form.program if isinstance(form, BatchedGraph) else program


def _rows_of(form: Form, program: Program, schedule: Schedule, key: SignatureKey) -> tuple[Row, ...]:
    """The counts of the legend for a stage: calls of a program, batches of a graph, else what the schedule runs."""
    if isinstance(form, Program):
        return _call_rows(form, key)
    if isinstance(form, BatchedGraph):
        batches: dict[int, list[int]] = {}
        for _, node in form.nodes("batch"):
            batches.setdefault(node.signature, []).append(len(node.calls))
        signatures = form.program.signatures
        return tuple(
            Row(key.number(signatures[s]), sum(sizes), len(sizes), max(sizes)) for s, sizes in batches.items()
        )
    return signature_rows(program, schedule, key)


def _call_rows(program: Program, key: SignatureKey) -> tuple[Row, ...]:
    """A row a signature that is called, in the order of the program."""
    calls = np.bincount(program.sig, minlength=len(program.signatures))
    return tuple(
        Row(key.number(program.signatures[s]), int(calls[s])) for s in dict.fromkeys(program.sig.tolist())
    )


def signature_rows(program: Program, schedule: Schedule, key: SignatureKey) -> tuple[Row, ...]:
    """A row a signature that occurs, in the order in which it first runs."""
    rows = np.diff(schedule.offsets)
    sig = program.sig[schedule.order[schedule.offsets[:-1]]] if len(schedule) else np.zeros(0, np.int64)
    out = []
    for s in dict.fromkeys(sig.tolist()):
        mine = rows[sig == s]
        number = key.number(program.signatures[s])
        out.append(Row(number, int(mine.sum()), len(mine), int(mine.max())))
    return tuple(out)


def _counts(program: Program, schedule: Schedule, plan: Plan | None) -> tuple[tuple[str, str], ...]:
    constants = np.array([is_constant(s) for s in program.signatures], dtype=bool)
    launches = int((~constants[program.sig]).sum()) if len(program) else 0
    starts = schedule.order[schedule.offsets[:-1]] if len(schedule) else np.zeros(0, np.int64)
    steps = int((~constants[program.sig[starts]]).sum()) if len(starts) else 0
    bound = lower_bound(program) - int(constants[np.unique(program.sig)].sum()) if len(program) else 0
    found = [
        ("instances", f"{program.instances:,}"),
        ("calls", f"{launches:,}"),
        ("steps", f"{steps:,}"),
        ("calls per step", f"{launches / steps:.1f}" if steps else "0"),
        ("lower bound", f"{bound:,}"),
        ("schedule", schedule.policy),
    ]
    if plan is not None:
        indexed = int((plan.gather_kind == INDEX).sum())
        found.append(("gathers elided", f"{len(plan.gather_kind) - indexed:,} of {len(plan.gather_kind):,}"))
    return tuple(found)
