"""A minibatch of tensors as columns: what a packed forward reads; an instance is made where somebody asks for it.

In: the owner of a method, and a list of tensors for each of its arguments. Out: a sequence of (args, kwargs).

    rows = Columns.of((model,), [[words_0, words_1]])
    rows.columns                 # the lists as they were given
    rows[1]                      # ((model, words_1), {})
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch


class Columns(Sequence[tuple[tuple[Any, ...], dict[str, Any]]]):
    """Instances whose arguments are columns of plain tensors: (args, kwargs) of each, made when it is asked for."""

    __slots__ = ("columns", "head")

    def __init__(self, head: tuple[Any, ...], columns: Sequence[Sequence[torch.Tensor]]) -> None:
        self.head = head
        self.columns = columns

    @staticmethod
    def of(head: tuple[Any, ...], columns: Sequence[Any]) -> Columns | None:
        """The instances of these columns; None where one is no list of tensors alone or has another length."""
        if len(head) != 1:
            return None
        for c in columns:
            if type(c) not in (list, tuple) or set(map(type, c)) != {torch.Tensor}:
                return None
        return Columns(head, columns) if len(set(map(len, columns))) == 1 else None

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    @overload
    def __getitem__(self, i: slice) -> Columns: ...
    def __getitem__(self, i: int | slice) -> Columns | tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(i, slice):
            return Columns(self.head, [c[i] for c in self.columns])
        return (*self.head, *[c[i] for c in self.columns]), {}

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return (((*self.head, *row), {}) for row in zip(*self.columns, strict=True))
