"""Native steps against Python kernels alone, and the undecorated forward (all shapes: tests/test_oracle.py)."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.codegen import native_programs as native_steps
from fxbatch.codegen.native import extension
from fxbatch.runtime.forward import NativeSteps
from fxbatch.torch_private import product_address
from tests import models as M
from tests.oracle import check_equal, compare, run, to_double
from tests.trust.programs import model, vectors

needs_extension = pytest.mark.skipif(extension is None, reason="the extension was not built")


def words(rng: random.Random, length: int) -> list[torch.Tensor]:
    return [torch.tensor(rng.randrange(20)) for _ in range(length)]


def cases() -> Iterator[tuple[str, nn.Module, list[Any]]]:
    rng = random.Random(3)
    yield "tree", M.TreeLSTM(), M.trees(1, [1, 2, 5, 9, 20])
    yield "childsum", M.ChildSum(), [M.wide_tree(rng, n) for n in (1, 3, 8)]
    yield "tagger", M.Tagger(), [words(rng, n) for n in (1, 4, 7)]
    yield "tied", M.Tied(), [[torch.tensor(rng.randrange(7)) for _ in range(n)] for n in (1, 3)]


CASES = list(cases())
each = pytest.mark.parametrize(("made", "instances"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """How many steps each call into C ran, forward and backward."""
    counts: list[tuple[str, int]] = []
    forward, backward = NativeSteps.forward, NativeSteps.backward

    def counting_forward(self: NativeSteps, first: int, last: int) -> int:
        stop = forward(self, first, last)
        counts.append(("forward", stop - first))
        return stop

    def counting_backward(self: NativeSteps, last: int, first: int = 0) -> int:
        stop = backward(self, last, first)
        counts.append(("backward", last - stop))
        return stop

    monkeypatch.setattr(NativeSteps, "forward", counting_forward)
    monkeypatch.setattr(NativeSteps, "backward", counting_backward)
    return counts


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_extension
def test_the_same_on_any_number_of_threads(several_threads: None) -> None:
    made = M.with_options(M.TreeLSTM(size=100, hidden=120), native=True)
    instances = M.trees(5, [3, 9, 14, 20] * 20)
    torch.set_num_threads(1)
    wanted = run(made, [instances])
    for threads in (2, 3):
        torch.set_num_threads(threads)
        found = run(made, [instances])
        assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]
    check_equal(made, instances)


@needs_extension
@each
def test_as_python_kernels(made: nn.Module, instances: list[Any], stretches: list[tuple[str, int]]) -> None:
    with_c = M.with_options(copy.deepcopy(made), native=True)
    found = run(with_c, [instances])
    assert {name for name, steps in stretches if steps} == {"forward", "backward"}
    stretches.clear()
    wanted = run(M.with_options(copy.deepcopy(made), native=False), [instances])
    assert not stretches
    memo: dict[int, Any] = {}
    with fxbatch.disabled():
        exact = run(to_double(made, memo), to_double([instances], memo))
    compare(found, wanted, exact)
    again = run(with_c, [instances])
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, again, strict=True))  # type: ignore[arg-type]


@needs_extension
def test_a_tree_is_one_stretch_after_its_words(stretches: list[tuple[str, int]]) -> None:
    made, trees = M.with_options(M.TreeLSTM(), native=True), M.trees(2, [12])
    made(trees).sum().backward()
    assert [name for name, _ in stretches].count("forward") == 1
    explained = fxbatch.explain(made, trees)
    assert all(row.python == "" for row in explained.operations)
    assert stretches[0][1] == explained.steps


def test_a_wrong_index_raises_what_it_raised() -> None:
    def forward(self: Any, x: Any) -> Any:
        return torch.tanh(self.embed(x))

    for native in (True, False):
        made = model(forward, {"embed": nn.Embedding(5, 3)}, native=native)
        made([torch.tensor(1), torch.tensor(4)])
        with pytest.raises(IndexError, match="out of range"):
            made([torch.tensor(1), torch.tensor(5)])
        check_equal(made, [torch.tensor(2), torch.tensor(0)])


class Shared(nn.Module):
    """Ways to use one matrix, vectors and pairs of them."""

    def __init__(self, how: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.one, self.two = nn.Linear(4, 6), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.how(self, x, y)


@needs_extension
@pytest.mark.parametrize(
    "how",
    [
        lambda m, x, y: torch.tanh(m.weight @ x),
        lambda m, x, y: torch.mv(m.weight, x) + m.one(y),
        lambda m, x, y: torch.addmv(m.one.bias, m.weight, x),
        lambda m, x, y: torch.einsum("ij,j->i", m.weight, x),
        lambda m, x, y: torch.sigmoid(m.two(torch.cat([x, y]))) * torch.tanh(m.one(x)),
        lambda m, x, y: torch.tanh(m.one(torch.stack([x, y]))).sum(0),
        lambda m, x, y: torch.stack([x, y]).mean(0),
        lambda m, x, y: (m.weight * x).sum(-1),
        lambda m, x, y: torch.dot(x, y),
        lambda m, x, y: torch.outer(x, y),
    ],
    ids=("@", "mv", "addmv", "einsum", "wide and apart", "stack", "mean", "rows", "dot", "outer"),
)
@pytest.mark.parametrize("grad", [True, False])
def test_products_of_one_matrix_run_in_c(how: Any, grad: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.cell(self.a(x), self.b(x))

    made = model(forward, {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "cell": Shared(how)})
    check_equal(made, vectors(4, 4, 4, 4))
    with torch.set_grad_enabled(grad):
        rows = fxbatch.explain(made, vectors(4, 4), fuse=False).operations
    assert [row.python for row in rows] == [""] * len(rows)


def test_a_kernel_with_a_call_that_is_not_native(stretches: list[tuple[str, int]]) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.b(torch.erf(self.a(x))) * torch.cumsum(x, 0)

    made = model(forward, {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, fuse=False)
    check_equal(made, vectors(4, 4, 4))
    rows = {row.operation: row.python for row in fxbatch.explain(made, vectors(4, 4)).operations}
    assert "erf" in rows["erf"]
    if extension is not None:
        assert rows["a"] == "" and sum(steps for _, steps in stretches)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
def test_other_types_run_as_before(dtype: torch.dtype, stretches: list[tuple[str, int]]) -> None:
    made = model(lambda self, x: self.a(x) * 2, {"a": nn.Linear(4, 4).to(dtype)})
    check_equal(made, [torch.randn(4).to(dtype) for _ in range(3)])
    assert not any(steps for _, steps in stretches)


def test_autocast_runs_as_before() -> None:
    made = model(lambda self, x: torch.tanh(self.a(x)), {"a": nn.Linear(8, 8)})
    xs = vectors(8, 8, 8)
    made(xs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = made(xs)
        with fxbatch.disabled():
            wanted = made(xs)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.GroupNorm(2, 8)], ids=repr)
def test_norms_of_what_autocast_made_have_gradients(norm: nn.Module) -> None:
    def forward(self: Any, xs: Any) -> Any:
        h = xs[0]
        for x in xs:
            h = self.norm(self.a(h + x)[None])[0]
        return h

    made, instances = (
        model(forward, {"a": nn.Linear(8, 8), "norm": norm}),
        [vectors(8) * n for n in (1, 3, 2)],
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = made(instances)
        with fxbatch.disabled():
            wanted = made(instances)
    weights = torch.randn(wanted.shape)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), made.parameters()) for x in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def test_parameters_that_changed_and_that_are_not_contiguous() -> None:
    made = model(lambda self, x: torch.sigmoid(self.a(x)), {"a": nn.Linear(6, 5)})
    xs = vectors(6, 6, 6)
    check_equal(made, xs)
    with torch.no_grad():
        made.a.weight.mul_(-2)
    check_equal(made, xs)
    made.a.weight.data = torch.randn(6, 5).t()
    check_equal(made, xs)
    made.a.weight.data = torch.randn(10, 12)[::2, ::2]
    check_equal(made, xs)
    made.a.weight.requires_grad_(False)
    check_equal(made, xs)
    with torch.inference_mode():
        assert torch.equal(made(xs), made(xs))


def test_value_branches_in_many_phases() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = torch.tanh(self.a(x))
        for _ in range(4):
            if h.sum().item() > 0:
                h = torch.tanh(self.b(h) - 0.4)
            else:
                h = self.a(h) + x
        return self.b(h)

    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    check_equal(model(forward, parts), vectors(4, 4, 4, 4, 4))


def test_gradients_reach_values_with_several_readers() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.a(x)
        return self.b(h) * torch.tanh(h) + h

    check_equal(model(forward, {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, fuse=False), vectors(4, 4, 4))


@pytest.mark.parametrize("of_torch", (1, 2))
def test_two_threads_at_once(of_torch: int, several_threads: None) -> None:
    torch.set_num_threads(of_torch)
    made = M.with_options(M.TreeLSTM(size=40, hidden=50), native=True)
    batches = [M.trees(seed, [5, 9, 14] * (3 * of_torch)) for seed in range(6)]
    with fxbatch.disabled():
        wanted = [made(batch) for batch in batches]
    failed: list[str] = []

    def work(order: list[int]) -> None:
        for i in order * 4:
            if not torch.allclose(made(batches[i]), wanted[i], rtol=1e-4, atol=1e-5):
                failed.append(f"minibatch {i}")

    threads = [
        threading.Thread(target=work, args=(order,)) for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("why", ("not built", "no products"))
def test_without_the_extension(why: str, monkeypatch: pytest.MonkeyPatch, stretches: list[Any]) -> None:
    if why == "not built":
        monkeypatch.setattr(native_steps, "available", lambda: why)
    elif extension is None:
        pytest.skip("the extension was not built")
    made, trees = M.TreeLSTM(), M.trees(4, [3, 8])
    made = M.with_options(made, native=True)
    if why == "no products":
        extension.set_products(0)
        level = extension.set_loops("plain")
    try:
        check_equal(made, trees)
        rows = fxbatch.explain(made, trees).operations
        assert any(row.python for row in rows)
    finally:
        if why == "no products":
            extension.set_products(product_address())
            extension.set_loops(level)


def test_the_option_is_checked() -> None:
    with pytest.raises(fxbatch.FxbatchError, match="native='yes': takes True or False"):
        fxbatch.autobatch(native="yes")(lambda self, x: x)
