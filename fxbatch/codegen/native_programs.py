"""Native programs of an operation's kernels, with where each of their inputs comes from.

In: OperationGraphs. Out: a NativeStep for one of them, or the reason why it has none.

    sources = sources_of(graphs, kept, "forward")
    step = make_step("cell", graphs.forward, shared, sources)     # NativeStep, or "aten.bernoulli.default"
    step.program                                          # runs in `_native.c`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxbatch.codegen import products
from fxbatch.codegen.build_operation import OperationGraphs
from fxbatch.codegen.native import available, extension
from fxbatch.codegen.native_lower import make_program, records
from fxbatch.codegen.native_table import Memory, Origin, Source
from fxbatch.codegen.operation_graphs import dtype, shape

_ORIGINS = {"output": Origin.RESULT, "saved": Origin.SAVED}


@dataclass(frozen=True, eq=False)
class NativeStep:
    """A kernel as a program."""

    name: str  # of the operation
    program: object
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # for one row: shape and type of each
    shared_bytes: tuple[int, ...]  # of each shared operand, from its first element to its last
    adding: object = None  # the program that adds to its results, where there is one
    calls: tuple[str, ...] = ()  # of torch, that it makes


def make_step(
    name: str,
    module: fx.GraphModule,
    shared: Sequence[torch.Tensor],
    sources: Sequence[Source],
    *,
    sums: bool = False,
) -> NativeStep | str:
    """The step of a graph whose first inputs come from `sources` and whose last are `shared`. sums: its results may be
    added to those of another."""
    if reason := available():
        return reason
    new_program = make_program(module, shared)
    if isinstance(new_program, str):
        return new_program
    last = int((new_program.bases["kind"] == Memory.INPUT).sum())
    first = last - len(shared)
    sizes = (new_program.bases["rest"] * new_program.bases["row_bytes"])[first:last].tolist()
    origins = records(Source, sources)
    products.settle()
    try:
        more = make_program(module, shared, adding=True) if sums else ""
        program, adding = (
            None if isinstance(x, str)
            else extension.Program(x.bases, x.instructions, origins, x.views, x.functions)
            for x in (new_program, more)
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    results = module.graph.output_node().args[0]
    outputs = tuple((tuple([a + b for a, b in shape(x)]), dtype(x)) for x in results)
    return NativeStep(name, program, outputs, tuple(sizes), adding, new_program.calls)


def sources_of(graphs: OperationGraphs, kept_groups: tuple[int, ...], part: str) -> list[Source]:
    """Where a graph finds its inputs before the shared operands: the forward, gathered groups; the backward, gradients
    of outputs, and what forward left; that of parameters is given rows of all steps."""
    if part == "forward":
        return [_group(graphs, kept_groups, g) for g in range(len(graphs.layout.groups))]
    if part == "parameters":
        return []
    sources = [Source()] * len(graphs.grad_outputs)  # where these are the plan says
    for ref in graphs.backward_inputs:
        group, index = ref.kind == "group", ref.index
        sources.append(_group(graphs, kept_groups, index) if group else Source(_ORIGINS[ref.kind], index))
    return sources


def _group(graphs: OperationGraphs, kept_groups: tuple[int, ...], group: int) -> Source:
    position = kept_groups.index(group) if group in kept_groups else -1
    copied = position >= 0 and graphs.in_parameters(group)
    return Source(Origin.GROUP, group, position, int(copied), len(graphs.layout.groups[group]))
