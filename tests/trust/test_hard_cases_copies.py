"""Hard cases of copies: deepcopy, pickle, checkpoints, processes, threads."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests import models as M
from tests.oracle import check_equal
from tests.trust.programs import Inner, assert_equal, model, two, vectors

# Copies, pickles, processes


def in_use() -> tuple[nn.Module, list[Any]]:
    made, trees = M.TreeLSTM(), M.trees(1, [2, 5])
    made(trees).sum().backward()
    made.zero_grad()
    return made, trees


def test_deepcopy_in_use() -> None:
    made, trees = in_use()
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.out.weight.zero_()
        other.out.bias.zero_()
    assert not other(trees).any() and made(trees).any()
    check_equal(other, trees)
    check_equal(made, trees)
    assert other(trees).sum().backward() is None and made.out.weight.grad is None


def test_copy_shares_parameters_and_not_engines() -> None:
    made, trees = in_use()
    check_equal(copy.copy(made), trees)
    check_equal(made, trees)


def test_pickle_and_state_dict_in_use() -> None:
    made, trees = in_use()
    expected = made(trees)
    torch.testing.assert_close(pickle.loads(pickle.dumps(made))(trees), expected)
    stored = io.BytesIO()
    torch.save(made.state_dict(), stored)
    stored.seek(0)
    fresh = M.TreeLSTM()
    fresh.load_state_dict(torch.load(stored, weights_only=True))
    torch.testing.assert_close(fresh(trees), expected)
    assert list(made.state_dict()) == list(M.TreeLSTM().state_dict())


def test_a_checkpoint_of_the_undecorated_model_fits() -> None:
    class Undecorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.a(x))

    plain, made = Undecorated(), Inner()
    made.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(4)
    torch.testing.assert_close(made([x])[0], plain(x))
    plain.load_state_dict(made.state_dict(), strict=True)


def _in_child(made: nn.Module, trees: Any, expected: torch.Tensor, answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        out = made(trees)
        out.sum().backward()
        answers.put(bool(torch.allclose(out, expected, atol=1e-6)))
    except BaseException as error:  # noqa: BLE001 - the parent asserts on it
        answers.put(repr(error))


def runs_in_a_child(method: str) -> None:
    """A model in use gives in a child process what it gives here, and goes on here."""
    made, trees = in_use()
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    # plain numbers for the child: shared tensors would need file descriptors of this process
    child = context.Process(target=_in_child, args=(made, trees, made(trees).detach(), answers))
    child.start()
    try:
        assert answers.get() is True
    finally:
        child.join()
    assert child.exitcode == 0
    check_equal(made, trees)


def test_a_spawned_process() -> None:
    runs_in_a_child("spawn")


def test_a_forked_process() -> None:
    """In an interpreter of its own: torch goes backward in no fork of a process in which a backward pass, of another
    test perhaps, has begun threads."""
    code = f"from {__name__} import runs_in_a_child; runs_in_a_child('fork')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_threads_share_a_model() -> None:
    made = M.TreeLSTM()
    batches = [M.trees(s, [1 + s % 5, 3, 7 - s % 4]) for s in range(8)]
    with fxbatch.disabled():
        expected = [made(b).detach() for b in batches]
    faults: list[str] = []

    def work(k: int) -> None:
        for i in range(k, len(batches) * 2, 2):
            b = i % len(batches)
            grads = torch.autograd.grad(made(batches[b]).sum(), list(made.parameters()), allow_unused=True)
            if not torch.allclose(made(batches[b]), expected[b], atol=1e-5) or grads[0] is None:
                faults.append(f"batch {b}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


def test_scripted_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    made = model(lambda self, x: self.s(self.a(x)), {**two(), "s": scripted})
    xs = vectors(4, 4)
    with pytest.raises(fxbatch.TraceError, match="TorchScript"):
        made(xs)


def test_instances_do_not_see_each_other_in_a_shared_cache() -> None:
    """Python state that one instance leaves to the next happens in the loop's order where nobody waits."""

    def forward(self: Any, x: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return self.a(x) * self.count

    made = model(forward, two())
    xs = [torch.ones(4)] * 3
    found = made(xs)
    made.count = 0
    with fxbatch.disabled():
        torch.testing.assert_close(found, made(xs))


def test_equal_with_options() -> None:
    for way in ({"mode": "unrolled"}, {"backward": "autograd"}, {"schedule": "none"}):
        assert_equal(lambda self, x: self.b(torch.relu(self.a(x))), vectors(4, 4, 4), two(), **way)
