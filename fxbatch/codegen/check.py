"""Operation graphs against per-row eager, values and gradients, on real numbers.

A wrong batching rule anywhere below makes this raise NotBatchable, so that the operation runs call by call.

    checked = check_graphs(graphs, input_needs, shared_needs, shared)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from fxbatch.codegen.body import (
    devices_of,
    embedding_sparse_gradient,
    entered_modes,
    gradients_of,
    rows_of_table,
)
from fxbatch.codegen.operation_graphs import NotBatchable, OperationGraphs, Ref, run_graph
from fxbatch.ir import Signature, TensorSpec
from fxbatch.judge import dense, differences, draws, on_common_rows
from fxbatch.torch_private import QuietDispatchMode

aten = torch.ops.aten
T = TypeVar("T")
_LARGE = 1 << 16  # elements of a table from which on its gradient is compared on the rows that were looked up
# What operations raise for such numbers.
_OUT_OF_DOMAIN = (RuntimeError, ValueError, IndexError, ArithmeticError)
Rows = list[torch.Tensor]
Numbers = Callable[[TensorSpec, int, torch.Generator], torch.Tensor]


class ZeroGradient(NotBatchable):
    """Eager's gradient is zeros where the graphs have none; they are built again with zeros there."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(f"the gradient of {what} {index} is missing")
        self.shared, self.index = what != "input", index


class _SparseTables(QuietDispatchMode):
    """Gradients of large tables are sparse, in eager and in the graphs, so that what a check takes does not grow.

    shapes: of the tables. Zeros of such a shape are a sparse tensor without rows, which rows are added to.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func is aten.embedding_dense_backward.default and not args[4]:
            grad, indices, rows, padding, _ = args
            if (rows, grad.shape[-1]) in self.shapes:
                return embedding_sparse_gradient(grad, indices, rows, padding)
        elif func is aten._embedding_bag_backward.default and (args[6], args[0].shape[-1]) in self.shapes:
            if not args[7] and args[8] < 2:  # no scaling by frequency, sums or means
                return func(*args[:9], True, *args[10:], **kwargs)
        elif func is aten.new_zeros.default and tuple(args[1]) in self.shapes:
            like, shape = args[:2]
            return rows_of_table(shape, like.new_zeros(0, dtype=torch.int64), like.new_zeros(0, *shape[1:]))
        elif func in _ADDITIONS and args[0].is_sparse:
            return _ADDITIONS[func](*args, **kwargs)
        elif func is aten.select_backward.default and args[2] == 0 and tuple(args[1]) in self.shapes:
            grad, shape, _, index = args
            at = torch.tensor([index % shape[0]], device=grad.device)
            return rows_of_table(shape, at, grad.unsqueeze(0))
        return self.call(func, args, kwargs)


class _OnHost(QuietDispatchMode):
    """What is made on a device is made on the host."""

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return self.call(func, args, kwargs)


def _index_add(x: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if dim:
        raise NotImplementedError("rows of a table")
    return x + rows_of_table(x.shape, index, rows)


def _index_put(
    x: torch.Tensor, indices: Any, rows: torch.Tensor, accumulate: bool, *_: object
) -> torch.Tensor:
    (index,) = indices
    if not accumulate or index.dtype is torch.bool:
        raise NotImplementedError("rows of a table")
    flat = rows.expand(*index.shape, *x.shape[1:]).reshape(-1, *x.shape[1:])
    return x.add_(rows_of_table(x.shape, index.reshape(-1) % x.shape[0], flat))


_ADDITIONS: dict[object, Callable[..., torch.Tensor]] = {
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
}


def _lean(shared: Sequence[torch.Tensor], run: Callable[[], T]) -> T:
    """The result of `run()`, with sparse gradients for large tables if everything that is done to them allows it."""
    shapes = {tuple(x.shape) for x in shared if x.numel() >= _LARGE and x.dim() > 1}
    if not shapes:
        return run()
    try:
        with _SparseTables(shapes):
            return run()
    except _OUT_OF_DOMAIN:
        return run()


def _normal(kind: TensorSpec, n: int, gen: torch.Generator, low: int = 0, high: int = 2) -> torch.Tensor:
    """Normal numbers; integers from `low` on that are less than `high`."""
    if kind.differentiable:
        wide = torch.complex128 if kind.dtype.is_complex else torch.float64
        return torch.randn(n, *kind.shape, generator=gen, dtype=wide, device="cpu").to(
            kind.device, kind.dtype
        )
    if kind.dtype is torch.bool:
        low, high = 0, 2
    return torch.randint(low, high, (n, *kind.shape), generator=gen, device="cpu").to(kind.device, kind.dtype)


def _positive(kind: TensorSpec, n: int, gen: torch.Generator) -> torch.Tensor:
    x = _normal(kind, n, gen)
    return (x.abs() / (1 + x.abs())).to(kind.dtype) if kind.differentiable else torch.zeros_like(x)


def _definite(kind: TensorSpec, n: int, gen: torch.Generator) -> torch.Tensor:
    x = _normal(kind, n, gen)
    square = len(kind.shape) >= 2 and kind.shape[-1] == kind.shape[-2] and kind.differentiable
    return (x @ x.mH + torch.eye(kind.shape[-1], dtype=x.dtype, device=x.device)) if square else x


_DRAWS: tuple[Numbers, ...] = (_normal, _positive, _definite)


class ValuesAndGradients(NamedTuple):
    """An operation's outputs, and the gradients of its inputs and shared operands: None if there is none."""

    outputs: Rows
    inputs: list[torch.Tensor | None]
    shared: list[torch.Tensor | None]

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [*self.inputs, *self.shared]

    @property
    def all(self) -> list[torch.Tensor | None]:
        return [*self.outputs, *self.gradients]


@dataclass(frozen=True)
class _Eager:
    """An operation one row at a time, and which operands gradients are asked for of."""

    signature: Signature
    needs: Sequence[bool]  # of inputs
    shared_needs: Sequence[bool]
    shared: Sequence[torch.Tensor]

    def draw(self, draw: Numbers, n: int, seed: int) -> tuple[Rows, Rows]:
        """Numbers for the inputs, and gradients for the outputs."""
        gen = torch.Generator().manual_seed(seed)
        inputs = [draw(kind, n, gen) for kind in self.signature.inputs]
        return inputs, [_normal(kind, n, gen) for kind in self.signature.outputs]

    def run(self, inputs: Rows, grads: Rows, n: int) -> ValuesAndGradients | None:
        """One row at a time, gradients `given`; None where the numbers are not in this operation's domain."""
        try:
            if any(x.device.type != "cpu" for x in (*inputs, *self.shared)):
                self.run_on_host(inputs, n)
            return _lean(self.shared, lambda: self._run(inputs, grads, n))
        except _OUT_OF_DOMAIN:
            return None

    def run_on_host(self, inputs: Rows, n: int) -> None:
        """Its forward on copies of the numbers. Raises where one is out of range: a label, an index, a probability. On
        CUDA that would be no exception but an assertion, after which the process can't use the device any more."""
        rows = [x.detach().cpu().requires_grad_(need) for x, need in zip(inputs, self.needs, strict=True)]
        with _OnHost():
            for i in range(n):
                self.signature.run([x[i].clone() for x in rows], self._shared_on_host)

    @cached_property
    def _shared_on_host(self) -> Rows:
        return [x.detach().cpu() for x in self.shared]

    def _run(self, inputs: Rows, grads: Rows, n: int) -> ValuesAndGradients:
        signature = self.signature
        rows = [x.detach().clone().requires_grad_(need) for x, need in zip(inputs, self.needs, strict=True)]
        weights = [  # as they are: bodies that write to them are refused before
            x.detach().requires_grad_(need and (x.is_floating_point() or x.is_complex()))
            for x, need in zip(self.shared, self.shared_needs, strict=True)
        ]
        with entered_modes(signature.modes, devices_of(signature)):
            # copies, here and of gradients: as_strided counts from the start of memory
            results = [signature.run([x[i].clone() for x in rows], weights) for i in range(n)]
        outputs = [torch.stack(column) for column in zip(*results, strict=True)]
        for i, (x, kind) in enumerate(zip(outputs, signature.outputs, strict=True)):
            row, told = list(x.shape[1:]), list(kind.shape)
            if row != told:
                raise NotBatchable(f"output {i} is {row} in eager, {told} on fake tensors")
        ends = [o for row in results for o in row]
        starts = [g[i].clone() for i in range(n) for g in grads]
        gradients = gradients_of(ends, starts, [*rows, *weights])
        values = [o.detach() for o in outputs]
        return ValuesAndGradients(values, gradients[: len(rows)], gradients[len(rows) :])


@dataclass(frozen=True)
class _Check:
    """The graphs of an operation, beside eager."""

    graphs: OperationGraphs
    eager: _Eager

    def batched(self, inputs: Rows, grads: Rows, n: int) -> ValuesAndGradients:
        """Values and gradients of n calls, by the operation's three graphs. grads: the gradients of the outputs."""
        return _lean(self.eager.shared, lambda: self._batched(inputs, grads, n))

    @torch.no_grad()
    def _batched(self, inputs: Rows, given: Rows, n: int) -> ValuesAndGradients:
        graphs, shared = self.graphs, self.eager.shared
        groups = _grouped(graphs, inputs)
        results = list(_result_of(graphs.forward, n, *groups, *shared))
        width = len(graphs.signature.outputs)
        tensors = {"group": groups, "output": results[:width], "saved": results[width:], "extra": []}
        pick: Callable[[Sequence[Ref]], Rows] = lambda refs: [tensors[r.kind][r.index] for r in refs]  # noqa: E731
        input_grads: list[torch.Tensor | None] = [None] * len(inputs)
        shared_grads: list[torch.Tensor | None] = [None] * len(shared)
        if graphs.backward is not None:
            starts = [given[i] for i in graphs.grad_outputs]
            outputs_and_saved = list(
                _result_of(graphs.backward, n, *starts, *pick(graphs.backward_inputs), *shared)
            )
            for index, grad in zip(graphs.grad_groups, outputs_and_saved, strict=False):
                members = graphs.layout.groups[index]
                for i, m in enumerate(members):
                    input_grads[m] = grad if len(members) == 1 else grad[:, i]
            tensors["extra"] = outputs_and_saved[len(graphs.grad_groups) :]
        if graphs.parameters is not None:
            grads = _result_of(graphs.parameters, n, *pick(graphs.parameter_inputs), *shared)
            for index, grad in zip(graphs.grad_shared, grads, strict=True):
                shared_grads[index] = grad
        saved, types = (*results[width:], *tensors["extra"]), (*graphs.saved_types, *graphs.extra_types)
        for x, kind in zip(saved, types, strict=True):
            if x.dtype != kind.dtype or tuple(x.shape[1:]) != kind.shape:
                raise NotBatchable(f"it keeps {x.dtype}{list(x.shape[1:])}, {kind} on fake tensors")
        return ValuesAndGradients(results[:width], input_grads, shared_grads)

    def on(self, draw: Numbers, n: int, seed: int) -> ValuesAndGradients | None:
        """Eager on n of these numbers; None where they can't be compared on. Raises NotBatchable where the graphs give
        something else."""
        inputs, grads = self.eager.draw(draw, n, seed)
        reference = self.eager.run(inputs, grads, n)
        if reference is None:
            return None
        ours = self.batched(inputs, grads, n)
        names = [f"output {i}" for i in range(len(reference.outputs))]
        pairs = (("input", ours.inputs, reference.inputs), ("shared operand", ours.shared, reference.shared))
        for what, gradients, references in pairs:
            for i, (x, y) in enumerate(zip(gradients, references, strict=True)):
                names.append(f"the gradient of {what} {i}")
                if x is None and y is not None and not y.any():
                    raise ZeroGradient(what, i)
        drawn = draws(lambda tensors: self.eager_of(tensors, n).all, [*inputs, *grads, *self.eager.shared])
        for i in differences(*_of_one_layout(ours.all, reference.all), drawn):
            if reference.all[i] is None and names[i].startswith("the gradient of input"):
                continue  # nobody reads it
            raise NotBatchable(f"{names[i]} differs from eager")
        return reference

    def eager_of(self, tensors: Rows, n: int) -> ValuesAndGradients:
        """Eager on inputs, gradients of outputs, and shared operands."""
        inputs, outputs = len(self.graphs.signature.inputs), len(self.graphs.signature.outputs)
        eager = replace(self.eager, shared=tensors[inputs + outputs :])
        reference = eager.run(tensors[:inputs], tensors[inputs : inputs + outputs], n)
        if reference is None:
            raise ValueError("these numbers are not in its domain")
        return reference

    def check_large(self) -> None:
        """Where eager is finite on large numbers, the graphs are too: a branch that a `where` did not take may
        overflow, and zero times infinity is no zero (the gradient of log_ndtr)."""

        def large(kind: TensorSpec, n: int, gen: torch.Generator) -> torch.Tensor:
            x = _normal(kind, n, gen)
            return (40 * x).to(kind.dtype) if kind.differentiable else x

        inputs, numbers = self.eager.draw(large, 2, 2)
        reference = self.eager.run(inputs, numbers, 2)
        if reference is None:
            return
        for a, b in zip(self.batched(inputs, numbers, 2).all, reference.all, strict=True):
            if a is None or b is None or a.shape != b.shape:
                continue
            x, y = on_common_rows(a, b)
            if bool((torch.isfinite(y) & ~torch.isfinite(x)).any()):
                raise NotBatchable("large numbers overflow where they don't in eager")

    def check_integers(self) -> None:
        """Negative and larger integers may mean something else (labels end at -1) or be an error."""
        if all(t.differentiable or t.dtype is torch.bool for t in self.graphs.signature.inputs):
            return
        for low, high in ((-1, 2), (0, 4)):
            self.on(partial(_normal, low=low, high=high), 3, high)


def _result_of(graph: Callable[..., Any], *operands: object) -> Any:
    """What a graph gives, node by node: its code takes longer to be compiled than a few calls of it."""
    return run_graph(graph, operands) if isinstance(graph, fx.GraphModule) else graph(*operands)


def check_graphs(
    graphs: OperationGraphs,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
) -> OperationGraphs:
    """An operation's graphs, compared with eager on random rows: with `checked` where there were any, and with the
    inputs that eager gives no gradient (a custom backward that returns None). Raises NotBatchable if they differ."""
    if graphs.random:
        return replace(graphs, checked=False, without_gradient=())
    check = _Check(graphs, _eager(graphs.signature, input_needs, shared_needs, shared))
    references = []
    for draw in _DRAWS:
        reference = check.on(draw, 1, 1) and check.on(draw, 3, 3)
        references += [] if reference is None else [reference]
        if reference is not None and all(map(_is_finite, reference.all)):
            break  # it is defined on all numbers
    if references:
        check.check_large()
        check.check_integers()
    without = _without_gradient(check.eager.needs, references)
    return replace(graphs, checked=bool(references), without_gradient=without)


def _is_finite(x: torch.Tensor | None) -> bool:
    if x is not None and x.layout is torch.sparse_coo:
        x = x.coalesce().values()
    return x is None or bool(torch.isfinite(x).all())


def inputs_without_gradient(
    signature: Signature,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
) -> tuple[int, ...]:
    """The inputs that eager gives no gradient, of those that need one; none where no numbers are in its domain."""
    if not signature.modes.grad or not any(input_needs):
        return ()
    eager = _eager(signature, input_needs, shared_needs, shared)
    try:
        with torch.random.fork_rng([]):
            drawn = [eager.run(*eager.draw(draw, 1, 1), 1) for draw in _DRAWS]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # noqa: BLE001  # users' code, on numbers that it was not written for (the rows of a packed sequence)
        return ()
    return _without_gradient(eager.needs, [x for x in drawn if x is not None])


def _eager(
    signature: Signature,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
) -> _Eager:
    needs = [a and t.differentiable for a, t in zip(input_needs, signature.inputs, strict=True)]
    return _Eager(signature, needs, shared_needs, shared)


def _without_gradient(needs: Sequence[bool], drawn: Sequence[ValuesAndGradients]) -> tuple[int, ...]:
    if not drawn:
        return ()
    return tuple([i for i, need in enumerate(needs) if need and all(x.inputs[i] is None for x in drawn)])


def _grouped(graphs: OperationGraphs, rows: Rows) -> Rows:
    return [rows[g[0]] if len(g) == 1 else torch.stack([rows[m] for m in g], 1) for g in graphs.layout.groups]


def refuse_backward_arguments(body: fx.GraphModule) -> None:
    """Raises NotBatchable for look-ups whose padding, scaling or sparseness only their own backward knows."""
    for node in body.graph.nodes:
        if node.target is torch.ops.aten.embedding.default:
            arguments = node.args[2:]  # padding, whether scaled, whether sparse: as many as were given
            if any(arguments[1:]) or arguments[:1] > (-1,):
                raise NotBatchable(
                    "its table's gradient has padding, is scaled or sparse, unknown to autograd"
                )


def check_autograd(graphs: OperationGraphs, shared: Sequence[torch.Tensor]) -> None:
    """Raises NotBatchable where autograd through the forward graph does not give eager's gradients: the graph says how
    a number is computed, not what the user's code wants its gradient to be (custom functions, writes to `.data`)."""
    signature = graphs.signature
    if graphs.random or not signature.modes.grad:
        return
    needs = [t.differentiable for t in signature.inputs]
    weights = [x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in shared]
    check = _Check(graphs, _Eager(signature, needs, [x.requires_grad for x in weights], shared))
    for draw in _DRAWS:
        inputs, numbers = check.eager.draw(draw, 3, 3)
        reference = check.eager.run(inputs, numbers, 3)
        if reference is not None:
            break
    else:
        return
    operands = [*(x.requires_grad_(need) for x, need in zip(inputs, needs, strict=True)), *weights]
    outputs = _result_of(graphs.forward, 3, *_grouped(graphs, inputs), *weights)[: len(reference.outputs)]
    by_autograd = gradients_of(outputs, numbers, operands)
    for i, (x, y) in enumerate(zip(by_autograd, reference.gradients, strict=True)):
        if x is not None and y is None:
            raise NotBatchable(f"operand {i} has a gradient by autograd, and none in eager")

    def eager(tensors: Rows) -> Rows:
        return _or_zeros(check.eager_of(tensors, 3).gradients, operands)

    drawn = draws(eager, [*inputs, *numbers, *shared])
    ours, theirs = _or_zeros(by_autograd, operands), _or_zeros(reference.gradients, operands)
    for i in differences(*_of_one_layout(ours, theirs), drawn):
        raise NotBatchable(f"the gradient of operand {i} by autograd differs from eager")


def _or_zeros(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> Rows:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, like, strict=True)]


def _of_one_layout(
    ours: Sequence[torch.Tensor | None], eager: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Both as they are compared: gradients of tables may be sparse in one of the two only."""
    one, other = list(ours), list(eager)
    for i, (x, y) in enumerate(zip(ours, eager, strict=True)):
        if not (x is not None and y is not None and x.is_sparse and y.is_sparse):
            one[i], other[i] = x if x is None else dense(x), y if y is None else dense(y)
    return one, other
