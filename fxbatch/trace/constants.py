"""Constants: integers, one in each tensor, as words and labels are, as a column that is read once; rows of tensors.

column = IntegerColumn.of([torch.tensor(17), torch.tensor(4)], torch.int64)     # None for other tensors
column.numbers               # int64 array([17, 4])
column[1]                    # tensor(4): in a program it stands for the list of tensors
column.written_to()          # whether torch has written to one of them since
RowColumn([states, start], [0, 0, 1], [3, 0, -1])   # of `states`, [7, d], two rows; and `start`, [d]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch

from fxbatch.ir import TensorSpec
from fxbatch.torch_private import inside_functorch

# Types whose tensors have no lazy sign: what is in memory is the number.
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # others (fake tensors, say) may have no numbers


def holds_integer(t: TensorSpec) -> bool:
    """Whether tensors of a type hold one integer (or bool) each."""
    return t.dtype in INTEGERS and all(n == 1 for n in t.shape)


def read_integers(tensors: list[torch.Tensor], dtype: torch.dtype) -> np.ndarray | None:
    """The numbers of tensors of one integer (or bool) each, of one type, int64.

    None where that can't be done: other types, another device, subclasses of Tensor.
    """
    if dtype not in INTEGERS or inside_functorch():
        return None
    if not all(type(t) in PLAIN_TENSORS and t.is_cpu and t.numel() == 1 for t in tensors):
        return None
    return (
        torch.stack(tensors).detach().numpy().astype(np.int64).reshape(-1)
        if tensors
        else np.empty(0, np.int64)
    )


def versions_of(tensors: list[torch.Tensor]) -> Sequence[int] | None:
    """How often torch has written to each; None where nobody counts for one, which was made in inference mode."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return None


class IntegerColumn(Sequence[torch.Tensor]):
    """Tensors with their numbers. Those of a choice are looked up when somebody asks for them."""

    __slots__ = ("_chosen", "_older", "_parts", "_rows", "_tensors", "_versions", "numbers")

    def __init__(self, numbers: np.ndarray, tensors: list[torch.Tensor] | None) -> None:
        self.numbers = numbers  # int64
        self._tensors = tensors
        self._parts: Sequence[IntegerColumn] = ()  # what it was joined from, until a tensor is asked for
        self._rows: Sequence[tuple[torch.Tensor, np.ndarray]] = ()  # of which it is rows, until then
        self._chosen: np.ndarray | None = None  # which of the tensors, None: all
        self._versions: Sequence[int] | None = None  # of the tensors when they were read
        self._older = False  # whether the tensors may have been written to since

    @staticmethod
    def of(tensors: list[torch.Tensor], dtype: torch.dtype, *, watched: bool = True) -> IntegerColumn | None:
        """The column of tensors of one type and one element; None where they can't be read.

        watched: whether it says later if one was written to.
        """
        versions = versions_of(tensors) if watched else None
        numbers = read_integers(tensors, dtype)
        if numbers is None or (watched and versions is None):
            return None
        column = IntegerColumn(numbers, tensors)
        column._versions = versions
        return column

    @staticmethod
    def met(tensors: list[torch.Tensor], numbers: np.ndarray) -> IntegerColumn:
        """The column of plain tensors that held these numbers when they were met."""
        column = IntegerColumn(numbers, tensors)
        column._older = True
        return column

    @staticmethod
    def joined(parts: Sequence[IntegerColumn]) -> IntegerColumn:
        """Several columns, one behind the other."""
        column = IntegerColumn(np.concatenate([p.numbers for p in parts]), None)
        column._parts = parts
        return column

    @staticmethod
    def of_rows(tensors: Sequence[torch.Tensor], rows: Sequence[np.ndarray]) -> IntegerColumn:
        """The column of these rows, of one element, of each of some plain tensors on the CPU."""
        numbers = [t.numpy()[i].reshape(-1) for t, i in zip(tensors, rows, strict=True)]
        column = IntegerColumn(np.concatenate(numbers), None)
        column._rows = list(zip(tensors, rows, strict=True))
        return column

    def take(self, indices: np.ndarray) -> IntegerColumn:
        """The column of these items."""
        column = IntegerColumn(self.numbers[indices], self._tensors)
        column._parts, column._rows = self._parts, self._rows
        column._chosen = indices if self._chosen is None else self._chosen[indices]
        column._older = self._older
        return column

    def written_to(self) -> bool:
        """Whether one of the tensors was written to since its number was read."""
        if self._parts:
            return any(p.written_to() for p in self._parts)
        if self._versions is None:
            return False
        return versions_of(self._tensors or []) != self._versions

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors themselves; others with these numbers, where some were written to since."""
        tensors = self._tensors
        if tensors is None:
            rows = [t[i] for t, numbers in self._rows for i in numbers.tolist()]
            tensors = list(itertools.chain(rows, *(p.tensors for p in self._parts)))
        chosen = tensors if self._chosen is None else [tensors[i] for i in self._chosen.tolist()]
        if self._older and chosen:
            now = read_integers(chosen, chosen[0].dtype)
            if now is None or not np.array_equal(now, self.numbers):
                written = torch.tensor(self.numbers, dtype=chosen[0].dtype)
                chosen = list(written.reshape(-1, *chosen[0].shape).unbind(0))
            self._tensors, self._chosen, self._older = chosen, None, False
        elif self._chosen is None:
            self._tensors = tensors
        return chosen

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: Any) -> object:
        if type(index) is slice or self._tensors is None or self._older:
            return self.tensors[index]
        return self._tensors[index if self._chosen is None else self._chosen[index]]


class RowColumn(Sequence[torch.Tensor]):
    """Tensors of one type, many of them rows of others, as an encoder's states are. The rows become tensors when
    somebody asks for one; gradients go to what they are rows of."""

    __slots__ = ("_unbound", "row", "source", "sources")

    def __init__(self, sources: Sequence[torch.Tensor], source: np.ndarray, row: np.ndarray) -> None:
        self.sources = sources
        self.source = source  # int64: which of them each item is of
        self.row = row  # int64: and which row of it; -1: it is the item
        self._unbound: dict[int, Sequence[torch.Tensor]] = {}

    @property
    def keys(self) -> np.ndarray:
        """int64: equal for items that are one tensor, or one row of one."""
        return self.source * (self.row.max(initial=0) + 2) + self.row

    def take(self, indices: np.ndarray) -> RowColumn:
        """The column of these items."""
        sources, source = np.unique(self.source[indices], return_inverse=True)
        return RowColumn([self.sources[i] for i in sources.tolist()], source.reshape(-1), self.row[indices])

    def alone(self, where: slice | np.ndarray) -> tuple[list[torch.Tensor], np.ndarray]:
        """Of the items there, those that are no rows, and which they are."""
        places = np.flatnonzero(self.row[where] < 0)
        return [self.sources[k] for k in self.source[where][places].tolist()], places

    def parts(self, where: slice | np.ndarray) -> Iterator[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
        """Of the items there, the rows of one source after another: (source, which of the items, rows)."""
        source, row = self.source[where], self.row[where]
        for k in np.unique(source[row >= 0]).tolist():
            places = np.flatnonzero(source == k)
            yield self.sources[k], places, row[places]

    def put(self, where: slice | np.ndarray, out: torch.Tensor) -> None:
        """Write the items there into the rows of `out`."""
        tensors, places = self.alone(where)
        if tensors:
            out.index_copy_(0, torch.from_numpy(places).to(out.device), torch.stack(tensors).to(out.device))
        for tensor, places, rows in self.parts(where):
            index = torch.from_numpy(rows).to(tensor.device)
            first, last = places.item(0), places.item(-1)
            if last - first + 1 == len(places):
                torch.index_select(tensor, 0, index, out=out[first : last + 1])
            else:
                at = torch.from_numpy(places).to(out.device)
                out.index_copy_(0, at, tensor.index_select(0, index))

    def __len__(self) -> int:
        return len(self.row)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        k, row = self.source.item(index), self.row.item(index)
        tensor = self.sources[k]
        if row < 0:
            return tensor
        rows = self._unbound.get(k)
        if rows is None:
            with torch.set_grad_enabled(tensor.requires_grad):
                rows = self._unbound[k] = tensor.unbind(0)
        return rows[row]


def taken(payload: Sequence[object], indices: np.ndarray) -> Sequence[object]:
    """These items of a payload, which stays a column where it is one."""
    if isinstance(payload, IntegerColumn | RowColumn):
        return payload.take(indices)
    return list(map(payload.__getitem__, indices.tolist()))


def sources_of(payload: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors that constants are, or are rows of: those that gradients of them go to."""
    return payload.sources if isinstance(payload, RowColumn) else payload


def read_payload(t: TensorSpec, kind: str, payload: Sequence[Any], *, watched: bool) -> IntegerColumn | None:
    """The payload of a constant of type t as a column; None where its numbers can't be read."""
    if isinstance(payload, IntegerColumn):
        return payload
    if kind != "constant" or not holds_integer(t) or t.device.type != "cpu":
        return None
    return IntegerColumn.of(payload if type(payload) is list else list(payload), t.dtype, watched=watched)
