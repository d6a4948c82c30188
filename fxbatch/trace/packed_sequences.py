"""Packed sequences of values: packing, unpacking and recurrent layers on them, step by step.

In: the functions that torch.nn.utils.rnn and nn.LSTM, nn.GRU, nn.RNN call for a PackedSequence. Out: the same as
recorded functions of values; how long sequences are is read from the batch sizes, which are plain numbers.

    packed = pack_sequence([h])          # packed.data is a Value, packed.batch_sizes a real tensor
    output, state = lstm(packed)         # one call a step, as a loop over a cell: steps of all instances batch

PyTorch's own functions read batch sizes in C++, where fake tensors have no numbers, so they can't be one operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State], State]


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`torch._pack_padded_sequence`: the rows of each time, and how many there are."""
    times = [int(n) for n in lengths.tolist()]
    x = x.transpose(0, 1) if batch_first else x
    if len(times) != x.shape[1]:
        raise RuntimeError(f"pack_padded_sequence: {len(times)} lengths of {x.shape[1]} sequences")
    if min(times, default=0) <= 0:
        raise RuntimeError("pack_padded_sequence: a sequence has no length")
    if any(a < b for a, b in itertools.pairwise(times)):
        raise RuntimeError(
            "pack_padded_sequence: lengths must be sorted in decreasing order: enforce_sorted=False"
        )
    sizes = [sum(n > t for n in times) for t in range(times[0])]
    places = [t * len(times) + i for t, n in enumerate(sizes) for i in range(n)]
    return _rows(x.flatten(0, 1), places), torch.tensor(sizes)


def _rows(x: Tensor, places: Sequence[int]) -> Tensor:
    """Some rows by one selection, which is the same operation wherever they are."""
    if list(places) == list(range(x.shape[0])):
        return x
    return x.index_select(0, torch.tensor(places, device=x.device))


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int = -1
) -> tuple[Tensor, Tensor]:
    """`torch._pad_packed_sequence`: sequences of one length, and how long they were."""
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise RuntimeError(
            f"Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {len(sizes)}"
        )
    most, longest = sizes[0], max(len(sizes), total_length)
    starts = list(itertools.accumulate(sizes, initial=0))
    nothing = [data.shape[0]] * most  # the row of padding behind all others
    places = [p for n, at in zip(sizes, starts, strict=False) for p in [*range(at, at + n), *nothing[n:]]]
    places += nothing * (longest - len(sizes))
    if len(places) > data.shape[0]:
        data = torch.cat(
            [data, torch.full((1, *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device)]
        )
    padded = _rows(data, places).unflatten(0, (longest, most))
    lengths = torch.tensor([sum(n > i for n in sizes) for i in range(most)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _lstm_cell(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Cell:
    def cell(x: Tensor, state: State) -> State:
        h, c = state
        i, f, g, o = (F.linear(x, weights[0], biases[0]) + F.linear(h, weights[1], biases[1])).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (F.linear(h, weights[2]) if len(weights) > 2 else h), c

    return cell


def _gru_cell(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Cell:
    def cell(x: Tensor, state: State) -> State:
        (h,) = state
        a, b, c = F.linear(x, weights[0], biases[0]).chunk(3, -1)
        d, e, f = F.linear(h, weights[1], biases[1]).chunk(3, -1)
        new = torch.tanh(c + torch.sigmoid(a + d) * f)
        return (new + torch.sigmoid(b + e) * (h - new),)

    return cell


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Cell]:
    def make(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Cell:
        return lambda x, state: (
            activation(F.linear(x, weights[0], biases[0]) + F.linear(state[0], weights[1], biases[1])),
        )

    return make


def _forwards(cell: Cell, steps: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    """From the first time to the last: sequences that are over leave their state behind."""
    outputs, over = [], []
    for x in steps:
        n = x.shape[0]
        if n < state[0].shape[0]:
            over.append(tuple(s[n:] for s in state))
            state = tuple(s[:n] for s in state)
        state = cell(x, state)
        outputs.append(state[0])
    over.append(state)
    return outputs, tuple(
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*over[::-1], strict=True)
    )


def _backwards(cell: Cell, steps: Sequence[Tensor], first: State) -> tuple[list[Tensor], State]:
    """From the last time to the first: sequences begin where they end."""
    outputs: list[Tensor] = []
    state = tuple(s[:0] for s in first)
    for x in reversed(steps):
        n, now = x.shape[0], state[0].shape[0]
        if n > now:
            state = tuple(
                torch.cat([s, f[now:n]]) if now else f[:n] for s, f in zip(state, first, strict=True)
            )
        state = cell(x, state)
        outputs.append(state[0])
    return outputs[::-1], state


def _layers(make: Callable[..., Cell], states: int) -> Callable[..., Any]:
    """A recurrent function on packed data: all of its layers and directions."""

    def run(
        data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        sizes, directions = batch_sizes.tolist(), 2 if bidirectional else 1
        ends = itertools.accumulate(sizes)
        places = [range(end - n, end) for n, end in zip(sizes, ends, strict=True)]
        each = len(params) // (num_layers * directions)
        first = hx if states == 2 else (hx,)
        last: list[State] = []
        for layer in range(num_layers):
            steps, sides = [_rows(data, rows) for rows in places], []
            for side in range(directions):
                k = layer * directions + side
                mine = params[k * each : (k + 1) * each]
                weights = [*mine[:2], *mine[4:]] if has_biases else mine
                cell = make(weights, mine[2:4] if has_biases else (None, None))
                walk = _backwards if side else _forwards
                outputs, state = walk(cell, steps, tuple(s[k] for s in first))
                sides.append(torch.cat(outputs))
                last.append(state)
            data = torch.cat(sides, -1) if directions == 2 else sides[0]
            if dropout and train and layer < num_layers - 1:
                data = F.dropout(data, dropout, True)
        return (data, *(torch.stack(parts) for parts in zip(*last, strict=True)))

    return run


_RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _layers(_lstm_cell, 2),
    torch.gru: _layers(_gru_cell, 1),
    torch.rnn_tanh: _layers(_plain_cell(torch.tanh), 1),
    torch.rnn_relu: _layers(_plain_cell(torch.relu), 1),
}
_PACKING: dict[Any, Callable[..., Any]] = {
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _unpack,
}


def on_packed(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to call instead of a function that met a packed sequence of values; None for all else."""
    if func in _PACKING:
        return _PACKING[func]
    packed = func in _RECURRENT and len(args) == 9 and isinstance(args[1], Tensor)  # a bool else: not packed
    return _RECURRENT[func] if packed and isinstance(args[3], (list, tuple)) else None


FUNCTIONS = frozenset([*_RECURRENT, *_PACKING])
