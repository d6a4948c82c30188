"""What a minibatch costs, in microseconds, from counts alone: batched, and one by one.

In: counts of a minibatch that was recorded (`Counts`), or of the calls of the plain loop (`Eager`). Out: estimates,
good to about a factor of 1.5, made of constants that were measured once and are shipped, so that equal counts give
equal choices on every machine and every run. How they were measured: docs/strategy.md.

    batched_cost(Counts(instances=64, calls=6592, steps=28, grad=True))      # 12,000
    loop_cost(Eager(calls=300, operators=640, nodes=500), instances=64, grad=True)           # 199,000
"""

from __future__ import annotations

from dataclasses import dataclass

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
