"""Where rows lie, against the same by numpy: sizes of 0, one instance, none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxbatch.ragged.lengths import Lengths
from fxbatch.ragged.row_places import measure, padded_places, padded_rows, windows


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_against_numpy(given_sizes: list[int], kernel: int, left: int, stride: int) -> None:
    sizes = np.array(given_sizes, dtype=np.int64)
    n, starts = len(sizes), np.empty(len(sizes), dtype=np.int64)
    total, longest, shortest = measure(sizes, starts)
    assert (total, longest, shortest) == (
        sizes.sum(),
        max(given_sizes, default=0),
        min(given_sizes, default=0),
    )
    assert starts.tolist() == [sum(given_sizes[:i]) for i in range(n)]
    rows = [(i, j) for i in range(n) for j in range(sizes[i])]
    assert Lengths(sizes, torch.device("cpu")).segments.tolist() == [i for i, _ in rows]
    assert Lengths(sizes, torch.device("cpu")).positions.tolist() == [j for _, j in rows]
    assert padded_places(sizes, total, longest).tolist() == [i * longest + j for i, j in rows]
    place = {row: k for k, row in enumerate(rows)}
    padded = [(i, j) for i in range(n) for j in range(longest)]
    assert padded_rows(sizes, total, longest, False).tolist() == [place.get(p, total) for p in padded]
    last = [place.get((i, min(j, given_sizes[i] - 1)), total) for i, j in padded]
    assert padded_rows(sizes, total, longest, True).tolist() == last
    out = np.maximum((sizes + left - kernel) // stride + 1, 0)
    met = [
        place.get((i, j * stride - left + k), total)
        for i in range(n)
        for j in range(out[i])
        for k in range(kernel)
    ]
    assert windows(sizes, out, int(out.sum()), total, kernel, left, stride, 1).tolist() == met


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="negative size"):
        measure(np.array([2, -1]), np.empty(2, dtype=np.int64))


@pytest.mark.parametrize("width", (1, 3, 9))
def test_softmax_and_weighted_sums_of_segments(width: int) -> None:
    size = Lengths(np.array([3, 0, 1, 5], dtype=np.int64), torch.device("cpu"))
    rows = torch.randn(9, width, dtype=torch.float64, requires_grad=True)
    values = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(size.softmax, (rows,))
    assert torch.autograd.gradgradcheck(size.softmax, (rows,))
    expected = torch.cat([x.softmax(0) for x in rows.split(size.list)])
    torch.testing.assert_close(size.softmax(rows), expected)
    with torch.no_grad():
        torch.testing.assert_close(size.softmax(rows), expected)
        weights = expected[:, :1]
        torch.testing.assert_close(size.weighted(weights, values), size.sum(weights * values))
    assert torch.autograd.gradcheck(size.weighted, (expected[:, :1].detach().requires_grad_(), values))
    hidden = torch.full((9, width), float("-inf"))
    assert size.softmax(hidden).isnan().all()
