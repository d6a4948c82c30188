"""Where the steps of a phase read and write, as tensors: for steps that Python runs.

Views of consecutive rows are made for all steps at once: 0.6 us a view, where a slice takes 1.0 and narrow 1.5.

    views = lay_out_steps(phase, memory)         # for forward
    views.sources[g], views.blocks[b], views.rows[k]
    gradients = GradientViews(phase, memory, rows, plan, p)
    grad = gradients.read(i, n)                  # read i of the gradient plan, or None
    gradients.written[j]                         # where write j goes
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fxbatch.codegen.step_functions import Kept, Source
from fxbatch.ir import BROADCAST, INDEX, Plan
from fxbatch.passes.gradients import GRADIENT_INDEX, GRADIENT_SUM, GRADIENT_VIEW, NOTHING, GradientPlan
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.memory import GradientRows, Memory
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.phase import Phase, StepViews

_NOTHING = torch.empty(0)


def split(tensor: torch.Tensor, start: int, sizes: list[int]) -> Sequence[torch.Tensor]:
    """Consecutive pieces of these sizes along the first dimension, from row `start` on."""
    return tensor.narrow(0, start, sum(sizes)).split_with_sizes(sizes)


def split_blocks(
    arenas: Sequence[torch.Tensor], arena: np.ndarray, start: np.ndarray, rows: np.ndarray
) -> list[torch.Tensor]:
    """One view a block: rows `start : start + rows` of its arena, in the order of the blocks."""
    out: list[torch.Tensor] = [_NOTHING] * len(arena)
    places: list[list[int]] = [[] for _ in arenas]
    for place, a in enumerate(arena.tolist()):
        places[a].append(place)
    first, count = start.tolist(), rows.tolist()
    for tensor, mine in zip(arenas, places, strict=True):
        if not mine:
            continue
        starts, sizes = [first[i] for i in mine], [count[i] for i in mine]
        if starts == [*itertools.accumulate(sizes[:-1], initial=starts[0])]:
            pieces = split(tensor, starts[0], sizes)
        else:
            pieces = [tensor[at : at + n] for at, n in zip(starts, sizes, strict=True)]
        for place, piece in zip(mine, pieces, strict=True):
            out[place] = piece
    return out


def lay_out_steps(phase: Phase, memory: Memory) -> StepViews:
    """Where the steps of a phase read and write, the memory being where it is now."""
    if phase.views is not None:
        return phase.views
    plan = phase.plan
    arenas = [memory.arena_of(t) for t in plan.arenas]
    rows = plan.step_rows.repeat(plan.first_block[1:] - plan.first_block[:-1])
    blocks = split_blocks(arenas, plan.block_arena, plan.block_start, rows)
    return StepViews(_sources(plan, arenas), blocks, _split_kept(phase, memory))


StepView = tuple[Sequence[Source], Sequence[torch.Tensor], tuple[list[Kept], list[torch.Tensor]]]


def lay_out_step(phase: Phase, memory: Memory, k: int) -> StepView:
    """The sources, blocks and rows of one step: for a phase of several, of which Python runs few steps."""
    plan = phase.plan
    n, s = plan.step_rows.item(k), plan.step_signature.item(k)
    sources: list[Source] = []
    for g in range(plan.first_gather.item(k), plan.first_gather.item(k + 1)):
        arena = memory.arena_of(plan.arenas[plan.gather_arena.item(g)])
        kind, start, rows = plan.gather_kind.item(g), plan.gather_start.item(g), plan.gather_rows.item(g)
        if kind == INDEX:
            sources.append((kind, arena, to_device(plan.indices[start : start + rows], arena.device)))
        else:
            sources.append((kind, arena.narrow(0, start, 1 if kind == BROADCAST else rows), None))
    blocks = range(plan.first_block.item(k), plan.first_block.item(k + 1))
    outs = [
        memory.arena_of(plan.arenas[plan.block_arena.item(b)]).narrow(0, plan.block_start.item(b), n)
        for b in blocks
    ]
    compiled = phase.compiled[s]
    assert compiled is not None
    if not memory.keeps() or compiled.forward is None:
        return sources, outs, ([], [])
    first = plan.step_offset.item(k)
    kept = [_split_group(memory, compiled, i, first, [n])[0] for i in range(len(compiled.kept_groups))]
    saved = [memory.saved(compiled, i).narrow(0, first, n) for i in range(len(compiled.saved_types))]
    return sources, outs, (kept, saved)


def _sources(plan: Plan, arenas: Sequence[torch.Tensor]) -> list[Source]:
    """Per gather of the plan what the step functions take."""
    sizes = plan.gather_rows[plan.gather_kind == INDEX].tolist()
    pieces: dict[torch.device, Sequence[torch.Tensor]] = {}
    out: list[Source] = []
    at = 0
    columns = (plan.gather_kind, plan.gather_arena, plan.gather_start, plan.gather_rows)
    for kind, a, start, rows in zip(*(x.tolist() for x in columns), strict=True):
        arena = arenas[a]
        if kind == INDEX:
            found = pieces.get(arena.device)
            if found is None:
                found = pieces[arena.device] = to_device(plan.indices, arena.device).split(sizes)
            out.append((kind, arena, found[at]))
            at += 1
        else:
            out.append((kind, arena[start : start + (1 if kind == BROADCAST else rows)], None))
    return out


def _split_kept(phase: Phase, memory: Memory) -> list[tuple[list[Kept], list[torch.Tensor]]]:
    """For each step the rows of its operation that backward reads: of kept groups, and saved ones."""
    out: list[tuple[list[Kept], list[torch.Tensor]]] = [([], [])] * len(phase.plan.step_signature)
    if not memory.keeps():
        return out  # without gradients nothing is kept
    for compiled, steps, start, counts in _by_operation(phase):
        if not compiled.kept_groups and not compiled.saved_types:
            continue
        kept = [_split_group(memory, compiled, i, start, counts) for i in range(len(compiled.kept_groups))]
        saved = [split(memory.saved(compiled, i), start, counts) for i in range(len(compiled.saved_types))]
        for i, k in enumerate(steps):
            out[k] = ([column[i] for column in kept], [column[i] for column in saved])
    return out


def _by_operation(phase: Phase) -> Iterator[tuple[CompiledOperation, list[int], int, list[int]]]:
    """Each batched operation, its steps, where their rows begin and how many each has: one after another."""
    plan = phase.plan
    steps_of: dict[int, list[int]] = {}
    for k, s in enumerate(plan.step_signature.tolist()):
        steps_of.setdefault(s, []).append(k)
    sizes = plan.step_rows.tolist()
    for s, steps in steps_of.items():
        compiled = phase.compiled[s]
        assert compiled is not None
        if compiled.forward is not None:
            yield compiled, steps, int(plan.step_offset[steps[0]]), [sizes[k] for k in steps]


def _split_group(
    memory: Memory, compiled: CompiledOperation, position: int, start: int, counts: list[int]
) -> list[Kept]:
    size, tensor = compiled.kept_members[position], memory.kept(compiled, position)
    flat = split(tensor, start * size, [n * size for n in counts])
    wide = flat
    if size > 1:
        whole = tensor.narrow(0, start * size, sum(counts) * size)
        wide = whole.view(sum(counts), size, *tensor.shape[1:]).split_with_sizes(counts)
    if memory.in_place(compiled, position):
        return [(None, piece) for piece in wide]
    return list(zip(flat, wide, strict=True))


def rows_of_output(phase: Phase, memory: Memory, step: int, index: int) -> torch.Tensor:
    """The rows of one output of a step."""
    plan = phase.plan
    block = int(plan.first_block[step]) + index
    arena = memory.arena_of(plan.arenas[int(plan.block_arena[block])])
    return arena.narrow(0, int(plan.block_start[block]), int(plan.step_rows[step]))


class GradientViews:
    """Where the steps of a phase read and write in backward; laid out where a step that Python runs asks."""

    def __init__(self, phase: Phase, memory: Memory, rows: GradientRows, plan: GradientPlan, p: int) -> None:
        self._phase, self._memory, self._rows, self._plan, self._p = phase, memory, rows, plan, p
        self.reads, self.writes = plan.first_read[p].tolist(), plan.first_write[p].tolist()

    @functools.cached_property
    def forward(self) -> StepViews:
        """What forward read, wrote and kept."""
        return lay_out_steps(self._phase, self._memory)

    @functools.cached_property
    def extra(self) -> list[list[torch.Tensor]]:
        """For each step the rows that it makes for the gradients of parameters."""
        out: list[list[torch.Tensor]] = [[]] * len(self._phase.plan.step_signature)
        for compiled, steps, start, counts in _by_operation(self._phase):
            columns = [split(tensor, start, counts) for tensor in self._rows.extra(compiled)]
            for i, k in enumerate(steps):
                out[k] = [column[i] for column in columns]
        return out

    @functools.cached_property
    def written(self) -> list[torch.Tensor]:
        """The blocks that gradients of what was read go to."""
        plan, p = self._plan, self._p
        arenas = [self._rows.tensor(i) for i in range(len(plan.capacity))]
        return split_blocks(arenas, plan.write_arena[p], plan.write_start[p], plan.write_rows[p])

    @functools.cached_property
    def _indices(self) -> dict[torch.device, tuple[dict[int, torch.Tensor], torch.Tensor]]:
        """By device the indices of each read that has some, and all bags: each in one copy."""
        return {}

    def read(self, i: int, n: int) -> torch.Tensor | None:
        """Read i, of n rows: a view, rows by an index, a sum over bags, or nothing."""
        plan, p = self._plan, self._p
        kind, start, stop = int(plan.read_kind[p][i]), int(plan.read_start[p][i]), int(plan.read_stop[p][i])
        if kind == NOTHING:
            return None
        arena = self._rows.tensor(int(plan.read_arena[p][i]))
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
        plan, p = self._plan, self._p
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
