"""What programs of one family have in common, found once: their shared operands, needs and compiled operations.

A family is the programs with one signature graph in which the same signatures are called, with or without gradients.
While the shared operands are of the types that they were (shapes, strides, who requires gradients), all that a new
program of it needs is a Template; which tensors they are, and where, is asked anew each time.

    family = Family(program, counts, grad=True)
    tensors = family.resolve({})                      # as they are now
    table = family.templates(tensors)                 # a Template by what else it depends on, empty where types changed
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxbatch.ir import Layout, Program, SharedOperand, Signature
from fxbatch.passes.plan import SlotTable, tabulate_slots
from fxbatch.passes.signature_graph import Needs
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.pointer_table import PointerTable, is_plain
from fxbatch.runtime.slab import SlabKinds

_MOST = 64  # templates of a family: which constants and early values carry gradients

Operands = dict[tuple[int, str], torch.Tensor]  # by SharedOperand.key


@dataclass(frozen=True, eq=False)
class OperationSet:
    """The compiled operations of a program's signatures, None where it has no call; one object a set."""

    signatures: tuple[Signature, ...]
    compiled: tuple[CompiledOperation | None, ...]
    layouts: tuple[Layout | None, ...]  # how each takes its inputs
    slots: SlotTable  # the same as columns
    memory: SlabKinds | None  # what a run of them needs, None where it can't lie in one piece
    forward: PointerTable | None  # for steps in C on such memory
    backward: PointerTable | None

    @staticmethod
    def of(program: Program, compiled: tuple[CompiledOperation | None, ...]) -> OperationSet:
        """The set for a program's signatures."""
        layouts = tuple(None if c is None else c.layout for c in compiled)
        slots = tabulate_slots(program, layouts)
        kinds = SlabKinds.of(program.types, compiled)
        tables = [
            None if kinds is None else PointerTable.of(compiled, kinds, backward=b) for b in (False, True)
        ]
        return OperationSet(program.signatures, compiled, layouts, slots, kinds, *tables)


@dataclass(frozen=True, eq=False)
class Template:
    """What a run of a family does not have to find again."""

    needs: Needs
    operations: OperationSet


class Family:
    """One family of programs."""

    def __init__(self, program: Program, counts: Sequence[int], *, grad: bool) -> None:
        self.signatures = program.signatures
        self.present = [n > 0 for n in counts]
        self.grad = grad
        self.settled = False  # whether no signature is to be compiled later than now
        places: dict[tuple[int, str], int] = {}
        operands: list[SharedOperand] = []
        self.places: list[tuple[int, ...]] = []  # of each signature's shared operands
        for signature, called in zip(program.signatures, self.present, strict=True):
            mine = signature.shared if called else ()
            for operand in mine:
                if operand.key not in places:
                    places[operand.key] = len(operands)
                    operands.append(operand)
            self.places.append(tuple(places[operand.key] for operand in mine))
        self.operands = [(operand.key, operand) for operand in operands]
        # Replaced as a whole, so that no thread puts a template beside types that it does not fit.
        self._current: tuple[Any, dict[Hashable, Template]] = (None, {})

    def resolve(self, known: Operands) -> list[torch.Tensor]:
        """The shared operands, each once: what a run knows already, else as they are now; noted in `known`."""
        found = []
        for key, operand in self.operands:
            tensor = known.get(key)
            if tensor is None:
                tensor = known[key] = operand.resolve()
            found.append(tensor)
        return found

    def shared(self, tensors: Sequence[torch.Tensor]) -> dict[Signature, list[torch.Tensor]]:
        """The shared operands of each signature that is called."""
        return {
            signature: [tensors[i] for i in places]
            for signature, places, called in zip(self.signatures, self.places, self.present, strict=True)
            if called
        }

    def templates(self, tensors: Sequence[torch.Tensor]) -> dict[Hashable, Template]:
        """The templates for operands of these types, to be looked up in and added to."""
        types = [_type_of(t) for t in tensors]
        before, found = self._current
        if before != types or len(found) > _MOST:
            found = {}
            self._current = (types, found)
        return found


def _type_of(t: torch.Tensor) -> tuple[Any, ...]:
    """All of a shared operand that operations depend on, but for its contents and where it is."""
    if t.layout is not torch.strided:
        return t.requires_grad, t.shape, t.layout, t.dtype, t.device
    return t.requires_grad, t.shape, t.stride(), t.dtype, t.device, is_plain(t)
