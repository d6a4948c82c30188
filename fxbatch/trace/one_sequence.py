"""Packed sequences of one sequence: what torch.nn.utils.rnn and recurrent layers call for them, without batch sizes.

In: such a call, which would read its batch sizes as numbers in C++. Out: what it gives, by calls that batch. A forward
of one instance has one sequence to pack; where it packs several, they run as torch has them.

    OneSequence()(torch.gru, (steps, sizes, hx, ...))   # torch.gru(steps.unsqueeze(1), hx, ...), without dimension 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Arguments: TypeAlias = Sequence[Any]
Layer: TypeAlias = Callable[..., Sequence[torch.Tensor]]
RECURRENT: dict[object, Layer] = {f: f for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)}
PACKED: frozenset[object] = frozenset({*RECURRENT, torch._pack_padded_sequence, torch._pad_packed_sequence})
_SELECT = torch.Tensor.index_select  # by the order of lengths


class BatchSizes:
    """The batch sizes of one packed sequence of which forms alone are known: ones, as many as it has steps."""

    device = torch.device("cpu")

    def __init__(self, n: int) -> None:
        self.shape = (n,)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, place: int) -> int:
        if place:
            raise NotImplementedError("a packed sequence's batch sizes are read")
        return 1

    def __getattr__(self, name: str) -> object:
        raise NotImplementedError(f"{name} of a packed sequence's batch sizes")

    @classmethod
    def __torch_function__(cls, func: object, *_: object) -> object:
        raise NotImplementedError(f"{func} of a packed sequence's batch sizes")


class OneSequence:
    """Makes calls of the functions in `calls`, as far as they are for one sequence."""

    calls = PACKED | {_SELECT}

    def length(self, lengths: torch.Tensor) -> int | None:
        """How long the only sequence is; None where there are several."""
        return int(lengths) if lengths.numel() == 1 else None

    def lengths(self, n: int) -> torch.Tensor:
        """The lengths of one sequence, int64 [1]."""
        return torch.tensor([n], device="cpu")

    def sizes(self, n: int) -> torch.Tensor | BatchSizes:
        """The batch sizes of one sequence, int64 [n]."""
        return torch.ones(n, dtype=torch.int64, device="cpu")

    def is_order(self, index: object) -> bool:
        """Whether an index is the order of one sequence, int64 [1]: zero."""
        return type(index) is torch.Tensor and index.numel() == index.dim() == 1 and not index.item()

    def layer(self, func: object) -> Layer:
        """What runs a recurrent layer."""
        return RECURRENT[func]

    def __call__(self, func: object, args: Arguments) -> object:
        """The result of a call; None where it is on none or several sequences, or torch will say what is wrong."""
        x, sizes, *rest = args
        if func is _SELECT:
            one = rest and type(sizes) is int and x.shape[sizes] == 1
            return x.clone() if one and self.is_order(rest[0]) else None
        if func == torch._pack_padded_sequence:
            along = 1 if rest[0] else 0
            n = self.length(sizes) if x.dim() > 1 and x.shape[1 - along] == 1 else None
            if n is None or not 0 < n <= x.shape[along]:
                return None
            steps = x.select(1 - along, 0)
            return (steps if n == steps.shape[0] else steps.narrow(0, 0, n)).clone(), self.sizes(n)
        recurrent = func in RECURRENT and len(rest) == 7 and isinstance(rest[1], (list, tuple))
        if not (recurrent or func == torch._pad_packed_sequence) or sizes.shape[0] != x.shape[0]:
            return None
        if recurrent:
            outputs, *states = self.layer(func)(x.unsqueeze(1), *rest, False)
            return (outputs.squeeze(1), *states)
        batch_first, value, total = rest
        if total < x.shape[0]:
            return None
        if total > x.shape[0]:
            x = torch.cat([x, x.new_full((total - x.shape[0], *x.shape[1:]), value)])
        return x.unsqueeze(0 if batch_first else 1).clone(), self.lengths(sizes.shape[0])


class OneSequenceOfForm(OneSequence):
    """The same of tensors of which the forms alone are known; it notes which tensors were made of a length."""

    calls = OneSequence.calls | {torch.tensor, torch.as_tensor, torch.sort}

    def __init__(self) -> None:
        self.told: dict[int, tuple[torch.Tensor, int, int]] = {}  # with lengths and versions, by id
        self.order: torch.Tensor | None = None

    def is_order(self, index: object) -> bool:
        return index is not None and index is self.order

    def length(self, lengths: torch.Tensor) -> int | None:
        told = not lengths.is_inference() and self.told.get(id(lengths))
        return told[1] if told and lengths._version == told[2] else None  # it may have been written to

    def lengths(self, n: int) -> torch.Tensor:
        tensor = torch.full((1,), n, dtype=torch.int64, device="cpu")
        self.told[id(tensor)] = tensor, n, 0 if tensor.is_inference() else tensor._version
        return tensor

    def sizes(self, n: int) -> torch.Tensor | BatchSizes:
        return BatchSizes(n)

    def of(self, func: object, args: Arguments, kwargs: Mapping[str, object]) -> object:
        """The result of a function in `calls`, None where it is as any other."""
        if func in OneSequence.calls:
            return None if kwargs else self(func, args)
        x = (*args, None)[0]
        if func == torch.sort:
            if id(x) not in self.told:
                return None
            self.order = torch.zeros(1, dtype=torch.int64, device="cpu")
            return torch.return_types.sort((x, self.order))
        one = isinstance(x, (list, tuple)) and len(x) == 1 and type(x[0]) in (int, torch.SymInt)
        as_lengths = kwargs.get("dtype") in (None, torch.int64) and str(kwargs.get("device", "cpu")) == "cpu"
        return self.lengths(x[0]) if one and as_lengths and len(args) == 1 else None
