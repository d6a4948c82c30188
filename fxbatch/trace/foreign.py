"""Tensors whose memory somebody else may write to unseen: numpy arrays, other processes.

In: such a tensor, at each call that meets it. Out: the value of a copy, the same as long as the content is.

    buffer[i] = 1; out.append(self.l(torch.from_numpy(buffer)))     # each call has the content of its moment

Torch counts its own writes, not those of others. Their storages can be told: they may not be resized.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxbatch.torch_private import FakeTensor
from fxbatch.trace.values import Value


def is_foreign(t: torch.Tensor) -> bool:
    """Whether somebody else may write to a tensor's memory."""
    if isinstance(t, FakeTensor) or t.layout is not torch.strided or t.device.type == "meta":
        return False
    try:
        return not t.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):  # a subclass without storage
        return False


class Foreign:
    """The copies of one recording."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[Value, torch.Tensor, torch.Tensor]] = {}  # by id: value, tensor, copy
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of each copy: tensor, copy

    def value(self, t: torch.Tensor, make: Callable[[torch.Tensor], Value]) -> Value:
        """The value of what t holds now. make: gives that of a copy, whose memory has no other owner."""
        known = self.copies.get(id(t))
        if known is not None and torch.equal(known[2], t):
            return known[0]
        with torch.set_grad_enabled(t.requires_grad):
            copy = t.clone()
        v = make(copy)
        self.copies[id(t)] = v, t, copy
        self.tensors[id(copy)] = t, copy
        return v

    def originals(self, payload: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Constants with the tensors themselves in place of copies, for a trace that is kept: whoever runs it reads
        them then. None where one has changed since it was copied: the forward itself writes to it."""
        found = []
        for x in payload:
            t, copy = self.tensors.get(id(x), (x, x))
            if t is not copy and not torch.equal(t, copy):
                return None
            found.append(t)
        return found
