"""A per-instance body becomes one graph of batched values and gradients, with `n` rows as an argument.

In: the body `(*groups, *shared)`. Out: the joint graph
`(n, *groups, *shared, *output gradients) -> (*outputs, *group gradients, *shared gradients)`.
It is traced at two numbers of rows; integers that differ are `a * n + b` and become nodes; a third number
of rows must give the same graph.

    joint = batch_body(body, signature, layout, input_needs, shared_needs, shared, mode)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxbatch.codegen.body import (
    devices_of,
    entered_modes,
    fake_rows,
    fake_shared,
    gradients_of,
    mutates,
)
from fxbatch.codegen.operation_graphs import NotBatchable
from fxbatch.codegen.shapes import evaluate, fit, rows_node
from fxbatch.ir import Layout, Signature
from fxbatch.torch_private import (
    FakeTensorMode,
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

    def graph_rows(self) -> fx.Node:
        """The placeholder n."""
        return rows_node(self.module.graph)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self.results[: len(self.output_gradients)]

    @property
    def gradients(self) -> list[fx.Node | None]:
        """A gradient or None for each group, then for each shared operand."""
        found = iter(self.results[len(self.output_gradients) :])
        return [next(found) if p else None for p in self.present]

    @property
    def group_gradients(self) -> list[fx.Node | None]:
        return self.gradients[: len(self.groups)]

    @property
    def shared_gradients(self) -> list[fx.Node | None]:
        return self.gradients[len(self.groups) :]


def sample_rows(signature: Signature, shared: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Three numbers of rows that are no size in the signature nor a factor of one."""
    sizes = {d for t in (*signature.inputs, *signature.outputs) for d in t.shape}
    sizes |= {d for x in shared for d in x.shape}
    free = [p for p in _PRIMES if all(s == 0 or (s % p and p % max(s, 2)) for s in sizes)]
    picked = (free if len(free) >= 3 else [*free, 107, 109, 113])[:3]
    return picked[0], picked[1], picked[2]


def batch_body(
    body: fx.GraphModule,
    signature: Signature,
    layout: Layout,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    zeros: Sequence[tuple[bool, int]] = (),
) -> Joint:
    """Trace the joint graph at three numbers of rows and make one graph of it.

    `zeros`: (is a shared operand, index) of those whose gradient is zeros where there is no path to them.
    """
    sizes = sample_rows(signature, shared)
    needs = [any(input_needs[m] for m in group) for group in layout.groups]
    filled = [any((False, m) in zeros for m in group) for group in layout.groups]
    filled += [(True, i) in zeros for i in range(len(shared))]
    traced = [
        _trace_joint(body, signature, layout, n, needs, shared_needs, shared, mode, filled) for n in sizes
    ]
    present = traced[0][1]
    if any(other[1] != present for other in traced[1:]):
        raise NotBatchable("different gradients exist at different numbers of rows")
    return _unify([t[0] for t in traced], sizes, present, len(layout.groups), shared)


def _trace_joint(
    body: fx.GraphModule,
    signature: Signature,
    layout: Layout,
    n: int,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    filled: Sequence[bool],
) -> tuple[fx.GraphModule, tuple[bool, ...]]:
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

    def joint(groups: Any, weights: Any, gradients: Any, dummy: torch.Tensor) -> list[torch.Tensor]:
        with entered_modes(signature.modes, devices_of(signature)):
            outputs = _run_batched(body, groups, weights, dummy)
        slots = gradients_of(outputs, gradients, [*groups, *weights])
        for i, x in enumerate((*groups, *weights)):
            slots[i] = _zeros(x) if slots[i] is None and filled[i] else slots[i]
        present[:] = [slot is not None for slot in slots]
        return [*outputs, *(slot for slot in slots if slot is not None)]

    with mode, no_vmap_fallback(), torch.set_grad_enabled(signature.modes.grad):
        dummy = torch.empty(n, device=signature.outputs[0].device if signature.outputs else "cpu")
        module = make_fx(joint)(groups, weights, gradients, dummy)
        if any(mutates(node) for node in module.graph.nodes):
            with torch.no_grad():
                module = make_fx(torch.func.functionalize(module))(groups, weights, gradients, dummy)
    for node in module.graph.nodes:
        if mutates(node):
            raise NotBatchable(f"{node.target} writes to a tensor that the operation was given")
    return module, tuple(present)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    """Zeros of the form of x that don't depend on x."""
    return torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)


def _run_batched(body: fx.GraphModule, groups: Any, weights: Any, dummy: torch.Tensor) -> list[torch.Tensor]:
    """vmap over the groups; the dummy says how many rows there are when there are no groups."""
    count = len(groups)
    run = _ElementwiseInterpreter(body).run if _needs_elementwise(body) else body

    def call(dummy: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(run(*tensors))

    dims = (0, *([0] * count), *([None] * len(weights)))
    return list(torch.func.vmap(call, in_dims=dims, randomness="different")(dummy, *groups, *weights))


def _is_elementwise_without_rule(target: Any) -> bool:
    overload = isinstance(target, torch._ops.OpOverload)
    return overload and torch.Tag.pointwise in target.tags and not has_vmap_rule(target)


def _needs_elementwise(body: fx.GraphModule) -> bool:
    return any(_is_elementwise_without_rule(node.target) for node in body.graph.nodes)


class _ElementwiseInterpreter(fx.Interpreter):
    """Runs a body in vmap; elementwise calls that vmap has no rule for are made on the whole batch."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if _is_elementwise_without_rule(target):
            return elementwise_under_vmap(target, *args, **kwargs)
        return super().call_function(target, args, kwargs)


def _unify(
    modules: list[fx.GraphModule],
    sizes: tuple[int, int, int],
    present: tuple[bool, ...],
    groups: int,
    shared: Sequence[torch.Tensor],
) -> Joint:
    lists = [list(m.graph.nodes) for m in modules]
    if len({len(nodes) for nodes in lists}) > 1:
        raise NotBatchable(f"different graphs at {sizes[0]} and {sizes[1]} rows")
    graph = fx.Graph()
    rows = graph.placeholder("n")
    rows.meta["values"] = sizes[:2]
    known: list[dict[fx.Node, fx.Node]] = [{}, {}, {}]
    unifier = _Unifier(graph, rows, sizes, known)
    places: list[fx.Node] = []
    results: list[fx.Node] = []
    for triple in zip(*lists, strict=True):
        new = unifier.node(*triple)
        if triple[0].op == "placeholder":
            places.append(new)
        elif triple[0].op == "output":
            results = list(new.args[0])
            graph.erase_node(new)
            continue
        for table, old in zip(known, triple, strict=True):
            table[old] = new
    graph.erase_node(places.pop())  # the dummy
    graph.output(tuple(results))
    first_gradient = groups + len(shared)
    return Joint(
        fx.GraphModule(modules[0], graph),
        tuple(places[:groups]),
        tuple(places[groups:first_gradient]),
        tuple(places[first_gradient:]),
        present,
    )


@dataclass
class _Unifier:
    """Builds one node of three that must agree up to integers linear in the number of rows."""

    graph: fx.Graph
    rows: fx.Node
    sizes: tuple[int, int, int]
    known: list[dict[fx.Node, fx.Node]]

    def node(self, a: fx.Node, b: fx.Node, c: fx.Node) -> fx.Node:
        same_target = a.target == b.target == c.target or a.op in ("placeholder", "get_attr", "output")
        if not (a.op == b.op == c.op and same_target):
            raise NotBatchable(f"different graphs at {self.sizes[0]} and {self.sizes[1]} rows ({a.target})")
        args = self.argument(a.args, b.args, c.args)
        kwargs = self.argument(a.kwargs, b.kwargs, c.kwargs)
        new = self.graph.create_node(a.op, a.target, args, kwargs)
        if a.op == "get_attr":
            new.meta["values"] = tuple(getattr(x.graph.owning_module, str(x.target)) for x in (a, b))
        elif "val" in a.meta:
            new.meta["values"] = (a.meta["val"], b.meta["val"])
        elif a.op != "output":
            new.meta["values"] = evaluate(new.target, new.args, new.kwargs)
        return new

    def argument(self, a: Any, b: Any, c: Any) -> Any:
        if isinstance(a, fx.Node):
            mapped = [self.known[i].get(x) for i, x in enumerate((a, b, c))]
            if mapped[0] is not mapped[1] or mapped[1] is not mapped[2]:
                raise NotBatchable(f"different graphs at {self.sizes[0]} and {self.sizes[1]} rows")
            return mapped[0]
        if isinstance(a, (list, tuple)):
            if not len(a) == len(b) == len(c):
                raise NotBatchable(f"different graphs at {self.sizes[0]} and {self.sizes[1]} rows")
            return type(a)([self.argument(*xs) for xs in zip(a, b, c, strict=True)])
        if isinstance(a, dict):
            return {key: self.argument(a[key], b[key], c[key]) for key in a}
        if type(a) is int and type(b) is int and type(c) is int and not a == b == c:
            return self.linear(a, b, c)
        if type(a) is not type(b) or not (a == b == c or a != a):
            raise NotBatchable(f"{a} at {self.sizes[0]} rows is {b} at {self.sizes[1]}")
        return a

    def linear(self, a: int, b: int, c: int) -> fx.Node:
        factor, rest = fit(a, b, self.sizes[:2])
        if factor * self.sizes[2] + rest != c:
            raise NotBatchable(f"{a}, {b}, {c} at {self.sizes} rows are not linear in the rows")
        node = self.rows
        for function, operand in ((operator.mul, factor), (operator.add, rest)):
            if operand != (1 if function is operator.mul else 0):
                values = tuple(function(v, operand) for v in node.meta["values"])
                node = self.graph.call_function(function, (node, operand))
                node.meta["values"] = values
        return node
