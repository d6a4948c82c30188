"""A step never waits for the device: counted on the CPU, and forbidden by CUDA itself where there is one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fxbatch
from benchmarks import gpu
from fxbatch.runtime.constants import stack_distinct
from fxbatch.runtime.devices import count_waits, host_numbers, to_device
from tests.models import ChildSum, Tree, TreeLSTM, random_tree, wide_tree


def make(kind: str, count: int) -> tuple[Any, list[Any]]:
    rng = random.Random(count)
    if kind == "binary":
        return TreeLSTM(), [random_tree(rng, rng.randrange(1, 9)) for _ in range(count)]
    return ChildSum(), [wide_tree(rng, rng.randrange(1, 9)) for _ in range(count)]


def on_cuda(tree: Tree) -> Tree:
    word = None if tree.word is None else tree.word.cuda()
    return Tree(word, [on_cuda(child) for child in tree.children])


@pytest.mark.parametrize("kind", ["binary", "wide"])
@pytest.mark.parametrize("count", [1, 7])
def test_no_operation_of_a_step_waits(kind: str, count: int) -> None:
    model, trees = make(kind, count)
    minibatch = fxbatch.compile_minibatch(model, trees)
    with count_waits() as waits:
        minibatch().sum().backward()
    assert waits == []


def test_what_waits_is_counted() -> None:
    with count_waits() as waits:
        x = torch.arange(3)
        x.sum().item()
        torch.nonzero(x)
    assert waits == ["aten._local_scalar_dense.default", "aten.nonzero.default"]


def test_numbers_that_are_on_the_host_are_no_wait() -> None:
    with count_waits() as waits:
        found = host_numbers([torch.tensor(3), torch.tensor(5)], np.int64)
        torch.tensor(2).item()
    assert found.tolist() == [3, 5] and waits == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("kinds", [1, 4, 30])
def test_tensors_that_come_again_are_stacked_once(kinds: int) -> None:
    words = [torch.randn(3) for _ in range(kinds)]
    items = [words[i * 7 % kinds] for i in range(40)]
    out = torch.empty(40, 3)
    stack_distinct(items, out)
    assert torch.equal(out, torch.stack(items))


def test_indices_on_the_cpu_are_not_copied() -> None:
    array = np.arange(5)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data


@pytest.mark.gpu
def test_cuda_forbids_waiting() -> None:
    model, _ = make("binary", 1)
    model.cuda()
    trees = [on_cuda(tree) for tree in make("binary", 7)[1]]
    minibatch = fxbatch.compile_minibatch(model, trees)
    minibatch().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        minibatch().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gradients_are_deterministic_on_cuda() -> None:
    model, _ = make("binary", 1)
    model.cuda()
    trees = [on_cuda(tree) for tree in make("binary", 9)[1]]
    found = []
    for _ in range(3):
        model.zero_grad()
        model(trees).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_gpu_script_runs_on_the_cpu_at_small_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sst"
    folder.mkdir()
    for part in ("train", "dev", "test"):
        trees = "(3 (2 It) (4 works))\n(1 (2 It) (1 (2 never) (1 fails)))\n"
        (folder / f"{part}.txt").write_text(trees * 2)
    gpu.main(["--device", "cpu", "--leaves", "5", "--state", "8", "--batch", "3", "--sst-hidden", "8",
              "--sst-batch", "4", "--rounds", "1", "--data", str(tmp_path)])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    start = max(i for i, line in enumerate(lines) if line.startswith("| task"))
    rows = [line for line in lines[start + 2 :] if line.startswith("|")]
    assert len(rows) == 2 * 5 + 2 * 5, "two modes of five contenders, for trees of one size and for SST"
    assert lines[-1] == rows[-1], "the table is printed last"
