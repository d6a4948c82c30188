"""What a backward pass takes and calls: one piece of memory, one call for all gradients of parameters, no copies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.codegen.native import extension
from fxbatch.codegen.native_lower import records
from fxbatch.codegen.native_table import Base, Instruction, Source
from fxbatch.ir import tensor_spec
from fxbatch.runtime import autograd as function
from fxbatch.runtime.backward import KernelTable, NativeKernels
from fxbatch.runtime.memory import GradientRows, Kinds
from fxbatch.runtime.pool import Pool
from tests import models as M
from tests.oracle import check_equal
from tests.trust.programs import model

needs_extension = pytest.mark.skipif(extension is None, reason="the extension was not built")
CPU = torch.device("cpu")


def test_arenas_are_pieces_of_one_memory() -> None:
    pool = Pool()
    kinds = [
        tensor_spec((3,), torch.float32, CPU),
        tensor_spec((), torch.complex64, CPU),
        tensor_spec((2, 2), torch.bfloat16, CPU),
        tensor_spec((0,), torch.float32, CPU),
        tensor_spec((5,), torch.float64, CPU),
    ]
    counts = np.array([4, 3, 9, 2, 0])
    rows = GradientRows(pool, Kinds.of(kinds), 5, counts, {})
    assert pool.allocated == 1
    for i, (kind, n) in enumerate(zip(kinds, [4, 3, 9, 2], strict=False)):
        arena = rows.tensor(i)
        assert arena.shape == (n, *kind.shape) and arena.dtype == kind.dtype and arena.is_contiguous()
        assert not arena[0].any()
        arena.fill_(i + 1)
    assert all(bool((rows.tensor(i) == i + 1).all()) for i in range(4))
    assert rows.tensor(4).numel() == 0  # the zero row alone: nobody reads or writes it
    rows.release()
    GradientRows(pool, Kinds.of(kinds), 5, counts, {})
    assert (pool.allocated, pool.reused) == (1, 1)


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Where the gradients lay that autograd was given, by the id of their parameter."""
    places: dict[int, int] = {}
    run_backward = function.run_backward

    def noting(*args: Any) -> Any:
        found = run_backward(*args)
        places.update({key: grad.data_ptr() for key, grad in found.items()})
        return found

    monkeypatch.setattr(function, "run_backward", noting)
    return places


@pytest.mark.parametrize("native", [False, True])
def test_autograd_takes_gradients_over(native: bool, handed_out: dict[int, int]) -> None:
    made, trees = M.with_options(M.TreeLSTM(), native=native), M.trees(1, [3, 7])
    made(trees).sum().backward()
    parameters = list(made.parameters())
    assert {id(p) for p in parameters} == set(handed_out)
    for p in parameters:
        assert p.grad is not None and p.grad.data_ptr() == handed_out[id(p)]


@needs_extension
def test_gradients_of_all_parameters_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = NativeKernels.run

    def counting(self: NativeKernels) -> bool:
        calls.append(len(self.steps))
        return run(self)

    monkeypatch.setattr(NativeKernels, "run", counting)
    made, trees = M.with_options(M.TreeLSTM(), native=True), M.trees(1, [3, 7])
    made(trees).sum().backward()
    assert len(calls) == 1 and calls[0] >= 3


class FirstWithoutState(nn.Module):
    """Its cell is two operations: the first call has a state of zeros of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        state = self.cell(words[0])
        for word in words[1:]:
            state = self.cell(word, state)
        return state[0]


@needs_extension
def test_gradients_of_two_operations_are_added_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    adds: list[bool] = []
    fill = KernelTable.fill

    def noting(table: KernelTable, *args: Any) -> NativeKernels:
        assert len(table.results) == 4
        adds.extend(k.adds for k in table.kernels)
        return fill(table, *args)

    monkeypatch.setattr(KernelTable, "fill", noting)
    made = FirstWithoutState()
    check_equal(made, [[torch.randn(3) for _ in range(n)] for n in (1, 2, 4)])
    assert adds == [False, True, False, True]  # of two runs


@needs_extension
def test_programs_and_their_memory_belong_together() -> None:
    program = extension.Program(*(records(kind, ()) for kind in (Base, Instruction, Source)))
    one, none = np.ones(1, np.int64), np.zeros((0, 2), np.int64)
    room = extension.Room()
    assert extension.run_all((program,), room, one, none, 0, 1) == 1
    assert (
        extension.run_all((program,), room, np.zeros(1, np.int64), none, 0, 1) == 0
    )  # no rows: it did not run
    for programs, counts, memory, first, last in (
        ((program, program), one, none, 0, 1),
        ((program,), one, np.zeros((1, 2), np.int64), 0, 1),
        ((program,), one, none, 0, 2),
        ((program,), one, none, -1, 1),
        ((None,), one, none, 0, 1),
    ):
        with pytest.raises(ValueError, match="belong together"):
            extension.run_all(programs, room, counts, memory, first, last)


def parts() -> dict[str, nn.Module]:
    return {"embed": nn.Embedding(9, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_tables_read_in_one_step_whose_gradients_lie_apart_or_together(native: bool, twice: bool) -> None:
    """The backward of a look-up only keeps gradients: as a view, by an index, as sums."""

    def forward(self: Any, word: Any) -> Any:
        x = self.embed(word)
        return self.a(x) * self.b(x) + x if twice else self.a(x)

    made = model(forward, parts(), native=native, fuse=False)
    check_equal(made, [torch.tensor(i) for i in (1, 3, 3, 8)])


@pytest.mark.parametrize("native", [False, True])
def test_only_some_results_and_twice(native: bool) -> None:
    def forward(self: Any, word: Any) -> Any:
        x = torch.tanh(self.a(self.embed(word)))
        return x, self.b(x)

    made = model(forward, parts(), native=native)
    words = [torch.tensor(i) for i in (1, 5, 2)]
    for chosen in ((0,), (1,), (0, 1), (1,)):
        found = []
        for k in range(2):
            made.zero_grad()
            with fxbatch.disabled() if k else nullcontext():
                results = made(words)
            loss = torch.stack([results[i].sum() for i in chosen]).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([p.grad for p in made.parameters()])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_sparse_gradient_is_not_overwritten(native: bool, padding: int | None) -> None:
    """Its values lay in the minibatch's memory, which the next one writes to."""
    table = nn.Embedding(9, 4, sparse=True, padding_idx=padding)
    made = model(lambda self, w: self.a(self.embed(w)), {**parts(), "embed": table}, native=native)
    made([torch.tensor(i) for i in (1, 5, 2)]).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse
    before = gradient.to_dense().clone()
    table.weight.grad = None
    for k in range(3):
        (made([torch.tensor(i) for i in (7, 6, 8)]) * (k + 2)).sum().backward()
    assert torch.equal(gradient.to_dense(), before)


class Scaled(nn.Module):
    """A layer that is trained, read through a buffer and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Buffer(torch.ones(3)), nn.Buffer(torch.ones(3))
        self.layer, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.frozen(self.layer(x) * self.scale) + self.shift)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(x)


@pytest.mark.parametrize("name", ["scale", "frozen.weight", "layer.weight"])
def test_what_backward_reads_may_not_be_written_to_before(name: str) -> None:
    scaled, xs = Scaled(), list(torch.randn(2, 3))
    written = scaled.state_dict(keep_vars=True)[name]
    x = xs[0].clone().requires_grad_()
    after = scaled([x, xs[1]])
    with fxbatch.lazy(scaled) as batch:
        late = scaled.read(batch.value(x))
    with torch.no_grad():
        scaled.shift.mul_(3)  # nobody reads it
    scaled([x, xs[1]]).sum().backward()
    with torch.no_grad():
        written.mul_(3)
    for result in (after, late):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_the_calls_of_a_lazy_block_after_an_optimizer_step_go_backward() -> None:
    scaled, x = Scaled(), torch.randn(3)
    with fxbatch.lazy(scaled) as batch:
        for _ in range(2):
            scaled.zero_grad()
            scaled.read(batch.value(x)).sum().backward()
            found = scaled.layer.weight.grad
            scaled.zero_grad()
            with fxbatch.disabled():
                scaled([x]).sum().backward()
            torch.testing.assert_close(found, scaled.layer.weight.grad)
            with torch.no_grad():
                scaled.layer.weight.mul_(2)
