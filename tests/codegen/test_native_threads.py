"""Native programs on several threads and on every level of the loops: the same numbers, bit by bit for threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from fxbatch.codegen import products
from fxbatch.codegen.kernel import Workspace, emit_kernel
from fxbatch.codegen.native import extension, use_loops
from fxbatch.codegen.operation_graphs import add_call
from fxbatch.torch_private import thread_addresses
from tests.codegen import test_native as native

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built")
ROWS = (1, 2, 5, 15, 16, 31, 32, 33, 47, 64, 65, 127, 128, 129, 300, 1001)
F, I = torch.float32, torch.int64
Case = tuple[fx.GraphModule, Callable[[int], list[torch.Tensor]], tuple[torch.Tensor, ...]]


def cell() -> Case:
    """A product with weights as they are in nn.Linear, gates of it, and a product of those."""
    weight, bias, back = torch.randn(240, 100), torch.randn(240), torch.randn(80, 96)

    def make(g: fx.Graph, x: fx.Node, c: fx.Node, w: fx.Node, b: fx.Node, v: fx.Node) -> list[fx.Node]:
        turned = add_call(g, aten.permute.default, (w, [1, 0]))
        gates = add_call(g, aten.addmm.default, (b, x, turned))
        parts = [add_call(g, aten.slice.Tensor, (gates, 1, 80 * i, 80 * i + 80)) for i in range(3)]
        i, f = (add_call(g, aten.sigmoid.default, (p,)) for p in parts[:2])
        u = add_call(g, aten.tanh.default, (parts[2],))
        new = add_call(g, aten.addcmul.default, (add_call(g, aten.mul.Tensor, (i, u)), f, c))
        return [new, add_call(g, aten.mm.default, (new, v))]

    shared = (weight, bias, back)
    module = native.graph_of(make, (100, F), (80, F), shared=shared)
    return module, lambda n: [torch.randn(n, 100), torch.randn(n, 80)], shared


def losses() -> Case:
    """Softmax, its gradient, what is picked and put along rows, and a look-up."""
    table = torch.randn(9, 400)

    def make(g: fx.Graph, x: fx.Node, label: fx.Node, w: fx.Node) -> list[fx.Node]:
        logs = add_call(g, aten._log_softmax.default, (x, 1, False))
        column = add_call(g, aten.reshape.default, (label, [next(iter(g.nodes)), 1]))
        picked = add_call(g, aten.gather.default, (logs, 1, column))
        zeros = add_call(g, aten.zeros_like.default, (x,))
        spread = add_call(g, aten.scatter_add.default, (zeros, 1, column, picked))
        back = add_call(g, aten._log_softmax_backward_data.default, (spread, logs, 1, F))
        found = add_call(g, aten.index_select.default, (w, 0, label))
        return [logs, picked, back, add_call(g, aten.tanh.default, (found,))]

    module = native.graph_of(make, (400, F), (I,), shared=(table,))
    return module, lambda n: [torch.randn(n, 400), torch.randint(9, (n,))], (table,)


def parameters() -> Case:
    """Pointwise work on rows, then sums and products over them, and then rows again."""

    def make(g: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        z = add_call(g, aten.tanh.default, (x,))
        turned = add_call(g, aten.permute.default, (z, [1, 0]))
        total = add_call(g, aten.sum.dim_IntList, (z, [0]))
        return [
            add_call(g, aten.mm.default, (turned, y)),
            total,
            add_call(g, aten.mul.Tensor, (z, total)),
            add_call(g, aten.sum.dim_IntList, (y, [1])),
        ]

    return native.graph_of(make, (330, F), (75, F)), lambda n: [torch.randn(n, 330), torch.randn(n, 75)], ()


def table() -> Case:
    module = native.graph_of(
        lambda g, x, i: [add_call(g, aten.embedding_dense_backward.default, (x, i, 500, 3, False))],
        (150, F), (I,),
    )  # fmt: skip
    return module, lambda n: [torch.randn(n, 150), torch.randint(500, (n,))], ()


CASES: tuple[Callable[[], Case], ...] = (cell, losses, parameters, table)
each = pytest.mark.parametrize("make", CASES, ids=[x.__name__ for x in CASES])


def run(
    module: fx.GraphModule, n: int, ins: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], threads: int
) -> list[torch.Tensor] | None:
    made = native.program_of(module, shared)
    program = extension.Program(made.bases, made.instructions, native.NO_SOURCES, made.views, made.functions)
    outs, room = native.results(module, n), extension.Room()
    room.threads = threads
    memory = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in (*ins, *shared, *outs)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return outs if native.ran(program, room, n, np.array(memory, dtype=np.int64)) else None
    finally:
        torch.set_num_threads(before)


@each
def test_as_the_python_kernel_and_the_same_on_any_number_of_threads(make: Callable[[], Case]) -> None:
    module, inputs, shared = make()
    kernel = emit_kernel(module)
    for n in ROWS:
        ins = inputs(n)
        alone = run(module, n, ins, shared, 1)
        assert alone is not None
        wanted = native.results(module, n)
        with torch.no_grad():
            kernel(n, [*ins, *shared], wanted, Workspace())
        for a, b in zip(alone, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-4)
        for threads in (2, 3, 5):
            found = run(module, n, ins, shared, threads)
            assert found is not None
            assert all(map(torch.equal, alone, found)), f"{n} rows, {threads} threads"


@pytest.fixture
def backwards() -> Iterator[list[int]]:
    """A pool that runs its threads one after another, the last first; how many each region asked for."""
    asked: list[int] = []
    now = [0, 1]

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(member: int, data: int, threads: int, flags: int) -> None:
        asked.append(threads)
        for thread in range(threads - 1, -1, -1):
            now[:] = thread, threads
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(member)(data)

    number, count = (ctypes.CFUNCTYPE(ctypes.c_int)(lambda i=i: now[i]) for i in (0, 1))
    places = [ctypes.cast(f, ctypes.c_void_p).value for f in (parallel, number, count)]
    extension.set_threads(*places, thread_addresses()[3])
    yield asked
    extension.set_threads(*thread_addresses())


@each
def test_the_order_of_threads_does_not_matter(make: Callable[[], Case], backwards: list[int]) -> None:
    module, inputs, shared = make()
    for n in (40, 1001):
        ins = inputs(n)
        alone = run(module, n, ins, shared, 1)
        assert alone is not None and not backwards
        for threads in (2, 5):
            found = run(module, n, ins, shared, threads)
            assert found is not None and all(map(torch.equal, alone, found))
            if n == 1001:
                assert backwards and set(backwards) == {threads}
            backwards.clear()


def weight_gradient(rows: int, width: int) -> fx.GraphModule:
    """The product of turned rows and rows: of parameters' gradients."""

    def make(g: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        return [add_call(g, aten.mm.default, (add_call(g, aten.permute.default, (x, [1, 0])), y))]

    return native.graph_of(make, (rows, F), (width, F))


def input_gradient(depth: int, width: int) -> Case:
    """A product by weights as they lie."""
    weight = torch.randn(depth, width)
    module = native.graph_of(
        lambda g, x, w: [add_call(g, aten.mm.default, (x, w))], (depth, F), shared=(weight,)
    )
    return module, lambda n: [torch.randn(n, depth)], (weight,)


@pytest.fixture
def blas() -> Iterator[None]:
    """All products by torch's BLAS."""
    choice = products.settle()
    assert choice is not None
    extension.set_choice(bytes([True] * len(choice.blas)))
    yield
    extension.set_choice(bytes(choice.blas))


def is_of_intel() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "GenuineIntel" in cpus.read_text(encoding="utf-8", errors="replace")


# MKL's kernels of AVX2, which it takes on other processors, add up a part of a result in another order.
@pytest.mark.skipif(
    extension is None or extension.products() != (True, "avx512") or not is_of_intel(),
    reason="needs MKL's kernels of AVX-512",
)
def test_products_by_blas_are_the_same_on_any_number_of_threads(blas: None) -> None:
    cases: list[tuple[Case, int]] = [
        ((weight_gradient(rows, width), lambda n, r=rows, w=width: [torch.randn(n, r), torch.randn(n, w)], ()), depth)  # type: ignore[misc]
        for rows, width, depth in ((192, 64, 2225), (750, 96, 1180), (330, 16, 1965), (64, 64, 800))
    ]  # fmt: skip
    for (module, inputs, shared), n in [*cases, (input_gradient(776, 20), 700)]:
        ins = inputs(n)
        a, b = (ins[0].t(), ins[1]) if not shared else (ins[0], shared[0])
        alone = run(module, n, ins, shared, 1)
        assert alone is not None
        exact = a.double() @ b.double()
        error, of_torch = ((x.double() - exact).abs().max() for x in (alone[0], a @ b))
        assert error <= 4 * of_torch
        for threads in (2, 3, 5):
            found = run(module, n, ins, shared, threads)
            assert found is not None and torch.equal(alone[0], found[0]), f"{alone[0].shape}, {threads}"


def test_a_small_result_is_shared_by_two_threads(backwards: list[int]) -> None:
    for rows, asked in ((64, [2]), (63, [])):  # two pieces of 32 rows at least
        ins = [torch.randn(2000, rows), torch.randn(2000, 32)]
        assert run(weight_gradient(rows, 32), 2000, ins, (), 2) is not None
        assert backwards == asked
        backwards.clear()


def test_little_work_stays_on_one_thread(backwards: list[int]) -> None:
    module = native.graph_of(lambda g, x: [add_call(g, aten.tanh.default, (x,))], (10, F))
    assert run(module, 100, [torch.randn(100, 10)], (), 2) is not None
    assert not backwards
    assert run(module, 20000, [torch.randn(20000, 10)], (), 2) is not None
    assert backwards == [2]


def test_regions_run_alone_where_others_keep_the_threads_from_running() -> None:
    module = native.graph_of(lambda g, x: [add_call(g, aten.tanh.default, (x,))], (10, F))
    ins, late = [torch.randn(20000, 10)], [0.0]
    asked: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(member: int, data: int, threads: int, flags: int) -> None:
        asked.append(threads)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(member)(data)
        time.sleep(late[0])  # the first thread has done all of it, and waits for the others

    number, count = (ctypes.CFUNCTYPE(ctypes.c_int)(lambda i=i: i) for i in (0, 1))
    wanted = run(module, 20000, ins, (), 1)
    assert wanted is not None

    def regions(times: int) -> int:
        asked.clear()
        for _ in range(times):
            found = run(module, 20000, ins, (), 2)
            assert found is not None and torch.equal(found[0], wanted[0])
        return len(asked)

    def counts() -> tuple[int, ...]:
        """How many regions asked for threads: while nobody is late, while they wait longer than they work, after."""
        pointers = [ctypes.cast(f, ctypes.c_void_p).value for f in (parallel, number, count)]
        extension.set_threads(*pointers, 0)
        before = regions(3)
        late[0] = 0.2
        waiting = regions(3)
        late[0] = 0.0
        return before, waiting, 0 < regions(1000) < 10, regions(3)

    try:
        # What is to be shown is a matter of seconds: on a busy machine a thread may be held up just where it waits.
        assert any(counts() == (3, 1, True, 3) for _ in range(20))
    finally:
        extension.set_threads(*thread_addresses())


def test_an_index_out_of_range_is_refused_on_any_thread() -> None:
    for make in (losses, table):
        module, inputs, shared = make()
        for place in (0, 500, 1000):
            ins = inputs(1001)
            ins[1][place] = 2**40
            assert run(module, 1001, ins, shared, 2) is None


def test_without_a_pool_all_runs_on_one_thread() -> None:
    module, inputs, shared = cell()
    ins = inputs(300)
    extension.set_threads(0, 0, 0, 0)
    try:
        found = run(module, 300, ins, shared, 4)
    finally:
        extension.set_threads(*thread_addresses())
    wanted = run(module, 300, ins, shared, 4)
    assert found is not None and wanted is not None
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def fork_and_compare() -> None:
    """Fails unless a child of this process computes what this process does, on threads that it doesn't have."""
    torch.set_num_threads(2)
    module, inputs, shared = cell()
    ins = inputs(300)
    wanted = run(module, 300, ins, shared, 2)
    assert wanted is not None
    child = os.fork()
    if not child:
        found = run(module, 300, ins, shared, 2)
        os._exit(0 if found is not None and all(map(torch.equal, found, wanted)) else 1)
    until = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.02)
    if status == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == (child, 0), "the child waited for threads that it doesn't have"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_stays_on_one_thread() -> None:
    # In a process of its own: a fork takes along whatever locks other threads of a test worker hold just then.
    code = "from tests.codegen.test_native_threads import fork_and_compare; fork_and_compare()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def levels() -> list[str]:
    """The sets of loops that this processor can run."""
    found = []
    for level in ("plain", "avx2", "avx512") if extension is not None else ():
        try:
            extension.set_loops(extension.set_loops(level))
        except ValueError:
            continue
        found.append(level)
    return found


@pytest.fixture(params=levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = extension.set_loops(request.param)
    yield request.param
    assert extension.set_loops(before) == request.param


@pytest.mark.parametrize(
    ("target", "function", "ulps"), native.FUNCTIONS, ids=[str(x[0]) for x in native.FUNCTIONS]
)
def test_functions_on_every_level(level: str, target: Any, function: Any, ulps: float) -> None:
    native.test_functions_over_the_range_of_float32(target, function, ulps)
    assert extension.set_loops(level) == level  # it was in force all the time


def test_programs_on_every_level(level: str) -> None:
    native.test_pieces_and_slices()
    native.test_numbers_columns_and_rows_are_spread()
    assert extension.set_loops(level) == level
    native.test_losses()
    native.test_gradients_of_parameters_sum_over_rows()
    native.test_the_gradient_of_a_table_and_its_padding()
    for target in (aten.div.Tensor, aten.sigmoid_backward.default, aten.tanh_backward.default):
        native.test_binary_functions(target)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no loops for neon"):
        extension.set_loops("neon")


def test_loops_up_to_a_level(level: str) -> None:
    """As FXBATCH_LOOPS says: the best that there are up to it."""
    best = use_loops("avx512")
    assert best == levels()[-1] and use_loops("plain") == "plain"
    assert use_loops(level) == level == extension.products()[1] or not extension.products()[1]
    with pytest.raises(ValueError, match="FXBATCH_LOOPS is one of plain, avx2, avx512, not neon"):
        use_loops("neon")


def test_the_environment_chooses_loops() -> None:
    code = "from fxbatch.codegen.native import extension; print(extension.set_loops('plain'))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"FXBATCH_LOOPS": "plain"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "plain", found.stderr
