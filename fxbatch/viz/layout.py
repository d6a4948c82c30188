"""Where boxes go: columns by depth, from leaves (left) to root (right), few crossings, straight lines.

Comes in: sizes of boxes, the column of each, and edges between them. Goes out: the left upper corner of each.

    x, y = place_in_columns(column, width, height, source, target)

Source: Sugiyama, Tagawa & Toda 1981 (layers, barycentres); positions inside a column are the least-squares
fit to the neighbours' centres that keeps the order and the gaps (isotonic regression, Barlow et al. 1972).
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

COLUMN_GAP = 46.0
ROW_GAP = 10.0
SWEEPS = 6


def place_in_columns(
    column: np.ndarray,
    width: np.ndarray,
    height: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    *,
    cluster: np.ndarray | None = None,
    row_gap: float = ROW_GAP,
    column_gap: float = COLUMN_GAP,
) -> tuple[np.ndarray, np.ndarray]:
    """Left upper corners, float64 [boxes] each; `column` int64 [boxes], edges as positions of boxes.

    Boxes of one column keep the order in which they come, as far as that gives few crossings; with
    `cluster`, those of one cluster stay together.
    """
    if not len(column):
        return np.zeros(0), np.zeros(0)
    columns = _order_columns(column, source, target, cluster)
    center = _straighten(columns, height, source, target, row_gap)
    y = center - height / 2
    y -= y.min()
    x = np.zeros(len(column))
    left = 0.0
    for members in columns:
        if not len(members):
            continue
        widest = float(width[members].max())
        x[members] = left + (widest - width[members]) / 2
        left += widest + column_gap
    return x, y


def _order_columns(
    column: np.ndarray, source: np.ndarray, target: np.ndarray, cluster: np.ndarray | None
) -> list[np.ndarray]:
    """Boxes of each column, from top to bottom: barycentre sweeps there and back, the best order kept."""
    count = len(column)
    group = cluster if cluster is not None else np.zeros(count, dtype=np.int64)
    columns = [np.flatnonzero(column == c) for c in range(int(column.max()) + 1)]
    columns = [members[np.argsort(group[members], kind="stable")] for members in columns]
    place = np.zeros(count)
    for members in columns:
        place[members] = _spread(len(members))
    best, fewest = place.copy(), crossings(column, place, source, target)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        ahead = sweep % 2 == 0
        for members in columns if ahead else reversed(columns):
            mean = _means(place, source, target, count) if ahead else _means(place, target, source, count)
            wish = np.where(np.isnan(mean[members]), place[members], mean[members])
            place[members[np.lexsort((place[members], wish, group[members]))]] = _spread(len(members))
        found = crossings(column, place, source, target)
        if found < fewest:
            best, fewest = place.copy(), found
    return [members[np.argsort(best[members], kind="stable")] for members in columns]


def crossings(column: np.ndarray, place: np.ndarray, source: np.ndarray, target: np.ndarray) -> int:
    """Pairs of edges between the same two columns whose ends lie in opposite order."""
    pair = column[source] * (int(column.max(initial=0)) + 1) + column[target]
    order = np.lexsort((place[target], place[source], pair))
    ends, pair = place[target][order].tolist(), pair[order]
    total = 0
    for begin, end in itertools.pairwise([0, *(np.flatnonzero(np.diff(pair)) + 1).tolist(), len(ends)]):
        above: list[float] = []
        for value in ends[begin:end]:
            at = bisect.bisect_right(above, value)
            total += len(above) - at
            above.insert(at, value)
    return total


def _spread(count: int) -> np.ndarray:
    """Even places in [0, 1], so that columns of different lengths compare."""
    return (np.arange(count) + 0.5) / max(count, 1)


def _means(place: np.ndarray, source: np.ndarray, target: np.ndarray, count: int) -> np.ndarray:
    """float64 [boxes]: the mean place of a target's sources, NaN where it has none."""
    total = np.bincount(target, weights=place[source], minlength=count)
    number = np.bincount(target, minlength=count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _straighten(
    columns: list[np.ndarray], height: np.ndarray, source: np.ndarray, target: np.ndarray, gap: float
) -> np.ndarray:
    """Vertical centres: each box near the mean of its neighbours, order and gaps kept."""
    count = len(height)
    center = np.zeros(count)
    tallest = max((float((height[m] + gap).sum()) for m in columns if len(m)), default=0.0)
    for members in columns:
        step = height[members] + gap
        center[members] = np.cumsum(step) - step / 2 + (tallest - float(step.sum())) / 2
    ends, others = np.concatenate([source, target]), np.concatenate([target, source])
    for sweep in range(SWEEPS):
        ahead = sweep % 2 == 0
        for members in columns if ahead else reversed(columns):
            if not len(members):
                continue
            if ahead:
                mean = _means(center, source, target, count)[members]
            else:
                mean = _means(center, others, ends, count)[members]
            wish = np.where(np.isnan(mean), center[members], mean)
            center[members] = keep_apart(wish, height[members], gap)
    return center


def keep_apart(wish: np.ndarray, height: np.ndarray, gap: float) -> np.ndarray:
    """The centres nearest to `wish` (least squares) in the given order, without overlap."""
    offset = np.zeros(len(wish))
    offset[1:] = np.cumsum((height[1:] + height[:-1]) / 2 + gap)
    blocks: list[tuple[float, int]] = []  # mean, members
    for value in (wish - offset).tolist():
        mean, members = value, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean, members = (mean * members + other * more) / (members + more), members + more
        blocks.append((mean, members))
    fitted = np.repeat([b[0] for b in blocks], [b[1] for b in blocks])
    return np.asarray(fitted + offset)
