"""Hard cases of objects: models that change, nest, are copied or pickled, hooks, modes, processes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests import models as M
from tests.oracle import check_equal, run
from tests.trust.programs import equal, model, vectors


def two() -> dict[str, Any]:
    return {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


# Errors of the forward


def test_a_forward_that_raises() -> None:
    def forward(self: Any, x: Any) -> Any:
        if x.shape[0] == 3:
            raise KeyError("word")
        return self.a(x).sum()

    made = model(forward, {"a": nn.Linear(4, 4)}, out="list")
    with pytest.raises(KeyError, match="word") as caught:
        made([torch.randn(2, 4), torch.randn(3, 4)])
    assert any("instance 1" in note for note in caught.value.__notes__)
    check_equal(made, [torch.randn(2, 4)])


@pytest.mark.parametrize("through", ["python", "modules", "values"])
def test_endless_recursion_is_an_error(through: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        if through == "modules":
            return forward(self, self.a(x))
        return forward(self, x if through == "python" else x * (self.a(x).sum().item() > -1e9))

    made = model(forward, {"a": nn.Linear(4, 4)})
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(600)
    try:
        with pytest.raises(RecursionError):
            made(vectors(4, 4))
    finally:
        sys.setrecursionlimit(before)
    assert model(lambda self, x: self.a(x), {"a": nn.Linear(4, 4)})(vectors(4, 4)).shape == (2, 4)


# Models that change


def test_a_model_changed_between_calls() -> None:
    made = model(lambda self, x: self.a(x) + self.b(x), two())
    xs = vectors(4, 4)
    check_equal(made, xs)
    made.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    check_equal(made, xs)
    made.a.weight = nn.Parameter(torch.randn(4, 4))
    check_equal(made, xs)
    made.a.weight.data = torch.randn(4, 4)
    check_equal(made, xs)
    made.a.weight.requires_grad_(False)
    check_equal(made, xs)
    made.double()
    check_equal(made, [x.detach().double() for x in xs])
    with torch.no_grad():
        made.a.weight.add_(1)
    check_equal(made, [x.detach().double() for x in xs])


def test_a_model_changed_between_trace_and_run() -> None:
    made = M.TreeLSTM()
    trees = M.trees(0, [3, 5])
    dataset = fxbatch.TracedDataset(made, trees)
    traces = fxbatch.collate(made)([dataset[0], dataset[1]])
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(0.5)
    with fxbatch.disabled():
        expected = made(trees)
    torch.testing.assert_close(made(traces), expected)


def test_parameters_changed_between_forward_and_backward_are_an_error() -> None:
    made = model(lambda self, x: self.b(torch.tanh(self.a(x))), two())
    loss = made(vectors(4, 4)).sum()
    with torch.no_grad():
        made.b.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice_needs_retain_graph() -> None:
    made = model(lambda self, x: self.b(torch.tanh(self.a(x))), two())
    loss = made(vectors(4, 4)).sum()
    loss.backward(retain_graph=True)
    first = made.a.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(made.a.weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_result_outlives_the_next_call() -> None:
    made = model(lambda self, x: self.b(torch.tanh(self.a(x))), two())
    xs = vectors(4, 4)
    first = made(xs)
    kept = first.detach().clone()
    made([x * 2 for x in xs]).sum().backward()
    assert torch.equal(first.detach(), kept)
    first.sum().backward()


def test_results_may_be_written() -> None:
    made = model(lambda self, x: torch.tanh(self.a(x)), two())
    xs = vectors(4, 4)
    with torch.no_grad():
        out = made(xs)
        out.mul_(0)
        assert made(xs).abs().sum() > 0
    out = made(xs)
    out.add_(1).sum().backward()
    assert made.a.weight.grad.abs().sum() > 0


# Nesting


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x))


def test_a_decorated_submodule_in_a_decorated_model() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.inner([x, self.a(x)]).sum(0)

    check_equal(model(forward, {"inner": Inner(), "a": nn.Linear(4, 4)}), vectors(4, 4))


def test_a_decorated_submodule_in_a_plain_model() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = Inner(), nn.Linear(4, 2)

        def forward(self, xs: Any) -> Any:
            return self.out(self.inner(xs))

    made, xs = Plain(), vectors(4, 4, 4)
    with fxbatch.disabled():
        eager = run(made, [xs])
    for a, b in zip(run(made, [xs]), eager, strict=True):
        torch.testing.assert_close(a, b)


def test_another_decorated_model_inside_a_forward() -> None:
    """Called with real tensors it is a minibatch of its own; re-entrant, in the middle of the outer one."""
    other = Inner()

    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            extra = other([torch.ones(4, dtype=x.dtype)] * 2).sum()
        return self.a(x) * extra + (1 if self.a(x).sum().item() > 0 else 2)

    made = model(forward, two())
    xs = [x.detach() for x in vectors(4, 4)]
    with fxbatch.disabled():
        expected = made(xs)
    torch.testing.assert_close(made(xs), expected)


def test_a_model_that_calls_itself() -> None:
    def forward(self: Any, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self.a(tree)
        left, right = self(list(tree)).unbind(0)
        return torch.tanh(left + self.b(right))

    made = model(forward, two())
    x, y, z = vectors(4, 4, 4)
    check_equal(made, [((x, y), z), x, (y, (z, (x, y)))])


# Hooks and modes


def test_hooks_of_operations_run_once_a_call() -> None:
    made = model(lambda self, x: self.b(self.a(x)), two())
    seen: list[Any] = []
    made.a.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    made.b.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    check_equal(made, vectors(4, 4))
    seen.clear()
    made(vectors(4, 4, 4))
    assert seen == [torch.Size([4])] * 3


def test_backward_hooks_are_refused() -> None:
    made = model(lambda self, x: self.b(self.a(x)), two())
    made.a.register_full_backward_hook(lambda m, gi, go: None)
    with pytest.raises(fxbatch.TraceError, match="full backward hook"):
        made(vectors(4, 4))


def test_parameter_hooks_see_the_whole_gradient() -> None:
    made = model(lambda self, x: self.a(x), two())
    made.a.weight.register_hook(lambda g: g * 10)
    made(vectors(4, 4)).sum().backward()
    hooked = made.a.weight.grad.clone()
    made.zero_grad()
    with fxbatch.disabled():
        torch.manual_seed(0)
        made(vectors(4, 4)).sum().backward()
    assert hooked.shape == made.a.weight.grad.shape and hooked.abs().sum() > 0


@pytest.mark.parametrize("backward", ["compiled", "autograd"])
def test_autocast(backward: str) -> None:
    made = model(lambda self, x: (self.a(x), torch.tanh(self.a(x)).sum()), two(), backward=backward)
    xs = vectors(4, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, total = made(xs)
        with fxbatch.disabled():
            expected, expected_total = made(xs)
    assert out.dtype == torch.bfloat16 and total.dtype == expected_total.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert made.a.weight.grad.dtype == torch.float32
    check_equal(made, xs)  # and without it again


def test_autocast_inside_the_forward() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.shape[0] == 4):
            y = self.a(x)
        return y.float() + self.b(x)

    made = model(forward, two())
    xs = vectors(4, 4)
    with fxbatch.disabled():
        expected = made(xs)
    torch.testing.assert_close(made(xs), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev"])
def test_torch_func_works_under_autograd_or_is_a_clear_error(transform: str) -> None:
    for backward in ("autograd", "compiled"):
        made = model(lambda self, x: torch.tanh(self.a(x)).sum(), two(), backward=backward)
        parameters = {k: p.detach() for k, p in made.named_parameters()}
        xs = torch.randn(3, 4)

        def loss(p: Any, x: Any, made: Any = made) -> Any:
            return torch.func.functional_call(made, p, (x,)).sum()

        def call(f: Any = loss, p: Any = parameters, x: Any = xs) -> Any:
            if transform == "grad":
                return torch.func.grad(f)(p, x)["a.weight"]
            if transform == "jacrev":
                return torch.func.jacrev(f)(p, x)["a.weight"]
            return torch.func.vmap(f, (None, 0))(p, torch.stack([x, 2 * x]))

        with fxbatch.disabled():
            expected = call()
        try:
            found = call()
        except fxbatch.FxbatchError as error:
            assert "backward=" in str(error) or "torch.func" in str(error) or "vmap" in str(error)
            continue
        torch.testing.assert_close(found, expected)


def test_inference_mode_and_no_grad() -> None:
    made = model(lambda self, x: self.a(x), two())
    xs = vectors(4, 4)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = made(xs)
            assert not out.requires_grad
    check_equal(made, xs)


def test_double_backward() -> None:
    made = model(lambda self, x: torch.tanh(self.a(x)).pow(2).sum(), two(), backward="autograd")
    x = torch.randn(4, requires_grad=True)

    def penalty() -> torch.Tensor:
        (g,) = torch.autograd.grad(made([x, x]).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), made.a.weight)[0]

    found = penalty()
    with fxbatch.disabled():
        torch.testing.assert_close(found, penalty())
    other = model(lambda self, x: torch.tanh(self.a(x)).sum(), two())
    with pytest.raises(fxbatch.GradientError, match="autograd"):
        torch.autograd.grad(other([x]).sum(), x, create_graph=True)


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


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_processes(method: str) -> None:
    made, trees = in_use()
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    # plain numbers for the child: shared tensors would need file descriptors of this process
    child = context.Process(target=_in_child, args=(made, trees, made(trees).detach(), answers))
    child.start()
    try:
        assert answers.get(timeout=120) is True
    finally:
        child.join(30)
    assert child.exitcode == 0
    check_equal(made, trees)


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
        equal(lambda self, x: self.b(torch.relu(self.a(x))), vectors(4, 4, 4), two(), **way)
