"""The memory of a run: one piece where it has one phase, arrays that don't touch each other, and that move whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxbatch.codegen.native import extension
from fxbatch.decorator import find_autobatched
from fxbatch.ir import VIEW, Operation, Program, Signature, tensor_spec
from fxbatch.passes.plan import Slots, WholePlan
from fxbatch.passes.room import LINE
from fxbatch.passes.schedule import batch_by_depth
from fxbatch.runtime.memory import Arrays, Kinds, Memory, Pieces
from fxbatch.runtime.pool import Piece, Pool
from fxbatch.runtime.run import Run
from tests import models as M
from tests.oracle import check_equal
from tests.runtime.test_native_steps import CASES
from tests.trust.programs import model, vectors

needs_extension = pytest.mark.skipif(extension is None, reason="the extension was not built")
each = pytest.mark.parametrize(("made", "instances"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arrays, WholePlan]]:
    """What was laid out."""
    found: list[tuple[Arrays, WholePlan]] = []
    launch = Run.launch

    def noting(run: Run, phase: Any) -> None:
        if phase.whole_plan is not None:
            found.append((phase.operations.arrays, phase.whole_plan))
        launch(run, phase)

    monkeypatch.setattr(Run, "launch", noting)
    return found


def check_layout(arrays: Arrays, layout: WholePlan) -> None:
    """Brute force: each byte belongs to one array, or to rows of an arena that an array reads where they are."""
    owner: dict[int, int] = {}
    plan, (device,), (end,) = layout.plan, arrays.kinds.devices, layout.ends
    assert device.type == "cpu"
    for array, (kind, rows) in enumerate(zip(arrays.kinds.types, layout.rows.tolist(), strict=True)):
        offset, size, flag = layout.places[array].tolist()
        assert size == rows * kind.numel * kind.dtype.itemsize
        if flag:
            continue
        assert offset % LINE == 0 and offset + size <= end
        for byte in range(offset, offset + size):
            assert byte not in owner
            owner[byte] = array
    for s, compiled in enumerate(arrays.compiled):
        groups = () if compiled is None else compiled.kept_groups
        steps = [k for k, x in enumerate(plan.step_signature.tolist()) if x == s]
        for position, group in enumerate(groups):
            array = arrays.first[s] + position
            gathers = [int(plan.first_gather[k]) + group for k in steps]
            assert layout.rows[array] == sum(int(plan.gather_rows[g]) for g in gathers)
            once = len(steps) == 1 and plan.gather_kind[gathers[0]] == VIEW
            assert once == bool(layout.places[array, 2])
            if once:
                arena = int(plan.gather_arena[gathers[0]])
                width = arrays.kinds.types[arena].nbytes
                start = layout.places[arena, 0] + int(plan.gather_start[gathers[0]]) * width
                assert layout.places[array, 0] == start
                assert all(owner[b] == arena for b in range(start, start + layout.places[array, 1]))


@each
def test_arrays_lie_apart(made: nn.Module, instances: list[Any], planned: list[Any]) -> None:
    engine = find_autobatched(made)[0].engine(made)
    engine.structures.clear()
    made(instances)
    with torch.no_grad():
        made(instances[-1:])
    for arrays, layout in planned:
        check_layout(arrays, layout)
    assert planned or made.__class__.__name__ == "Tagger"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lines of each piece that is taken from the pool."""
    rows: list[int] = []
    take = Pool.take

    def counting(self: Pool, device: Any, n: int) -> Piece:
        rows.append(n)
        return take(self, device, n)

    monkeypatch.setattr(Pool, "take", counting)
    yield rows


@pytest.mark.parametrize("native", [True, False])
def test_a_run_of_one_phase_takes_memory_once(taken: list[int], native: bool) -> None:
    made, trees = M.with_options(M.TreeLSTM(), native=native), M.trees(4, [5, 9, 2])
    with torch.no_grad():
        made(trees)
    assert len(taken) == 1
    taken.clear()
    found = made(trees)
    assert len(taken) == 1
    engine = find_autobatched(made)[0].engine(made)
    free = engine.pool.bytes
    found.sum().backward()
    assert engine.pool.bytes > free, "its memory came back"
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


def test_arrays_that_outgrow_their_memory_move_with_what_they_hold() -> None:
    """A model that waits: its arenas and kept rows move to new pieces, most phases move nothing."""
    pool = Pool()
    memory = Memory(pool)
    types = [ROW, INDEX]
    arrays = Arrays.of(types, (None, None))
    memory.type_ids = {kind: i for i, kind in enumerate(types)}

    used = [0, 0]

    def grow(*rows: int) -> None:
        """A phase that makes so many values of each type in all."""
        if not used[0]:
            memory._number(arrays)
        more = [max(0, n - before) for n, before in zip(rows, used, strict=True)]
        made = [Signature(Operation("constant", "constant"), (), (kind,)) for kind in types]
        program = Program(
            tuple(made), np.repeat([0, 1], more).astype(np.int32), np.zeros(0, np.int64),
            np.zeros(sum(more), np.int32), np.zeros(0, np.int64), known=sum(used),
        )  # fmt: skip
        plan = memory.plan(
            program, batch_by_depth(program), Slots(program, [None, None]), arrays, np.zeros(2, bool)
        )
        assert plan.capacity.tolist() == [max(n, before) for n, before in zip(rows, used, strict=True)]
        memory.phases.ran()
        used[:] = plan.capacity.tolist()

    taken = []
    for n in range(1, 40):
        grow(n, 2 * n)
        memory.arena(0)[n - 1] = n
        memory.arena(1)[2 * n - 2 : 2 * n] = n
        taken.append(pool.allocated)
        assert memory.arena(0)[:n, 0].tolist() == list(range(1, n + 1))
        assert memory.arena(1)[: 2 * n].tolist() == [k for k in range(1, n + 1) for _ in range(2)]
        assert used == [memory.phases.rows_used(i) for i in range(2)] == [n, 2 * n]
        arenas, places = memory.columns(arrays)
        assert arenas[:, 2].tolist() == [12, 8] and (places[:, 1] >= [12 * n, 16 * n]).all()
        if extension is not None:
            assert arenas[:, 0].tolist() == [memory.arena(0).data_ptr(), memory.arena(1).data_ptr()]
    assert taken[-1] <= 7
    grow(3, 0)
    assert memory.arena(0)[38, 0] == 39, "they never shrink"
    memory.release()
    assert pool.bytes > 0


def test_a_run_that_ends_while_its_thread_takes_memory() -> None:
    """A collection of garbage may come anywhere: what it gives back waits for its turn, nobody for it."""
    pool = Pool()
    piece = pool.take(ROW.device, 4)
    with pool._lock:
        pool.give(piece)
    assert pool.bytes == piece.tensor.nbytes
    assert pool.take(ROW.device, 4) is piece


def test_tensors_of_memory() -> None:
    pool = Pool()
    memory = Pieces(pool)
    kinds = [ROW, INDEX, EMPTY, tensor_spec((2,), torch.complex128, ROW.device)]
    rows = np.array([3, 2, 4, 0])
    memory.lay(Kinds.of(kinds), rows, *Kinds.of(kinds).place(rows))
    memory.tensor(0).fill_(1.5)
    memory.tensor(1).fill_(7)
    assert memory.tensor(0).tolist() == [[1.5] * 3] * 3 and memory.tensor(1).tolist() == [7, 7]
    assert memory.tensor(2).shape == (4, 0) and memory.tensor(3).shape == (0, 2)
    if extension is not None:
        assert memory.tensor(0).data_ptr() == memory.places[0, 0] and memory.places[0, 0] % LINE == 0
    memory.release()
    assert pool.bytes >= 128


ROW = tensor_spec((3,), torch.float32, torch.device("cpu"))
INDEX = tensor_spec((), torch.int64, torch.device("cpu"))
EMPTY = tensor_spec((0,), torch.float32, torch.device("cpu"))


def test_a_model_that_waits_begins_with_the_rows_that_the_last_run_came_to_have(taken: list[int]) -> None:
    def forward(self: Any, x: Any) -> Any:
        for _ in range(12):
            x = torch.tanh(self.a(x))
            x = x if x.sum().item() > -1e9 else -x
        return x

    made = model(forward, {"a": nn.Linear(4, 4)})
    for _ in range(2):
        taken.clear()
        check_equal(made, vectors(4, 4, 4), gradients=False)
    with torch.no_grad():
        taken.clear()
        made(vectors(4, 4, 4))
    assert len(taken) <= 2


def test_freed_memory_is_kept_for_what_is_taken_next() -> None:
    """Where glibc is: a block of 20 MB, which it would map by itself, comes from the heap once an engine is made."""
    code = """
import ctypes, torch, fxbatch
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
asked = getattr(ctypes.CDLL(None), "mallinfo2", None)
if asked is not None:
    asked.restype = Info
    def mapped(megabytes):
        before = asked().hblkhd
        block = torch.empty(megabytes << 20, dtype=torch.uint8)
        return asked().hblkhd - before
    first = mapped(1)
    layer = torch.nn.Linear(2, 2)
    fxbatch.autobatch(layer.forward)([torch.ones(2)])
    print(first, mapped(20))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if not ran.stdout:
        pytest.skip("another C library")
    first, then = map(int, ran.stdout.split())
    assert first >= 1 << 20 and then == 0
