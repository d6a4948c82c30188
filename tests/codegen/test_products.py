"""Products of native programs: our loops against float64, what they read and write, and who decides what runs."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterator

import pytest
import torch

import fxbatch
from fxbatch.codegen import products
from fxbatch.codegen.native import extension
from fxbatch.codegen.operation_graphs import add_call
from fxbatch.errors import OptionError
from fxbatch.torch_private import product_address
from tests import models as M
from tests.codegen import test_native as native
from tests.oracle import check_equal

pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built")
LAYOUTS = (0, 1, 2, 3, 4)
ALL = len(products.LAYOUTS) * len(products.CLASSES)
ROWS = (1, 2, 3, 4, 5, 6, 7, 24, 40, 41, 47, 97)
WIDTHS = (1, 3, 4, 5, 15, 16, 17, 48, 63, 64, 65, 130)
DEPTHS = (1, 2, 7, 8, 15, 16, 17, 31, 128, 129, 300)


@pytest.fixture(params=("avx2", "avx512"))
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of the processor that there is."""
    try:
        before = extension.set_loops(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    if extension.products()[1] != request.param:
        extension.set_loops(before)
        pytest.skip("this compiler made no loops for it")
    yield request.param
    extension.set_loops(before)


@pytest.fixture
def chosen() -> Iterator[None]:
    """What this process decided is put back."""
    yield
    extension.set_choice(bytes(products.settle().blas))


def stored(x: torch.Tensor, layout: int, turned: int = 2) -> torch.Tensor:
    """a, or b (turned = 1), as it lies in a layout."""
    if layout == 4 and turned == 1:
        panel = 64 if extension.products()[1] == "avx512" else 16
        whole = torch.nn.functional.pad(x, (0, -x.shape[1] % panel))
        return torch.cat([part.flatten() for part in whole.split(panel, 1)])
    return (x.t() if layout & turned else x).contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_as_exact_as_sums_in_float32_can_be(layout: int, level: str) -> None:
    torch.manual_seed(layout)
    for rows, width, depth in itertools.product(ROWS, WIDTHS, DEPTHS):
        a, b = torch.randn(rows, depth), torch.randn(depth, width)
        room = torch.full((rows * width + 32,), 7.0)
        ours = room[16:-16].view(rows, width)
        places = stored(a, layout), stored(b, layout, 1)
        products.multiply(*places, ours, (rows, width, depth), layout, 0)
        wanted = a.double() @ b.double()
        bound = (a.double().abs() @ b.double().abs()) * (depth + 2) * 2.0**-24
        assert bool(((ours.double() - wanted).abs() <= bound).all()), (rows, width, depth)
        assert room[:16].eq(7).all() and room[-16:].eq(7).all(), (rows, width, depth)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", ((1500, 70, 300), (50, 65, 9001), (803, 5, 520)))
def test_large_products_are_done_in_blocks(layout: int, sizes: tuple[int, int, int], level: str) -> None:
    rows, width, depth = sizes
    torch.manual_seed(layout)
    a, b = torch.randn(rows, depth), torch.randn(depth, width)
    places = stored(a, layout), stored(b, layout, 1)
    out, few = torch.empty(rows, width), torch.empty(49, width)
    products.multiply(*places, out, sizes, layout, 0)
    wanted = a.double() @ b.double()
    bound = (a.double().abs() @ b.double().abs()) * (depth + 2) * 2.0**-24
    assert bool(((out.double() - wanted).abs() <= bound).all())
    part = stored(a[:49], layout)
    products.multiply(part, places[1], few, (49, width, depth), layout, 0)
    assert torch.equal(few, out[:49])  # no number depends on how many rows there are, or how they are cut


def at_the_end(x: torch.Tensor, pages: list[mmap.mmap]) -> torch.Tensor:
    """A copy whose last element is the last before memory that must not be touched."""
    size, page = x.numel() * 4, mmap.PAGESIZE
    whole = (size + page - 1) // page * page
    memory = mmap.mmap(-1, whole + page)
    pages.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + whole), page, 0) == 0
    made = torch.frombuffer(memory, dtype=torch.float32, count=x.numel(), offset=whole - size)
    return made.view(x.shape).copy_(x)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as Linux does it")
def test_nothing_is_read_or_written_beyond_the_matrices(level: str) -> None:
    pages: list[mmap.mmap] = []
    for rows, width, depth in ((1, 1, 1), (3, 5, 7), (7, 65, 17), (45, 70, 131), (50, 3, 15)):
        for layout in LAYOUTS:
            a, b = torch.randn(rows, depth), torch.randn(depth, width)
            out = at_the_end(torch.zeros(rows, width), pages)
            places = stored(a, layout), stored(b, layout, 1)
            there = [at_the_end(x, pages) for x in places]
            products.multiply(there[0], there[1], out, (rows, width, depth), layout, 0)
            torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as Linux does it")
@pytest.mark.parametrize("loops", ("plain", "avx2", "avx512"))
def test_weights_of_one_row_are_no_panels(loops: str, chosen: None) -> None:
    """`nn.Linear(1, 21)`: they were read beyond their end, and without loops of ours by loops that there are not."""
    try:
        before = extension.set_loops(loops)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        extension.set_choice(bytes(ALL))
        pages: list[mmap.mmap] = []
        weight, x = at_the_end(torch.randn(1, 21), pages), torch.randn(70, 1)
        mm = native.aten.mm.default
        module = native.graph_of(
            lambda g, x, w: [add_call(g, mm, (x, w))], (1, torch.float32), shared=(weight,)
        )
        assert torch.equal(native.run_native(module, 70, [x], (weight,))[0], x * weight)
    finally:
        extension.set_loops(before)


def test_what_is_not_finite_stays_in_its_row_and_column(level: str) -> None:
    for rows, layout in itertools.product((3, 50), LAYOUTS):
        a, b = torch.randn(rows, 19), torch.randn(19, 21)
        a[1, 18], b[0, 20] = float("nan"), float("inf")
        out = torch.empty(rows, 21)
        places = stored(a, layout), stored(b, layout, 1)
        products.multiply(*places, out, (rows, 21, 19), layout, 0)
        bad = torch.zeros(rows, 21, dtype=torch.bool)
        bad[1], bad[:, 20] = True, True
        assert torch.equal(~out.isfinite(), bad)


@pytest.mark.parametrize("blas", (False, True))
@pytest.mark.parametrize("size", (1, 12, 70))
def test_a_model_gives_the_loop_s_results_with_each_library(blas: bool, size: int, chosen: None) -> None:
    model = M.with_options(M.TreeLSTM(), verify=True)
    products.settle()
    extension.set_choice(bytes([blas] * ALL))
    check_equal(model, M.trees(3, [9, 4, 1][: min(size, 3)] * max(size // 3, 1)))


def test_products_run_without_blas(chosen: None) -> None:
    if not extension.products()[1]:
        pytest.skip("no loops of ours here")
    extension.set_choice(bytes([1] * ALL))
    extension.set_products(0)
    try:
        assert extension.products()[0] is False
        model = M.TreeLSTM()
        trees = M.trees(5, [3, 8])
        check_equal(model, trees)
        assert not any(row.python for row in fxbatch.explain(model, trees).operations)
    finally:
        extension.set_products(product_address())


def test_sizes_and_libraries_are_checked() -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="sizes of a product"):
        products.multiply(x, x, x, (0, 1, 1), 0, 0)
    extension.set_products(0)
    try:
        with pytest.raises(ValueError, match="no such library"):
            products.multiply(x, x, x, (1, 1, 1), 0, 1)
    finally:
        extension.set_products(product_address())
    with pytest.raises(ValueError, match=f"{ALL} bytes"):
        extension.set_choice(b"1")


# Who decides.


@pytest.fixture
def both() -> str:
    has_blas, found = extension.products()
    if not (has_blas and found):
        pytest.skip("only one library here")
    return str(found)


def test_the_variable_takes_one_library_for_all(both: str) -> None:
    assert products.decide("torch").blas == (True,) * ALL
    assert products.decide("own").blas == (False,) * ALL
    assert products.decide("own").describe() == f"own {both} loops (FXBATCH_PRODUCTS=own)"
    with pytest.raises(OptionError, match="FXBATCH_PRODUCTS='mkl': takes torch or own"):
        products.decide("mkl")


def test_processors_of_one_level_multiply_alike(both: str) -> None:
    choice = products.decide("")
    assert choice.blas == products.FASTER[both] * len(products.LAYOUTS)
    assert choice.source == "faster on such processors"


def test_explain_says_who_multiplies() -> None:
    found = fxbatch.explain(M.TreeLSTM(), M.trees(2, [3]))
    assert found.products == products.settle().describe()
    assert f"products: {found.products}" in found.details


def test_classes_are_named() -> None:
    mixed = products.ProductChoice(products.FASTER["avx2"] * len(products.LAYOUTS), "measured", "avx2")
    assert mixed.describe() == "own avx2 loops, torch's BLAS for 25 to 96, more (measured)"
    assert products.ProductChoice((True,) * ALL, "the only one here", "").describe() == (
        "torch's BLAS (the only one here)"
    )
