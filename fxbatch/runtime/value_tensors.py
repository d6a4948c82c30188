"""What values are that are no rows of a run's memory: constants, what packed calls gave, and rows of that.

tensors = ValueTensors()
tensors.note(program)                    # its constants
tensors.put(values, column)              # what these values are, in order: tensors, numbers, or a PackedColumn
tensors.of(7)                            # a tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import numpy as np
import torch

from fxbatch.ir import Program, TensorSpec
from fxbatch.ragged.packed_column import PackedColumn
from fxbatch.trace.constants import RowColumn

AT_HAND, HELD_APART = 1, 3  # marks of values; what packed calls gave is at hand, too

Tensors = Sequence[torch.Tensor] | PackedColumn
Column = Sequence[object] | PackedColumn


class ValueTensors:
    """The tensors that a minibatch's values stand for so far, while its phases run: each a place in a column."""

    number: np.ndarray | None = None  # int64: each value's in the memory, -1: outside; None: as recorded
    count = 0  # values in the run's memory

    def __init__(self) -> None:
        self.marks = np.zeros(0, dtype=np.uint8)  # by value
        self.earlier: list[tuple[Program, np.ndarray]] = []  # programs, and which of their calls ran apart
        self.columns: list[Column] = []
        self._numbers: dict[int, int] = {}  # of the columns, by id
        self._column = self._place = np.zeros(0, dtype=np.int64)  # of each value
        self._programs: list[Program] = []  # whose constants nobody has asked for

    def make_room(self, values: int) -> None:
        """There are so many values."""
        if len(self.marks) < values:
            self.marks = np.concatenate([self.marks, np.zeros(2 * values, dtype=np.uint8)])
            none = np.full(2 * values, -1)
            self._column, self._place = (np.concatenate([x, none]) for x in (self._column, self._place))

    def note(self, program: Program) -> None:
        """The constants of a phase."""
        self._programs.append(program)
        self.marks[program.first_value[:-1][program.columns.constant[program.sig]]] |= AT_HAND

    def put(
        self, values: np.ndarray, column: Column, places: np.ndarray | None = None, mark: int = AT_HAND
    ) -> None:
        """These values are items of a column: those at these places, or all in order."""
        places = np.arange(len(values)) if places is None else places
        self.put_apart(values, self.number_of(column), places, mark)

    def number_of(self, column: Column) -> int:
        """The number of a column."""
        number = self._numbers.setdefault(id(column), len(self.columns))
        if number == len(self.columns):
            self.columns.append(column)
        return number

    def put_apart(
        self, values: np.ndarray, columns: np.ndarray | int, places: np.ndarray, mark: int = AT_HAND
    ) -> None:
        """`put` of values in several columns, by their numbers."""
        self._column[values], self._place[values] = columns, places
        self.marks[values] |= mark

    def places(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [values] each: which column each is in, and where."""
        programs, self._programs = self._programs, []
        for program in programs:
            for s, payload in program.constants.items():
                constants = program.first_value[np.flatnonzero(program.sig == s)]
                if not is_of_packed(payload):
                    self.put(constants, payload)
                    continue
                columns: list[Column] = [x if isinstance(x, PackedColumn) else [x] for x in payload.sources]
                numbers = np.array(list(map(self.number_of, columns)))[payload.source]
                self.put_apart(constants, numbers, np.maximum(payload.row, 0))
        return self._column[values], self._place[values]

    def column_of(self, values: np.ndarray) -> tuple[PackedColumn, np.ndarray] | None:
        """The packed column that has all of these, and where; None if there is none."""
        columns, places = self.places(values)
        if not len(values) or columns[0] < 0 or (columns != columns[0]).any():
            return None
        column = self.columns[columns[0]]
        return (column, places) if isinstance(column, PackedColumn) else None

    def items(self, values: np.ndarray) -> list[object]:
        """What these are: tensors, or numbers that constants are."""
        columns, places = self.places(values)
        return [self.columns[c][i] for c, i in zip(columns.tolist(), places.tolist(), strict=True)]

    def payload(self, values: np.ndarray) -> Sequence[object]:
        """`items` as constants: places in packed columns, which are many that nobody reads, as such."""
        columns, places = self.places(values)
        numbers, of = np.unique(columns, return_inverse=True)
        of_packed = np.array([isinstance(self.columns[c], PackedColumn) for c in numbers.tolist()])
        if not of_packed.any():
            return self.items(values)
        in_packed = of_packed[of := of.reshape(-1)]
        apart = np.flatnonzero(~in_packed)
        source, row = (of_packed.cumsum() - 1)[of], np.where(in_packed, places, -1)
        sources: list[object] = [self.columns[c] for c in numbers[of_packed].tolist()]
        source[apart] = len(sources) + np.arange(len(apart))
        pairs = zip(columns[apart].tolist(), places[apart].tolist(), strict=True)
        sources += [self.columns[c][i] for c, i in pairs]
        return RowColumn(sources, source, row)  # type: ignore[arg-type]  # until they are at hand

    def numbers(self, recorded: int) -> np.ndarray:
        """int64 [recorded]: the number in the run's memory of each value that was recorded before a phase."""
        if self.number is None:
            self.count = recorded
            return np.arange(recorded)
        return self.number

    def of(self, v: int) -> torch.Tensor:
        """A value that is no row of the run's memory."""
        (x,) = self.items(np.array([v]))
        if isinstance(x, torch.Tensor):
            return x
        program = next(p for p, _ in reversed(self.earlier) if p.known <= v)
        kind = program.signatures[program.sig[program.makers(np.array([v]))[0]]].outputs[0]
        return torch.tensor(x, dtype=kind.dtype, device=kind.device)

    def every(self, values: np.ndarray, types: Iterable[TensorSpec]) -> list[torch.Tensor]:
        """`of` of each, whose types are known."""
        pairs = zip(self.items(values), types, strict=True)
        return [
            x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=t.dtype, device=t.device)
            for x, t in pairs
        ]


def is_of_packed(payload: Sequence[object]) -> TypeGuard[RowColumn]:
    """Whether constants are places in packed columns, some of them."""
    return type(payload) is RowColumn and any(isinstance(x, PackedColumn) for x in payload.sources)
