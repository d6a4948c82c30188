"""Operation graphs against per-row eager, values and gradients, on real numbers.

A wrong batching rule anywhere below makes this raise NotBatchable, so that the operation runs call by call.

    checked = check_graphs(graphs, input_needs, shared_needs, shared)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from fxbatch.codegen.body import devices_of, embedding_sparse_gradient, entered_modes
from fxbatch.codegen.operation_graphs import NotBatchable, OperationGraphs, Ref
from fxbatch.ir import TensorType
from fxbatch.torch_private import QuietDispatchMode

aten = torch.ops.aten
T = TypeVar("T")
_LARGE = 1 << 16  # elements of a table from which on its gradient is compared on the rows that were looked up
_PIECE = 1 << 18  # elements that are compared at once
_TOLERANCE = {
    torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 5e-4, torch.complex64: 5e-4,
    torch.float64: 1e-8, torch.complex128: 1e-8,
}  # fmt: skip
Rows = list[torch.Tensor]


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            return _rows_of_table(shape, like.new_zeros(0, dtype=torch.int64), like.new_zeros(0, *shape[1:]))
        elif func in _ADDITIONS and args[0].is_sparse:
            return _ADDITIONS[func](*args, **kwargs)
        elif func is aten.select_backward.default and args[2] == 0 and tuple(args[1]) in self.shapes:
            grad, shape, _, index = args
            return _rows_of_table(
                shape, torch.tensor([index % shape[0]], device=grad.device), grad.unsqueeze(0)
            )
        return func(*args, **kwargs)


def _rows_of_table(shape: Sequence[int], indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A sparse tensor that is these rows added up."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        return torch.sparse_coo_tensor(indices.reshape(1, -1), rows, tuple(shape))


def _index_add(x: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if dim:
        raise NotImplementedError("rows of a table")
    return x + _rows_of_table(x.shape, index, rows)


def _index_put(x: torch.Tensor, indices: Any, rows: torch.Tensor, accumulate: bool, *_: Any) -> torch.Tensor:
    (index,) = indices
    if not accumulate or index.dtype is torch.bool:
        raise NotImplementedError("rows of a table")
    flat = rows.expand(*index.shape, *x.shape[1:]).reshape(-1, *x.shape[1:])
    return x.add_(_rows_of_table(x.shape, index.reshape(-1) % x.shape[0], flat))


_ADDITIONS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
}


def _lean(shared: Sequence[torch.Tensor], run: Callable[[], T]) -> T:
    """What `run` gives; with sparse gradients of large tables, where all that is done to them can be done so."""
    shapes = {tuple(x.shape) for x in shared if x.numel() >= _LARGE and x.dim() > 1}
    if not shapes:
        return run()
    try:
        with _SparseTables(shapes):
            return run()
    except (RuntimeError, ValueError, IndexError, ArithmeticError):
        return run()


def _normal(kind: TensorType, n: int, gen: torch.Generator) -> torch.Tensor:
    if kind.differentiable:
        wide = torch.complex128 if kind.dtype.is_complex else torch.float64
        return torch.randn(n, *kind.shape, generator=gen, dtype=wide).to(kind.device, kind.dtype)
    return torch.randint(0, 2, (n, *kind.shape), generator=gen).to(kind.device, kind.dtype)


def _positive(kind: TensorType, n: int, gen: torch.Generator) -> torch.Tensor:
    x = _normal(kind, n, gen)
    return (x.abs() / (1 + x.abs())).to(kind.dtype) if kind.differentiable else torch.zeros_like(x)


def _definite(kind: TensorType, n: int, gen: torch.Generator) -> torch.Tensor:
    x = _normal(kind, n, gen)
    square = len(kind.shape) >= 2 and kind.shape[-1] == kind.shape[-2] and kind.differentiable
    return (x @ x.mH + torch.eye(kind.shape[-1], dtype=x.dtype, device=x.device)) if square else x


def check_graphs(
    graphs: OperationGraphs,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
) -> bool:
    """Whether there were numbers to compare on. Raises NotBatchable where the graphs differ from eager."""
    if graphs.random:
        return False
    needs = [a and t.differentiable for a, t in zip(input_needs, graphs.signature.inputs, strict=True)]
    for draw in (_normal, _positive, _definite):
        for n in (3, 1):
            gen = torch.Generator().manual_seed(n)
            inputs = [draw(kind, n, gen) for kind in graphs.signature.inputs]
            try:
                given = [_normal(kind, n, gen) for kind in graphs.signature.outputs]
                reference = by_rows(graphs, inputs, needs, shared_needs, shared, given, n)
            except (RuntimeError, ValueError, IndexError, ArithmeticError):
                break  # not in this operation's domain: other numbers
            results = run_graphs(graphs, inputs, shared, reference[3], n)
            try:
                _compare(results, reference, graphs)
            except NotBatchable as error:
                if not _as_exact(results, reference, graphs, inputs, needs, shared_needs, shared, n):
                    raise error
        else:
            _check_large(graphs, needs, shared_needs, shared)
            _check_integers(graphs, needs, shared_needs, shared)
            return True
    return False


def _check_large(
    graphs: OperationGraphs,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
) -> None:
    """Where eager is finite on large numbers, the graphs are too: a branch that a `where` did not take may
    overflow, and zero times infinity is no zero (the gradient of log_ndtr)."""
    gen = torch.Generator().manual_seed(2)
    drawn = [(kind, _normal(kind, 2, gen)) for kind in graphs.signature.inputs]
    inputs = [(40 * x).to(kind.dtype) if kind.differentiable else x for kind, x in drawn]
    try:
        given = [_normal(kind, 2, gen) for kind in graphs.signature.outputs]
        reference = by_rows(graphs, inputs, needs, shared_needs, shared, given, 2)
    except (RuntimeError, ValueError, IndexError, ArithmeticError):
        return  # not in this operation's domain
    results = run_graphs(graphs, inputs, shared, reference[3], 2)
    ours = [*results[0], *results[1], *results[2]]
    theirs = [*reference[0], *reference[1], *reference[2]]
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None or a.shape != b.shape:
            continue
        if any(bool((torch.isfinite(y) & ~torch.isfinite(x)).any()) for x, y in _pieces(a, b)):
            raise NotBatchable("large numbers overflow where they don't in eager")


def _check_integers(
    graphs: OperationGraphs,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
) -> None:
    """Negative and larger integers may mean something else (labels end at -1) or be an error."""
    kinds = graphs.signature.inputs
    if all(kind.differentiable or kind.dtype is torch.bool for kind in kinds):
        return
    for low, high in ((-1, 2), (0, 4)):
        gen = torch.Generator().manual_seed(high)
        inputs = [_normal(kind, 3, gen) for kind in kinds]
        for i, kind in enumerate(kinds):
            if not kind.differentiable and kind.dtype is not torch.bool:
                drawn = torch.randint(low, high, (3, *kind.shape), generator=gen)
                inputs[i] = drawn.to(kind.device, kind.dtype)
        try:
            given = [_normal(kind, 3, gen) for kind in graphs.signature.outputs]
            reference = by_rows(graphs, inputs, needs, shared_needs, shared, given, 3)
        except (RuntimeError, ValueError, IndexError, ArithmeticError):
            continue  # not in this operation's domain
        _compare(run_graphs(graphs, inputs, shared, reference[3], 3), reference, graphs)


Reference = tuple[Rows, list[torch.Tensor | None], list[torch.Tensor | None], Rows]


def by_rows(
    graphs: OperationGraphs,
    inputs: Rows,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    given: Rows,
    n: int,
) -> Reference:
    """Outputs, input gradients, shared gradients and the output gradients used (`given`), one row at a time."""
    return _lean(shared, lambda: _by_rows(graphs, inputs, needs, shared_needs, shared, given, n))


def _by_rows(
    graphs: OperationGraphs,
    inputs: Rows,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    given: Rows,
    n: int,
) -> Reference:
    signature = graphs.signature
    rows = [x.detach().clone().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    weights = [  # as they are: bodies that write to them are refused before
        x.detach().requires_grad_(need and (x.is_floating_point() or x.is_complex()))
        for x, need in zip(shared, shared_needs, strict=True)
    ]
    with entered_modes(signature.modes, devices_of(signature)):
        # copies, here and of gradients: as_strided counts from the start of memory
        results = [signature.run([x[i].clone() for x in rows], weights) for i in range(n)]
    outputs = [torch.stack(column) for column in zip(*results, strict=True)]
    for i, (x, kind) in enumerate(zip(outputs, signature.outputs, strict=True)):
        if tuple(x.shape[1:]) != tuple(kind.shape):
            raise NotBatchable(
                f"output {i} is {list(x.shape[1:])} in eager, {list(kind.shape)} on fake tensors"
            )
    pairs = [
        (o, g[i].clone())
        for i, row in enumerate(results)
        for o, g in zip(row, given, strict=True)
        if o.requires_grad
    ]
    wanted = [x for x in (*rows, *weights) if x.requires_grad]
    grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        ends, starts = zip(*pairs, strict=True)
        grads = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
    found = iter(grads)
    slots = [next(found) if x.requires_grad else None for x in (*rows, *weights)]
    return [o.detach() for o in outputs], slots[: len(rows)], slots[len(rows) :], given


def run_graphs(
    graphs: OperationGraphs, inputs: Rows, shared: Sequence[torch.Tensor], given: Rows, n: int
) -> tuple[Rows, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The same from the three graphs."""
    return _lean(shared, lambda: _run_graphs(graphs, inputs, shared, given, n))


@torch.no_grad()
def _run_graphs(
    graphs: OperationGraphs, inputs: Rows, shared: Sequence[torch.Tensor], given: Rows, n: int
) -> tuple[Rows, list[torch.Tensor | None], list[torch.Tensor | None]]:
    layout = graphs.layout
    groups = [inputs[g[0]] if len(g) == 1 else torch.stack([inputs[m] for m in g], 1) for g in layout.groups]
    results = list(graphs.forward(n, *groups, *shared))
    width = len(graphs.signature.outputs)
    tensors = {"group": groups, "output": results[:width], "saved": results[width:], "extra": []}
    pick: Callable[[Sequence[Ref]], Rows] = lambda refs: [tensors[r.kind][r.index] for r in refs]  # noqa: E731
    input_grads: list[torch.Tensor | None] = [None] * len(inputs)
    shared_grads: list[torch.Tensor | None] = [None] * len(shared)
    if graphs.backward is not None:
        starts = [given[i] for i in graphs.grad_outputs]
        found = list(graphs.backward(n, *starts, *pick(graphs.backward_inputs), *shared))
        for index, grad in zip(graphs.grad_groups, found, strict=False):
            members = layout.groups[index]
            for i, m in enumerate(members):
                input_grads[m] = grad if len(members) == 1 else grad[:, i]
        tensors["extra"] = found[len(graphs.grad_groups) :]
    if graphs.parameters is not None:
        grads = graphs.parameters(n, *pick(graphs.parameter_inputs), *shared)
        for index, grad in zip(graphs.grad_shared, grads, strict=True):
            shared_grads[index] = grad
    return results[:width], input_grads, shared_grads


def refuse_backward_arguments(body: fx.GraphModule) -> None:
    """Raises NotBatchable for look-ups whose padding, scaling or sparseness only their own backward knows."""
    for node in body.graph.nodes:
        if node.target is torch.ops.aten.embedding.default:
            given = list(
                node.args[2:]
            )  # padding, whether it is scaled, whether it is sparse: as many as were given
            if any(given[1:]) or given[:1] > [-1]:
                raise NotBatchable(
                    "its table's gradient has padding, is scaled or sparse, which autograd is not told"
                )


def check_autograd(graphs: OperationGraphs, shared: Sequence[torch.Tensor]) -> None:
    """Raises NotBatchable where autograd through the forward graph does not give eager's gradients: the graph says how
    a number is computed, not what the user's code wants its gradient to be (custom functions, writes to `.data`)."""
    signature = graphs.signature
    needs = [t.differentiable for t in signature.inputs]
    weights = [x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in shared]
    if graphs.random or not signature.modes.grad:
        return
    for draw in (_normal, _positive, _definite):
        gen = torch.Generator().manual_seed(3)
        inputs = [draw(kind, 3, gen) for kind in signature.inputs]
        given = [_normal(kind, 3, gen) for kind in signature.outputs]
        try:
            reference = by_rows(graphs, inputs, needs, [x.requires_grad for x in weights], shared, given, 3)
        except (RuntimeError, ValueError, IndexError, ArithmeticError):
            continue  # not in this operation's domain: other numbers
        rows = [x.requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        groups = [
            rows[g[0]] if len(g) == 1 else torch.stack([rows[m] for m in g], 1) for g in graphs.layout.groups
        ]
        outputs = list(graphs.forward(3, *groups, *weights))[: len(signature.outputs)]
        wanted = [x for x in (*rows, *weights) if x.requires_grad]
        pairs = [(o, g) for o, g in zip(outputs, reference[3], strict=True) if o.requires_grad]
        grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            ends, starts = zip(*pairs, strict=True)
            grads = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
        found = iter(grads)
        slots = [next(found) if x.requires_grad else None for x in (*rows, *weights)]
        operands = (*rows, *weights)
        ours, theirs = _or_zeros(slots, operands), _or_zeros([*reference[1], *reference[2]], operands)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _close(a, b, f"the gradient of operand {i} by autograd", 0.0)
        return


def _or_zeros(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> Rows:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, like, strict=True)]


def _compare(
    got: tuple[Rows, list[torch.Tensor | None], list[torch.Tensor | None]],
    reference: Reference,
    graphs: OperationGraphs,
) -> None:
    signature = graphs.signature
    kinds = [t.dtype for t in (*signature.inputs, *signature.outputs)]
    lowest = max(
        (_TOLERANCE.get(t, 0.0) for t in [*kinds, *(t for _, t in signature.modes.autocast)]), default=0.0
    )
    for i, (a, b) in enumerate(zip(got[0], reference[0], strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise NotBatchable(
                f"batched output {i} is {a.dtype}{list(a.shape)}, eager {b.dtype}{list(b.shape)}"
            )
        _close(a, b, f"output {i}", lowest)
    for what, ours, theirs in (("input", got[1], reference[1]), ("shared operand", got[2], reference[2])):
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if y is None and (x is None or not x.any()):
                continue
            if what == "input" and y is None:
                continue
            if x is None and y is not None and not y.any():
                raise ZeroGradient(what, i)
            if x is None or y is None:
                raise NotBatchable(f"the gradient of {what} {i} is {'missing' if x is None else 'extra'}")
            _close(x, y, f"the gradient of {what} {i}", lowest)


def _as_exact(
    results: tuple[Rows, list[torch.Tensor | None], list[torch.Tensor | None]],
    reference: Reference,
    graphs: OperationGraphs,
    inputs: Rows,
    needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    n: int,
) -> bool:
    """Whether the batched results are as exact as eager's, by float64: the numbers are ill-conditioned."""
    signature = graphs.signature
    if any(t.dtype not in (torch.float32, torch.int64, torch.bool) for t in signature.inputs):
        return False
    wide_inputs, wide_shared, given = (_doubled(x) for x in (inputs, shared, reference[3]))
    try:
        exact = by_rows(graphs, wide_inputs, needs, shared_needs, wide_shared, given, n)
    except (RuntimeError, ValueError, IndexError, ArithmeticError):
        return False
    triples = [triple for i in range(3) for triple in zip(results[i], reference[i], exact[i], strict=True)]
    return all(_no_worse(*triple) for triple in triples)


def _no_worse(a: torch.Tensor | None, b: torch.Tensor | None, true: torch.Tensor | None) -> bool:
    """Whether a is about as near to the truth as b."""
    if a is None or b is None or true is None:
        return b is None and (a is None or not a.any())
    if true.dtype not in (torch.float64, a.dtype) or a.shape != b.shape:
        return False
    a, b, true = _on_common_rows(a, b, true)
    return _error(a, true) <= 4 * _error(b, true) + 1e-6 * _size(true)


def _doubled(tensors: Sequence[torch.Tensor]) -> Rows:
    return [x.double() if x.is_floating_point() else x for x in tensors]


def _error(x: torch.Tensor, true: torch.Tensor) -> float:
    return _size(x.double() - true.double())


def _size(x: torch.Tensor) -> float:
    return float(x.detach().double().abs().max()) if x.numel() else 0.0


def _close(a: torch.Tensor, b: torch.Tensor, what: str, lowest: float) -> None:
    """`lowest`: the tolerance of the least precise dtype that the operation computes in."""
    if a.shape != b.shape:
        raise NotBatchable(f"{what} is batched to {list(a.shape)}, eager has {list(b.shape)}")
    tolerance = _TOLERANCE.get(b.dtype, 0.0)
    a, b = _on_common_rows(a, b)
    if tolerance == 0.0:
        if not torch.equal(a, b):
            raise NotBatchable(f"{what} differs from eager")
        return
    tolerance = max(tolerance, lowest)
    wide = torch.complex128 if b.is_complex() else torch.float64
    scale = 1e-3
    for _, y in _pieces(a, b):
        size = y.to(wide).abs()
        scale = max(scale, float(torch.where(torch.isfinite(size), size, 0).max()) if size.numel() else 0.0)
    for x, y in _pieces(a, b):
        if not torch.allclose(x.to(wide), y.to(wide), rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            raise NotBatchable(f"{what} differs from eager")


def _on_common_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Dense tensors of the rows that any of them has, where all are sparse (gradients of tables); else all rows."""
    if not all(x.is_sparse and x.sparse_dim() == 1 for x in tensors):
        return [x.to_dense() if x.is_sparse else x for x in tensors]
    parts = [x.coalesce() for x in tensors]
    rows = torch.cat([x.indices()[0] for x in parts]).unique()
    return [x.index_select(0, rows).to_dense() for x in parts]


def _pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape, a piece at a time: what is made to compare them does not grow with them."""
    a, b = _on_common_rows(a, b)
    return zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True)
