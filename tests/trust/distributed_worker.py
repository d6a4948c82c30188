"""One process of the data-parallel tests, started by torchrun: `distributed_worker.py CASE [CASE ...]`.

Each case compares two processes with one process on the joined minibatch; any difference ends the process
with an error.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxbatch
from fxbatch.data.balanced_sampler import BalancedBatchSampler
from tests import models as M

Gradients = dict[str, torch.Tensor | None]


def whole(rank: int, ranks: int) -> tuple[M.TreeLSTM, list[Any], list[Any]]:
    """The model, all trees, and this rank's."""
    torch.manual_seed(0)
    trees = [M.random_tree(random.Random(k), 1 + k) for k in range(4 * ranks)]
    return M.TreeLSTM(), trees, trees[rank::ranks]


def loss_of(model: Any, trees: Any) -> torch.Tensor:
    return model(trees).pow(2).sum()


def reference(model: torch.nn.Module, trees: list[Any]) -> Gradients:
    """Gradients of one process on the joined minibatch, one instance at a time: the mean over ranks of the
    sums, which is what reduction gives."""
    copied = copy.deepcopy(model)
    with fxbatch.disabled():
        (loss_of(copied, trees) / dist.get_world_size()).backward()
    return {name: p.grad for name, p in copied.named_parameters()}


def compare(model: torch.nn.Module, expected: Gradients) -> None:
    for name, p in model.named_parameters():
        wanted = expected[name]
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        if wanted is None:
            assert grad is None or not grad.any(), f"{name}: a gradient, one process has none"
        else:
            assert grad is not None, f"{name}: no gradient"
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)


def differs(model: torch.nn.Module, expected: Gradients) -> bool:
    try:
        compare(model, expected)
    except AssertionError:
        return True
    return False


def equal_gradients(rank: int, ranks: int) -> None:
    model, trees, mine = whole(rank, ranks)
    wrapped = DistributedDataParallel(model)
    expected = reference(model, trees)
    for _ in range(2):
        model.zero_grad()
        loss_of(wrapped, mine).backward()
        compare(model, expected)
    assert differs(model, reference(model, mine)), "the check would not see gradients of this rank alone"


def autograd(rank: int, ranks: int) -> None:
    """The other backward."""
    torch.manual_seed(0)

    class Differentiable(M.TreeLSTM):
        forward = fxbatch.autobatch(backward="autograd")(M.TreeLSTM.forward.__wrapped__)

    _, trees, mine = whole(rank, ranks)
    model = Differentiable()
    wrapped = DistributedDataParallel(model)
    loss_of(wrapped, mine).backward()
    compare(model, reference(model, trees))


def unused(rank: int, ranks: int) -> None:
    """Single leaves on all ranks but one: they don't use the cell; then on all: nobody does."""
    model, trees, mine = whole(rank, ranks)
    leaves = [M.Tree(torch.tensor(k)) for k in range(2)]
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    expected = reference(model, [*leaves * (ranks - 1), *trees[0::ranks]])
    loss_of(wrapped, leaves if rank else mine).backward()
    compare(model, expected)
    model.zero_grad()
    loss_of(wrapped, leaves).backward()
    compare(model, reference(model, leaves * ranks))


def accumulation(rank: int, ranks: int) -> None:
    """`no_sync`: gradients are this rank's until the last part, then those of all parts of all ranks."""
    model, trees, mine = whole(rank, ranks)
    expected = reference(model, trees)
    alone = reference(model, mine[:2])
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        loss_of(wrapped, mine[:2]).backward()
    compare(model, {name: None if g is None else g * ranks for name, g in alone.items()})
    loss_of(wrapped, mine[2:]).backward()
    compare(model, expected)


def join(rank: int, ranks: int) -> None:
    """Rank 0 has one minibatch, rank 1 three: each step equals one process on what is left of the ranks."""
    model, trees, _ = whole(rank, ranks)
    alone = copy.deepcopy(model)
    shares = [[trees[r::ranks][k : k + 2] for k in range(1 + 2 * r)] for r in range(ranks)]
    wrapped = DistributedDataParallel(model)
    with Join([wrapped]):
        for step, share in enumerate(shares[rank]):
            joined = [tree for s in shares if step < len(s) for tree in s[step]]
            wanted = reference(alone, joined)
            loss_of(wrapped, share).backward()
            compare(model, wanted)
            descend(model)
            descend(alone, wanted)
            model.zero_grad()
    for other in shares[-1][len(shares[rank]) :]:  # what the others did meanwhile
        descend(alone, reference(alone, other))
    for (name, p), (_, q) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def descend(model: torch.nn.Module, gradients: Gradients | None = None) -> None:
    for name, p in model.named_parameters():
        grad = p.grad if gradients is None else gradients[name]
        if grad is not None:
            p.sub_(grad, alpha=0.1)


def balanced(rank: int, ranks: int) -> None:
    """The sampler's shares: complete, even in calls, and their gradients those of the joined minibatch."""
    model, _, _ = whole(rank, ranks)
    trees = [M.random_tree(random.Random(k), 1 + k % 13) for k in range(40)]
    calls = [len(fxbatch.trace(model, tree).sig) for tree in trees]
    wrapped = DistributedDataParallel(model)
    seen: list[int] = []
    for mine in BalancedBatchSampler(calls, 8, rank=rank, ranks=ranks):
        shares: list[Any] = [None] * ranks
        dist.all_gather_object(shares, mine)
        joined = [i for share in shares for i in share]
        loads = [sum(calls[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(calls[i] for i in joined), loads
        seen += joined
        model.zero_grad()
        loss_of(wrapped, [trees[i] for i in mine]).backward()
        compare(model, reference(model, [trees[i] for i in joined]))
    assert sorted(seen) == list(range(len(trees)))


def sharded(rank: int, ranks: int) -> None:
    """FSDP2 on the root module: parameters are whole while its forward runs; steps of an optimizer follow."""
    model, trees, mine = whole(rank, ranks)
    alone = copy.deepcopy(model)
    fully_shard(model)
    for _ in range(3):
        wanted = reference(alone, trees)
        loss_of(model, mine).backward()
        compare(model, wanted)
        descend(model)
        descend(alone, wanted)
        model.zero_grad()


def sharded_submodule(rank: int, ranks: int) -> None:
    """FSDP2 on a submodule of a decorated model as well: right, or an error that says what to do."""
    model, trees, mine = whole(rank, ranks)
    expected = reference(model, trees)
    fully_shard(model.cell)
    fully_shard(model)
    try:
        loss_of(model, mine).backward()
    except fxbatch.FxbatchError as error:
        assert "fully_shard" in str(error) and "root module alone" in str(error), error
        return
    compare(model, expected)


class Undecorated(M.TreeLSTM):
    """The same model as its author would have written it without this library."""

    forward = M.TreeLSTM.forward.__wrapped__


def checkpoints(rank: int, ranks: int) -> None:
    """Between the undecorated model, the decorated one, DistributedDataParallel and FSDP2, any way."""
    model, _, mine = whole(rank, ranks)
    plain = Undecorated()
    plain.load_state_dict(model.state_dict(), strict=True)
    expected = torch.stack([plain(tree) for tree in mine])

    stored = io.BytesIO()
    torch.save(plain.state_dict(), stored)
    stored.seek(0)
    wrapped = DistributedDataParallel(M.TreeLSTM())
    wrapped.module.load_state_dict(torch.load(stored, weights_only=True), strict=True)
    torch.testing.assert_close(wrapped(mine), expected)
    again = Undecorated()
    again.load_state_dict({k.removeprefix("module."): v for k, v in wrapped.state_dict().items()})
    torch.testing.assert_close(torch.stack([again(tree) for tree in mine]), expected)

    shards = M.TreeLSTM()
    fully_shard(shards)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(shards, plain.state_dict(), options=options)
    torch.testing.assert_close(shards(mine), expected)
    gathered = get_model_state_dict(shards, options=options)
    assert list(gathered) == list(plain.state_dict())
    last = Undecorated()
    last.load_state_dict(gathered, strict=True)
    torch.testing.assert_close(torch.stack([last(tree) for tree in mine]), expected)


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        dist.init_process_group("gloo")
        stack.callback(dist.destroy_process_group)
        for case in sys.argv[1:]:
            globals()[case](dist.get_rank(), dist.get_world_size())
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{case}: equal", flush=True)


if __name__ == "__main__":
    main()
