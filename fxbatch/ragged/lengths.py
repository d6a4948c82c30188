"""One size of all instances of a minibatch: where the rows of each instance lie, packed and padded.

In: a column of sizes, one an instance. Out: offsets, segments, and rows moved between the packed form
[sum of sizes, ...] and the padded one [n, longest, ...]. Everything is made when it is first asked for.

    lengths = Lengths(np.array([2, 0, 3]), device)
    lengths.segment            # tensor([0, 0, 2, 2, 2])
    lengths.pad(rows)          # [3, 3, ...]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Lengths:
    """A size of each instance."""

    def __init__(self, sizes: np.ndarray, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.n = len(sizes)

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @functools.cached_property
    def total(self) -> int:
        """Rows of all instances."""
        return int(self.sizes.sum())

    @functools.cached_property
    def longest(self) -> int:
        return int(self.sizes.max()) if self.n else 0

    @functools.cached_property
    def shortest(self) -> int:
        return int(self.sizes.min()) if self.n else 0

    @property
    def uniform(self) -> bool:
        """Whether no instance is padded."""
        return self.shortest == self.longest

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """int64 [n]: the first row of each instance."""
        ends = np.cumsum(self.sizes)
        return np.asarray(ends - self.sizes, dtype=np.int64)

    @functools.cached_property
    def list(self) -> list[int]:
        return [int(x) for x in self.sizes]

    @functools.cached_property
    def column(self) -> torch.Tensor:
        """int64 [n]: the sizes."""
        return self._to(self.sizes.astype(np.int64))

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [n]: the first row of each instance."""
        return self._to(self.starts)

    @functools.cached_property
    def segments(self) -> np.ndarray:
        return np.repeat(np.arange(self.n, dtype=np.int64), self.sizes)

    @functools.cached_property
    def segment(self) -> torch.Tensor:
        """int64 [total]: the instance of each row."""
        return self._to(self.segments)

    @functools.cached_property
    def positions(self) -> np.ndarray:
        return np.arange(self.total, dtype=np.int64) - self.starts[self.segments]

    @functools.cached_property
    def position(self) -> torch.Tensor:
        """int64 [total]: the place of each row in its instance."""
        return self._to(self.positions)

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """int64 [total]: the place of each row in the padded form, its first two dimensions as one."""
        return self._to(self.segments * self.longest + self.positions)

    @functools.cached_property
    def sources(self) -> torch.Tensor:
        """int64 [n * longest]: the row that each place of the padded form repeats: its own, or its instance's last.

        Places of an instance without rows repeat row `total`, which is no instance's.
        """
        last = np.maximum(self.sizes - 1, 0)[:, None]
        rows = self.starts[:, None] + np.minimum(np.arange(self.longest, dtype=np.int64)[None], last)
        rows[self.sizes == 0] = self.total
        return self._to(rows.reshape(-1))

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """bool [n, longest]: which places of the padded form are rows."""
        return self._to(np.arange(self.longest)[None] < self.sizes[:, None])

    @functools.cached_property
    def padding(self) -> torch.Tensor:
        """bool [n, longest]: which places are none."""
        return ~self.mask

    # -- moving rows --------------------------------------------------------------------------------

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """[total, ...] => [n, longest, ...]; padding repeats rows of the instance, so that whatever is computed of it
        is finite where the instance's own values are."""
        if not self.uniform:
            if self.shortest == 0:
                rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
            rows = rows.index_select(0, self.sources)
        return rows.reshape(self.n, self.longest, *rows.shape[1:])

    def pad(self, rows: torch.Tensor, fill: Any = 0) -> torch.Tensor:
        """[total, ...] => [n, longest, ...]; padding is `fill`."""
        if not self.uniform:
            out = rows.new_full((self.n * self.longest, *rows.shape[1:]), fill)
            rows = out.index_copy(0, self.places, rows)
        return rows.reshape(self.n, self.longest, *rows.shape[1:])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[n, longest, ...] => [total, ...]."""
        flat = padded.reshape(self.n * self.longest, *padded.shape[2:])
        return flat if self.uniform else flat.index_select(0, self.places)

    def clear(self, padded: torch.Tensor, dim: int) -> torch.Tensor:
        """Padding along dimension `dim` of [n, ...] becomes zero."""
        if self.uniform:
            return padded
        shape = [self.n] + [1] * (padded.dim() - 1)
        shape[dim] = self.longest
        return padded.masked_fill(self.padding.view(shape), 0)

    def hide(self, padded: torch.Tensor, dim: int, fill: Any = float("-inf")) -> torch.Tensor:
        """Padding along dimension `dim` of [n, ...] becomes `fill`."""
        if self.uniform:
            return padded
        shape = [self.n] + [1] * (padded.dim() - 1)
        shape[dim] = self.longest
        return padded.masked_fill(self.padding.view(shape), fill)

    # -- over the rows of each instance ---------------------------------------------------------------

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """[total, ...] => [n, ...]."""
        if self.uniform:
            return rows.reshape(self.n, self.longest, *rows.shape[1:]).sum(1)
        out = rows.new_zeros((self.n, *rows.shape[1:]))
        return out.index_add(0, self.segment, rows)

    def each(self, per_instance: torch.Tensor) -> torch.Tensor:
        """[n, ...] => [total, ...]: every row gets its instance's."""
        return per_instance.index_select(0, self.segment)

    def divided(self, per_instance: torch.Tensor, times: int) -> torch.Tensor:
        """[n, ...] divided by `times` the sizes."""
        count = self.column.to(per_instance.dtype) * times
        return per_instance / count.view(-1, *[1] * (per_instance.dim() - 1))

    # -- indices --------------------------------------------------------------------------------------

    def rows_of(self, index: torch.Tensor, first: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Rows that an instance's own indices mean; first and size are those of each index. An index that is out of
        the instance's range becomes one that is out of every range, so that reading it is an error."""
        row = torch.where(index < 0, index + size, index)
        bad = (row < 0) | (row >= size)
        return torch.where(bad, self.total, row + first)

    def taken(self, start: np.ndarray, sizes: Lengths, step: int = 1) -> torch.Tensor:
        """int64 [sizes.total]: `sizes` rows of each instance, from `start` on."""
        first = np.broadcast_to(self.starts + start, (self.n,))
        return self._to(first[sizes.segments] + sizes.positions * step)

    @functools.cached_property
    def reversed(self) -> torch.Tensor:
        """int64 [total]: the rows of each instance from its last to its first."""
        return self._to((self.starts + self.sizes - 1)[self.segments] - self.positions)

    @functools.cached_property
    def by_time(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For packed sequences: instances from longest to shortest; where each row is among all first, second, ...
        rows; instances at each time; rows in that order; and the instances back in order."""
        order = np.argsort(-self.sizes, kind="stable")
        counts = (self.sizes[:, None] > np.arange(self.longest)[None]).sum(0)
        time = np.repeat(np.arange(self.longest), counts)
        starts = np.cumsum(counts) - counts
        rank = np.arange(self.total) - starts[time]
        rows = self.starts[order[rank]] + time
        unsorted = np.argsort(order, kind="stable")
        counted = torch.from_numpy(counts.astype(np.int64))  # on the CPU, as torch wants it
        return (
            self._to(order),
            self._to(np.argsort(rows, kind="stable")),
            counted,
            self._to(rows),
            self._to(unsorted),
        )


def interleaved(parts: Sequence[Lengths], device: torch.device) -> torch.Tensor:
    """The order that takes the rows of all parts, part after part, to those of each instance, one after another."""
    base = 0
    keys, rows = [], []
    for place, part in enumerate(parts):
        keys.append(part.segments * len(parts) + place)
        rows.append(np.arange(part.total, dtype=np.int64) + base)
        base += part.total
    order = np.argsort(np.concatenate(keys), kind="stable")
    return torch.from_numpy(np.concatenate(rows)[order]).to(device)
