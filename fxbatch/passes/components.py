"""Strongly connected components of a small graph, as they feed each other.

In: a number of nodes and edges (a, b) "a feeds b". Out: the components, each sorted; among those that could come
next, the one with the lowest node comes first.

    components(4, [(0, 1), (1, 2), (2, 1), (3, 2)])      # [[0], [3], [1, 2]]

Without networkx, whose import takes as long as the rest of a first minibatch's planning. Plain Python: compiled
passes can't index from the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def components(nodes: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The components in topological order (Tarjan 1972, without recursion)."""
    feeds: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in edges:
        feeds[a].append(b)
    parts = _tarjan(feeds)
    part_of = {node: p for p, part in enumerate(parts) for node in part}
    after = [sorted({part_of[b] for a in part for b in feeds[a]} - {p}) for p, part in enumerate(parts)]
    waits = [0] * len(parts)
    for readers in after:
        for p in readers:
            waits[p] += 1
    ready = [(part[0], p) for p, part in enumerate(parts) if not waits[p]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, p = heapq.heappop(ready)
        ordered.append(parts[p])
        for reader in after[p]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (parts[reader][0], reader))
    return ordered


def _tarjan(feeds: list[list[int]]) -> list[list[int]]:
    seen: dict[int, int] = {}  # node -> when it was met
    lowest = [0] * len(feeds)  # the earliest node on the path that it leads back to
    path: list[int] = []
    on_path = [False] * len(feeds)
    parts = []
    for root in range(len(feeds)):
        work = [] if root in seen else [(root, iter(feeds[root]))]
        while work:
            node, rest = work[-1]
            if node not in seen:
                seen[node] = lowest[node] = len(seen)
                path.append(node)
                on_path[node] = True
            for reader in rest:
                if reader not in seen:
                    work.append((reader, iter(feeds[reader])))
                    break
                if on_path[reader]:
                    lowest[node] = min(lowest[node], seen[reader])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == seen[node]:
                    part = []
                    while on_path[node]:  # what was met after it
                        part.append(path.pop())
                        on_path[part[-1]] = False
                    parts.append(sorted(part))
    return parts
