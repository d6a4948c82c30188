"""Memory of parameters' gradients: used again when nobody else has it, and never before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.codegen.native import extension
from fxbatch.runtime.pool import GradientMemory

SHAPE = (200, 300)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.out = nn.Linear(64, 200)

    @fxbatch.autobatch
    def forward(self, word: Tensor) -> Tensor:
        return self.out(self.embed(word)).sum()


def engine_of(model: Words) -> Any:
    return type(model).forward.__fxbatch__.engine(model)  # type: ignore[attr-defined]  # set by the decorator


def test_memory_is_used_again_only_when_free() -> None:
    memory = GradientMemory()
    first = memory.take(SHAPE, torch.float32)
    place = first.data_ptr()
    second = memory.take(SHAPE, torch.float32)
    assert second.data_ptr() != place
    view = first[3:5]
    del first
    assert memory.take(SHAPE, torch.float32).data_ptr() != place  # the view holds it
    del view
    again = memory.take(SHAPE, torch.float32)
    assert {again.data_ptr(), second.data_ptr()} >= {second.data_ptr()} and memory.reused >= 1
    assert again.shape == SHAPE and again.is_contiguous() and again._base is None and again.grad_fn is None


def test_small_and_other_kinds_are_not_mixed() -> None:
    memory = GradientMemory()
    place = memory.take((3,), torch.float32).data_ptr()
    assert memory.reused == 0 and place
    a = memory.take(SHAPE, torch.float32)
    del a
    b = memory.take((300, 200), torch.float32)
    c = memory.take(SHAPE, torch.int32)
    assert memory.reused == 0 and b.shape == (300, 200) and c.dtype == torch.int32


@pytest.mark.parametrize("change", ["resize", "share", "numpy", "storage"])
def test_what_a_user_did_with_it_is_left_to_them(change: str) -> None:
    memory = GradientMemory()
    given = memory.take(SHAPE, torch.float32)
    place = given.data_ptr()
    held: Any = None
    if change == "resize":
        given.untyped_storage().resize_(8)
    elif change == "share":
        given.share_memory_()
    else:
        held = given.numpy() if change == "numpy" else given.untyped_storage()
    del given
    taken = memory.take(SHAPE, torch.float32)
    taken.fill_(1.0)
    assert memory.reused == 0 and (held is None or taken.data_ptr() != place)


def test_a_bounded_number_is_kept() -> None:
    memory = GradientMemory()
    held = [memory.take(SHAPE, torch.float32) for _ in range(10)]
    assert len({t.data_ptr() for t in held}) == 10
    assert list(map(len, memory._storages.values())) == [4]
    for i in range(100):
        memory.take((100 + i, 300), torch.float32)
    assert len(memory._storages) <= 64


@pytest.mark.skipif(extension is None, reason="the extension was not built")
def test_steps_use_the_memory_of_gradients_that_are_gone() -> None:
    model = Words()
    batches = [[torch.tensor(i) for i in torch.randint(500, (8,)).tolist()] for _ in range(6)]
    for batch in batches:
        model.zero_grad(set_to_none=True)
        model(batch).sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        with fxbatch.disabled():
            model(batch).sum().backward()
        for a, p in zip(grads, model.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(a, p.grad)
    assert engine_of(model).gradient_memory.reused >= 4  # the table's, in all steps but the first


@pytest.mark.skipif(extension is None, reason="the extension was not built")
def test_gradients_that_are_kept_stay_as_they_are() -> None:
    model, kept = Words(), []
    for step in range(7):
        model.zero_grad(set_to_none=True)
        model([torch.tensor(step), torch.tensor(step + 1)]).sum().backward()
        assert model.embed.weight.grad is not None
        kept.append((model.embed.weight.grad, model.embed.weight.grad.clone()))
    assert all(torch.equal(now, then) for now, then in kept)
    assert len({now.data_ptr() for now, _ in kept}) == 7


def test_threads_never_share_a_piece() -> None:
    memory, faults = GradientMemory(), []

    def work(number: float) -> None:
        for _ in range(200):
            mine = memory.take(SHAPE, torch.float32)
            mine.fill_(number)
            if not bool((mine == number).all()):
                faults.append(number)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults
