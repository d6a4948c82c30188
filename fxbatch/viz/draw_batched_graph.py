"""Draw a batched graph: one box per node, as tall as its batch, in columns by depth; edges carry rows.

Comes in: a BatchedGraph of any stage. Goes out: a Picture, in which pass-throughs are dashed, gathers dotted.

    draw_batched_graph(insert_gathers(batch_calls(program, schedule)), key)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxbatch.batched_graph import BatchedGraph, Node, Read, rows_text
from fxbatch.ir import Schedule
from fxbatch.viz.layout import place_in_columns
from fxbatch.viz.picture import Arrow, ArrowKind, Box, Picture, SignatureKey, Tick, shorten, text_width

LIMIT = 700
TOP = 40.0
MARGIN = 20.0
_Reads = list[tuple[str, Read, str]]  # from, what, to


@dataclass(eq=False)
class _Group:
    """Nodes that share a box; one node, where the graph is small enough."""

    names: list[str]
    node: Node
    rows: int
    column: int
    depth_end: int


def draw_batched_graph(
    batched: BatchedGraph,
    key: SignatureKey,
    *,
    title: str = "",
    schedule: Schedule | None = None,
    limit: int = LIMIT,
) -> Picture:
    """A box a node; above `limit` nodes, a box the nodes of one kind and signature in a range of depths.

    `schedule`: the one that the graph was made of; tells which step a batch is.
    """
    groups, place = _groups(batched, limit)
    edges = _edges(batched, place)
    column = (
        np.unique([g.column for g in groups], return_inverse=True)[1] if groups else np.zeros(0, np.int64)
    )
    labels = [_label(batched, g) for g in groups]
    width = np.array([max(text_width(a), text_width(b)) + 18 for a, b in labels])
    height = np.array([34.0 + 5 * min(float(np.log2(max(g.rows, 1))), 12) for g in groups])
    source = np.array([s for s, _ in edges], dtype=np.int64)
    target = np.array([t for _, t in edges], dtype=np.int64)
    x, y = place_in_columns(column, width, height, source, target, row_gap=14.0, column_gap=54.0)
    step_of = _first_calls(schedule)
    places = zip((x + MARGIN).tolist(), (y + TOP).tolist(), width.tolist(), height.tolist(), strict=True)
    boxes = [
        _box(batched, key, g, label, place, step_of)
        for g, label, place in zip(groups, labels, places, strict=True)
    ]
    arrows = _arrows(edges, boxes, groups)
    note = (
        "" if len(groups) == len(batched.graph) else f"{len(batched.graph):,} nodes in {len(groups):,} boxes"
    )
    right = max((b.x + b.w for b in boxes), default=0) + MARGIN
    bottom = max((b.y + b.h for b in boxes), default=TOP) + MARGIN
    return Picture(
        title or batched.stage, tuple(boxes), arrows, (), _ticks(groups, boxes), note, right, bottom
    )


def _groups(batched: BatchedGraph, limit: int) -> tuple[list[_Group], dict[str, int]]:
    """The boxes in order of execution, and the box of each node."""
    nodes = batched.nodes()
    column = _columns(batched)
    bucket = 1
    keys: list[tuple[object, ...]] = [(name,) for name, _ in nodes]
    while len(set(keys)) > limit:
        keys = [(column[name] // bucket, n.kind, n.signature) for name, n in nodes]
        bucket *= 2
    found: dict[tuple[object, ...], int] = {}
    groups: list[_Group] = []
    place: dict[str, int] = {}
    for (name, node), k in zip(nodes, keys, strict=True):
        if k not in found:
            found[k] = len(groups)
            groups.append(_Group([], node, 0, column[name] // (bucket // 2 or 1), node.depth))
        place[name] = found[k]
        group = groups[found[k]]
        group.names.append(name)
        group.rows += node.rows
        group.depth_end = max(group.depth_end, node.depth)
    return groups, place


def _columns(batched: BatchedGraph) -> dict[str, int]:
    """A column a node: by depth, and inside a depth by the longest path, so that edges lead to the right."""
    inner: dict[str, int] = {}
    for name, node in batched.nodes():
        before = [b for b in batched.graph.predecessors(name) if batched.node(b).depth == node.depth]
        inner[name] = 1 + max((inner[b] for b in before if b in inner), default=-1)
    pairs = sorted({(batched.node(name).depth, level) for name, level in inner.items()})
    number = {pair: i for i, pair in enumerate(pairs)}
    return {name: number[batched.node(name).depth, level] for name, level in inner.items()}


def _edges(batched: BatchedGraph, place: dict[str, int]) -> dict[tuple[int, int], _Reads]:
    """Pairs of boxes, with the reads between them."""
    out: dict[tuple[int, int], _Reads] = {}
    for name, _ in batched.nodes():
        for before, read in batched.reads(name):
            pair = (place[before], place[name])
            if pair[0] != pair[1]:
                out.setdefault(pair, []).append((before, read, name))
    return out


def _read_text(edge: tuple[str, Read, str]) -> str:
    before, read, name = edge
    return f"{before}.{read.output}[{rows_text(read.rows)}] to {name}, input {read.input}"


def _label(batched: BatchedGraph, group: _Group) -> tuple[str, str]:
    node = group.node
    name = batched.program.signatures[node.signature].name if node.kind == "batch" else node.kind
    many = f", {len(group.names):,} nodes" if len(group.names) > 1 else ""
    return shorten(name), f"×{group.rows:,}{many}"


def _first_calls(schedule: Schedule | None) -> dict[int, int]:
    """The first call of each step -> the step."""
    if schedule is None:
        return {}
    starts = schedule.order[schedule.offsets[:-1]] if len(schedule) else schedule.order
    return {c: k for k, c in enumerate(starts.tolist())}


def _box(
    batched: BatchedGraph,
    key: SignatureKey,
    group: _Group,
    label: tuple[str, str],
    place: tuple[float, float, float, float],
    step_of: dict[int, int],
) -> Box:
    node = group.node
    number = key.number(batched.program.signatures[node.signature]) if node.kind == "batch" else -1
    single = len(group.names) == 1
    step = step_of.get(int(node.calls[0]), -1) if single and len(node.calls) else -1
    names = ", ".join(group.names[:4]) + (f", ... {len(group.names)} nodes" if len(group.names) > 4 else "")
    info = [("node", names)]
    depth = str(node.depth) if group.depth_end == node.depth else f"{node.depth} to {group.depth_end}"
    info.append(("depth", depth))
    info.append(("batch size" if single and node.kind == "batch" else "rows", f"{group.rows:,}"))
    info.append(("gives", ", ".join(map(str, node.types)) or "nothing"))
    if single and node.kind != "batch" and node.gives:
        info.append(("values", ", ".join(f"v{v}" for v in node.gives[0][:12].tolist())))
    return Box(
        group.names[0],
        node.kind,
        *place,
        *label,
        number,
        step,
        node.kind == "result",
        tuple(info),
    )


def _arrows(
    edges: dict[tuple[int, int], _Reads], boxes: list[Box], groups: list[_Group]
) -> tuple[Arrow, ...]:
    arity: dict[int, int] = {}
    for _, t in edges:
        arity[t] = arity.get(t, 0) + 1
    seen: dict[int, int] = {}
    out = []
    order = sorted(edges, key=lambda pair: (pair[1], boxes[pair[0]].y))
    for s, t in order:
        seen[t] = seen.get(t, 0) + 1
        a, b = boxes[s], boxes[t]
        kinds = (groups[s].node.kind, groups[t].node.kind)
        kind: ArrowKind = "pass" if "pass" in kinds else "gather" if "gather" in kinds else "data"
        reads = edges[s, t]
        text = "\n".join(map(_read_text, reads[:6])) + (f"\n... {len(reads)} reads" if len(reads) > 6 else "")
        width = 1.3 + 0.3 * min(float(np.log2(max(min(groups[s].rows, groups[t].rows), 1))), 12)
        y = b.y + b.h * seen[t] / (arity[t] + 1)
        out.append(Arrow(s, t, a.x + a.w, a.y + a.h / 2, b.x, y, kind, width, text))
    return tuple(out)


def _ticks(groups: list[_Group], boxes: list[Box]) -> tuple[Tick, ...]:
    spans: dict[int, tuple[float, float]] = {}
    for group, box in zip(groups, boxes, strict=True):
        low, high = spans.get(group.node.depth, (box.x, box.x + box.w))
        spans[group.node.depth] = (min(low, box.x), max(high, box.x + box.w))
    return tuple(Tick((low + high) / 2, f"depth {depth}") for depth, (low, high) in sorted(spans.items()))
