"""How many operations of PyTorch the steps of a minibatch dispatch: no more for more instances of the same kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxbatch
import fxbatch.blocks as fb
from examples.fold import attention, weave
from fxbatch.runtime import run
from fxbatch.runtime.forward import execute_forward


class Counting(TorchDispatchMode):
    """Counts what is dispatched within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def dispatched(model: fb.CompiledBlock, data: list[Any]) -> int:
    for _ in range(2):  # the second time all is known
        model(data)
    count = 0

    def counted(*args: Any, native: bool) -> int:
        nonlocal count
        with Counting() as counting:
            launches = execute_forward(*args, native=False)
        count += counting.count
        return launches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "execute_forward", counted)
        model(data)
    return count


def molecule(n: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    atoms = torch.rand(n, weave.ATOM, generator=g).tolist()
    return (atoms, torch.rand(n, n, weave.PAIR, generator=g).tolist()), [float(seed)]


@pytest.mark.parametrize("name", ["attention", "weave"])
def test_operations_of_the_examples_do_not_grow_with_the_instances(name: str) -> None:
    if name == "attention":
        model = fb.compile(attention.build(attention.Layers(6)))
        data = attention.adding_task(16, 30, 0)
    else:
        model = fb.compile(weave.build(weave.Layers(1, 5)))
        data = [molecule(2 + i % 3, i) for i in range(8)]
    few, many = (dispatched(model, data * times) for times in (1, 6))
    assert many <= 1.25 * few + 20, (few, many)  # 16 and 96 sequences, 500 and 3,000 vectors in them


@pytest.mark.parametrize("kind", ["lists", "arrays", "numpy scalars", "text"])
def test_objects_are_no_operation_each(kind: str) -> None:
    vectors = fb.Map(fb.Vector(3)) >> fb.Sum()
    numbers = fb.Map(fb.Scalar("int64") >> fb.Embedding(5, 3)) >> fb.Sum()
    model = fb.compile(vectors if kind in ("lists", "arrays") else numbers)

    def element(i: int) -> Any:
        if kind == "arrays":
            return np.arange(i, i + 3)
        return [i, i, i] if kind == "lists" else np.int64(i) if kind == "numpy scalars" else str(i)

    few, many = ([[element(i + k) for k in range(8)] for i in range(n)] for n in (4, 64))
    assert dispatched(model, many) <= dispatched(model, few) + 12


def test_rows_of_shared_memory_are_independent() -> None:
    block = fb.Map(fb.Vector(2)) >> fb.Fold(fb.Function(lambda a, x: 2 * a + x), fb.Zeros(2))
    model = fb.compile(block)
    first = [[[i, j] for j in range(n)] for i, n in enumerate((0, 3, 40, 7))]
    second = [[[j, -i] for j in range(n)] for i, n in enumerate((50, 2, 1))]
    want = [torch.stack([block.eval(x) for x in data]) for data in (first, second, first)]
    for data, w in zip((first, second, first), want, strict=True):
        assert torch.equal(model(data), w)
    kept = model(first)
    model(second)
    assert torch.equal(kept, want[0])
    traced = fxbatch.TracedDataset(model, first)
    assert torch.equal(model([traced[i] for i in range(4)]), want[0])
