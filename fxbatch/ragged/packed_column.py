"""One tensor of each instance, all in one: how they lie in it, and how they are put together and taken apart.

column = PackedColumn(words, PACKED, (0,), [lengths], 2)     # [T0 + T1, 64]
column[1]                                                    # [T1, 64]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fxbatch.ragged.lengths import Lengths, pairs

# One tensor for all; [n, ...]; the rows of one instance after those of another; [n, longest, longest, ...].
WHOLE, DENSE, PACKED, PADDED = "whole", "dense", "packed", "padded"


class PackedColumn:
    """One tensor of each instance, in the layout in which a packed function gives and takes them."""

    def __init__(
        self, tensor: torch.Tensor, layout: str, axes: Sequence[int], lengths: Sequence[Lengths], n: int
    ) -> None:
        self._grad = torch.is_grad_enabled()
        self.tensor = tensor if self._grad or not tensor.requires_grad else tensor.detach()
        self._layout, self._axes, self._lengths, self._n = layout, axes, lengths, n
        self._parts: list[torch.Tensor] | None = None
        self._rows: dict[bool, PackedColumn] = {}

    @staticmethod
    def of_rows(tensor: torch.Tensor) -> PackedColumn:
        """The rows of a tensor."""
        return PackedColumn(tensor, DENSE, (), [], len(tensor))

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._apart())

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._apart()[i]

    def _apart(self) -> list[torch.Tensor]:
        if self._parts is None:
            with torch.set_grad_enabled(self._grad):
                self._parts = apart(self.tensor, self._layout, self._axes, self._lengths, self._n)
        return self._parts

    def by_rows(self, *, grad: bool) -> tuple[PackedColumn, np.ndarray, np.ndarray] | None:
        """All rows of all its tensors as a column, where those of each begin, and how many each has; None where they
        don't lie one behind the other. grad: whether gradients go through them."""
        if self._layout == DENSE and self.tensor.dim() > 1:
            each = self.tensor.shape[1]
            begins, counts = np.arange(self._n) * each, np.full(self._n, each)
        elif self._layout == PACKED and tuple(self._axes) == (0,):
            begins, counts = self._lengths[0].starts, self._lengths[0].sizes
        else:
            return None
        if grad not in self._rows:
            with torch.set_grad_enabled(grad):
                tensor = self.tensor.flatten(0, 1) if self._layout == DENSE else self.tensor
                self._rows[grad] = PackedColumn.of_rows(tensor)
        return self._rows[grad], begins, counts

    @property
    def is_dense(self) -> bool:
        """Whether all its tensors have one shape."""
        return self._layout == DENSE

    def taken(self, places: np.ndarray) -> Sequence[torch.Tensor] | PackedColumn:
        """The tensors at these places, in this order."""
        if len(places) == self._n and (places == np.arange(self._n)).all():
            return self
        if self._layout not in (DENSE, PACKED):
            parts = self._apart()
            return [parts[i] for i in places.tolist()]
        rows, lengths = places, []
        if self._layout == PACKED:
            (size,) = self._lengths
            lengths = [Lengths(size.sizes[rows], self.tensor.device)]
            rows = size.starts[rows][lengths[0].segments] + lengths[0].positions
        with torch.set_grad_enabled(self._grad):
            tensor = self.tensor.index_select(0, torch.from_numpy(rows).to(self.tensor.device))
            return PackedColumn(tensor, self._layout, self._axes, lengths, len(places))

    def stacked(self, places: np.ndarray, counts: Sequence[int], *, joined: bool = False) -> PackedColumn:
        """Stacks of the tensors at these places, so many in each; all have one shape. joined: of one row each, which
        are put together along that."""
        rows = self.taken(places)
        assert isinstance(rows, PackedColumn)
        sizes = Lengths(np.array(counts, dtype=np.int64), rows.tensor.device)
        tensor = rows.tensor.flatten(0, 1) if joined else rows.tensor
        return PackedColumn(tensor, PACKED, (0,), [sizes], len(counts))

    def sizes(self, dims: Sequence[int]) -> list[np.ndarray] | None:
        """The sizes of these dimensions; None where other ones differ."""
        as_they_lie = self._layout != WHOLE and tuple(dims) == tuple(self._axes)
        return [x.sizes for x in self._lengths] if as_they_lie else None


def apart(
    tensor: torch.Tensor, layout: str, axes: Sequence[int], lengths: Sequence[Lengths], n: int
) -> list[torch.Tensor]:
    """A value as the tensors of the instances; lengths: of its own dimensions. Contiguous, as views of them may ask."""
    if layout == WHOLE:
        return [tensor] * n
    if layout == DENSE:
        return list(tensor.unbind(0))
    if layout == PACKED:
        parts = tensor.split(lengths[0].list)
        return [(p.movedim(0, axes[0]) if axes[0] else p).contiguous() for p in parts]
    a, b = lengths
    return [tensor[i, : a.list[i], : b.list[i]].movedim((0, 1), tuple(axes)).contiguous() for i in range(n)]


def together(
    parts: Sequence[torch.Tensor], axes: Sequence[int], lengths: Sequence[Lengths] = ()
) -> torch.Tensor:
    """The tensors of the instances in their layout; axes: the dimensions of their own; lengths: of these, if two."""
    if not axes:
        return torch.stack(list(parts))
    if len(axes) == 1:
        joined = torch.cat(list(parts), dim=axes[0])
        return joined.movedim(axes[0], 0) if axes[0] else joined
    first, second = lengths
    rows = torch.cat([p.movedim(tuple(axes), (0, 1)).flatten(0, 1) for p in parts])
    return pairs(rows, first, second, Lengths(first.sizes * second.sizes, rows.device))
