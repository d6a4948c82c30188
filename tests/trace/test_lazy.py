"""Lazy use: values made outside any decorated call."""

from __future__ import annotations

import torch
from torch import nn

from fxbatch.trace.minibatch import LazyBatch
from fxbatch.trace.table import SignatureTable
from tests.trace.reference import ReferenceExecution

LIN = nn.Linear(4, 4)
X = [torch.randn(4, generator=torch.Generator().manual_seed(k)) for k in range(6)]


def loss(x: torch.Tensor) -> torch.Tensor:
    return (LIN(x) ** 2).sum()


def test_losses_run_as_one_batch() -> None:
    want = torch.autograd.grad(sum(loss(x) for x in X), LIN.weight)[0]
    execution = ReferenceExecution()
    LIN.zero_grad()
    with LazyBatch(SignatureTable(), execution, execution.materialise, (LIN,)) as batch:
        losses = [LIN_loss(batch, x) for x in X]
        sum(losses).backward()
    assert len(execution.programs) == 1
    torch.testing.assert_close(LIN.weight.grad, want)


def LIN_loss(batch: LazyBatch, x: torch.Tensor) -> torch.Tensor:
    v = batch.value(x)
    return ((v @ LIN.weight.T + LIN.bias) ** 2).sum()


def test_reading_runs_what_is_pending() -> None:
    execution = ReferenceExecution()
    with LazyBatch(SignatureTable(), execution, execution.materialise) as batch:
        a = batch.value(X[0]) * 2
        b = batch.value(X[1]) * 3
        assert a.tolist() == (X[0] * 2).tolist()
        assert b.sum().item() == (X[1] * 3).sum().item()
    assert len(execution.programs) == 2
    assert b.tolist() == (X[1] * 3).tolist()


def test_values_are_real_tensors_after_the_block() -> None:
    execution = ReferenceExecution()
    with LazyBatch(SignatureTable(), execution, execution.materialise) as batch:
        a = batch.value(X[0]) @ LIN.weight
    c = a * 2
    assert type(c) is torch.Tensor and c.requires_grad
    torch.testing.assert_close(c, X[0] @ LIN.weight * 2)
    assert batch.real({"a": [a]})["a"][0].requires_grad
