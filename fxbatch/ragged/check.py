"""A packed function against its body, one instance at a time, before it is used.

In: a function, and instances that it is for, of which three run. Out: nothing, or an AssertionError: a wrong rule makes
a forward slow, not wrong.

    check_against_body(function, columns, shared)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxbatch.ragged.packed_function import PackedFunction

# Of the largest number, in double precision and in others: layouts that are mixed up are far off.
_DOUBLE, _OTHER = 1e-6, 1e-2
_LARGE = 1 << 20  # elements of a table whose gradient is compared
Tensors = list[torch.Tensor]


def check_against_body(
    function: PackedFunction, columns: Sequence[Sequence[torch.Tensor]], shared: Sequence[torch.Tensor]
) -> None:
    """Values, and gradients where they are recorded, of these instances. What draws numbers is not compared."""
    if function.lowered.random:
        return
    every = list(zip(*columns, strict=True))
    every.sort(key=lambda given: sum(t.numel() for t in given))
    chosen = {0, len(every) // 2, len(every) - 1}  # the smallest and the largest among them
    instances = [[_leaf(t) for t in every[i]] for i in sorted(chosen)]
    operands = [_leaf(t) for t in shared]
    try:
        loop = [list(function.graph.body(*given, *operands)) for given in instances]
    except Exception:  # noqa: BLE001 - the user's own mistake, which is raised where the instance runs
        return
    given = list(zip(*instances, strict=True))
    outputs, z = function(given, operands, function.columns_of(given), given[0][0].device)
    apart = [function.apart(o, t, z) for o, t in zip(function.lowered.outputs, outputs, strict=True)]
    packed = [list(row) for row in zip(*apart, strict=True)]
    _compare([t for row in packed for t in row], [t for row in loop for t in row])
    leaves = [t for row in (*instances, operands) for t in row if t.requires_grad and t.numel() <= _LARGE]
    if leaves and torch.is_grad_enabled():
        _compare(_gradients(packed, leaves), _gradients(loop, leaves))


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _gradients(results: Sequence[Tensors], leaves: Tensors) -> Tensors:
    found = [t for row in results for t in row if t.requires_grad]
    weights = [torch.linspace(0.5, 1.5, t.numel(), device=t.device).view(t.shape).to(t.dtype) for t in found]
    if not found:
        return []
    made = torch.autograd.grad(found, leaves, weights, allow_unused=True, materialize_grads=True)
    return [g.to_dense() if g.is_sparse else g for g in made]


def _compare(packed: Tensors, loop: Tensors) -> None:
    assert len(packed) == len(loop), "other results than the loop"
    largest = max([1e-3, *[_largest(t) for t in loop]])
    for a, b in zip(packed, loop, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{a.dtype}{list(a.shape)} in place of {b.dtype}{list(b.shape)}"
        )
        far = largest * (_DOUBLE if b.dtype in (torch.float64, torch.complex128) else _OTHER)
        far = far if b.is_floating_point() or b.is_complex() else 0.0
        assert torch.allclose(a.detach(), b.detach(), rtol=0, atol=far, equal_nan=True), (
            "it differs from the loop"
        )


def _largest(t: torch.Tensor) -> float:
    if not t.dtype.is_floating_point:
        return 0.0
    found = t.detach()[torch.isfinite(t.detach())].abs()
    return float(found.max()) if found.numel() else 0.0
