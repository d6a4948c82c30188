"""Draw a schedule as a timeline: one row per signature, one box per step, as wide as its batch.

Comes in: a Program and its Schedule (or several, one below the other, to compare). Goes out: a Picture.

    draw_schedule(program, schedule, key)
    draw_schedules([("depth", program, a), ("agenda", program, b)], key)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxbatch.ir import Program, Schedule, Signature
from fxbatch.viz.picture import Box, Lane, Picture, SignatureKey, is_constant, shorten, text_width

LIMIT = 1500  # boxes
WIDTH = 1180.0  # pixels of the axis, where boxes can be that narrow
NARROWEST = 5.0
ROW = 26.0
LEFT = 170.0


def draw_schedule(
    program: Program, schedule: Schedule, key: SignatureKey, *, title: str = "schedule", limit: int = LIMIT
) -> Picture:
    """The timeline of one schedule; steps go from left to right in order of execution."""
    return draw_schedules([(title, program, schedule)], key, title=title, limit=limit)


def draw_schedules(
    schedules: Sequence[tuple[str, Program, Schedule]],
    key: SignatureKey,
    *,
    title: str = "schedules",
    limit: int = LIMIT,
) -> Picture:
    """Timelines below each other, on one scale: pixels a call are the same in all of them."""
    boxes: list[Box] = []
    lanes: list[Lane] = []
    notes = []
    longest = max((int(_launched(p)[p.sig].sum()) for _, p, _ in schedules), default=1)
    scale = min(WIDTH / max(longest, 1), 14.0)
    y = 8.0
    for nth, (name, program, schedule) in enumerate(schedules):
        several = len(schedules) > 1
        prefix = f"t{nth}-" if several else "t-"
        if several:
            lanes.append(Lane(4, y, 0, 22, f"{name}: {_counts(program, schedule)}"))
            y += 26
        some, rows, note = _timeline(program, schedule, key, scale, y, prefix, limit)
        boxes += some
        lanes += rows
        notes += [note] if note else []
        y += ROW * len(rows) + 14
    right = max([b.x + b.w for b in boxes] + [LEFT + 60]) + 16
    lanes = [Lane(lane.x, lane.y, right - 8, lane.h, lane.label, lane.signature) for lane in lanes]
    return Picture(title, tuple(boxes), (), tuple(lanes), (), "; ".join(notes), right, y)


def _counts(program: Program, schedule: Schedule) -> str:
    launched = _launched(program)
    starts = schedule.order[schedule.offsets[:-1]]
    return f"{int(launched[program.sig].sum()):,} calls in {int(launched[program.sig[starts]].sum()):,} steps"


def _launched(program: Program) -> np.ndarray:
    """bool [signatures]: those that launch something, unlike constants."""
    return np.array([not is_constant(s) for s in program.signatures], dtype=bool)


def _timeline(
    program: Program,
    schedule: Schedule,
    key: SignatureKey,
    scale: float,
    top: float,
    prefix: str,
    limit: int,
) -> tuple[list[Box], list[Lane], str]:
    sig = program.sig[schedule.order[schedule.offsets[:-1]]]
    step = np.flatnonzero(_launched(program)[sig])  # constants launch nothing and are not drawn
    sig, rows, steps = sig[step], np.diff(schedule.offsets)[step], len(step)
    bucket = max(1, -(-steps // limit))
    pairs = np.stack([np.arange(steps) // bucket, sig])
    keys, first, group = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    total = np.bincount(group, weights=rows, minlength=keys.shape[1]).astype(np.int64)
    number = np.bincount(group, minlength=keys.shape[1])
    order = np.argsort(first, kind="stable")
    row_of = {s: i for i, s in enumerate(dict.fromkeys(sig.tolist()))}
    x = LEFT
    boxes = []
    for g in order.tolist():
        k, s = int(step[first[g]]), int(keys[1, g])
        w = max(float(total[g]) * scale, NARROWEST)
        place = (x, top + row_of[s] * ROW + 3, w, ROW - 6)
        boxes.append(_step_box(program, key, k, s, int(total[g]), int(number[g]), place, prefix))
        x += w + 1.5
    lanes = [
        Lane(
            4, top + i * ROW, 0, ROW - 2, _row_label(program, s, sig, rows), key.number(program.signatures[s])
        )
        for s, i in row_of.items()
    ]
    note = "" if bucket == 1 else f"{steps:,} steps in {len(boxes):,} boxes: up to {bucket} steps in a box"
    return boxes, lanes, note


def _step_box(
    program: Program,
    key: SignatureKey,
    k: int,
    s: int,
    rows: int,
    number: int,
    place: tuple[float, float, float, float],
    prefix: str,
) -> Box:
    text = f"×{rows:,}"
    label = (
        text
        if text_width(text, 10) + 4 <= place[2]
        else str(rows)
        if place[2] >= 9 + 6 * len(str(rows))
        else ""
    )
    info = [("step", str(k) if number == 1 else f"{number:,} steps from {k} on"), ("batch size", f"{rows:,}")]
    if number > 1:
        info[1] = ("calls", f"{rows:,}")
    return Box(
        f"{prefix}{k}", "step", *place, label, "", key.number(program.signatures[s]), k, False, tuple(info)
    )


def _row_label(program: Program, s: int, sig: np.ndarray, rows: np.ndarray) -> str:
    mine = sig == s
    signature: Signature = program.signatures[s]
    twins = sum(other.name == signature.name for other in program.signatures) > 1
    name = (
        f"{signature.name} {', '.join(map(str, signature.inputs))}"
        if twins and signature.inputs
        else signature.name
    )
    if twins and not signature.inputs:
        name = f"{signature.name} {', '.join(map(str, signature.outputs))}"
    return f"{shorten(name, 18)}  {int(rows[mine].sum()):,} in {int(mine.sum()):,}"
