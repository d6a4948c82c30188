"""The calls of a program as columns to draw: depth, signature, instance, edges; and their summary.

Comes in: a Program. Goes out: a CallGraph, a row a box; `summarise` puts calls of one depth and signature
in one box, so that any program has a picture of bounded size.

    graph = call_graph(program)
    summarise(graph, 900).count.sum() == len(graph.depth)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxbatch.ir import Program
from fxbatch.passes.schedule import depths


@dataclass(frozen=True, eq=False)
class CallGraph:
    """A row a box, and edges between rows. Values of earlier phases are rows too, with signature -1."""

    program: Program
    call: np.ndarray  # int64 [boxes]: the (first) call; of values of earlier phases, -1 - value
    count: np.ndarray  # int64 [boxes]: calls that the box stands for
    signature: np.ndarray  # int64 [boxes]: index into program.signatures, -1 for known values
    depth: np.ndarray  # int64 [boxes]: the column
    depth_end: np.ndarray  # int64 [boxes]: the deepest call in the box
    instance: np.ndarray  # int64 [boxes]; -1: several
    instances: np.ndarray  # int64 [boxes]: how many instances have calls in the box
    source: np.ndarray  # int64 [edges]
    target: np.ndarray  # int64 [edges]
    value: np.ndarray  # int64 [edges]: the (first) value carried
    rows: np.ndarray  # int64 [edges]: how many inputs the edge stands for


def call_graph(program: Program) -> CallGraph:
    """A box a call, in recorded order, and one a value of an earlier phase that is read."""
    calls = len(program)
    source = program.makers(program.inputs).copy()
    known = np.unique(program.inputs[source < 0])
    source[source < 0] = calls + np.searchsorted(known, program.inputs[source < 0])
    depth = np.concatenate([depths(program).astype(np.int64), np.zeros(len(known), np.int64)])
    instance = np.concatenate([program.instance.astype(np.int64), np.full(len(known), -1)])
    one = np.ones(calls + len(known), dtype=np.int64)
    return CallGraph(
        program=program,
        call=np.concatenate([np.arange(calls), -1 - known]),
        count=one,
        signature=np.concatenate([program.sig.astype(np.int64), np.full(len(known), -1)]),
        depth=depth,
        depth_end=depth,
        instance=instance,
        instances=one,
        source=source,
        target=program.reader.astype(np.int64),
        value=program.inputs,
        rows=np.ones(len(source), dtype=np.int64),
    )


def keep(graph: CallGraph, mask: np.ndarray) -> CallGraph:
    """Only the boxes of `mask` (bool [boxes]), and the edges between them."""
    place = np.cumsum(mask) - 1
    edges = mask[graph.source] & mask[graph.target]
    return CallGraph(
        program=graph.program,
        call=graph.call[mask],
        count=graph.count[mask],
        signature=graph.signature[mask],
        depth=graph.depth[mask],
        depth_end=graph.depth_end[mask],
        instance=graph.instance[mask],
        instances=graph.instances[mask],
        source=place[graph.source[edges]],
        target=place[graph.target[edges]],
        value=graph.value[edges],
        rows=graph.rows[edges],
    )


def keep_instances(graph: CallGraph, instances: Sequence[int]) -> CallGraph:
    """The boxes of those instances, and the known values that they read."""
    mask = np.isin(graph.instance, np.asarray(instances, dtype=np.int64))
    known = graph.source[mask[graph.target]]
    mask[known[graph.signature[known] < 0]] = True
    return keep(graph, mask)


def summarise(graph: CallGraph, limit: int) -> CallGraph:
    """At most about `limit` boxes: calls of one depth and signature in one box.

    Where that is still too much, neighbouring depths are put together. Nothing to do: the same object.
    """
    if len(graph.call) <= limit:
        return graph
    signatures = len(graph.program.signatures) + 1
    depth, signature = graph.depth, graph.signature + 1
    per_column = max(len(np.unique(signature)), 1)
    deepest = int(depth.max()) + 1
    bucket = 1
    while len(np.unique(depth // bucket * signatures + signature)) > limit and bucket < deepest:
        bucket = max(bucket + 1, int(np.ceil(deepest * per_column / limit)) if bucket == 1 else bucket * 2)
    key = depth // bucket * signatures + signature
    keys, first, group = np.unique(key, return_index=True, return_inverse=True)
    count = np.bincount(group, minlength=len(keys))
    deepest_in = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(deepest_in, group, depth)
    pairs = np.unique(group.astype(np.int64) * (int(graph.instance.max(initial=0)) + 2) + graph.instance + 1)
    instances = np.bincount(pairs // (int(graph.instance.max(initial=0)) + 2), minlength=len(keys))
    edge = group[graph.source].astype(np.int64) * len(keys) + group[graph.target]
    edges, first_edge, rows = np.unique(edge, return_index=True, return_counts=True)
    inside = edges // len(keys) == edges % len(keys)  # calls of neighbouring depths in one box
    edges, first_edge, rows = edges[~inside], first_edge[~inside], rows[~inside]
    return CallGraph(
        program=graph.program,
        call=graph.call[first],
        count=count,
        signature=graph.signature[first],
        depth=depth[first] // bucket * bucket,
        depth_end=deepest_in,
        instance=np.where(instances == 1, graph.instance[first], -1),
        instances=instances,
        source=edges // len(keys),
        target=edges % len(keys),
        value=graph.value[first_edge],
        rows=rows,
    )
