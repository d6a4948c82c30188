"""A per-instance body becomes one graph of batched values and gradients, with `n` rows as an argument.

In: the body `(*groups, *shared)`. Out: the joint graph
`(n, *groups, *shared, *output gradients) -> (*outputs, *group gradients, *shared gradients)`.
It is recorded at a number of rows that is no factor of any size: integers that are multiples of it grow with the
rows, and become nodes. Recorded at two, those that differ are `a * n + b`. The graphs are compared with eager at other
numbers of rows (check.py): where they differ, two recordings say more; where they can't be compared, three must agree.
A single recording is of tensors on "meta", if one device and no autocast make these as good as fake ones, at a sixth of
the time.

    joint = batch_body(body, signature, layout, input_needs, shared_needs, shared, mode)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.body import (
    Call,
    Result,
    Tape,
    devices_of,
    entered_modes,
    fake_rows,
    fake_shared,
    gradients_of,
    only_device,
    record,
    run,
)
from fxbatch.codegen.operation_graphs import NotBatchable, fit, run_graph, size_argument
from fxbatch.ir import Layout, Signature
from fxbatch.torch_private import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    elementwise_under_vmap,
    has_vmap_rule,
    no_vmap_fallback,
)

aten = torch.ops.aten
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)


@dataclass(frozen=True, eq=False)
class Joint:
    """The joint graph and which of its placeholders and results are which (rewrites may replace results)."""

    module: fx.GraphModule
    groups: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]
    output_gradients: tuple[fx.Node, ...]
    present: tuple[bool, ...]  # which groups, then which shared operands, have gradients

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self.results[: len(self.output_gradients)]

    @property
    def gradients(self) -> list[fx.Node | None]:
        """A gradient or None for each group, then for each shared operand."""
        left = iter(self.results[len(self.output_gradients) :])
        return [next(left) if p else None for p in self.present]

    @property
    def group_gradients(self) -> list[fx.Node | None]:
        return self.gradients[: len(self.groups)]

    @property
    def shared_gradients(self) -> list[fx.Node | None]:
        return self.gradients[len(self.groups) :]


def sample_rows(signature: Signature, shared: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Three numbers of rows, the first two far apart, that are no size in the signature nor a factor of one."""
    sizes = {d for t in (*signature.inputs, *signature.outputs) for d in t.shape}
    sizes |= {d for x in shared for d in x.shape}
    free = [p for p in _PRIMES if all(s == 0 or (s % p and p % max(s, 2)) for s in sizes)]
    first, second, *_, last = free if len(free) >= 3 else [*free, 107, 109, 113]
    return first, last, second


def batch_body(
    body: fx.GraphModule,
    signature: Signature,
    layout: Layout,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    mode: Callable[[], FakeTensorMode],
    zeros: Sequence[tuple[bool, int]] = (),
    recordings: int = 3,
) -> Joint:
    """Record the joint calls at one (of tensors on "meta"), two or three numbers of rows and make one graph of them.

    `zeros`: (is a shared operand, index) of those whose gradient is zeros where there is no path to them. `recordings`:
    of three, the last has to give the same graph as the others; three are made where random numbers keep the graphs
    from being compared with eager, whose numbers of rows are others. One is enough where there is an `only_device`.
    """
    sizes = sample_rows(signature, shared)
    device = recorded_on(body, signature, shared) if recordings == 1 else None
    needs = [any(input_needs[m] for m in group) for group in layout.groups]
    filled = [any((False, m) in zeros for m in group) for group in layout.groups]
    filled += [(True, i) in zeros for i in range(len(shared))]
    forms = mode() if device is None else None
    recorded: dict[int, tuple[Tape, tuple[bool, ...]]] = {}
    operands = needs, shared_needs, shared, forms, filled
    for n in (sizes[1], sizes[0], sizes[2]):
        if len(recorded) < recordings or recorded[sizes[1]][0].random:
            recorded[n] = _record_joint(body, signature, layout, n, *operands)
    once, present = recorded[sizes[1]]
    if any(other != present for _, other in recorded.values()):
        raise NotBatchable("different gradients exist at different numbers of rows")
    tapes = [recorded[n][0] if n in recorded else None for n in sizes]
    tapes[0] = tapes[0] or _scaled(once, sizes[1], sizes[0])
    kinds = {"groups": len(layout.groups), "weights": len(shared), "gradients": len(signature.outputs)}
    return _unify([tape for tape in tapes if tape], sizes, present, kinds, device)


def recorded_on(
    body: fx.GraphModule, signature: Signature, shared: Sequence[torch.Tensor]
) -> torch.device | None:
    """The `only_device` of an operation; None where a call of its body gives other forms on "meta"."""
    other = any(node.target is _BATCH_NORM for node in body.graph.nodes)
    return None if other else only_device(signature, shared)


# It gives no statistics where it doesn't train, on the CPU alone.
_BATCH_NORM = torch.ops.aten.native_batch_norm.default


def _scaled(tape: Tape, n: int, rows: int) -> Tape:
    """What a tape that was recorded at n rows is at others, if what is a multiple of n there is one of the rows."""

    def scaled(x: Any) -> Any:
        if type(x) is int:
            return x if x % n else x // n * rows
        if isinstance(x, torch.Tensor) and x.device.type == "meta" and x.layout is torch.strided:
            shape, strides = map(scaled, x.shape), map(scaled, x.stride())
            return torch.empty_strided(tuple(shape), tuple(strides), dtype=x.dtype, device="meta")
        if isinstance(x, (list, tuple)):
            return tuple(map(scaled, x)) if hasattr(x, "_fields") else type(x)(map(scaled, x))
        return {key: scaled(y) for key, y in x.items()} if type(x) is dict else x

    calls = [Call(x.target, scaled(x.args), scaled(x.kwargs), scaled(x.value)) for x in tape.calls]
    return Tape(calls, scaled(tape.results))


def _record_joint(
    body: fx.GraphModule,
    signature: Signature,
    layout: Layout,
    n: int,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    mode: FakeTensorMode | None,
    filled: Sequence[bool],
) -> tuple[Tape, tuple[bool, ...]]:
    """The calls of `(*groups, *shared, *output gradients, dummy)`, and which gradients exist."""
    groups = []
    for group, need in zip(layout.groups, needs, strict=True):
        lead = (n,) if len(group) == 1 else (n, len(group))
        kind = signature.inputs[group[0]]
        groups.append(fake_rows(mode, kind, *lead).requires_grad_(need and kind.differentiable))
    weights = [
        x.requires_grad_(need and (x.is_floating_point() or x.is_complex()))
        for x, need in zip(fake_shared(mode, shared), shared_needs, strict=True)
    ]
    gradients = [fake_rows(mode, kind, n) for kind in signature.outputs]
    present: list[bool] = []

    def joint(*_: torch.Tensor) -> list[object]:
        with entered_modes(signature.modes, devices_of(signature)):
            outputs = _run_batched(body, groups, weights, dummy)
        slots = gradients_of(outputs, gradients, [*groups, *weights])
        for i, x in enumerate((*groups, *weights)):
            if slots[i] is None and filled[i]:  # zeros that don't depend on x
                slots[i] = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
        present[:] = [slot is not None for slot in slots]
        return [*outputs, *(slot for slot in slots if slot is not None)]

    with mode or contextlib.nullcontext(), no_vmap_fallback(), torch.set_grad_enabled(signature.modes.grad):
        dummy = fake_rows(mode, signature.outputs[0], n) if signature.outputs else torch.empty(n)
        operands = [*groups, *weights, *gradients, dummy]
        tape = record(joint, operands)
        if tape.writes:
            with torch.no_grad():
                first = tape
                tape = record(torch.func.functionalize(lambda *xs: run(first, xs)), operands)
        for target in tape.writes:
            raise NotBatchable(f"{target} writes to a tensor that the operation was given")
    return tape, tuple(present)


def _run_batched(body: fx.GraphModule, groups: Any, weights: Any, dummy: torch.Tensor) -> list[torch.Tensor]:
    """vmap over the groups; the dummy says how many rows there are when there are no groups."""
    count = len(groups)

    def call(dummy: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(run_graph(body, tensors, _under_vmap))

    dims = (0, *([0] * count), *([None] * len(weights)))
    return list(torch.func.vmap(call, in_dims=dims, randomness="different")(dummy, *groups, *weights))


def _under_vmap(target: Any) -> Any:
    """What calls a target: elementwise calls that vmap has no rule for are made on the whole batch."""
    by_elements = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    if by_elements and not has_vmap_rule(target):
        return functools.partial(elementwise_under_vmap, target)
    return target


def _unify(
    tapes: list[Tape],
    sizes: tuple[int, int, int],
    present: tuple[bool, ...],
    kinds: dict[str, int],
    device: torch.device | None,
) -> Joint:
    """One graph of tapes that must agree up to integers linear in the number of rows."""
    if len({len(tape.calls) for tape in tapes}) > 1:
        raise NotBatchable(f"different graphs at {sizes[0]} and {sizes[1]} rows")
    graph, root = fx.Graph(), torch.nn.Module()
    rows = graph.placeholder("n")
    rows.meta["values"] = sizes[:2]
    if device is not None:
        rows.meta["device"] = device
    names = [f"{kind}_{i + 1}" for kind, count in (*kinds.items(), ("dummy", 1)) for i in range(count)]
    unifier = _Unifier(graph, root, rows, sizes, names)
    for calls in zip(*(tape.calls for tape in tapes), strict=True):
        unifier.nodes.append(unifier.node(*calls))
    results = unifier.argument(*(tape.results for tape in tapes))
    places = [node for node in graph.nodes if node.op == "placeholder"][1:]
    graph.erase_node(places.pop())  # the dummy
    graph.output(tuple(results))
    left = iter(places)
    groups, weights, gradients = (tuple(itertools.islice(left, count)) for count in kinds.values())
    return Joint(LazyGraphModule(root, graph), groups, weights, gradients, present)


@dataclass
class _Unifier:
    """Builds one node of calls that must agree up to integers linear in the number of rows."""

    graph: fx.Graph
    root: torch.nn.Module  # has the constants
    rows: fx.Node
    sizes: tuple[int, int, int]
    names: Sequence[str]  # of placeholders
    nodes: list[fx.Node] = field(default_factory=list)  # of the calls so far

    def node(self, a: Call, *others: Call) -> fx.Node:
        if not all(x.target == a.target for x in others):
            raise NotBatchable(f"different graphs at {self.sizes[0]} and {self.sizes[1]} rows ({a.target})")
        if a.target == "placeholder":
            new = self.graph.placeholder(self.names[len(self.nodes)])
        elif a.target == "constant":
            new = self.constant(a.value, *(x.value for x in others))
        else:
            args = self.argument(a.args, *(x.args for x in others))
            kwargs = self.argument(a.kwargs, *(x.kwargs for x in others))
            new = self.graph.call_function(a.target, args, kwargs)
        new.meta["values"] = (_form(a.value), _form(others[0].value))
        return new

    def constant(self, a: torch.Tensor, *others: torch.Tensor) -> fx.Node:
        if not all(x is a or _same(x, a) for x in others):
            raise NotBatchable(f"a tensor at {self.sizes[0]} rows is another at {self.sizes[1]}")
        name = f"_tensor_constant{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, a)
        return self.graph.get_attr(name)

    def argument(self, a: object, *others: Any) -> Any:
        if isinstance(a, Result):
            if any(x != a for x in others):
                raise NotBatchable(f"different graphs at {self.sizes[0]} and {self.sizes[1]} rows")
            return self.nodes[a.index]
        if isinstance(a, (list, tuple)):
            if any(len(x) != len(a) for x in others):
                raise NotBatchable(f"different graphs at {self.sizes[0]} and {self.sizes[1]} rows")
            return type(a)([self.argument(*xs) for xs in zip(a, *others, strict=True)])
        if isinstance(a, dict):
            return {key: self.argument(a[key], *(x[key] for x in others)) for key in a}
        if isinstance(a, torch.device) and "device" in self.rows.meta:
            return self.rows.meta["device"]
        alike = all(type(x) is type(a) for x in others)
        if alike and (a != a or all(x == a for x in others)):
            return a
        if not alike or type(a) is not int:
            raise NotBatchable(f"{a} at {self.sizes[0]} rows is {others[0]} at {self.sizes[1]}")
        return self.linear(a, *others)

    def linear(self, a: int, b: int, *others: int) -> int | fx.Node:
        factor, rest = fit(a, b, self.sizes[:2])
        if any(factor * self.sizes[2] + rest != c for c in others):
            raise NotBatchable(f"{a}, {b}, {others[0]} at {self.sizes} rows are not linear in the rows")
        return size_argument(self.graph, (factor, rest))


def _form(value: object) -> object:
    """A value without what autograd knows of it."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    return type(value)(map(_form, value)) if isinstance(value, (list, tuple)) else value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two constants are one; what a fake tensor stands for is not known."""
    return not isinstance(a, FakeTensor) and not isinstance(b, FakeTensor) and torch.equal(a, b)
