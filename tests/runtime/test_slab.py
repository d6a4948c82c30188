"""All memory of a run of one phase in one piece: one allocation, arrays that don't touch each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.codegen.native import extension
from fxbatch.decorator import find_autobatched
from fxbatch.ir import VIEW, Plan, tensor_type
from fxbatch.runtime import engine as module
from fxbatch.runtime.buffers import Buffer, BufferPool
from fxbatch.runtime.slab import LINE, Slab, SlabKinds, SlabPlan, plan_slab
from tests import models as M
from tests.oracle import check_equal
from tests.runtime.test_native_steps import CASES
from tests.trust.programs import model, vectors

needs_extension = pytest.mark.skipif(extension is None, reason="the extension was not built")
each = pytest.mark.parametrize(("made", "instances"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SlabKinds, Plan, SlabPlan]]:
    """The slabs that were planned."""
    found: list[tuple[SlabKinds, Plan, SlabPlan]] = []

    def noting(kinds: SlabKinds, plan: Plan) -> SlabPlan:
        found.append((kinds, plan, plan_slab(kinds, plan)))
        return found[-1][2]

    monkeypatch.setattr(module, "plan_slab", noting)
    return found


def check_slab(kinds: SlabKinds, plan: Plan, slab: SlabPlan) -> None:
    """Brute force: each byte belongs to one array, or to rows of an arena that an array reads where they are."""
    owner: dict[int, int] = {}
    for array, (kind, rows) in enumerate(zip(kinds.kinds, slab.rows, strict=True)):
        offset, size, flag = slab.places[array].tolist()
        assert size == rows * kind.numel * kind.dtype.itemsize
        assert flag == (array in slab.inside)
        if flag:
            continue
        assert offset % LINE == 0 and offset + size <= LINE * slab.lines
        for byte in range(offset, offset + size):
            assert byte not in owner
            owner[byte] = array
    for s, groups in kinds.kept:
        steps = [k for k, x in enumerate(plan.step_signature.tolist()) if x == s]
        for position, group in enumerate(groups):
            array = kinds.first[s] + position
            gathers = [int(plan.first_gather[k]) + group for k in steps]
            assert slab.rows[array] == sum(int(plan.gather_rows[g]) for g in gathers)
            once = len(steps) == 1 and plan.gather_kind[gathers[0]] == VIEW
            assert once == (array in slab.inside)
            if once:
                arena = int(plan.gather_arena[gathers[0]])
                start = slab.places[arena, 0] + int(plan.gather_start[gathers[0]]) * kinds.row_bytes[arena]
                assert slab.places[array, 0] == start
                assert all(owner[b] == arena for b in range(start, start + slab.places[array, 1]))


@each
def test_arrays_lie_apart(made: nn.Module, instances: list[Any], planned: list[Any]) -> None:
    engine = find_autobatched(made)[0].engine(made)
    engine.plans.clear()
    made(instances)
    with torch.no_grad():
        made(instances[-1:])
    for kinds, plan, slab in planned:
        check_slab(kinds, plan, slab)
    assert planned or made.__class__.__name__ == "Tagger"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each buffer that is taken from the pool."""
    rows: list[int] = []
    take = BufferPool.take

    def counting(self: BufferPool, kind: Any, n: int) -> torch.Tensor:
        rows.append(n)
        return take(self, kind, n)

    monkeypatch.setattr(BufferPool, "take", counting)
    yield rows


@needs_extension
def test_a_run_of_one_phase_takes_memory_once(taken: list[int]) -> None:
    made, trees = M.with_options(M.TreeLSTM(), native=True), M.trees(4, [5, 9, 2])
    with torch.no_grad():
        made(trees)
    assert len(taken) == 1
    taken.clear()
    found = made(trees)
    assert len(taken) == 1
    engine = find_autobatched(made)[0].engine(made)
    free = engine.pool.bytes
    found.sum().backward()
    assert engine.pool.bytes > free, "the slab came back"
    for size in (5, 4, 3):
        made(M.trees(size, [5, 8, 2])).sum().backward()
    assert engine.pool.allocated <= 2 + len(taken)


@needs_extension
def test_steps_that_python_runs_lie_there_too() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.b(torch.erf(self.a(x))) * torch.cumsum(x, 0)

    made = model(forward, {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, fuse=False)
    for n in (3, 1, 5):
        check_equal(made, vectors(*[4] * n))


def test_a_buffer_that_outgrows_what_it_was_lent() -> None:
    pool = BufferPool()
    kind = ROW
    lent = torch.arange(6.0).view(2, 3)
    buffer = Buffer(pool, kind)
    buffer.lend(lambda: lent, 2)
    assert buffer.tensor is lent and buffer.reserve(2) is lent
    grown = buffer.reserve(5)
    assert grown is not lent and torch.equal(grown[:2], lent)
    assert pool.bytes == 0, "what was lent is not the pool's"
    buffer.release()
    assert pool.bytes == grown.nbytes
    buffer.lend(lambda: lent, 2)
    buffer.release()
    assert pool.bytes == grown.nbytes and buffer.tensor is None


def test_a_run_that_ends_while_its_thread_takes_memory() -> None:
    """A collection of garbage may come anywhere: what it gives back waits for its turn, nobody for it."""
    pool = BufferPool()
    tensor = pool.take(ROW, 4)
    with pool._lock:
        pool.give(ROW, tensor)
    assert pool.bytes == tensor.nbytes
    assert pool.take(ROW, 4) is tensor


def test_tensors_of_a_slab() -> None:
    kinds = SlabKinds((ROW, INDEX), 2, (12, 8), ((3, 1), (1,)), (), (), ())
    places = torch.tensor([[0, 36, 0], [64, 16, 0]]).numpy()
    pool = BufferPool()
    slab = Slab(pool, kinds, SlabPlan(2, places, (3, 2), (), frozenset()))
    slab.tensor(0).fill_(1.5)
    slab.tensor(1).fill_(7)
    assert slab.tensor(0).tolist() == [[1.5] * 3] * 3 and slab.tensor(1).tolist() == [7, 7]
    assert slab.tensor(0).data_ptr() == slab.pointer and slab.pointer % LINE == 0
    slab.release()
    assert pool.bytes >= 128


ROW = tensor_type((3,), torch.float32, torch.device("cpu"))
INDEX = tensor_type((), torch.int64, torch.device("cpu"))
