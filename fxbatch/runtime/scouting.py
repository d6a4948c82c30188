"""What the plain loop does, counted while a few instances run in it: how many calls, and how many could be batched.

In: a few instances of a minibatch, which run exactly as undecorated. Out: `Seen`, from which the cost of batching
a whole minibatch is estimated before anything of it is recorded or built.

    seen = Seen()
    for args, kwargs in instances[:4]:
        with seen.watch():
            results.append(forward(*args, **kwargs))
    seen.expected(64, grad=True)          # Counts of a minibatch of 64 such instances
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxbatch.runtime.costs import Counts, Eager, Products
from fxbatch.torch_private import QuietDispatchMode

MOST = 64  # instances that are remembered; then counting begins anew
# Modules are recorded as one call each, so there are fewer calls, operations and steps than calls of functions. How
# many is only known once a minibatch was recorded: these are between modules of few calls and bare functions.
RECORDED, OPERATIONS, STEPS = 0.5, 0.5, 0.7
_ASK = torch.ops.aten._local_scalar_dense.default
_BY_MASK = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
# Products, and which of their tensors has the terms of a sum along its last dimension.
_PRODUCTS = {
    torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten.bmm.default: 0,
    torch.ops.aten.baddbmm.default: 1, torch.ops.aten.mv.default: 0, torch.ops.aten.addmv.default: 1,
    torch.ops.aten.dot.default: 0,
}  # fmt: skip


class _Kind:
    """Calls of one function on tensors of the same shapes."""

    __slots__ = ("chain", "instances", "last")

    def __init__(self) -> None:
        self.instances = 0  # that make such calls
        self.chain = 0  # the most in one instance that follow one another
        self.last = -1  # the last instance that made one


class Seen:
    """The calls of the instances that were watched. `waits`: how often one asked for values after other calls."""

    def __init__(self) -> None:
        self.instances = 0
        self.calls = self.inner = self.waits = self.elements = 0
        self.products = Products()
        self.phases = 0  # the most that one instance waits for
        self.kinds: dict[Any, _Kind] = {}
        self.alone: dict[Any, int] = {}  # calls of kinds that only one instance makes

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the calls of one instance."""
        if self.instances >= MOST:
            self.__init__()  # type: ignore[misc]  # begin anew
        watch = _Watch()
        with watch:
            yield
        self._add(watch)

    def _add(self, watch: _Watch) -> None:
        for key, (calls, depths) in watch.kinds.items():
            kind = self.kinds.get(key)
            if kind is None:
                kind = self.kinds[key] = _Kind()
                self.alone[key] = calls
            else:
                self.alone.pop(key, None)
            kind.instances += 1
            kind.chain = max(kind.chain, len(depths))
        self.instances += 1
        self.calls += watch.calls
        self.inner += watch.inner
        self.elements += watch.elements
        self.products += watch.products
        self.waits += watch.groups
        self.phases = max(self.phases, watch.groups)

    @property
    def eager(self) -> Eager:
        """Calls of one instance on average."""
        n = max(1, self.instances)
        return Eager(self.calls / n, self.inner / n, self.elements / n, self.products / n)

    @property
    def operations(self) -> int:
        """About how many operations would have to be built."""
        return math.ceil(len(self.kinds) * OPERATIONS)

    def expected(self, instances: int, *, grad: bool) -> Counts:
        """About what a minibatch of so many such instances is made of, all graphs being built.

        A kind of call that most instances make takes as many steps as the longest chain of one instance. Kinds that
        were seen in one instance alone, as those of tensors whose size is the instance's, are taken to be new in each.
        """
        n = max(1, self.instances)
        shared = alone = 0.0
        for key, kind in self.kinds.items():
            if n > 1 and key in self.alone:
                alone += self.alone[key]
            else:
                shared += kind.chain * (1.0 - (1.0 - kind.instances / n) ** instances)
        new = instances * alone / n
        recorded = RECORDED * self.calls / n
        return Counts(
            instances,
            calls=round(instances * recorded),
            steps=round(STEPS * shared),
            python_steps=round(new),
            phases=1 + self.phases,
            waits=round(instances * self.waits / n),
            grad=grad,
        )


class _Watch(QuietDispatchMode):
    """Counts calls of torch functions: by function and shapes, and how deep each stands below what there was before.

    What is seen are calls of ATen. Those that come from the same instruction of the same Python frame are one call, of
    a linear layer or a cell, up to where the first of them comes again, as in a loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.inner = self.groups = self.elements = 0
        self.products = Products()
        self.kinds: dict[Any, tuple[int, set[int]]] = {}
        self._depths: dict[int, int] = {}  # by id; one that is used again is only counted wrongly
        self._pending = 0  # calls since the last time that a value was asked for
        self._place: tuple[int, int] = (0, 0)
        self._first: Any = None  # the first call of ATen of the call that runs
        self._mine: set[int] = set()  # what it has made so far
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        place = (id(frame), frame.f_lasti)
        tensors = [
            t
            for a in args
            for t in (a if isinstance(a, (list, tuple)) else (a,))
            if isinstance(t, torch.Tensor)
        ]
        begins = place != self._place or func is self._first
        if begins:
            self._place, self._first, self._depth = place, func, 0
            self._mine.clear()
        for t in tensors:
            if id(t) not in self._mine:
                self._depth = max(self._depth, self._depths.get(id(t), 0) + 1)
        if func is _ASK or (func in _BY_MASK and any(t.dtype is torch.bool for t in tensors)):
            self.calls += begins
            self.groups += self._pending > 0
            self._pending = 0
        elif begins:
            self.calls += 1
            self._pending += 1
            key = (func, *[t.shape for t in tensors])
            count, depths = self.kinds.get(key, (0, set()))
            depths.add(self._depth)
            self.kinds[key] = (count + 1, depths)
        else:
            self.inner += 1
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, torch.Tensor):
                self._depths[id(t)] = self._depth
                self.elements += 0 if func.is_view else t.numel()
                self._mine.add(id(t))
                if func in _PRODUCTS and tensors:
                    rows = t.shape[-2] if t.dim() > 1 else 1
                    self.products += Products.of(rows, t.numel() * tensors[_PRODUCTS[func]].shape[-1])
        return out
