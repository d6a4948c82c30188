"""Training steps of plans that repeat: forward and backward replayed, gradients as one by one, memory lent once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import CompileWarning
from fxbatch.runtime.cuda_graphs import IN_USE, GraphedPlans
from fxbatch.runtime.devices import count_waits
from tests.compile.graphed import Captured, engine_of, model_of, on_cuda, tree_of
from tests.models import Tree, TreeLSTM

Loss = Callable[[torch.Tensor], torch.Tensor]


def trees(words: int) -> list[Tree]:
    """Two trees of always the same shapes."""
    return [tree_of(1, words), tree_of(2, words + 1)]


def step(model: nn.Module, batch: Any, loss: Loss) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results and gradients of a training step."""
    model.zero_grad(set_to_none=True)
    found = model(batch)
    loss(found).backward()
    return found.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def check(model: nn.Module, batch: Any, loss: Loss = lambda x: x.square().sum()) -> None:
    """A step against the undecorated forward, one instance at a time in float64."""
    results, grads = step(model, batch, loss)
    model.double()
    with fxbatch.disabled():
        wanted, wanted_grads = step(model, batch, loss)
    model.float()
    torch.testing.assert_close(results.double(), wanted, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def one(graphs: GraphedPlans) -> Any:
    """The only plan that is captured."""
    (found,) = graphs.kept
    return found


@pytest.fixture
def model(graphs: GraphedPlans) -> TreeLSTM:
    """Its forward has met the plan of `trees` once in training: the next time it is captured."""
    made = model_of(graphs)
    step(made, trees(0), torch.sum)
    return made


def test_both_ways_are_captured_once_and_replayed(model: TreeLSTM, graphs: GraphedPlans) -> None:
    batches = [trees(10 * k) for k in range(1, 5)]
    found = [step(model, batch, lambda x: x.square().sum()) for batch in batches]
    assert graphs.captures == 1 and graphs.replays == 4
    assert one(graphs).captures == 1 and one(graphs).replays == 4 and not one(graphs).busy
    with fxbatch.disabled():
        for (results, grads), batch in zip(found, batches, strict=True):
            wanted, wanted_grads = step(model, batch, lambda x: x.square().sum())
            torch.testing.assert_close(results, wanted)
            for ours, theirs in zip(grads, wanted_grads, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_a_replayed_step_waits_for_nothing_and_walks_no_step(
    graphs: GraphedPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(graphs)
    collate = fxbatch.collate(model)

    def ready(words: int) -> Any:
        data = fxbatch.TracedDataset(model, trees(words))
        return collate([data[0], data[1]])

    for words in (1, 2):
        step(model, ready(words), torch.sum)
    batch = ready(3)
    for operation in engine_of(model).operations._entries.values():
        if operation.forward is not None:
            monkeypatch.setattr(operation, "forward", walked)
            monkeypatch.setattr(operation, "backward", walked)
    with count_waits() as waits:
        model(batch).sum().backward()
    assert waits == [] and one(graphs).replays == 2


def walked(*args: Any) -> None:
    raise AssertionError("a step was launched by itself")


def test_gradients_and_results_do_not_change_when_the_graphs_are_replayed(
    model: TreeLSTM, graphs: GraphedPlans
) -> None:
    kept = [step(model, trees(words), torch.sum) for words in range(1, 4)]
    copies = [(results.clone(), [g.clone() for g in grads]) for results, grads in kept]
    step(model, trees(9), lambda x: x.exp().sum())
    assert one(graphs).replays == 4
    for (results, grads), (same, equal) in zip(kept, copies, strict=True):
        assert torch.equal(results, same) and all(map(torch.equal, grads, equal))


def test_an_optimiser_changes_what_the_next_replay_reads(model: TreeLSTM, graphs: GraphedPlans) -> None:
    with fxbatch.disabled():
        torch.manual_seed(0)
        twin = TreeLSTM()
    optimisers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    for words in range(1, 6):
        step(model, trees(words), lambda x: x.square().sum())
        with fxbatch.disabled():
            step(twin, trees(words), lambda x: x.square().sum())
        for optimiser in optimisers:
            optimiser.step()
    assert graphs.captures == 1 and one(graphs).replays == 5
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_gradients_accumulate(model: TreeLSTM, graphs: GraphedPlans) -> None:
    model.zero_grad(set_to_none=True)
    for words in range(1, 4):
        model(trees(words)).sum().backward()
    assert one(graphs).replays == 3
    found = [p.grad for p in model.parameters()]
    with fxbatch.disabled():
        wanted = [step(model, trees(words), torch.sum)[1] for words in range(1, 4)]
    for ours, theirs in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs).sum(0))


def test_two_minibatches_before_one_backward_do_not_share_memory(
    model: TreeLSTM, graphs: GraphedPlans
) -> None:
    step(model, trees(1), torch.sum)
    check_pair(model)
    assert graphs.refused == {IN_USE: 1} and not one(graphs).busy
    step(model, trees(5), torch.sum)
    assert one(graphs).replays == 3


def check_pair(model: TreeLSTM) -> None:
    """Gradients of a loss over two minibatches of one plan."""
    model.zero_grad(set_to_none=True)
    (model(trees(2)).square() + model(trees(3)).square()).sum().backward()
    found = [p.grad for p in model.parameters()]
    with fxbatch.disabled():
        wanted = [step(model, trees(words), lambda x: x.square().sum())[1] for words in (2, 3)]
    for ours, a, b in zip(found, *wanted, strict=True):
        torch.testing.assert_close(ours, a + b)


def test_a_retained_graph_is_differentiated_again(model: TreeLSTM, graphs: GraphedPlans) -> None:
    step(model, trees(1), torch.sum)
    model.zero_grad(set_to_none=True)
    found = model(trees(2))
    found.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert one(graphs).busy, "the memory is kept"
    found.sum().backward()
    assert not one(graphs).busy
    for p, grad in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad)


def test_a_step_without_backward_gives_the_memory_back(model: TreeLSTM, graphs: GraphedPlans) -> None:
    found = model(trees(1))
    assert one(graphs).busy
    del found
    gc.collect()
    assert not one(graphs).busy
    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way(model)
    gc.collect()
    before = graphs.replays
    step(model, trees(3), torch.sum)
    assert graphs.replays == before + 1 and not one(graphs).busy


def fail_half_way(model: TreeLSTM) -> None:
    """A backward pass that does not reach the minibatch."""

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("half way")

    found = model(trees(2)) * 1
    found.register_hook(fail)
    found.sum().backward()


def test_gradients_of_some_results_are_a_walk_of_their_own(graphs: GraphedPlans) -> None:
    class Both(TreeLSTM):
        @fxbatch.autobatch
        def forward(self, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
            h, c = self.encode(tree)
            return self.out(h), c

    model = Both()
    model(trees(0))[0].sum().backward()
    engine_of(model).cuda_graphs = graphs
    for words in range(8):
        for which in (0, 1):
            model.zero_grad(set_to_none=True)
            model(trees(words))[which].square().sum().backward()
            found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            with fxbatch.disabled():
                model(trees(words))[which].square().sum().backward()
            for ours, p in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(ours, p.grad)
    assert one(graphs).captures == 2 and one(graphs).replays >= 14


def test_another_parameter_at_the_same_place_gets_its_gradient(model: TreeLSTM, graphs: GraphedPlans) -> None:
    for words in (1, 2):
        step(model, trees(words), torch.sum)
    model.out.weight = nn.Parameter(model.out.weight.data)
    for words in (3, 4, 5):
        _, grads = step(model, trees(words), torch.sum)
        assert len(grads) == len(list(model.parameters()))
    assert graphs.captures == 2


def test_frozen_parameters_have_a_plan_of_their_own(model: TreeLSTM, graphs: GraphedPlans) -> None:
    for words in (1, 2):
        step(model, trees(words), torch.sum)
    model.out.weight.requires_grad_(False)
    for words in (3, 4, 5):
        _, grads = step(model, trees(words), torch.sum)
        assert model.out.weight.grad is None and len(grads) == len(list(model.parameters())) - 1
    assert graphs.captures == 2


def test_inputs_that_require_gradients_are_walked(graphs: GraphedPlans) -> None:
    linear = nn.Linear(3, 2)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    model = Rows()
    model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    engine_of(model).cuda_graphs = graphs
    for _ in range(4):
        x = torch.randn(4, 3, requires_grad=True)
        model(list(x.unbind())).square().sum().backward()
        found = x.grad
        (wanted,) = torch.autograd.grad(torch.tanh(linear(x)).square().sum(), x)
        torch.testing.assert_close(found, wanted)
    assert one(graphs).replays == 0 and one(graphs).refused == "constants require gradients"


def test_sparse_gradients_are_walked(graphs: GraphedPlans) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 3, sparse=True)

        @fxbatch.autobatch
        def forward(self, word: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.embed(word))

    model = Words()
    model([torch.tensor(1)] * 3).sum().backward()
    engine_of(model).cuda_graphs = graphs
    for word in range(4):
        model.zero_grad(set_to_none=True)
        model([torch.tensor(word)] * 3).sum().backward()
        assert model.embed.weight.grad is not None and model.embed.weight.grad.is_sparse
        assert float(model.embed.weight.grad.to_dense()[word].min()) > 0
    assert one(graphs).replays == 0 and one(graphs).refused == "a gradient is sparse"


def test_a_backward_that_cannot_be_captured_is_walked_and_says_why(
    model: TreeLSTM, graphs: GraphedPlans
) -> None:
    capture, tried = graphs.capture, []

    def failing(work: Callable[[], None]) -> Callable[[], None]:
        tried.append(work)
        if len(tried) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(work)

    graphs.capture = failing
    with pytest.warns(CompileWarning, match="backward of a repeated plan.*not permitted"):
        step(model, trees(1), torch.sum)
    for words in (2, 3):
        _, grads = step(model, trees(words), torch.sum)
        with fxbatch.disabled():
            _, wanted = step(model, trees(words), torch.sum)
        for ours, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(tried) == 2 and graphs.replays == 3


def test_threads_that_train_on_one_plan(model: TreeLSTM, graphs: GraphedPlans) -> None:
    step(model, trees(1), torch.sum)
    with fxbatch.disabled():
        wanted = {words: step(model, trees(words), torch.sum)[1] for words in range(4)}
    faults: list[BaseException] = []

    def work(words: int) -> None:
        try:
            for _ in range(10):
                grads = torch.autograd.grad(model(trees(words)).sum(), list(model.parameters()))
                for ours, theirs in zip(grads, wanted[words], strict=True):
                    torch.testing.assert_close(ours, theirs)
        except BaseException as error:  # noqa: BLE001 a thread's failure is the test's
            faults.append(error)

    threads = [threading.Thread(target=work, args=(words,)) for words in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert not one(graphs).busy


@pytest.mark.gpu
def test_training_on_cuda_equals_one_by_one() -> None:
    model = Captured().cuda()
    for words in range(5):
        batch = [on_cuda(tree) for tree in trees(words)]
        _, grads = step(model, batch, lambda x: x.square().sum())
        with fxbatch.disabled():
            _, wanted = step(model, batch, lambda x: x.square().sum())
        for ours, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    graphs = engine_of(model).cuda_graphs
    assert graphs is not None and graphs.captures == 1 and one(graphs).replays == 4
