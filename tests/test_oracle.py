"""Batched equals one by one, on models of every shape, under every schedule, mode and backward."""

from __future__ import annotations

import random

import pytest
import torch

import fxbatch
from tests import models as M
from tests.oracle import check_equal, compare, compare_in_autocast

WAYS = [
    {},
    {"schedule": "depth"},
    {"schedule": "fold"},
    {"schedule": "none"},
    {"native": False},
    {"backward": "autograd"},
    {"mode": "unrolled"},
    {"deduplicate": True},
    {"fuse": False},
]


def make(name: str) -> tuple[torch.nn.Module, tuple]:
    torch.manual_seed(1)
    rng = random.Random(5)
    if name == "tree":
        return M.TreeLSTM(), (M.trees(2, [1, 2, 3, 7, 12, 5]),)
    if name == "child sum":
        return M.ChildSum(), ([M.wide_tree(rng, n) for n in (1, 2, 6, 11)],)
    if name == "rnn":
        return M.RNN(), ([torch.randn(n, 4) for n in (1, 4, 2, 7)],)
    if name == "tagger":
        return M.Tagger(), ([[torch.tensor(rng.randrange(20)) for _ in range(n)] for n in (3, 1, 5)],)
    if name == "graph":
        made = []
        for n in (2, 5, 5, 3):
            pairs = [[i, (i + 1) % n] for i in range(n)] + [[(i + 1) % n, i] for i in range(n)]
            made.append(M.Molecule(torch.randn(n, 4), torch.tensor(pairs)))
        return M.GraphNet(), (made,)
    if name == "tied":
        return M.Tied(), ([[torch.tensor(rng.randrange(7)) for _ in range(n)] for n in (3, 1, 5)],)
    raise KeyError(name)


NAMES = ["tree", "child sum", "rnn", "tagger", "graph", "tied"]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: " ".join(f"{k}={v}" for k, v in w.items()) or "default")
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop(name: str, way: dict) -> None:
    model, args = make(name)
    check_equal(M.with_options(model, **way), *args)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_small_minibatches(name: str, count: int) -> None:
    model, args = make(name)
    check_equal(model, *(a[:count] for a in args))


@pytest.mark.parametrize("name", NAMES)
def test_inference_equals_the_loop(name: str) -> None:
    model, args = make(name)
    with torch.no_grad():
        check_equal(model, *args, gradients=False)
    with torch.inference_mode():
        check_equal(model, *args, gradients=False)


def test_empty_minibatch() -> None:
    assert M.TreeLSTM()([]).shape[0] == 0
    assert M.Tagger()([]) == []


def test_one_leaf() -> None:
    check_equal(M.TreeLSTM(), M.trees(0, [1]))


def test_shared_subtrees() -> None:
    inner = M.trees(3, [4])[0]
    pair = M.Tree(None, [inner, inner])
    check_equal(M.TreeLSTM(), [pair, inner, M.Tree(None, [pair, inner])])


def test_inputs_get_gradients() -> None:
    xs = [torch.randn(n, 4, requires_grad=True) for n in (2, 3, 2)]
    check_equal(M.RNN(), xs)


def test_a_tensor_of_instances() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    model = M.WithDropout().eval()
    check_equal(model, x)
    torch.testing.assert_close(model(x), model(list(x)))


def test_deep_chain() -> None:
    model = M.Chain()
    x = [torch.randn(3) for _ in range(2)]
    with fxbatch.disabled():
        expected = model(x, 5000)
    torch.testing.assert_close(model(x, 5000), expected)
    model(x, 5000).sum().backward()
    assert model.cell.weight.grad is not None


def test_dropout_is_drawn_anew_for_each_instance_and_run() -> None:
    torch.manual_seed(0)
    model = M.WithDropout(512)
    x = torch.ones(512)
    first, second = model([x, x]), model([x, x])
    for a, b in ((first[0], first[1]), (first, second)):
        assert not torch.equal(a == 0, b == 0)
    rate = (torch.cat([first, second]) == 0).float().mean().item()
    assert abs(rate - 0.5) < 0.06
    kept = first != 0
    model.eval()
    torch.testing.assert_close(first[kept], 2 * model([x, x])[kept])


def test_dropout_gradient_fits_its_draw() -> None:
    model = M.WithDropout(64)
    x = [torch.randn(64, requires_grad=True) for _ in range(3)]
    out = model(x)
    out.sum().backward()
    for i, xi in enumerate(x):
        expected = ((out[i] != 0).float() * 2) @ model.linear.weight
        torch.testing.assert_close(xi.grad, expected)


# The oracle itself, on wrong data


def test_a_wrong_value_is_found() -> None:
    exact = torch.linspace(-1, 1, 9, dtype=torch.float64)
    eager = exact.float()
    compare([eager.clone(), None], [eager, None], [exact, None])
    for wrong in (
        eager + 1e-5,
        eager * 1.00001,
        eager.double(),
        eager[:8],
        torch.full((9,), torch.nan),
        None,
    ):
        with pytest.raises(AssertionError):
            compare([wrong], [eager], [exact])


def test_a_wrong_value_in_autocast_is_found() -> None:
    eager = torch.linspace(-1, 1, 9)
    compare_in_autocast([eager * 1.01, None], [eager, None], torch.bfloat16)
    for wrong in (eager * 1.1, eager.bfloat16(), eager[:8], None):
        with pytest.raises((AssertionError, RuntimeError)):
            compare_in_autocast([wrong], [eager], torch.bfloat16)


def test_the_own_error_of_the_loop_is_capped() -> None:
    """A loop that is far from float64 allowed a batched result that is 16 times as large."""
    eager = torch.tensor([1.0, 2.0])
    with pytest.raises(AssertionError, match="no oracle"):
        compare([16 * eager], [eager], [eager.double() * 5])


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.seen = 0

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x) / self.seen


def test_a_loop_that_does_not_repeat_itself_is_no_oracle() -> None:
    with pytest.raises(AssertionError, match=r"the loop doesn't repeat itself: tensor 0"):
        check_equal(Counter(), [torch.randn(4) for _ in range(8)])
