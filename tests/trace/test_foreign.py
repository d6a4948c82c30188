"""Memory that a tensor shares with numpy is read when a call meets it, and anew whenever a kept trace runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fxbatch
from fxbatch.tensor_memory import memory_places
from fxbatch.trace.constants import is_foreign
from tests.trace.made import instances, linear, model


def reused(self: Any, x: Any) -> Any:
    buffer, out = np.zeros(4, np.float32), []
    for i in range(3):
        buffer[i] = 1
        out.append(self.l(torch.from_numpy(buffer)) * x)
    return torch.stack(out)


def one_tensor(self: Any, x: Any) -> Any:
    buffer, out = np.zeros(4, np.float32), []
    t = torch.from_numpy(buffer)
    for i in range(3):
        buffer[i] = 1
        out.append(self.l(t) * x + t)
    return torch.stack(out)


def view(self: Any, x: Any) -> Any:
    buffer = np.zeros((2, 4), np.float32)
    t = torch.from_numpy(buffer)[1]
    before = self.l(t)
    buffer[:] = 2
    return before * x + self.l(t)


def lent_later(self: Any, x: Any) -> Any:
    t = torch.zeros(4)
    before = self.l(t) + t
    t.numpy()[:] = 3
    return before * x + self.l(t)


def lent_through_a_view(self: Any, x: Any) -> Any:
    t = torch.zeros(8)
    before = self.l(t[4:])
    np.asarray(t)[:] = 3
    return before * x + self.l(t[4:])


def integers(self: Any, x: Any) -> Any:
    number = np.zeros(1, np.int64)
    t = torch.from_numpy(number)[0]
    before = self.l(x)[t]
    number[:] = 2
    return before + self.l(x)[t] * 10


@pytest.mark.parametrize("forward", [reused, one_tensor, view, lent_later, lent_through_a_view, integers])
def test_each_call_reads_what_is_there(forward: Callable[..., Any]) -> None:
    made = model(forward, l=linear)
    with torch.no_grad():  # eager keeps the memory itself for gradients: those of what is in it afterwards
        with fxbatch.disabled():
            expected = made(instances())
        for _ in range(2):
            torch.testing.assert_close(made(instances()), expected)


def test_gradients_reach_a_tensor_that_shares_its_memory() -> None:
    array = np.ones(4, np.float32)
    t = torch.from_numpy(array).requires_grad_()
    made = model(lambda self, x: self.l(x.view(4, 1).t()[0] * 1 + t), l=linear)
    grads = []
    for context in (fxbatch.disabled(), torch.enable_grad()):
        with context:
            made(instances()).sum().backward()
        grads.append(t.grad)
        t.grad = None
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("dtype", [np.float32, np.int64], ids=lambda t: t.__name__)
def test_kept_traces_notice_writes(dtype: Any) -> None:
    array = np.arange(4).astype(dtype)
    words = list(torch.from_numpy(array).unbind(0))
    made = model(lambda self, word: self.l(torch.ones(4) * 1).sum() * word, l=linear)
    data = fxbatch.TracedDataset(made, words)
    for number in (0, 3, 7):
        array[:] = number
        items = [data[i] for i in range(4)]
        assert all(x.trace is not None for x in items)
        torch.testing.assert_close(made(items), made(words))
        planned = list(fxbatch.prefetch(made, [items]))
        array[0] = 9
        torch.testing.assert_close(made(planned[0]), made(words))


def test_a_forward_that_writes_to_its_buffer_is_not_kept() -> None:
    array = np.zeros(4, np.float32)

    def forward(self: Any, x: Any) -> Any:
        array[:] += 1
        return (
            self.l(torch.from_numpy(array)) * x + self.l(torch.from_numpy(array[::-1].copy())) + _later(self)
        )

    def _later(self: Any) -> Any:
        y = self.l(torch.from_numpy(array))
        array[0] += 1
        return y

    item = fxbatch.TracedDataset(model(forward, l=linear), instances(1))[0]
    assert item.trace is None
    assert "writes to memory that a tensor shares with numpy" in item.reason


def test_which_tensors_share_their_memory() -> None:
    lent = torch.zeros(2)
    assert not is_foreign(lent)
    lent.numpy()
    assert is_foreign(lent)
    assert is_foreign(lent[1])
    assert is_foreign(torch.frombuffer(bytearray(8), dtype=torch.float32))
    assert not is_foreign(torch.zeros(2)[0])


def test_torch_says_where() -> None:
    """C reads there; where it moves, C asks Python for each tensor: slower, and as right."""
    assert memory_places() is not None
