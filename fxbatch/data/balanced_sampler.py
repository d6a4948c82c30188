"""Instances of very different sizes -> an even share of work for each rank of data-parallel training.

In: how much work each instance is (calls, nodes, words), ranks, instances a minibatch. Out: a sampler of
minibatches of indices for one rank: as many minibatches on each rank, of nearly equal work.

    sampler = BalancedBatchSampler([tree.size for tree in trees], batch_size=64, rank=0, ranks=2)
    loader = DataLoader(trees, batch_sampler=sampler, collate_fn=list)
    for epoch in range(10):
        sampler.set_epoch(epoch)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from fxbatch.errors import DataError


class BalancedBatchSampler(Sampler[list[int]]):
    """Minibatches of indices for one process of data-parallel training, with equal work for each process.

    A step's time goes by calls, not by instances. The instances of a global minibatch (`ranks * batch_size` of a random
    permutation) are given out largest first, each to the process with the least work so far that has room. All
    processes have equally many minibatches. The last global minibatch may be smaller. For a seed and an epoch it is the
    same in every process; call `set_epoch` in every process.

    Arguments:
        work: one number per instance, what it costs: nodes of a tree, words of a sentence.
        batch_size: how many instances a minibatch of one process has.
        rank: the number of this process.
        ranks: how many processes there are.
        shuffle: another order in each epoch.
        drop_last: leave out a last minibatch that is smaller.
        seed: of the order.

    Errors:
        DataError: a rank out of range, a batch size below 1, or negative work.

    Example:
        >>> from fxbatch.data.balanced_sampler import BalancedBatchSampler
        >>> list(BalancedBatchSampler([9, 1, 1, 7], 2, rank=0, ranks=2, shuffle=False))
        [[0, 2]]
    """

    def __init__(
        self,
        work: Sequence[float],
        batch_size: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < ranks:
            raise DataError(
                f"batch_size={batch_size}, rank={rank}, ranks={ranks}: rank counts from 0 to ranks - 1"
            )
        if any(w < 0 for w in work):
            raise DataError("work is negative for some instance")
        self.work = list(work)
        self.batch_size = batch_size
        self.rank = rank
        self.ranks = ranks
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Another permutation for another epoch; call it on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.work), self.batch_size * self.ranks)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for share in self.shares():
            yield share[self.rank]

    def shares(self) -> Iterator[list[list[int]]]:
        """The minibatches of all ranks, one global minibatch after another."""
        order = list(range(len(self.work)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        size = self.batch_size * self.ranks
        for k in range(len(self)):
            yield deal(self.work, order[k * size : (k + 1) * size], self.ranks)


def deal(work: Sequence[float], instances: Sequence[int], ranks: int) -> list[list[int]]:
    """Instances dealt to ranks: counts differ by one at most, work as little as largest-first gives.

    >>> deal([5, 1, 4, 2], [0, 1, 2, 3], 2)
    [[0, 1], [2, 3]]
    """
    if not instances:
        return [[] for _ in range(ranks)]
    given = list(instances)
    while len(given) < ranks:  # dealt again, so that every rank has something to do
        given.append(instances[len(given) % len(instances)])
    room = [len(given) // ranks + (r < len(given) % ranks) for r in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for i in sorted(given, key=lambda i: (-work[i], i)):
        r = min((r for r in range(ranks) if len(shares[r]) < room[r]), key=lambda r: (load[r], r))
        shares[r].append(i)
        load[r] += work[i]
    return shares
