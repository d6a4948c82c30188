"""Draw a plan as a map of memory: one row per arena, one block per output of a step, where it lies.

Comes in: a Plan and the signatures of its program. Goes out: a Picture; hovering tells what the step reads.

    draw_plan(plan, program.signatures, key)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxbatch.ir import BROADCAST, INDEX, VIEW, Plan, Signature
from fxbatch.text import step_text
from fxbatch.viz.picture import Box, Lane, Picture, SignatureKey, text_width

LIMIT = 1500  # blocks
WIDTH = 1180.0
LEFT = 190.0
ROW = 40.0
TOP = 10.0


def draw_plan(
    plan: Plan, signatures: Sequence[Signature], key: SignatureKey, *, title: str = "plan", limit: int = LIMIT
) -> Picture:
    """Rows of the arenas from left to right; the first `limit` blocks, and a note where there are more."""
    longest = max(int(plan.capacity.max(initial=1)), 1)
    scale = min(WIDTH / longest, 16.0)
    lanes = [
        Lane(4, TOP + a * (ROW + 6), LEFT + longest * scale + 8, ROW, f"a{a} {type_}, {rows:,} rows")
        for a, (type_, rows) in enumerate(zip(plan.arenas, plan.capacity.tolist(), strict=True))
    ]
    blocks = np.repeat(np.arange(len(plan)), np.diff(plan.first_block))
    shown = min(len(blocks), limit)
    steps = plan.steps
    boxes = []
    for b in range(shown):
        k = int(blocks[b])
        signature = signatures[int(plan.step_signature[k])]
        rows, arena, start = int(plan.step_rows[k]), int(plan.block_arena[b]), int(plan.block_start[b])
        w = max(rows * scale, 1.5)
        name = signature.name if text_width(signature.name, 10) + 6 <= w else ""
        place = (LEFT + start * scale, TOP + arena * (ROW + 6) + 4, w, ROW - 8)
        info = (
            ("step", str(k)),
            ("rows", f"a{arena}[{start}:{start + rows}]"),
            ("batch size", f"{rows:,}"),
            ("plan", _short(step_text(plan, k, steps[k], signatures))),
        )
        sub = f"×{rows:,}" if name else ""
        boxes.append(Box(f"p{b}", "block", *place, name, sub, key.number(signature), k, False, info))
    note = _gathers(plan) + (f"; {shown:,} of {len(blocks):,} blocks shown" if shown < len(blocks) else "")
    width = LEFT + longest * scale + 24
    return Picture(title, tuple(boxes), (), tuple(lanes), (), note, width, TOP + len(lanes) * (ROW + 6) + 10)


def _gathers(plan: Plan) -> str:
    counts = np.bincount(plan.gather_kind, minlength=3)
    return (
        f"inputs read in place: {int(counts[VIEW]):,}, one row for all: {int(counts[BROADCAST]):,}, "
        f"gathered by index: {int(counts[INDEX]):,}"
    )


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
