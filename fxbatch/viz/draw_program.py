"""Draw a program: one box per call, in columns by depth; big ones summarised, one box per depth and signature.

Comes in: a Program. Goes out: a Picture.

    draw_program(program, key)                       # the merged graph
    draw_instances(program, key, instances=(0, 1))   # one lane per instance
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fxbatch.ir import Program, Schedule
from fxbatch.viz.call_graph import CallGraph, call_graph, keep_instances, summarise
from fxbatch.viz.layout import place_in_columns
from fxbatch.viz.picture import (
    Arrow,
    Box,
    BoxKind,
    Lane,
    Picture,
    SignatureKey,
    Tick,
    is_constant,
    shorten,
    text_width,
)

LIMIT = 900  # boxes of a picture
TOP = 30.0  # room for the axis
MARGIN = 20.0
LANE_PAD = 14.0


def draw_program(
    program: Program,
    key: SignatureKey,
    *,
    title: str = "program",
    schedule: Schedule | None = None,
    limit: int = LIMIT,
) -> Picture:
    """All calls of the program, equal signatures of a depth next to each other.

    `schedule`: of this program; tells for each box which step runs it.
    """
    whole = call_graph(program)
    graph = summarise(whole, limit)
    note = ""
    if graph is not whole:
        note = f"{len(program):,} calls in {len(graph.call):,} boxes: one box per depth and signature"
    boxes, arrows = _draw(graph, key, _steps(program, schedule), cluster=True)
    return _picture(title, graph, boxes, arrows, note)


def draw_instances(
    program: Program,
    key: SignatureKey,
    *,
    instances: Sequence[int] | None = None,
    title: str = "trace",
    schedule: Schedule | None = None,
    limit: int = LIMIT,
) -> Picture:
    """A lane an instance; without `instances`, as many of the first as fit into `limit` boxes."""
    whole = call_graph(program)
    sizes = np.bincount(program.instance, minlength=program.instances)
    if instances is None:
        instances = range(max(1, int(np.searchsorted(np.cumsum(sizes), limit, side="right"))))
        instances = instances[: min(program.instances, 24)]
    steps = _steps(program, schedule)
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    lanes: list[Lane] = []
    graphs = []
    y = TOP
    for i in instances:
        part = keep_instances(whole, [i])
        graph = summarise(part, max(limit // max(len(instances), 1), 60))
        graphs.append(graph)
        some, lines = _draw(
            graph, key, steps, cluster=False, top=y + LANE_PAD + 8, prefix=f"i{i}-", first=len(boxes)
        )
        bottom = max((b.y + b.h for b in some), default=y + LANE_PAD) + LANE_PAD
        summed = f", in {len(graph.call)} boxes" if graph is not part else ""
        lanes.append(Lane(0, y, 0, bottom - y, f"instance {i}: {int(sizes[i]):,} calls{summed}"))
        boxes += some
        arrows += lines
        y = bottom + 12
    shown = len(graphs)
    note = "" if shown == program.instances else f"{shown} of {program.instances:,} instances shown"
    width = (
        max([b.x + b.w for b in boxes] + [text_width(lane.label) + 40 for lane in lanes], default=0) + MARGIN
    )
    lanes = [Lane(lane.x + 4, lane.y, width - 8, lane.h, lane.label) for lane in lanes]
    return Picture(title, tuple(boxes), tuple(arrows), tuple(lanes), (), note, width, y)


def _steps(program: Program, schedule: Schedule | None) -> np.ndarray | None:
    """int64 [calls]: the step of each call."""
    if schedule is None or len(schedule.order) != len(program):
        return None
    out = np.empty(len(program), dtype=np.int64)
    out[schedule.order] = np.repeat(np.arange(len(schedule)), np.diff(schedule.offsets))
    return out


def _picture(title: str, graph: CallGraph, boxes: list[Box], arrows: list[Arrow], note: str) -> Picture:
    columns: dict[str, tuple[float, float]] = {}
    for box, start in zip(boxes, graph.depth.tolist(), strict=True):
        name = f"depth {start}"
        low, high = columns.get(name, (box.x, box.x + box.w))
        columns[name] = (min(low, box.x), max(high, box.x + box.w))
    ticks = tuple(Tick((low + high) / 2, name) for name, (low, high) in columns.items())
    width = max((b.x + b.w for b in boxes), default=0) + MARGIN
    height = max((b.y + b.h for b in boxes), default=TOP) + MARGIN
    return Picture(title, tuple(boxes), tuple(arrows), (), ticks, note, width, height)


def _draw(
    graph: CallGraph,
    key: SignatureKey,
    steps: np.ndarray | None,
    *,
    cluster: bool,
    top: float = TOP + 10,
    prefix: str = "",
    first: int = 0,
) -> tuple[list[Box], list[Arrow]]:
    payloads = _payload_texts(graph)
    labels = [_label(graph, i, payloads) for i in range(len(graph.call))]
    width = np.array([_box_width(*label) for label in labels])
    height = np.array([_box_height(graph, i) for i in range(len(labels))])
    column = np.unique(graph.depth, return_inverse=True)[1] if len(graph.depth) else graph.depth
    x, y = place_in_columns(
        column, width, height, graph.source, graph.target, cluster=graph.signature if cluster else None
    )
    places = zip((x + MARGIN).tolist(), (y + top).tolist(), width.tolist(), height.tolist(), strict=True)
    boxes = [
        _box(graph, key, i, label, place, steps, prefix)
        for i, (label, place) in enumerate(zip(labels, places, strict=True))
    ]
    return boxes, _arrows(graph, boxes, first)


def _label(graph: CallGraph, i: int, payloads: dict[int, str]) -> tuple[str, str]:
    """The text of a box: name and, of groups, how many calls; constants say their payload."""
    s, count = int(graph.signature[i]), int(graph.count[i])
    if s < 0:
        return (f"v{-1 - int(graph.call[i])}", "") if count == 1 else ("known", f"×{count:,}")
    signature = graph.program.signatures[s]
    if is_constant(signature):
        if count > 1:
            return signature.name, f"×{count:,}"
        return shorten(payloads.get(int(graph.call[i]), ""), 9), ""
    return shorten(signature.name), f"×{count:,}" if count > 1 else ""


def _box_width(label: str, sub: str) -> float:
    return max(14.0, text_width(label) + 16 if label else 0, text_width(sub) + 16 if sub else 0)


def _box_height(graph: CallGraph, i: int) -> float:
    count = int(graph.count[i])
    if count > 1:
        return 34.0 + 5 * min(float(np.log2(count)), 12)
    s = int(graph.signature[i])
    return 17.0 if s < 0 or is_constant(graph.program.signatures[s]) else 24.0


def _box(
    graph: CallGraph,
    key: SignatureKey,
    i: int,
    label: tuple[str, str],
    place: tuple[float, float, float, float],
    steps: np.ndarray | None,
    prefix: str,
) -> Box:
    program, call, count, s = graph.program, int(graph.call[i]), int(graph.count[i]), int(graph.signature[i])
    number = key.number(program.signatures[s]) if s >= 0 else -1
    start, end = int(graph.depth[i]), int(graph.depth_end[i])
    info = [("depth", str(start) if start == end else f"{start} to {end}")]
    if count > 1:
        info.append(("calls", f"{count:,}"))
        info.append(("instances", f"{int(graph.instances[i]):,}"))
        return Box(f"{prefix}g{i}", "group", *place, *label, number, -1, False, tuple(info))
    if call < 0:
        info.append(("value", f"v{-1 - call}, of an earlier phase"))
        return Box(f"{prefix}v{-1 - call}", "known", *place, *label, number, -1, False, tuple(info))
    values = range(int(program.first_value[call]), int(program.first_value[call + 1]))
    read = program.inputs[program.input_offsets[call] : program.input_offsets[call + 1]].tolist()
    info.append(("instance", str(int(program.instance[call]))))
    info.append(("makes", ", ".join(f"v{v}" for v in values) or "nothing"))
    if read:
        info.append(("reads", ", ".join(f"v{v}" for v in read)))
    step = int(steps[call]) if steps is not None else -1
    kind: BoxKind = "constant" if is_constant(program.signatures[s]) else "call"
    result = bool(np.isin(program.outputs, values).any()) if len(values) else False
    return Box(
        f"{prefix}c{call}",
        kind,
        *place,
        *label,
        number,
        step,
        result,
        tuple(info),
    )


def _arrows(graph: CallGraph, boxes: list[Box], first: int) -> list[Arrow]:
    """From the right side of the source to the reader's left side, inputs from top to bottom."""
    order = np.argsort(graph.target, kind="stable")
    arity = np.bincount(graph.target, minlength=len(boxes))
    nth = np.zeros(len(order), dtype=np.int64)
    nth[order] = np.arange(len(order)) - np.repeat(np.cumsum(arity) - arity, arity)
    arrows = []
    for e, (s, t, n) in enumerate(
        zip(graph.source.tolist(), graph.target.tolist(), nth.tolist(), strict=True)
    ):
        a, b, rows = boxes[s], boxes[t], int(graph.rows[e])
        y = b.y + b.h * (n + 1) / (int(arity[t]) + 1)
        info = f"v{int(graph.value[e])}" if rows == 1 else f"{rows:,} values"
        width = 1.2 if rows == 1 else 1.2 + min(float(np.log2(rows)), 14) * 0.3
        arrows.append(Arrow(s + first, t + first, a.x + a.w, a.y + a.h / 2, b.x, y, "data", width, info))
    return arrows


def _payload_texts(graph: CallGraph) -> dict[int, str]:
    """Of single constant calls with one number as payload: call -> that number as text."""
    program = graph.program
    single = graph.call[(graph.count == 1) & (graph.signature >= 0)]
    out = {}
    for s, payload in program.constants.items():
        calls = np.flatnonzero(program.sig == s)
        for c in single[program.sig[single] == s].tolist():
            nth = int(np.searchsorted(calls, c))
            if nth < len(payload):
                out[c] = _scalar_text(payload[nth])
    return out


def _scalar_text(payload: object) -> str:
    if isinstance(payload, torch.Tensor):
        if payload.dim() or payload.device.type == "meta":
            return ""
        payload = payload.detach().item()
    return f"{payload:.4g}" if isinstance(payload, float) else str(payload)
