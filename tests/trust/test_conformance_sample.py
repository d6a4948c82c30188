"""A fiftieth of PyTorch's operator and module databases, the same each time; `make conformance` runs them all."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.databases import Call, Entry, entries
from tests.conformance.judge import judge


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_the_databases(part: int) -> None:
    known = entries()
    faults = []
    for k, name in enumerate(sorted(known)[::50][part::4]):
        line = judge(known[name], samples=1, seconds=float("inf"), other=k % 2 == 0)
        if line["bad"]:
            faults.append((name, line["bad"]))
    assert not faults


def _entry(function: object) -> Entry:
    def make(dtype: torch.dtype, grad: bool) -> list[Call]:
        return [Call(function, (torch.randn(3, dtype=dtype, requires_grad=grad),), {}) for _ in range(2)]

    return Entry("op: made", "op", (torch.float32,), True, False, make)


def test_the_judge_knows_good_from_wrong() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) if type(x) is torch.Tensor else torch.sin(x) * 1.01

    def broken(x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            raise ZeroDivisionError
        return torch.sin(x)

    assert judge(_entry(torch.sin))["verdict"] == "batched"
    assert judge(_entry(wrong))["verdict"] == "wrong"
    assert judge(_entry(broken))["verdict"] == "crash"
    assert judge(_entry(lambda x: x.nonzero()))["verdict"] == "no call"
