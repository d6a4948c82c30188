"""Where in memory is what hot paths ask of plain tensors: how often torch has written to one, whether it is a view,
whether it may be resized, and whether two are of one type.

In: tensors that differ in one respect. Out: offsets, for `trace/_fast_constants.h`, which reads there what a call of
torch's getters takes 100 ns for; None where the layout is not understood, and then nobody reads so.

    places = memory_places()
    places.version, places.counted      # from a tensor's implementation to the number of its writes
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch


class MemoryPlaces(NamedTuple):
    """Where what hot paths ask of tensors lies in memory: offsets in bytes."""

    implementation: int  # in a tensor's Python object: its implementation, in which are
    storage: int
    autograd: int
    version: int
    offset: int  # where it begins in its storage, counted in numbers
    numbers: int  # in a storage: where its numbers are
    resizable: int  # in a storage: the byte that says whether it may be resized; what numpy has too may not
    counted: int  # in what counts a tensor's writes: their number
    no_view: int  # address that the autograd part of a tensor that is no view begins with
    kind: tuple[int, ...] = ()  # in an implementation: words that are equal for tensors of one type alone


_WORDS = range(0, 176, 8)  # of an implementation


@functools.cache
def memory_places() -> MemoryPlaces | None:
    """Found by comparing the memory of tensors that differ in one respect, and tried on others; None where it isn't
    found. Checked: 2.13.0, Linux.
    """
    tensor, other = torch.tensor([1.0]), torch.tensor([2.0])
    implementation = _place_of(tensor._cdata, id(tensor), torch.Tensor.__basicsize__)
    storage = _place_of(tensor.untyped_storage()._cdata, tensor._cdata, 48)
    mine, others, shared = _words(tensor), _words(other), _words(tensor.detach())
    counters = [i for i in _WORDS if mine[i] == shared[i] != others[i] and i != storage]
    asking = torch.empty(1)
    before = _words(asking)
    asking.requires_grad_()
    autograds = [i for i, word in _words(asking).items() if not before[i] and word]
    if implementation < 0 or storage < 0 or len(counters) != 1 or len(autograds) != 1:
        return None
    (version,), (autograd,) = counters, autograds
    far = torch.arange(80_000)[77_777]
    offsets = [i for i, word in _words(far).items() if word == 77_777]
    numbers = _place_of(tensor.data_ptr(), mine[storage], 72)
    resized = _changed(mine[storage], 72, tensor.numpy)
    counted = _changed(mine[version], 24, lambda: tensor.zero_())
    no_view, view = (_word(_words(t)[autograd]) for t in (asking, tensor[0]))
    if any(len(found) != 1 for found in (resized, counted, offsets)) or numbers < 0 or no_view == view:
        return None
    found = MemoryPlaces(
        implementation,
        storage,
        autograd,
        version,
        offsets[0],
        numbers,
        resized[0],
        counted[0],
        no_view,
        _kind_words(),
    )
    return found if found.kind and _is_right(found) else None


def _kind_words() -> tuple[int, ...]:
    """The words of a tensor's implementation that tell its type; none where they don't."""
    numbers = torch.arange(10)
    alike = [torch.zeros((), dtype=torch.int64), torch.tensor(3), numbers[7], numbers.clone().unbind()[4]]
    first = _words(alike[0])
    same = tuple(
        i for i in _WORDS if i != 8 and all(_words(t)[i] == first[i] for t in alike)
    )  # 8: references
    types = [
        torch.zeros(shape)
        for shape in ((), (1,), (2,), (1, 1), (2, 3), (3, 2), (1, 2, 3, 4, 5), (5, 4, 3, 2, 1))
    ]
    types += [
        alike[0],
        alike[0].int(),
        alike[0].bool(),
        torch.zeros((), device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ]
    kept = {tuple(_words(t)[i] for i in same) for t in types}
    return same if len(kept) == len(types) else ()


def _is_right(places: MemoryPlaces) -> bool:
    lent = torch.frombuffer(bytearray(8), dtype=torch.float32)
    for t in (
        torch.zeros(3),
        torch.ones(2)[1],
        lent,
        lent[1],
        torch.zeros(1).add_(1).mul_(2),
        torch.tensor(3),
    ):
        words = _words(t)
        view = words[places.autograd] and _word(words[places.autograd]) != places.no_view
        if (
            words[places.storage] != t.untyped_storage()._cdata
            or ctypes.c_uint8.from_address(words[places.storage] + places.resizable).value
            != t.untyped_storage().resizable()
            or _word(words[places.storage] + places.numbers) + words[places.offset] * t.element_size()
            != t.data_ptr()
            or ctypes.c_uint32.from_address(words[places.version] + places.counted).value != t._version
            or bool(view) != t._is_view()
        ):
            return False
    return True


def _words(t: torch.Tensor) -> dict[int, int]:
    return {i: _word(t._cdata + i) for i in _WORDS}


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _changed(start: int, size: int, change: Callable[[], object]) -> list[int]:
    """The places of the bytes that a change changes."""
    before = ctypes.string_at(start, size)
    change()
    after = ctypes.string_at(start, size)
    return [i for i in range(size) if before[i] != after[i]]


def _place_of(pointer: int, start: int, size: int) -> int:
    """Where a pointer lies in memory, in bytes from its start; -1: nowhere."""
    words = [int.from_bytes(ctypes.string_at(start + i, 8), "little") for i in range(0, size - 7, 8)]
    return 8 * words.index(pointer) if pointer in words else -1
