"""Traces ahead of time, ready minibatches, lazy blocks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fxbatch
from tests import models as M


def grads(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


def test_a_traced_dataset_gives_what_instances_give() -> None:
    torch.manual_seed(0)
    model, trees = M.TreeLSTM(), M.trees(1, [1, 4, 7, 3, 2, 9])
    data = fxbatch.TracedDataset(model, trees)
    expected = model(trees)
    batch = fxbatch.collate(model)([data[i] for i in range(6)])
    found = model(batch)
    torch.testing.assert_close(found, expected)
    close(grads(model, found.sum()), grads(model, expected.sum()))
    torch.testing.assert_close(model(pickle.loads(pickle.dumps(batch))), expected)


def test_workers_trace_and_prefetch_plans() -> None:
    torch.manual_seed(0)
    model, trees = M.TreeLSTM(), M.trees(1, [1, 4, 7, 3, 2, 9])
    data = fxbatch.TracedDataset(model, trees)
    loader = DataLoader(data, batch_size=4, collate_fn=fxbatch.collate(model), num_workers=1)
    found = [model(ready) for ready in fxbatch.prefetch(model, loader)]
    torch.testing.assert_close(torch.cat(found), model(trees))


def test_a_stale_trace_is_made_again() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y * 2 if self.training else y

    model, xs = Net(), [torch.randn(4) for _ in range(3)]
    data = fxbatch.TracedDataset(model, xs)
    batch = [data[i] for i in range(3)]
    training = model(batch)
    model.eval()
    torch.testing.assert_close(model(batch), training / 2)
    bare = [fxbatch.trace(model.train(), x) for x in xs]
    torch.testing.assert_close(model(bare), training)
    with pytest.raises(fxbatch.StaleTraceError):
        model.eval()(bare)


def test_a_ready_minibatch_sees_parameters_change() -> None:
    torch.manual_seed(0)
    model, trees = M.TreeLSTM(), M.trees(1, [4, 7])
    data = fxbatch.TracedDataset(model, trees)
    batches = [[data[0], data[1]]] * 3
    for ready in fxbatch.prefetch(model, batches):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        model.out.weight = torch.nn.Parameter(model.out.weight.detach().clone())
        torch.testing.assert_close(model(ready), model(trees))
        torch.testing.assert_close(model(ready), model(trees))  # used: planned again


def test_prefetch_raises_what_the_loader_raises() -> None:
    model = M.TreeLSTM()

    def broken():
        yield [fxbatch.TracedDataset(model, M.trees(1, [2]))[0]]
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        for ready in fxbatch.prefetch(model, broken()):
            model(ready)


def test_leaving_a_prefetch_loop_does_not_wait_for_the_source() -> None:
    """The source waits for the loop to be left: a loop that waited for the source would hang."""
    model, asked, left, waited = M.TreeLSTM(), threading.Event(), threading.Event(), []
    batch = [fxbatch.TracedDataset(model, M.trees(1, [2]))[0]]

    def source() -> Iterator[Any]:
        yield batch
        asked.set()
        waited.append(left.wait())
        yield batch

    for ready in fxbatch.prefetch(model, source()):
        torch.testing.assert_close(model(ready), model(batch))
        assert asked.wait()
        break
    left.set()
    for thread in threading.enumerate():
        if thread.name == "fxbatch-prefetch":
            thread.join(30)
    assert waited == [True]


def test_recordings_under_way_keep_their_table_when_it_is_full() -> None:
    """A second thread begins new tables while the first one records; so does a call inside another's trace."""
    go_on, began = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor, wait: bool) -> torch.Tensor:
            y = self.linear(x)
            if wait:
                began.set()
                assert go_on.wait()
            return torch.tanh(y) * x[: y.shape[0]]

    model, xs = Slow(), [torch.randn(4) for _ in range(3)]
    engine = model.forward.__func__.__fxbatch__.engine(model)
    engine.table.limit = 1
    with fxbatch.disabled():
        expected = model(xs, [False] * 3)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(xs, [False, True, False])))
    thread.start()
    assert began.wait()
    for _ in range(2):
        torch.testing.assert_close(model(xs, [False] * 3), expected)
    assert engine.table.limit == 1 and not len(engine.table) > 8
    go_on.set()
    thread.join()
    torch.testing.assert_close(found[0], expected)


def test_random_instances_are_not_frozen() -> None:
    class Noisy(torch.nn.Module):
        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + torch.randn(4)

    model = Noisy()
    data = fxbatch.TracedDataset(model, [torch.zeros(4)])
    assert "random" in data[0].reason
    assert not torch.equal(model([data[0]]), model([data[0]]))


@pytest.mark.parametrize("backward", ["compiled", "autograd"])
def test_lazy_losses_run_as_one_batch(backward: str) -> None:
    torch.manual_seed(0)
    model, trees = M.TreeLSTM(), M.trees(1, [1, 4, 7, 3])
    plain = M.TreeLSTM.forward.__fxbatch__.fn
    expected = [plain(model, t).logsumexp(-1) for t in trees]
    with fxbatch.lazy(model, backward=backward) as batch:
        losses = [plain(model, t).logsumexp(-1) for t in trees]
        assert losses[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
        more = [plain(model, t).logsumexp(-1) for t in trees]
        total = sum(losses) + sum(more)
        total.backward()
    assert len(batch.statistics.phases) == 2
    found = [p.grad for p in model.parameters()]
    close(found, grads(model, 2 * sum(expected)))
