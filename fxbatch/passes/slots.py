"""How operations take their inputs, as columns: what the planner of arenas reads of signatures.

In: a program's signatures and a Layout of each. Out: a SlotTable.

    slots = tabulate_slots(program, layouts)
    slots.first_group[s]                     # where the groups of signature s begin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxbatch.ir import Layout, Program, Signature, SignatureColumns, offsets


@dataclass(frozen=True)
class SlotTable:
    """Per signature slot (flat over signatures): where its rows go among the step's gathered rows."""

    first_slot: np.ndarray  # int64 [signatures + 1]
    prior: np.ndarray  # members of earlier groups of the signature
    size: np.ndarray  # members of the slot's group
    member: np.ndarray  # position in the group
    first_group: np.ndarray  # int64 [signatures + 1]
    group_size: np.ndarray  # int64 [groups]
    group_type: np.ndarray  # int64 [groups]: type id of the members
    # Checked with the columns of signatures, see plan.py.
    checked: dict[SignatureColumns, Any] = field(init=False, default_factory=dict, repr=False, compare=False)


def tabulate_slots(program: Program, layouts: Sequence[Layout | None]) -> SlotTable:
    """The layouts of all signatures as columns; None means one group a slot."""
    prior: list[int] = []
    size: list[int] = []
    member: list[int] = []
    group_size: list[int] = []
    group_type: list[int] = []
    groups_of = []
    type_ids = program.type_ids
    for signature, layout in zip(program.signatures, layouts, strict=True):
        arity = len(signature.inputs)
        groups = tuple((i,) for i in range(arity)) if layout is None else layout.groups
        rows = [(0, 0, 0)] * arity
        before = 0
        for group in groups:
            for position, slot in enumerate(group):
                rows[slot] = (before, len(group), position)
            before += len(group)
            group_size.append(len(group))
            group_type.append(type_ids[signature.inputs[group[0]]])
        for a, b, c in rows:
            prior.append(a)
            size.append(b)
            member.append(c)
        groups_of.append(len(groups))
    columns = [np.array(x, dtype=np.int64) for x in (prior, size, member, groups_of, group_size, group_type)]
    prior_of, size_of, member_of, counts, sizes, types = columns
    return SlotTable(offsets(program.arity), prior_of, size_of, member_of, offsets(counts), sizes, types)


def is_constant(signature: Signature) -> bool:
    """Whether calls of it have a payload instead of a body."""
    return signature.operation.kind in ("constant", "number")
