"""A step never waits for the device: counted on the CPU, and forbidden by CUDA itself where there is one."""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fxbatch
from benchmarks import compiled_steps, gpu
from benchmarks.task import Settings
from benchmarks.workloads import made_up_trees
from fxbatch.ir import INDEX
from fxbatch.runtime import backward, forward, memory, run
from fxbatch.runtime.memory import host_numbers, move, stack_distinct, to_device
from tests.compile.waits import count_waits
from tests.models import ChildSum, Tree, TreeLSTM, random_tree, wide_tree


def make(kind: str, count: int) -> tuple[Any, list[Any]]:
    rng = random.Random(count)
    if kind == "binary":
        return TreeLSTM(), [random_tree(rng, rng.randrange(1, 9)) for _ in range(count)]
    return ChildSum(), [wide_tree(rng, rng.randrange(1, 9)) for _ in range(count)]


def on_cuda(tree: Tree) -> Tree:
    word = None if tree.word is None else tree.word.cuda()
    return Tree(word, [on_cuda(child) for child in tree.children])


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")


@contextmanager
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What reads a tensor's numbers on the host by a method that dispatches nothing on the CPU."""
    found: list[str] = []
    with monkeypatch.context() as patch:
        for name in READS:
            original = getattr(torch.Tensor, name)

            def reading(self: torch.Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
                found.append(name)
                return original(self, *args)

            patch.setattr(torch.Tensor, name, reading)
        yield found


@pytest.mark.parametrize("native", [True, False], ids=["native", "as on a GPU"])
@pytest.mark.parametrize("kind", ["binary", "wide"])
@pytest.mark.parametrize("count", [1, 7])
def test_no_operation_of_a_step_waits(
    kind: str, count: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trees = make(kind, count)
    minibatch = fxbatch.compile_minibatch(model, trees, native=native)
    minibatch().sum().backward()
    with count_waits() as waits, host_reads(monkeypatch) as reads:
        minibatch().sum().backward()
    assert waits == [] and reads == []


def test_a_read_of_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_reads(monkeypatch) as reads:
        torch.ones(3).tolist()
        if torch.ones(1) > 0:
            torch.ones(2).numpy()
    assert reads == ["tolist", "__bool__", "numpy"]


@pytest.mark.parametrize("count", [3, 20])
def test_copies_to_the_device_do_not_grow_with_the_steps(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All indices of a phase in one copy, those of its backward and the bags in two, one more a request."""
    copies: Counter[str] = Counter()
    for module in (forward, backward, run, memory):
        name = module.__name__.rpartition(".")[2]

        def counted(array: np.ndarray, device: torch.device, name: str = name) -> torch.Tensor:
            copies[name] += 1
            return to_device(array, device)

        monkeypatch.setattr(module, "to_device", counted)
    model, trees = make("binary", count)
    minibatch = fxbatch.compile_minibatch(model, trees, native=False)
    plan = minibatch.plan
    assert (plan.gather_kind == INDEX).sum() > 2, "several gathers have indices"
    copies.clear()
    minibatch().sum().backward()
    assert copies["forward"] == 1 and copies["backward"] == 2 and copies["run"] <= 1 and not copies["memory"]


def test_copies_are_pinned_and_nobody_waits_for_them() -> None:
    class Recorded:
        """Notes what is asked of it, in place of a tensor: there is no device here."""

        device = torch.device("cpu")

        def __init__(self) -> None:
            self.asked: list[Any] = []

        def pin_memory(self) -> Recorded:
            self.asked.append("pin_memory")
            return self

        def to(self, device: torch.device, *, non_blocking: bool = False) -> Recorded:
            self.asked.append((str(device), non_blocking))
            return self

    tensor: Any = Recorded()
    move(tensor, torch.device("cuda", 0))
    assert tensor.asked == ["pin_memory", ("cuda:0", True)]


def test_the_next_minibatch_is_planned_while_one_is_in_use() -> None:
    model, trees = make("binary", 6)
    data = fxbatch.TracedDataset(model, trees)
    asked, planned = threading.Event(), threading.Event()

    def batches() -> Iterator[list[Any]]:
        yield [data[0], data[1]]
        asked.set()
        yield [data[2], data[3]]
        planned.set()  # asked for the third: the second is planned
        yield [data[4], data[5]]

    ready = fxbatch.prefetch(model, batches(), ahead=2)
    first = next(ready)
    assert asked.wait() and planned.wait(), "the first is not run yet, nor is the second asked for"
    found = [model(first), *(model(other) for other in ready)]
    with fxbatch.disabled():
        torch.testing.assert_close(torch.cat(found), model(trees))


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
    once = [p.grad.clone() for p in model.parameters()]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not all operations are covered
        torch.cuda.set_sync_debug_mode("error")
    try:
        minibatch().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close([p.grad for p in model.parameters()], [2 * g for g in once])


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


def make_treebank(folder: Path) -> None:
    (folder / "sst").mkdir()
    for part in ("train", "dev", "test"):
        trees = "(3 (2 It) (4 works))\n(1 (2 It) (1 (2 never) (1 fails)))\n"
        (folder / "sst" / f"{part}.txt").write_text(trees * 2)


def test_the_steps_script_says_where_a_step_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_treebank(tmp_path)
    compiled_steps.main(
        ["--hidden", "8", "--batch", "2", "--batches", "2", "--ways", "native", "--data", str(tmp_path)]
    )
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("parts of a native training step")
    parts = {line[2:28].strip(): float(line[28:].split()[0]) for line in lines[start + 1 :]}
    assert list(parts) == [*dict.fromkeys(name for name, _, _ in compiled_steps.PARTS), "the rest"]
    assert all(ms > 0 for ms in parts.values()), "each part is met, and counts without those inside it"


def test_the_gpu_script_runs_on_the_cpu_at_small_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_treebank(tmp_path)
    gpu.main(["--device", "cpu", "--leaves", "3", "--state", "8", "--batch", "2", "--sst-hidden", "8",
              "--sst-batch", "2", "--rounds", "1", "--data", str(tmp_path)])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    start = max(i for i, line in enumerate(lines) if line.startswith("| task"))
    rows = [line for line in lines[start + 2 :] if line.startswith("|")]
    assert len(rows) == 2 * 5 * 2, "two modes of five contenders, for trees of one size and for SST"
    assert lines[-1] == rows[-1], "the table is printed last"
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    launches = {(c[0], c[1], c[2]): float(c[5]) for c in cells}
    for task, batch, name in launches:
        if name == gpu.ONE:
            assert launches[task, batch, gpu.OURS] < launches[task, batch, name], "launches are counted"
    assert all(float(c[3]) > 0 and c[6].endswith("%") for c in cells), "wall time, and the host's share of it"
    wanted = [line for line in lines if ": at least" in line or ": at most" in line]
    assert len(wanted) == len(gpu.TARGETS) * 4 and not any("not measured" in line for line in wanted)


def test_the_gpu_script_measures_compiled_operations_where_there_is_a_backend() -> None:
    settings = Settings(device=torch.device("cpu"), seed=0)
    model, batches = made_up_trees(settings, leaves=3, hidden=8, embedding=8, batch=2, all_nodes=False)
    rows = gpu.rows_of("trees", model, batches[0], "inference", settings.device, 1, "eager")
    assert [row.name for row in rows if row.wall > 0][-2:] == [gpu.COMPILED, gpu.PRODUCTS]


def test_the_gpu_script_measures_the_table_at_full_size() -> None:
    options = gpu.arguments([])
    assert (options.leaves, options.state) == (128, 1024)
    assert options.batch[0] == 1 and options.batch[-1] == 1024
    assert (options.sst_hidden, options.sst_batch) == (300, 256)
