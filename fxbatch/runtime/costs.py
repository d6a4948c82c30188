"""What a minibatch costs, in microseconds, from counts alone: batched, and one by one; and how the loop is counted.

In: counts of a minibatch that was recorded (`Counts`), or of the calls of the plain loop (`Eager`). Out: estimates,
good to about a factor of 1.5, made of constants that were measured once and are shipped, so that equal counts give
equal choices on every machine and every run. How they were measured: docs/strategy.md.

    batched_cost(Counts(instances=64, calls=6592, steps=28, grad=True))      # 12,000
    loop_cost(Eager(calls=300, operators=640, nodes=500), instances=64, grad=True)           # 199,000

The loop is counted while a few instances run exactly as undecorated: how many calls, and how many could be batched.

    seen = Seen()
    for args, kwargs in instances[:4]:
        with seen.watch():
            results.append(forward(*args, **kwargs))
        seen.gave(results[-1])
    seen.expected(64, grad=True)          # Counts of a minibatch of 64 such instances, before anything is recorded
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from fxbatch.torch_private import QuietDispatchMode, tree_leaves

# One by one: a call of a torch function, and of a module of torch.nn; each call of ATen that it makes, or view; an
# instance.
EAGER_CALL, EAGER_MODULE, EAGER_OPERATOR, EAGER_VIEW, EAGER_INSTANCE = 0.76, 1.18, 0.76, 0.84, 0.7
# Recording for autograd costs this many times that; a node of its graph, backward.
EAGER_GRAD, EAGER_NODE = 1.48, 4.1
# What a convolution, and each step of a whole recurrent layer, takes besides; with gradients, as many times.
CONVOLUTION, LAYER_STEP, HEAVY_GRAD = 13.0, 3.0, 2.4

# Per number that a call gives, the same work however it is launched.
ELEMENT, ELEMENT_GRAD = 0.001, 0.003
# Packed (sizes of their own): a minibatch, and a call of one instance, which is one for all; building, per call too.
PACKED, PACKED_CALL = 150.0, 20.0
PACKED_GRAD, PACKED_CALL_GRAD = 400.0, 50.0
PACKED_ALONE, PACKED_ALONE_GRAD = 15.0, 35.0  # an operator without a rule, for each instance
PACKED_HEAVY = 0.6  # of what convolutions and layers take one by one
PACKING, PACKING_CALL = 10_000.0, 7_000.0
PACKING_HEAVY = 6_000.0  # a microsecond of convolutions and recurrent layers, of at most two convolutions
# Batched: a minibatch, an instance, a recorded call, one that is recorded in Python, a signature that is new; what
# backward adds.
MINIBATCH, INSTANCE, CALL, LONG_CALL, NEW_SIGNATURE = 580.0, 12.0, 0.6, 10.0, 700.0
MINIBATCH_GRAD, INSTANCE_GRAD, CALL_GRAD = 500.0, 9.0, 0.5
# A step by its native program, or in Python, or a call that runs by itself; what backward adds.
STEP, PYTHON_STEP, UNBATCHED_CALL = 66.0, 175.0, 30.0
STEP_GRAD, PYTHON_STEP_GRAD, UNBATCHED_CALL_GRAD = 19.0, 67.0, 50.0
# A phase, and an instance that waits in one; what backward adds.
PHASE, WAIT = 120.0, 6.5
PHASE_GRAD = 120.0
# The graphs of one operation; importing what symbols for sizes need (sympy; torch._dynamo), once a process.
BUILD, IMPORTING, IMPORTING_DYNAMO = 80_000.0, 400_000.0, 450_000.0

# Batching is chosen where it is estimated to take at most this share of the loop's time.
WORTH_IT = 0.8
# Of the pointwise work on numbers, batching saves this share: fewer kernels walk the same memory.
SAVED = 0.3


# Multiplications a microsecond: of products of one row, of few, of many, of all instances; what backward adds.
ONE_ROW, FEW_ROWS, MANY_ROWS, TOGETHER = 14_000.0, 30_000.0, 60_000.0, 50_000.0
PRODUCTS_GRAD = 3.0


@dataclass(frozen=True)
class Products:
    """What products of matrices take: as one instance makes them, and together with those of many others."""

    alone: float = 0.0
    together: float = 0.0

    @staticmethod
    def of(rows: int, operations: int) -> Products:
        """A product of so many rows and multiplications."""
        rate = ONE_ROW if rows == 1 else FEW_ROWS if rows < 16 else MANY_ROWS
        return Products(operations / rate, operations / max(rate, TOGETHER))

    def __add__(self, other: Products) -> Products:
        return Products(self.alone + other.alone, self.together + other.together)

    def __truediv__(self, n: float) -> Products:
        return Products(self.alone / n, self.together / n)


@dataclass(frozen=True)
class Eager:
    """What one instance does on average, undecorated."""

    calls: float = 0.0  # of torch functions
    modules: float = 0.0  # of these, in modules of torch.nn
    operators: float = 0.0  # calls of ATen that make tensors
    views: float = 0.0  # and those that give views
    nodes: float = 0.0  # of autograd's graph that the result hangs on
    heavy: float = 0.0  # microseconds of convolutions and recurrent layers beyond other calls
    elements: float = 0.0  # numbers that the calls give
    products: Products = Products()


@dataclass(frozen=True)
class Counts:
    """What a recorded minibatch was made of."""

    instances: int
    calls: int = 0  # recorded
    long_calls: int = 0  # of these, in Python
    new: int = 0  # signatures that were not met before
    steps: int = 0  # that run by a native program
    python_steps: int = 0
    unbatched: int = 0  # calls that run one by one, for good
    late_steps: int = 0  # steps of operations whose graphs are not built yet
    late: int = 0  # how many operations those are
    late_calls: int = 0  # which run one by one until then
    phases: int = 1
    waits: int = 0  # how often an instance waited for a value
    grad: bool = False


def loop_cost(eager: Eager, instances: float, *, grad: bool) -> float:
    """The plain loop over so many instances, its backward included, without the work on their numbers."""
    found = EAGER_INSTANCE + EAGER_CALL * eager.calls + EAGER_MODULE * eager.modules
    found += EAGER_OPERATOR * eager.operators + EAGER_VIEW * eager.views
    if grad:
        found = EAGER_GRAD * found + EAGER_NODE * eager.nodes
    return instances * (found + eager.heavy * (HEAVY_GRAD if grad else 1.0))


def work_cost(eager: Eager, instances: float, *, grad: bool, together: bool = False) -> float:
    """The work on the numbers of so many instances, each by itself or all of them together."""
    products = eager.products.together if together else eager.products.alone
    elements = eager.elements * (ELEMENT_GRAD if grad else ELEMENT) * (1.0 - SAVED * together)
    return instances * (elements + products * (PRODUCTS_GRAD if grad else 1.0))


def packed_cost(eager: Eager, instances: float, alone: float, *, grad: bool) -> float:
    """A packed minibatch, its backward included: however many instances it has, as many calls as one of them, and
    `alone` that are made for each instance."""
    heavy = PACKED_HEAVY * eager.heavy * (HEAVY_GRAD if grad else 1.0)
    found = PACKED + PACKED_CALL * eager.calls + (PACKED_ALONE * alone + heavy) * instances
    return (
        found + PACKED_GRAD + PACKED_CALL_GRAD * eager.calls + PACKED_ALONE_GRAD * alone * instances
        if grad
        else found
    )


def packing_cost(eager: Eager) -> float:
    """Building the packed form."""
    return PACKING + PACKING_CALL * eager.calls + PACKING_HEAVY * min(eager.heavy, 2 * CONVOLUTION)


def batched_cost(counts: Counts) -> float:
    """A minibatch batched, its backward included, once all graphs are built."""
    forward = (
        MINIBATCH
        + INSTANCE * counts.instances
        + CALL * counts.calls
        + (LONG_CALL - CALL) * counts.long_calls
        + NEW_SIGNATURE * counts.new
        + STEP * counts.steps
        + PYTHON_STEP * (counts.python_steps + counts.late_steps)
        + UNBATCHED_CALL * counts.unbatched
        + PHASE * (counts.phases - 1)
        + WAIT * counts.waits
    )
    if not counts.grad:
        return forward
    return (
        forward
        + MINIBATCH_GRAD
        + INSTANCE_GRAD * counts.instances
        + CALL_GRAD * counts.calls
        + STEP_GRAD * counts.steps
        + PYTHON_STEP_GRAD * (counts.python_steps + counts.late_steps)
        + UNBATCHED_CALL_GRAD * counts.unbatched
        + PHASE_GRAD * (counts.phases - 1)
    )


def one_by_one_cost(counts: Counts, calls: int) -> float:
    """So many calls in a batched minibatch whose graphs are not built."""
    return calls * (UNBATCHED_CALL + (UNBATCHED_CALL_GRAD if counts.grad else 0.0))


def trial_cost(counts: Counts, operations: int) -> float:
    """A minibatch that is recorded with nothing built: its calls run one by one."""
    return batched_cost(counts) + NEW_SIGNATURE * operations + one_by_one_cost(counts, counts.calls)


# -- the plain loop, counted while a few instances run in it

MOST_REMEMBERED = 64  # instances that are remembered; then counting begins anew
# Modules are recorded as one call each, so there are fewer calls, operations and steps than calls of functions. How
# many is only known once a minibatch was recorded: these are medians of the rows of the benchmarks.
RECORDED, OPERATIONS, STEPS, MODULE_STEPS = 0.5, 0.5, 0.8, 0.35
# Of the calls outside torch's modules, those that are recorded in Python: of numbers, of the instance's own tensors.
LONG = 0.05
ROWS, STACKS = 8, 3  # of a stack that may be packed; how many an instance has at most
_STACK, _SELECT = torch.ops.aten.stack.default, torch.ops.aten.select.int
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


# Calls that take long for their numbers; of a recurrent layer, each step, of which its output has as many.
_HEAVY = {
    torch.ops.aten.convolution.default: CONVOLUTION,
    torch.ops.aten.mkldnn_rnn_layer.default: LAYER_STEP,
}
_DETACH, _TRANSPOSE = torch.ops.aten.detach.default, torch.ops.aten.t.default


_ENGINE = "torch.autograd.graph"  # whose frame calls autograd's engine


def _of_a_transform(frame: FrameType) -> bool:
    """Whether torch.func asked autograd's engine, for torch.func.grad and the like."""
    asks = frame.f_back and frame.f_back.f_back
    return asks is not None and asks.f_globals.get("__name__", "").startswith("torch._functorch")


class _Kind:
    """Calls of one function on tensors of the same shapes."""

    __slots__ = ("chain", "instances", "last")

    def __init__(self) -> None:
        self.instances = 0  # that make such calls
        self.chain = 0  # the most in one instance that follow one another
        self.last = -1  # the last instance that made one


class Seen:
    """The calls of the instances that were watched. `waits`: how often one asked for values."""

    def __init__(self) -> None:
        self.instances = 0
        self.calls = self.modules = self.operators = self.views = self.nodes = self.recorded = 0
        self.waits = self.elements = 0
        self.heavy = 0.0
        self.stacks = 0  # of many rows
        self.derivatives = False  # whether torch.autograd.grad runs in the forward, which can't be recorded
        self.most_nodes = 0  # of one instance; what hangs on more of them was made by others
        self.products = Products()
        self.phases = 0  # the most that one instance waits for
        self.kinds: dict[Any, _Kind] = {}
        self.alone: dict[Any, int] = {}  # calls of kinds that only one instance makes

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the calls of one instance."""
        if self.instances >= MOST_REMEMBERED:
            self.__init__()  # type: ignore[misc]  # begin anew
        watch = _Watch()
        with watch:
            yield
        self._add(watch)

    def gave(self, result: Any) -> None:
        """What the instance gave that was watched last: what of its calls is gone through backward."""
        self.nodes += _nodes(result, self.most_nodes)

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
        self.most_nodes = 2 * (watch.operators + watch.views)
        self.calls += watch.calls
        self.modules += watch.modules
        self.operators += watch.operators
        self.views += watch.views
        self.heavy += watch.heavy
        self.stacks += watch.stacks
        self.derivatives |= watch.derivatives
        self.elements += watch.elements
        self.products += watch.products
        self.recorded += watch.recorded
        self.waits += watch.waits
        self.phases = max(self.phases, watch.groups)

    @property
    def eager(self) -> Eager:
        """Calls of one instance on average."""
        n = max(1, self.instances)
        return Eager(
            self.calls / n, self.modules / n, self.operators / n, self.views / n, self.nodes / n,
            self.heavy / n, self.elements / n, self.products / n,
        )  # fmt: skip

    @property
    def as_it_is(self) -> float:
        """The share of the calls that runs instance by instance in a batched minibatch too: none of it is recorded."""
        return 1.0 if self.derivatives else 1.0 - self.recorded / max(1, self.calls)

    @property
    def operations(self) -> int:
        """About how many operations would have to be built."""
        found = len(self.kinds)
        if self.packs_stacks:
            found += len(self._families()) - len(self.alone)
        return math.ceil(found * OPERATIONS)

    @property
    def packs_stacks(self) -> bool:
        """Whether calls on stacks of many rows, another number in each instance, would be packed."""
        return 0 < self.stacks <= STACKS * self.instances

    def _families(self) -> dict[Any, int]:
        """Calls of kinds that only one instance makes, by what they are besides their sizes: the most of one kind."""
        found: dict[Any, int] = {}
        for key in self.alone:
            func, inside, *shapes = key
            family = (func, inside, *map(len, shapes))
            found[family] = max(found.get(family, 0), self.kinds[key].chain)
        return found

    def expected(self, instances: int, *, grad: bool) -> Counts:
        """About what a minibatch of so many such instances is made of, all graphs being built.

        A kind of call that most instances make takes as many steps as the longest chain of one instance. Kinds that
        were seen in one instance alone, as those of tensors whose size is the instance's, are taken to be new in each.
        """
        n = max(1, self.instances)
        steps = alone = 0.0
        for key, kind in self.kinds.items():
            if n > 1 and key in self.alone:
                alone += self.alone[key]
            else:
                some = 1.0 - (1.0 - kind.instances / n) ** instances
                steps += kind.chain * some * (MODULE_STEPS if key[1] else STEPS)
        packed = sum(self._families().values()) if self.packs_stacks else 0
        new = 0 if packed else instances * alone / n
        recorded = RECORDED * self.recorded / n
        return Counts(
            instances,
            calls=round(instances * recorded),
            long_calls=round(instances * LONG * max(0, self.recorded - self.modules) / n),
            steps=round(steps),
            python_steps=packed,
            unbatched=round(new),
            phases=1 + self.phases + (packed > 0),
            waits=round(instances * self.waits / n),
            grad=grad,
        )


def _nodes(result: Any, most: int) -> int:
    """How many nodes of autograd's graph a result hangs on; `most` where there is more, which others made."""
    todo = [x.grad_fn for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    found: set[Any] = set()
    while todo and len(found) < most:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [before for before, _ in node.next_functions]
    return len(found)


class _Watch(QuietDispatchMode):
    """Counts calls of torch functions: by function and shapes, and how deep each stands below what there was before.

    What is seen are calls of ATen. Those that come from the same instruction of the same Python frame are one call, of
    a linear layer or a cell, up to where the first of them comes again, as in a loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.modules = self.operators = self.views = self.recorded = self.waits = self.groups = (
            self.elements
        ) = 0
        self.heavy = 0.0
        self.stacks = 0
        self.derivatives = False
        self.products = Products()
        self.kinds: dict[Any, tuple[int, set[int]]] = {}
        self._depths: dict[int, int] = {}  # by id; one that is used again is only counted wrongly
        self._recorded: set[int] = set()  # ids of what comes of vectors, which batching would record
        self._pending = 0  # calls since the last time that a value was asked for
        self._place: tuple[int, int] = (0, 0)
        self._first: Any = None  # the first call of ATen of the call that runs
        self._mine: set[int] = set()  # what it has made so far
        self._depth = 0
        self._in_module = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.call(func, args, kwargs)
        if func is _DETACH:  # what autograd saves
            return out
        if func is _TRANSPOSE:  # of weights, which says nothing of the call's size
            self.views += 1
            return out
        frame = sys._getframe(1)
        place = (id(frame), frame.f_lasti)
        tensors = [
            t
            for a in args
            for t in (a if isinstance(a, (list, tuple)) else (a,))
            if isinstance(t, torch.Tensor)
        ]
        is_recorded = any(id(t) in self._recorded or (t.dim() > 0 and t.is_floating_point()) for t in tensors)
        if func is _ASK and not is_recorded:  # numbers of the instance's own tensors are there
            self.operators += 1
            return out
        begins = place != self._place or func is self._first
        if begins:
            self._place, self._first, self._depth = place, func, 0
            self._mine.clear()
            name = frame.f_globals.get("__name__", "")
            self._in_module = name.startswith("torch.nn.")
            self.modules += self._in_module
            self.derivatives |= name == _ENGINE and not _of_a_transform(frame)
        if func.is_view:
            self.views += 1
        else:
            self.operators += 1
            if func in _HEAVY:
                self.heavy += _HEAVY[func] * (len(out[0]) if type(out) is tuple else 1)
        for t in tensors:
            if id(t) not in self._mine:
                self._depth = max(self._depth, self._depths.get(id(t), 0) + 1)
        if func is _ASK or (func in _BY_MASK and any(t.dtype is torch.bool for t in tensors)):
            self.calls += begins
            self.waits += is_recorded
            self.groups += self._pending > 0
            self._pending = 0
        elif begins:
            self.calls += 1
        if begins and is_recorded and func is not _ASK:
            self.recorded += 1
            self._pending += 1
            self.stacks += func is _STACK and len(tensors) >= ROWS
            shapes = [t.shape for t in tensors]
            if func is _SELECT and len(args) == 3 and args[1] == 0:  # a row, of however many
                shapes = [torch.Size((0, *t.shape[1:])) for t in tensors]
            key = (func, self._in_module, *shapes)
            count, depths = self.kinds.get(key, (0, set()))
            depths.add(self._depth)
            self.kinds[key] = (count + 1, depths)
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, torch.Tensor):
                self._depths[id(t)] = self._depth
                (self._recorded.add if is_recorded else self._recorded.discard)(id(t))
                self.elements += 0 if func.is_view else t.numel()
                self._mine.add(id(t))
                if func in _PRODUCTS and tensors:
                    rows = t.shape[-2] if t.dim() > 1 else 1
                    self.products += Products.of(rows, t.numel() * tensors[_PRODUCTS[func]].shape[-1])
        return out
