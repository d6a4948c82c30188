"""Data-parallel training under torchrun, two processes on the CPU; the sampler that balances work."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from fxbatch.data.balanced_sampler import BalancedBatchSampler, deal
from fxbatch.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*command: str) -> str:
    """Standard output of two processes; fails with their errors."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def two_processes(*cases: str) -> None:
    """All cases in the same two processes: starting them takes longer than most."""
    out = torchrun(str(Path(__file__).with_name("distributed_worker.py")), *cases)
    assert out.split("\n")[:-1] == [f"{case}: equal" for case in cases], out


pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo backend")


def test_data_parallel() -> None:
    two_processes("equal_gradients", "accumulation", "join")


@pytest.mark.slow
def test_data_parallel_in_full() -> None:
    two_processes("autograd", "unused", "balanced", "checkpoints")


@pytest.mark.slow
def test_fully_sharded() -> None:
    two_processes("sharded", "sharded_submodule")


@pytest.mark.slow
def test_the_example() -> None:
    assert "on 2 processes" in torchrun("examples/distributed.py", "--steps", "4")


def test_shares_are_even_and_complete() -> None:
    rng = random.Random(0)
    work = [rng.randrange(1, 200) for _ in range(101)]
    samplers = [BalancedBatchSampler(work, 8, rank=r, ranks=4, seed=3) for r in range(4)]
    batches = [list(s) for s in samplers]
    assert {len(b) for b in batches} == {len(s) for s in samplers}
    assert sorted(i for b in batches for m in b for i in m) == list(range(101))
    for shares in list(samplers[0].shares())[:-1]:
        loads = [sum(work[i] for i in share) for share in shares]
        assert all(len(share) == 8 for share in shares)
        assert max(loads) - min(loads) <= 60, loads
    again = list(BalancedBatchSampler(work, 8, rank=1, ranks=4, seed=3))
    assert again == batches[1]
    samplers[1].set_epoch(1)
    assert list(samplers[1]) != batches[1]


def test_few_instances_and_bad_arguments() -> None:
    assert deal([1, 1], [0], 3) == [[0], [0], [0]]
    assert deal([], [], 2) == [[], []]
    assert list(BalancedBatchSampler([], 4)) == []
    assert len(BalancedBatchSampler([1] * 9, 4, drop_last=True)) == 2
    with pytest.raises(DataError, match="rank=2, ranks=2"):
        BalancedBatchSampler([1], 1, rank=2, ranks=2)
    with pytest.raises(DataError, match="negative"):
        BalancedBatchSampler([-1], 1)
