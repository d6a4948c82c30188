"""What is out of range is no exception on CUDA but the end of the device's use: it is tried on the host first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxbatch.codegen.check import _eager
from fxbatch.codegen.operation_graphs import OperationGraphs
from tests.codegen.operation_cases import build, signature_of

IN_RANGE: dict[str, tuple[Any, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
    "a label": (F.cross_entropy, (torch.randn(3), torch.tensor(2)), ()),
    "a word": (F.embedding, (torch.tensor(0),), (torch.randn(1, 4),)),
    "a probability": (F.binary_cross_entropy, (torch.rand(4), torch.rand(4)), ()),
    "a place": (lambda x, i: x.gather(0, i), (torch.randn(2), torch.tensor([1, 0])), ()),
}
OUT_OF_RANGE: dict[str, tuple[torch.Tensor, ...]] = {
    "a label": (torch.randn(1, 3), torch.tensor([3])),
    "a word": (torch.tensor([1]),),
    "a probability": (torch.full((1, 4), 2.0), torch.rand(1, 4)),
    "a place": (torch.randn(1, 2), torch.tensor([[0, 2]])),
}


@pytest.mark.parametrize("name", IN_RANGE)
def test_the_host_refuses_what_is_out_of_range(name: str) -> None:
    target, inputs, shared = IN_RANGE[name]
    signature, tensors = signature_of(target, inputs, shared=shared)
    eager = _eager(signature, [True] * len(inputs), [True] * len(shared), tensors)
    eager.run_on_host([x[None] for x in inputs], 1)
    with pytest.raises((IndexError, RuntimeError)):
        eager.run_on_host(list(OUT_OF_RANGE[name]), 1)


def test_what_an_operation_makes_on_a_device_is_made_on_the_host() -> None:
    def scaled(x: Any) -> Any:
        return x * torch.full((3,), 2.0, device="meta" if x.is_meta else "cpu")

    signature, _ = signature_of(scaled, [torch.randn(3)])
    moved = signature_of(lambda x: x + torch.ones(3, device="meta"), [torch.empty(3, device="meta")])[0]
    for given in (signature, moved):
        _eager(given, [True], [], []).run_on_host([torch.randn(2, 3)], 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_RANGE)
def test_operations_are_built_on_a_gpu(name: str) -> None:
    target, inputs, shared = IN_RANGE[name]
    graphs, _ = build(target, [x.cuda() for x in inputs], shared=[x.cuda() for x in shared])
    assert isinstance(graphs, OperationGraphs)
    assert graphs.checked
    torch.cuda.synchronize()
