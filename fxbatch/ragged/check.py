"""A packed function against its body, one instance at a time, before it is used.

In: a function, and instances that it is for, of which three run. Out: nothing, or an AssertionError: a wrong rule makes
a forward slow, not wrong. What is equal says `fxbatch.judge`.

    check_against_body(function, columns, shared)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from fxbatch.judge import differences, draws
from fxbatch.ragged.packed_function import PackedFunction

_LARGE = 1 << 20  # elements of a table whose gradient is compared
Tensors = Sequence[torch.Tensor]
Rows = Sequence[Tensors]  # of instances


def check_against_body(
    function: PackedFunction, columns: Sequence[Sequence[torch.Tensor]], shared: Sequence[torch.Tensor]
) -> None:
    """Values, and gradients where they are recorded, of these instances. What draws numbers is not compared."""
    if function.lowered.random:
        return
    every = list(zip(*columns, strict=True))
    every.sort(key=lambda instance: sum(t.numel() for t in instance))
    chosen = {0, len(every) // 2, len(every) - 1}  # the smallest and the largest among them
    instances = [[_leaf(t) for t in every[i]] for i in sorted(chosen)]
    operands = [_leaf(t) for t in shared]

    def run_loop(instances: Rows, shared: Tensors) -> list[list[torch.Tensor]]:
        return [list(function.graph.body(*row, *shared)) for row in instances]

    try:
        loop = run_loop(instances, operands)
    except Exception:  # noqa: BLE001 - the user's own mistake, which is raised where the instance runs
        return
    columns = list(zip(*instances, strict=True))
    outputs, z = function(columns, operands, function.columns_of(columns), columns[0][0].device)
    packed = list(zip(*function.apart(outputs, z), strict=True))
    for message in packed_differences(packed, loop, instances, operands, run_loop):
        raise AssertionError(f"it differs from the loop: {message}")


def packed_differences(
    packed: Rows, loop: Rows, instances: Rows, shared: Tensors, run_loop: Callable[[Rows, Tensors], Rows]
) -> list[str]:
    """Messages for each difference between results [instance][output], and between the gradients of a weighted sum of
    them. run_loop: the loop, which is run on other numbers, too."""
    flat, starts = [*(t for row in instances for t in row), *shared], [0]
    for row in instances:
        starts.append(starts[-1] + len(row))
    grads = torch.is_grad_enabled()
    places = [(f"input {k}", t) for row in instances for k, t in enumerate(row)]
    places += [(f"shared operand {k}", t) for k, t in enumerate(shared)]
    needed = [i for i, (_, t) in enumerate(places) if grads and t.requires_grad and t.numel() <= _LARGE]
    kinds = [f"output {k}" for row in loop for k in range(len(row))]
    kinds += [f"the gradient of {places[i][0]}" for i in needed]

    def with_gradients(results: Rows, tensors: Tensors) -> list[torch.Tensor]:
        values = [t for row in results for t in row]
        ends, leaves = [t for t in values if t.requires_grad], [tensors[i] for i in needed]
        if not (ends and leaves):
            return [*values, *map(torch.zeros_like, leaves)]
        # Numbers that every type has exactly.
        numbers = [(torch.arange(t.numel(), device=t.device) % 8 + 4) / 8 for t in ends]
        weights = [n.view(t.shape).to(t.dtype) for n, t in zip(numbers, ends, strict=True)]
        gradients = torch.autograd.grad(ends, leaves, weights, allow_unused=True, materialize_grads=True)
        return [*values, *gradients]

    def loop_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        rows = [tensors[a:b] for a, b in itertools.pairwise(starts)]
        return with_gradients(run_loop(rows, tensors[starts[-1] :]), tensors)

    ours, theirs = with_gradients(packed, flat), with_gradients(loop, flat)
    messages = differences(ours, theirs, draws(loop_of, flat), kinds=kinds)
    return [f"{kinds[i]}: {judged.message}" for i, judged in messages.items()]


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)
