"""Shared operands as they are at a call: which tensors they are, and of which types.

    tensors = resolve_all(operands)
    types_of(tensors)                    # all that operations depend on, but for what is in them and where they are
    by_signature(called, tensors)        # {signature: its tensors}

Compiled by Cython (see uncompiled.py): a call asks for all of it anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxbatch.ir import SharedOperand, Signature
from fxbatch.trace.integers import PLAIN_TENSORS

_STRIDED = torch.strided


def resolve_all(operands: Sequence[SharedOperand]) -> list[torch.Tensor]:
    """`resolve` of each."""
    found = []
    for operand in operands:
        owner = operand.owner
        t = None if owner is None else owner._parameters.get(operand.name)
        found.append(operand.resolve() if t is None else t)
    return found


def types_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """A type each, with everything that decides which code may read it."""
    return [
        (t.requires_grad, t.shape, t.stride(), t.dtype, t.device, is_plain(t))
        if t.layout is _STRIDED
        else (t.requires_grad, t.shape, t.layout, t.dtype, t.device)
        for t in tensors
    ]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's numbers in memory are what it is, so that C can read them."""
    return type(tensor) in PLAIN_TENSORS and not tensor.is_neg()


def by_signature(
    called: Sequence[tuple[Signature, Sequence[int]]], tensors: Sequence[torch.Tensor]
) -> dict[Signature, list[torch.Tensor]]:
    """The tensors of each signature that is called. called: with the places of its shared operands among them."""
    return {signature: [tensors[i] for i in places] for signature, places in called}


def put_operands(
    put_places: Any, rows: Any, parts: Sequence[Any], operands: Mapping[Signature, Sequence[torch.Tensor]]
) -> list[int]:
    """Write where the shared operands of each part of a table of pointers are into its rows; the signatures whose
    operands C can't read."""
    refused = []
    for part in parts:
        if not put_places(rows, 3, part.shared, operands[part.operation.signature], part.step.shared_bytes):
            refused.append(part.s)
    return refused
