"""Hard cases of objects: models that change, nest, are copied or pickled, hooks, modes, processes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests import models as M
from tests.oracle import check_equal, run
from tests.trust.programs import Inner, assert_equal, model, two, vectors

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


@pytest.mark.parametrize("limit", [600, None])
@pytest.mark.parametrize("through", ["python", "modules", "values"])
def test_endless_recursion_is_an_error(through: str, limit: int | None) -> None:
    def forward(self: Any, x: Any) -> Any:
        if through == "modules":
            return forward(self, self.a(x))
        return forward(self, x if through == "python" else x * (self.a(x).sum().item() > -1e9))

    made = model(forward, {"a": nn.Linear(4, 4)})
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit or before)
    try:
        with pytest.raises(RecursionError) as caught:
            made(vectors(4, 4))
    finally:
        sys.setrecursionlimit(before)
    assert any("recursed too deeply" in note for note in caught.value.__notes__)
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
    """Once, with the sum over all calls: a hook of each call's share would clamp another number."""
    made = model(lambda self, x: self.a(x), two())
    seen: list[torch.Tensor] = []
    made.a.weight.register_hook(lambda g: (seen.append(g.clone()), g.clamp(-1, 1))[1])
    xs = vectors(4, 4, 4)
    made(xs).sum().backward()
    hooked = made.a.weight.grad.clone()
    made.zero_grad()
    with fxbatch.disabled():
        made(xs).sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(hooked, made.a.weight.grad)


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
        if backward == "compiled":
            with pytest.raises(fxbatch.GradientError, match='backward="autograd"'):
                call()
        else:
            torch.testing.assert_close(call(), expected)


def test_inference_mode_and_no_grad() -> None:
    made = model(lambda self, x: self.a(x), two())
    xs = vectors(4, 4)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = made(xs)
            assert not out.requires_grad
    check_equal(made, xs)


@pytest.mark.parametrize(
    "options", [{}, {"backward": "autograd"}, {"mode": "unrolled"}, {"schedule": "fold"}]
)
@pytest.mark.parametrize("outer", [True, False])
def test_no_grad_for_a_part_of_the_forward(options: dict[str, Any], outer: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            target = torch.tanh(self.a(x))
        return (target if outer else target.detach()) * self.a(self.b(x)) + target

    assert_equal(forward, vectors(4, 4, 4), two(), **options)


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
