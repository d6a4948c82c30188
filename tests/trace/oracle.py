"""Compare a recording, run by the reference execution, with the plain forward one instance at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.torch_private import tree_leaves
from fxbatch.trace.minibatch import Recording, record_minibatch
from fxbatch.trace.table import SignatureTable
from tests.oracle import assert_same
from tests.trace.reference import ReferenceExecution


def recorded(
    fn: Callable[..., Any],
    instances: Sequence[Any],
    table: SignatureTable | None = None,
    **options: Any,
) -> tuple[list[Any], Recording, ReferenceExecution]:
    """Per-instance results of recording `fn` over one-argument instances."""
    execution = ReferenceExecution()
    wrapped = [(x if type(x) is tuple else (x,), {}) for x in instances]
    recording = record_minibatch(
        fn, wrapped, SignatureTable() if table is None else table, execution, **options
    )
    return execution.results(recording), recording, execution


def check_equal(
    fn: Callable[..., Any],
    instances: Sequence[Any],
    parameters: Sequence[torch.Tensor] = (),
    table: SignatureTable | None = None,
) -> tuple[Recording, ReferenceExecution]:
    """Values and gradients of the recording equal those of the loop up to rounding."""
    got, recording, execution = recorded(fn, instances, table)
    want = [fn(*(x if type(x) is tuple else (x,))) for x in instances]
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        flat_g, flat_w = tree_leaves(g), tree_leaves(w)
        assert len(flat_g) == len(flat_w), f"instance {k}: {g} for {w}"
        for a, b in zip(flat_g, flat_w, strict=True):
            if isinstance(b, torch.Tensor):
                assert a.requires_grad == b.requires_grad, f"instance {k}: requires_grad"
            else:
                assert a == b, f"instance {k}: {a} for {b}"
        assert_same(flat_g, flat_w)
    if parameters:
        ours, theirs = (list(_gradients(results, parameters)) for results in (got, want))
        assert [g is None for g in ours] == [g is None for g in theirs]
        assert_same(ours, theirs)
    return recording, execution


def _gradients(results: Sequence[Any], parameters: Sequence[torch.Tensor]) -> Any:
    leaves = [x for x in tree_leaves(list(results)) if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = sum((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in leaves)
    return torch.autograd.grad(loss, parameters, allow_unused=True)
