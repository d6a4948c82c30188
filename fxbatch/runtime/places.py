"""Where the steps of a phase read and write in backward, as tensors; for steps that Python runs.

places = Places(backward, p)
grad = places.read(i, n)           # read i of the gradient plan: a view, by an index, a sum over bags, or None
places.written[j]                  # where write j goes
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from fxbatch.passes.gradients import GRADIENT_INDEX, GRADIENT_SUM, GRADIENT_VIEW, NOTHING
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.forward import lay_out
from fxbatch.runtime.phase import Layout
from fxbatch.runtime.pieces import Kept, split, split_blocks, split_extra, split_kept

if TYPE_CHECKING:
    from fxbatch.runtime.backward import Backward


class Places:
    """Where the steps of a phase read and write in backward; laid out where a step that Python runs asks."""

    def __init__(self, backward: Backward, p: int) -> None:
        self._backward, self._p = backward, p
        self._phase = backward.run.phases[p]
        plan = backward.plan
        self.reads, self.writes = plan.first_read[p].tolist(), plan.first_write[p].tolist()

    @functools.cached_property
    def layout(self) -> Layout:
        """What forward read and wrote: from its last run, where memory hasn't moved since."""
        return self._phase.layout or lay_out(self._backward.run, self._phase)

    @functools.cached_property
    def pieces(self) -> list[tuple[list[Kept], list[torch.Tensor]]]:
        """What forward kept, a step."""
        return self._phase.pieces or split_kept(self._backward.run, self._phase)

    @functools.cached_property
    def extra(self) -> list[list[torch.Tensor]]:
        """What is made for the gradients of parameters, a step."""
        return split_extra(self._phase, self._backward.rows)

    @functools.cached_property
    def written(self) -> list[torch.Tensor]:
        """The blocks that gradients of what was read go to."""
        given, p, rows = self._backward.plan, self._p, self._backward.rows
        arenas = [rows.arena(i) for i in range(len(given.capacity))]
        return split_blocks(arenas, given.write_arena[p], given.write_start[p], given.write_rows[p])

    @functools.cached_property
    def _indices(self) -> dict[torch.device, tuple[dict[int, torch.Tensor], torch.Tensor]]:
        """By device the indices of each read that has some, and all bags: each in one copy."""
        return {}

    def read(self, i: int, n: int) -> torch.Tensor | None:
        """Read i, of n rows: a view, rows by an index, a sum over bags, or nothing."""
        plan, p = self._backward.plan, self._p
        kind, start, stop = int(plan.read_kind[p][i]), int(plan.read_start[p][i]), int(plan.read_stop[p][i])
        if kind == NOTHING:
            return None
        arena = self._backward.rows.arena(int(plan.read_arena[p][i]))
        if kind == GRADIENT_VIEW:
            return arena[start:stop]
        found = self._indices.get(arena.device)
        if found is None:
            pieces, bags = self._split_indices(arena.device), to_device(plan.bags, arena.device)
            found = self._indices[arena.device] = pieces, bags
        index, bags = found[0][i], found[1]
        if kind == GRADIENT_SUM:
            bag = int(plan.bag[p][i])
            return sum_bags(arena, index, bags[bag : bag + n])
        return torch.index_select(arena, 0, index)

    def _split_indices(self, device: torch.device) -> dict[int, torch.Tensor]:
        """The indices of each read that has some: they are one after another."""
        plan, p = self._backward.plan, self._p
        reads = np.flatnonzero(plan.read_kind[p] >= GRADIENT_INDEX)
        sizes = (plan.read_stop[p][reads] - plan.read_start[p][reads]).tolist()
        pieces = split(to_device(plan.indices, device), int(plan.read_start[p][reads[0]]), sizes)
        return dict(zip(reads.tolist(), pieces, strict=True))


def sum_bags(rows: torch.Tensor, index: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """For each bag b, the sum of `rows[index[bags[b] : bags[b + 1]]]`; deterministic on every device."""
    flat = torch.view_as_real(rows) if rows.is_complex() else rows
    table = flat.reshape(flat.shape[0], -1)
    if table.shape[1] == 0:
        return rows.new_zeros((len(bags), *rows.shape[1:]))
    summed = torch.embedding_bag(table, index, bags, False, 0)[0].view(len(bags), *flat.shape[1:])
    return torch.view_as_complex(summed) if rows.is_complex() else summed
