"""What is kept goes with the model, and caches stay within their bounds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.ir import Operation, Signature, TensorSpec
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.operation_cache import OperationCache
from fxbatch.runtime.pool import Pool

WORDS = [[1, 2], [3], [4, 5, 6]]


def model(**options: Any) -> tuple[nn.Module, type]:
    """A model whose class and custom gradient are defined here, so that they should go with it."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.l = nn.Linear(4, 4)

        @fxbatch.autobatch(**options)
        def forward(self, words: list[int]) -> torch.Tensor:
            h = self.embed(torch.tensor(words[0]))
            for w in words[1:]:
                h = self.l(h) + self.embed(torch.tensor(w))
            return Doubled.apply(h)

    return Model(), Doubled


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "fold"},
        {"mode": "unrolled"},
        {"backward": "autograd"},
        {"fuse": True, "deduplicate": True},
    ],
    ids=str,
)
def test_a_deleted_model_is_gone(options: dict[str, Any]) -> None:
    m, function = model(**options)
    m(WORDS).sum().backward()
    with torch.no_grad():
        m(WORDS)
    if not options:
        str(fxbatch.explain(m, WORDS))
        with fxbatch.lazy(m) as batch:
            batch.value(torch.ones(4)) + m.l.bias
    refs = [weakref.ref(x) for x in (*m.parameters(), type(m), function)]
    del m, function
    if not options:
        del batch
    for _ in range(3):  # runs that end in a collection leave something to the next
        gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_looking_at_an_undecorated_model_again_and_again_keeps_one_engine() -> None:
    class Plain(nn.Linear):
        def head(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

    m = Plain(3, 3)
    for _ in range(3):
        fxbatch.trace(m, torch.ones(3))
        fxbatch.trace(m.head, torch.ones(3))
    assert len(m.__dict__["_fxbatch_engines"]) == 2


def rows_of(length: int) -> TensorSpec:
    return TensorSpec((length,), torch.float32, torch.device("cpu"))


def minibatch(pool: Pool, *lines: int) -> None:
    """What a minibatch does with the pool: pieces of so many lines, 80 bytes each with what they have to spare."""
    pool.begin()
    taken = [pool.take(torch.device("cpu"), n) for n in lines]
    for tensor in taken:
        pool.give(tensor)


def test_a_pool_keeps_nothing_of_sizes_that_do_not_come_again() -> None:
    pool = Pool(least=0)
    for k in range(1, 60):
        minibatch(pool, 1000 + 40 * k, 20000 + 900 * k)
    assert pool.bytes <= 2 * 80 * (1000 + 40 * 60 + 20000 + 900 * 60)
    before = pool.reused
    minibatch(pool, 1000 + 40 * 59, 20000 + 900 * 59)
    assert pool.reused == before + 2, "the last sizes are there"


def test_a_pool_keeps_what_every_minibatch_takes() -> None:
    pool = Pool(least=0)
    for k in range(20):
        minibatch(pool, 1000, 3000 + k)
    assert (pool.allocated, pool.reused) == (2, 38)


def test_a_pool_forgets_that_a_minibatch_was_large() -> None:
    pool = Pool(least=0)
    minibatch(pool, *range(1000, 1016))
    assert pool.bytes == 64 * sum(n + n // 4 for n in range(1000, 1016))
    for k in range(60):
        minibatch(pool, 10 + k)
    assert pool.bytes <= 2 * 80 * 70 + 80 * 1016


def test_small_pools_are_left_alone() -> None:
    pool = Pool()
    for k in range(16):
        minibatch(pool, 1 << k)
    assert pool.bytes >= 64 << 15


def test_waiting_models_with_ever_new_shapes_do_not_fill_the_pool() -> None:
    @fxbatch.autobatch
    def wait(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    engine: Engine = wait.__fxbatch__.engine(None)  # type: ignore[attr-defined]
    engine.pool.least = 0
    sizes = []
    for k in range(12):
        wait([torch.ones(1000 + k), -torch.ones(1000 + k)])
        sizes.append(engine.pool.bytes)
    assert max(sizes) <= 3 * sizes[0]


def test_operations_that_were_not_used_for_the_longest_time_go_first() -> None:
    cache = OperationCache(most=2)
    signatures = [Signature(Operation("constant", "constant"), (), (rows_of(n),)) for n in range(3)]
    first, second, third = signatures
    for signature in (first, second, first, third, first):
        cache.get(signature, ((), ()), ())
    assert (cache.hits, cache.misses) == (2, 3)
    cache.get(second, ((), ()), ())
    assert cache.misses == 4
    assert len(cache) == 2
