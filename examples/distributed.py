"""Data-parallel training of a Tree-LSTM with DistributedDataParallel: one process per device.

    torchrun --nproc-per-node 2 examples/distributed.py --steps 20

The model is decorated as for one process; DistributedDataParallel wraps it and reduces gradients as always.
`BalancedBatchSampler` gives each process as many calls, not as many trees. Uneven ends are no problem
(`Join`), nor is gradient accumulation (`no_sync`).
"""

from __future__ import annotations

import argparse
import contextlib
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fxbatch
from fxbatch.data.balanced_sampler import BalancedBatchSampler


@dataclass(eq=False)
class Tree:
    """A binary tree: a word at a leaf, two children elsewhere; `calls` is what it costs."""

    word: torch.Tensor | None
    children: tuple[Tree, ...] = ()

    @property
    def calls(self) -> int:
        return 1 + sum(child.calls for child in self.children)


class TreeLSTM(nn.Module):
    """A binary Tree-LSTM that classifies one tree."""

    def __init__(self, words: int = 50, hidden: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, hidden)
        self.gates = nn.Linear(2 * hidden, 5 * hidden)
        self.out = nn.Linear(hidden, classes)

    def encode(self, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        if not tree.children:
            h = torch.tanh(self.embed(tree.word))
            return h, h
        (hl, cl), (hr, cr) = (self.encode(child) for child in tree.children)
        i, fl, fr, o, u = self.gates(torch.cat([hl, hr])).chunk(5)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c

    @fxbatch.autobatch
    def forward(self, tree: Tree) -> torch.Tensor:
        return self.out(self.encode(tree)[0])


def random_trees(count: int, seed: int = 0) -> list[Tree]:
    """Trees of 1 to 24 leaves."""
    rng = random.Random(seed)

    def grow(leaves: int) -> Tree:
        if leaves == 1:
            return Tree(torch.tensor(rng.randrange(50)))
        left = rng.randrange(1, leaves)
        return Tree(None, (grow(left), grow(leaves - left)))

    return [grow(rng.randrange(1, 25)) for _ in range(count)]


def minibatch(trees: int = 8, seed: int = 0) -> tuple[TreeLSTM, list[Tree]]:
    """The undistributed model and random trees."""
    torch.manual_seed(seed)
    return TreeLSTM(), random_trees(trees, seed)


def train(steps: int, batch_size: int = 16, accumulate: int = 2) -> float:
    """Train on this rank's share; the last loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    trees = random_trees(200)
    model = DistributedDataParallel(TreeLSTM())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = BalancedBatchSampler([t.calls for t in trees], batch_size, rank=rank, ranks=ranks)
    loss = torch.zeros(())
    done = 0
    with Join([model]):
        while done < steps:
            sampler.set_epoch(done)
            for k, indices in enumerate(sampler):
                minibatch = [trees[i] for i in indices]
                labels = torch.tensor([t.calls % 5 for t in minibatch])
                last = (k + 1) % accumulate == 0
                context: Any = contextlib.nullcontext() if last else model.no_sync()
                with context:
                    loss = nn.functional.cross_entropy(model(minibatch), labels)
                    (loss / accumulate).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                done += 1
                if done >= steps:
                    break
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="minibatches of each process (default: 20)")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 examples/distributed.py --steps 20")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        loss = train(args.steps)
        if dist.get_rank() == 0:
            print(f"loss {loss:.4f} after {args.steps} steps on {dist.get_world_size()} processes")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
