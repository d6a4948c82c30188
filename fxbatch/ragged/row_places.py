"""Where rows lie: from the sizes of the instances, packed and padded places in one loop each.

In: int64 [n], the size of each instance. Out: int64 columns, which tensors share.

    starts = np.empty(3, np.int64)
    measure(np.array([2, 0, 3]), starts)       # (5, 3, 0): rows in all, the longest, the shortest; starts is [0, 2, 2]
    padded_places(np.array([2, 0, 3]), 5, 3)   # [0, 1, 6, 7, 8]

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

import numpy as np

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Written = cython.typedef(cython.longlong[::1])


def measure(sizes: Ints, starts: Written) -> tuple[int, int, int]:
    """Rows in all, the largest and the smallest size (0 and 0 of none); the first row of each instance goes to
    `starts`."""
    total = 0
    longest = 0
    shortest = sizes[0] if len(sizes) else 0
    for i in range(len(sizes)):
        starts[i] = total
        total += sizes[i]
        longest = sizes[i] if sizes[i] > longest else longest
        shortest = sizes[i] if sizes[i] < shortest else shortest
    if shortest < 0:
        raise ValueError("an instance has a negative size")
    return total, longest, shortest


def padded_places(sizes: Ints, total: Int, longest: Int) -> np.ndarray:
    """int64 [total]: the place of each row in the padded form, its first two dimensions as one."""
    out = np.empty(total, dtype=np.int64)
    written: Written = out
    at = 0
    for i in range(len(sizes)):
        for j in range(sizes[i]):
            written[at + j] = i * longest + j
        at += sizes[i]
    return out


def padded_rows(sizes: Ints, total: Int, longest: Int, repeats: bool) -> np.ndarray:
    """int64 [n * longest]: the row at each place of the padded form. Where there is none, its instance's last row if it
    repeats, else `total`, which is no instance's; and that where an instance has none."""
    out = np.empty(len(sizes) * longest, dtype=np.int64)
    written: Written = out
    at = 0
    to = 0
    for i in range(len(sizes)):
        for j in range(sizes[i]):
            written[to + j] = at + j
        at += sizes[i]
        beyond = at - 1 if repeats and sizes[i] > 0 else total
        for j in range(sizes[i], longest):
            written[to + j] = beyond
        to += longest
    return out


def windows(
    sizes: Ints, out_sizes: Ints, places: Int, total: Int, kernel: Int, left: Int, stride: Int, dilation: Int
) -> np.ndarray:
    """int64 [places * kernel]: the row that each tap of a sliding kernel meets at each place of all instances;
    `total` beyond the ends of the instance. left: how far the first place begins before the first row."""
    out = np.empty(places * kernel, dtype=np.int64)
    written: Written = out
    at = 0
    to = 0
    for i in range(len(sizes)):
        for j in range(out_sizes[i]):
            for k in range(kernel):
                row = j * stride - left + k * dilation
                written[to + k] = at + row if row >= 0 and row < sizes[i] else total
            to += kernel
        at += sizes[i]
    return out
