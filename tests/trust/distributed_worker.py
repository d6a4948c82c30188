"""One process of the data-parallel tests, started by torchrun: `distributed_worker.py CASE`.

Each case compares the gradients of two processes with those of one process on the joined minibatch; any
difference ends the process with an error.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests import models as M


def whole(rank: int, ranks: int) -> tuple[torch.nn.Module, list[Any], list[Any]]:
    """The model, all trees, and this rank's."""
    torch.manual_seed(0)
    trees = [M.random_tree(random.Random(k), 1 + k) for k in range(4 * ranks)]
    return M.TreeLSTM(), trees, trees[rank::ranks]


def reference(model: torch.nn.Module, trees: list[Any]) -> dict[str, torch.Tensor | None]:
    """Gradients of one process: the mean over ranks of the sums, which is what reduction gives."""
    copied = copy.deepcopy(model)
    (copied(trees).pow(2).sum() / dist.get_world_size()).backward()
    return {name: p.grad for name, p in copied.named_parameters()}


def compare(model: torch.nn.Module, expected: dict[str, torch.Tensor | None], factor: float = 1.0) -> None:
    for name, p in model.named_parameters():
        wanted = expected[name]
        assert p.grad is not None or wanted is None, f"{name}: no gradient"
        if wanted is not None:
            torch.testing.assert_close(p.grad, factor * wanted, rtol=1e-4, atol=1e-6)


def equal_gradients(rank: int, ranks: int) -> None:
    model, trees, mine = whole(rank, ranks)
    wrapped = DistributedDataParallel(model)
    expected = reference(model, trees)
    for _ in range(2):
        model.zero_grad()
        wrapped(mine).pow(2).sum().backward()
        compare(model, expected)


def unused(rank: int, ranks: int) -> None:
    """Only leaves: the cell has no gradient on any rank; single trees on one rank only."""
    model, trees, mine = whole(rank, ranks)
    leaves = [M.Tree(torch.tensor(k)) for k in range(2)]
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    batch = leaves if rank else mine
    expected = reference(model, [*leaves, *trees[0::ranks]])
    wrapped(batch).pow(2).sum().backward()
    compare(model, expected)


def accumulation(rank: int, ranks: int) -> None:
    model, trees, mine = whole(rank, ranks)
    expected = reference(model, trees)
    wrapped = DistributedDataParallel(model)
    for last, part in ((False, mine[:2]), (True, mine[2:])):
        with contextlib.nullcontext() if last else wrapped.no_sync():
            wrapped(part).pow(2).sum().backward()
    compare(model, expected)


def join(rank: int, ranks: int) -> None:
    """Rank 0 has one minibatch, rank 1 three."""
    model, _, mine = whole(rank, ranks)
    wrapped = DistributedDataParallel(model)
    steps = 0
    with Join([wrapped]):
        for _ in range(1 + 2 * rank):
            wrapped(mine).pow(2).sum().backward()
            steps += 1
    assert steps == 1 + 2 * rank
    total = [p.grad for p in model.parameters() if p.grad is not None]
    assert total and all(torch.isfinite(g).all() for g in total)


def sharded(rank: int, ranks: int) -> None:
    """FSDP2 on the root module: parameters are whole while its forward runs."""
    from torch.distributed.fsdp import fully_shard

    model, trees, mine = whole(rank, ranks)
    expected = reference(model, trees)
    fully_shard(model)
    model(mine).pow(2).sum().backward()
    for name, p in model.named_parameters():
        wanted = expected[name]
        assert p.grad is not None and wanted is not None, name
        torch.testing.assert_close(p.grad.full_tensor(), wanted, rtol=1e-4, atol=1e-6)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        globals()[sys.argv[1]](dist.get_rank(), dist.get_world_size())
        dist.barrier()
        if dist.get_rank() == 0:
            print("equal")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
