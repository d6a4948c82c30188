"""A per-instance body as a graph whose sizes are symbols, and the sizes for which it is the body.

In: a body, example tensors of one instance, and which of their dimensions are the instance's own. Out: a SizedGraph:
operators as the body calls them, before autograd. A body that does something else for other sizes (an `if` on a
length, a loop over it) has asked about them; what was asked are the guards, and they are evaluated for each call.
Sizes 0 and 1, about which torch itself asks much that changes nothing, are tried: the body is traced with them as
plain numbers, and is the graph where the two have the same nodes.

    graph = SizedGraph(body, tensors, ((0,), ()))
    graph.fitting([np.array([7])])            # [True]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxbatch.codegen.body import Call, IndexByTensor, Result, Tape, as_graph, record, without_fast_path
from fxbatch.ragged.expressions import (
    ColumnsFunction,
    UnknownExpressionError,
    columns_function,
    depends,
    expression,
    know_numbers,
)
from fxbatch.ragged.recurrent import OneSymbolicSequence
from fxbatch.ragged.stand_ins import FUNCTIONS, TYPES, Names, stand_ins
from fxbatch.torch_private import (
    FakeTensor,
    PlainNumberError,
    composite_operators,
    fakes_to_trace,
    quiet_fakes,
    set_grad_enabled,
    trace_with_sizes,
    tree_flatten,
    tree_map,
    without_symbols,
)
from fxbatch.trace.operations import one_hot_within
from fxbatch.trace.torch_patches import functions_refused

REGIONS = 4  # of sizes, by the answers to what torch asks about them, for which one graph may stand
TRIED = 16  # combinations of sizes that are tried for one graph
FAILED = 3  # of those with a 0 or 1, and of the others, that may fail before no more are
MOST_SIZES = 16  # sizes of one instance that may differ


Function = Callable[..., object]
Values: TypeAlias = dict[sympy.Symbol, int]


class NoPackedForm(Exception):
    """Why a body has no packed form."""


class SizedGraph:
    """A traced body and the sizes for which it stands: `body(*tensors)`; NoPackedForm where its sizes can't be symbols.

    kept: composite operators that stay whole; flags_known: whether these tensors require gradients where all that are
    given will; code: the users' modules and functions that it runs; by_tape: whether it is a function of torch that is
    no composite (`is_composite`), of which a tape below autograd says the same, in about half the time.
    """

    def __init__(
        self,
        body: Callable[..., Iterable[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        dynamic: Sequence[Sequence[int]],
        whole: frozenset[str] = frozenset(),
        *,
        flags_known: bool = True,
        code: Sequence[object] = (),
        by_tape: bool = False,
    ) -> None:
        self.body, self.tensors, self.dynamic = body, tensors, dynamic
        self.how = {"whole": whole, "flags_known": flags_known, "code": code, "by_tape": by_tape}
        self.module, env = self._traced()
        self.inputs = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        inputs = zip(self.inputs, dynamic, strict=True)
        sizes = [node.meta["val"].shape[d] for node, dims in inputs for d in dims]
        self.symbols: list[sympy.Symbol] = list(map(_original, sizes))  # one a dynamic dimension, in order
        self._refuse_questions_about_values(env)
        self.guards = [g for g in dict.fromkeys(g.expr for g in env.guards) if not _of_all_but_small(g)]
        try:
            self._regions = [columns_function(self.guards, self.symbols)]  # of sizes whose body is the graph
        except UnknownExpressionError as error:
            raise NoPackedForm(f"its code asks about {error}") from None
        self._complete = False  # whether no others are looked for
        self.assumed: list[sympy.Basic] = []  # what rules took for granted besides
        self._tried: dict[tuple[int, ...], bool] = {}

    def _traced(self) -> tuple[fx.GraphModule, ShapeEnv]:
        """The graph; with stand-ins for types as well where the code needs a size as a plain number otherwise."""
        trace = functools.partial(_trace, self.body, self.tensors, self.dynamic, **self.how)
        reason: Exception | None = None
        try:
            traced = trace()
            if not any(_is_of_number(g.expr) for g in traced[1].guards):
                return traced
        except PlainNumberError as error:
            reason = error
        with contextlib.suppress(Exception):  # the code asks what a stand-in is not: as without
            return trace(names=TYPES)
        if reason is not None:
            raise NoPackedForm(str(reason))
        return traced

    def unseen(self, size: object) -> bool:
        """Whether a size depends on values, as that of `x[mask]` does."""
        return bool(getattr(expression(size), "free_symbols", set()) - set(self.symbols))

    def _refuse_questions_about_values(self, env: ShapeEnv) -> None:
        """Raises if torch assumed something about a size that depends on values, since nothing would compare it later:
        that it is not 1 where a dimension of 1 is left out, or that it equals another."""
        asked = [str(a.expr) for asserts in env.deferred_runtime_asserts.values() for a in asserts]
        for node in self.module.graph.nodes:
            if str(node.target).startswith("aten.squeeze"):
                shape = node.args[0].meta["val"].shape
                dims = node.args[1] if len(node.args) > 1 else range(len(shape))
                dims = dims if isinstance(dims, (list, tuple, range)) else [dims]
                asked += [str(shape[d]) for d in dims if self.unseen(shape[d])]
        if asked:
            raise NoPackedForm(f"it asks about a size that depends on values: {asked[0]}")

    def certain(self, smallest: Sequence[int]) -> bool:
        """Whether nothing but the smallest of each size has to be known for the graph to be the body."""
        return not self.guards and not self.assumed and min(smallest, default=2) > 1

    def fitting(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """bool [n]: for which instances the graph is the body; columns: their sizes, one column a symbol."""
        # symbols are taken to be 2 or more: `max(len(x), 1)` leaves no guard
        usual = np.logical_and.reduce([column > 1 for column in columns])
        good = np.zeros_like(usual)
        for region in self._regions:
            good |= _all_hold(region, columns)
        good &= usual
        for i in np.flatnonzero(~good).tolist():
            sizes = tuple(int(c[i]) for c in columns)
            if not good[i] and usual[i] and self._adds_region(sizes):
                good |= usual & _all_hold(self._regions[-1], columns)
            good[i] = good[i] or self._stands_for(sizes)
        for answer in self._assumed(*columns):
            good &= answer
        return good

    def assume(self, fact: object) -> None:
        """Instances for whose sizes this is not so don't fit."""
        if fact is not sympy.true and fact not in self.assumed:
            self.assumed.append(fact)

    @functools.cached_property
    def _assumed(self) -> ColumnsFunction:
        return columns_function(self.assumed, self.symbols)

    def equal(self, a: object, b: object) -> bool:
        """Whether two sizes are one: where they are in the example, instances in which they are not don't fit."""
        if a == b:
            return True
        inputs = zip(self.tensors, self.dynamic, strict=True)
        example = [t.shape[d] for t, dims in inputs for d in dims]
        values = dict(zip(self.symbols, example, strict=True))
        same = sympy.sympify(a).subs(values) == sympy.sympify(b).subs(values)
        if same:
            self.assume(sympy.Eq(a, b))
        return bool(same)

    def _adds_region(self, sizes: tuple[int, ...]) -> bool:
        """Whether the graph is the body for all sizes for which torch gets the answers it gets for these, too: what
        it asks often decides nothing that one can see, as which of its kernels it takes from 16 images on."""
        if self._complete:
            return False
        example = self._example(sizes)
        try:
            other = SizedGraph(self.body, example, self.dynamic, **self.how)
            stands = self.symbols == other.symbols and _same_nodes(self.module.graph, other.module.graph, {})
        except Exception:  # noqa: BLE001 - it is no packed call then, and raises again where it runs by itself
            stands = False
        if stands:
            self._regions += other._regions
        self._complete = not stands or len(self._regions) == REGIONS
        return stands

    def _example(self, sizes: Iterable[int]) -> list[torch.Tensor]:
        """Tensors like the example's, of these sizes."""
        tensors, taken = [], iter(sizes)
        for tensor, dims in zip(self.tensors, self.dynamic, strict=True):
            shape = [next(taken) if d in dims else size for d, size in enumerate(tensor.shape)]
            example = tensor.new_empty(shape).requires_grad_(tensor.requires_grad) if dims else tensor
            tensors.append(example)
        return tensors

    def _stands_for(self, sizes: tuple[int, ...]) -> bool:
        """Whether the body with these sizes as numbers has the nodes of the graph."""
        stands_here = self._tried.get(sizes)
        if stands_here is None:
            small = min(sizes) < 2
            failed = sum(not stands for met, stands in self._tried.items() if (min(met) < 2) is small)
            if failed >= FAILED or len(self._tried) >= TRIED:
                return False
            stands_here = self._tried[sizes] = self._try(sizes)
        return stands_here

    def _try(self, sizes: tuple[int, ...]) -> bool:
        tensors = self._example(sizes)
        try:
            module, _ = _trace(self.body, tensors, [()] * len(tensors), **self.how)
        except Exception:  # noqa: BLE001 - it is no packed call then, and raises again where it runs by itself
            return False
        values = dict(zip(self.symbols, sizes, strict=True))
        return _same_nodes(self.module.graph, module.graph, values)


def _all_hold(region: ColumnsFunction, columns: Sequence[np.ndarray]) -> np.ndarray:
    """bool [n]: which instances are of a region."""
    holds = np.ones(len(columns[0]), dtype=bool)
    with np.errstate(divide="ignore"):  # by sizes 0, of which it says nothing
        for answer in region(*columns):
            holds &= answer
    return holds


def _of_all_but_small(guard: object) -> bool:
    """Whether a guard holds for all sizes of 2 and more by its form."""
    if not isinstance(guard, (sympy.Ge, sympy.Gt, sympy.Ne)) or not isinstance(guard.lhs, sympy.Symbol):
        return False
    least = 2 if isinstance(guard, sympy.Ge) else 1
    return isinstance(guard.rhs, sympy.Integer) and guard.rhs <= least


def _is_of_number(guard: sympy.Basic) -> bool:
    """Whether a guard says that a number made of sizes is this one (`int(n / 2)`, `math.log(n)`)."""
    return isinstance(guard, sympy.Eq) and any(
        type(x).__name__ in ("TruncToInt", "ToFloat", "IntTrueDiv", "FloatTrueDiv")
        for x in sympy.preorder_traversal(guard)
    )


@quiet_fakes()
def _trace(
    body: Callable[..., Iterable[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[int]],
    whole: frozenset[str],
    flags_known: bool,
    code: Sequence[object],
    by_tape: bool,
    names: Names = FUNCTIONS,
) -> tuple[fx.GraphModule, ShapeEnv]:
    with without_fast_path(), functions_refused(NoPackedForm), stand_ins((body, *code), names):
        arguments = _watched(body, flags_known), tensors, dynamic
        if by_tape:
            module, env = _taped(*arguments)
        else:  # what does not stay whole
            composites = {f: f.decompose for f, name in _composites().items() if name not in whole}
            module, env = trace_with_sizes(*arguments, composites)
    know_numbers(env)
    _without_whole_slices(module.graph)
    _without_writes(module.graph)
    _without_copies(module.graph)
    module.graph.eliminate_dead_code(
        lambda n: n.op in ("placeholder", "output") or not isinstance(n.target, torch._ops.OpOverload)
    )
    return module, env


def _taped(
    body: Function, tensors: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]]
) -> tuple[fx.GraphModule, ShapeEnv]:
    mode, env, fakes = fakes_to_trace([t.detach() for t in tensors], dynamic)
    with mode, torch.no_grad():
        tape = record(body, fakes)
    env.refuse_plain_numbers()
    return as_graph(_with_nodes_for_numbers(tape)), env


def _with_nodes_for_numbers(tape: Tape) -> Tape:
    """The tape in which numbers made of sizes are values of calls, which nobody makes: a graph has nodes for them."""
    calls: list[Call] = []
    place: dict[int, int] = {}

    def told(x: object) -> object:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            calls.append(Call(operator.index, (), {}, x))
            return Result(len(calls) - 1)
        return Result(place[x.index]) if type(x) is Result else x

    for i, call in enumerate(tape.calls):
        args, kwargs = tree_map(told, (call.args, call.kwargs))
        place[i] = len(calls)
        calls.append(dataclasses.replace(call, args=args, kwargs=kwargs))
    return Tape(calls, tree_map(told, tape.results))


# What a graph of operators does not hold: it would be lost, and gradients would be others.
_LOST = ("register_hook", "retain_grad", "requires_grad_", "backward", "register_post_accumulate_grad_hook")
_READ = ("grad", "grad_fn")
_FLAGS = ("requires_grad", "is_leaf")


class WithoutPlainSizes(IndexByTensor):
    """Functions that ask for sizes or values as plain numbers, by others that don't. It counts all functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.one = OneSymbolicSequence()

    def __torch_function__(self, func: Function, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.calls += 1
        if func in _POOLINGS and (dims := _whole_dimensions(*args, **(kwargs or {}))):
            return functools.reduce(_POOLINGS[func], dims, args[0])
        if func in (torch.max_pool1d, F.max_pool1d):
            func = functools.partial(_max_pool1d, func)
        elif func in (torch.bincount, torch.Tensor.bincount):
            func = functools.partial(_bincount, func)
        elif func == F.one_hot:  # the plain one asks for the largest class
            func = one_hot_within
        elif func is torch.Tensor.fill_diagonal_:
            func = functools.partial(_fill_diagonal, func)
        elif func is torch.Tensor.__getitem__ and _counts(args[1]):
            func = _row_of_own_place
        elif func is torch.Tensor.__setitem__ and _counts(args[1]):
            func = _write_to_own_place
        elif func is torch.Tensor.__getitem__:
            args = (args[0], _all_rows(args[1]))
        elif func in (torch.nonzero, torch.Tensor.nonzero) or (
            func == torch.where and len(args) == 1 and not kwargs
        ):
            func = functools.partial(_nonzero, func)
        elif func in self.one.calls and (result := self.one.of(func, args, kwargs or {})) is not None:
            return result
        return super().__torch_function__(func, types, args, kwargs)


class _Refused(WithoutPlainSizes):
    """Refuses what hooks into autograd or reads its state: the attributes that tensors have now, since recording
    replaces some of them."""

    def __init__(self, read: Sequence[str]) -> None:
        super().__init__()
        self.lost = {getattr(torch.Tensor, name) for name in _LOST}
        self.lost |= {torch.autograd.grad, torch.autograd.backward}
        self.read = {getattr(torch.Tensor, name).__get__ for name in read}

    def __torch_function__(
        self, func: Function, types: object, args: object = (), kwargs: object = None
    ) -> object:
        asking = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        if func in self.lost or (func in self.read and asking != "torch"):
            raise NoPackedForm(f"it calls {getattr(func, '__qualname__', func)}")
        return super().__torch_function__(func, types, args, kwargs)


def _fill_diagonal(plain: Function, x: torch.Tensor, value: float, wrap: bool = False) -> object:
    """The diagonal of a matrix as a view, which asks for no strides as plain numbers."""
    if x.dim() != 2 or wrap or not isinstance(x, FakeTensor):
        return plain(x, value, wrap)
    x.diagonal().fill_(value)
    return x


def _counts(index: object) -> bool:
    """Whether an index is a number of sizes, or has one among numbers and slices: `x[len(x) // 2, 1:]`."""
    kinds = [type(i) for i in (index if type(index) is tuple else (index,))]
    return torch.SymInt in kinds and set(kinds) <= {torch.SymInt, int, slice}


def _row_of_own_place(x: torch.Tensor, index: object) -> torch.Tensor:
    """x[index], where plain indexing asks for the number."""
    parts = index if type(index) is tuple else (index,)
    for d, i in reversed(list(enumerate(parts))):
        x = x if isinstance(i, slice) else x.select(d, i)
    rest = tuple(i for i in parts if isinstance(i, slice))
    return x if all(i == slice(None) for i in rest) else x[rest]


def _write_to_own_place(x: torch.Tensor, index: object, value: torch.Tensor | float) -> None:
    """x[index] = value, where plain indexing asks for the number."""
    _row_of_own_place(x, index)[...] = value


def _all_rows(index: object) -> object:
    """An index with a mask of rows on fake tensors without symbols, as if it picked all: what is asked of such a run is
    what the code does besides."""
    if isinstance(index, tuple):
        return tuple(map(_all_rows, index))
    if not isinstance(index, FakeTensor) or index.dtype != torch.bool or index.dim() != 1:
        return index
    return torch.arange(len(index), device=index.device) if without_symbols(index) else index


def _nonzero(plain: Function, x: torch.Tensor, as_tuple: bool = False) -> object:
    """The places of a mask of rows; on fake tensors without symbols as if it picked all."""
    if not isinstance(x, FakeTensor) or x.dim() != 1:
        return plain(x, as_tuple=True) if as_tuple else plain(x)
    places = _all_rows(x != 0) if without_symbols(x) else torch.ops.aten.nonzero(x).select(1, 0)
    return (places,) if as_tuple or plain == torch.where else places.unsqueeze(1)


def _bincount(
    plain: Function, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int | torch.SymInt = 0
) -> object:
    """bincount to a length; a number beyond it, where the result would be longer, is an index out of range."""
    if weights is not None or not isinstance(x, FakeTensor) or (type(minlength) is int and minlength < 1):
        return plain(x, weights, minlength)
    return x.new_zeros((minlength,), dtype=torch.int64).index_add(0, x, torch.ones_like(x, dtype=torch.int64))


def _max_pool1d(
    plain: Function,
    x: torch.Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> object:
    """max_pool1d, which asks for sizes as plain numbers, by max_pool2d, which does not."""
    if return_indices:
        return plain(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    numbers = (kernel_size, stride or kernel_size, padding, dilation)
    one = [n[0] if isinstance(n, (list, tuple)) else n for n in numbers]
    size, step, pad, far = ((first, n) for first, n in zip((1, 1, 0, 1), one, strict=True))
    return torch.max_pool2d(x.unsqueeze(-2), size, step, pad, far, ceil_mode).squeeze(-2)


_MAX_POOLINGS = (torch.max_pool1d, F.max_pool1d, torch.max_pool2d, F.max_pool2d)
_POOLINGS: dict[object, Callable[[torch.Tensor, int], torch.Tensor]] = {
    **dict.fromkeys(_MAX_POOLINGS, lambda x, dim: x.max(dim, keepdim=True)[0]),
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d), functools.partial(torch.mean, keepdim=True)),
}


def _whole_dimensions(
    x: torch.Tensor,
    kernel_size: int | Sequence[int],
    stride: object = None,
    padding: object = 0,
    dilation: object = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    divisor_override: int | None = None,
    **unread: object,
) -> list[int]:
    """The dimensions that a pooling goes over as a whole, `max_pool1d(x, x.size(2))`; none where it is another, or one
    of several windows."""
    kernel = tuple(kernel_size) if isinstance(kernel_size, (list, tuple)) else (kernel_size,)
    first = -len(kernel)
    sizes = [expression(size) for size in x.shape[first:]]
    whole = [first + i for i, k in enumerate(kernel) if expression(k) == sizes[i]]
    plain = stride in (None, kernel_size) and padding in _ZEROS and dilation in _ONES
    plain = plain and not return_indices and divisor_override is None
    windows = [k for i, k in enumerate(kernel) if first + i not in whole and expression(k) != 1]
    large = [d for d in whole if sizes[d] != 1]  # of two, one would meet equal numbers in another order
    return whole if plain and not windows and len(large) <= 1 else []


_ZEROS = (0, (0,), (0, 0), [0], [0, 0])
_ONES = (1, (1,), (1, 1), [1], [1, 1])


def _watched(body: Function, flags_known: bool) -> Function:
    def run(*tensors: torch.Tensor) -> object:
        with _Refused(_READ if flags_known else (*_READ, *_FLAGS)):
            return body(*tensors)

    return run


@functools.cache
def _composites() -> dict[torch._ops.OpOverload, str]:
    """All composite operators that can be taken apart, with their names."""
    names: dict[torch._ops.OpOverload, str] = {}
    for name in composite_operators():
        base, _, overload = name.partition(".")
        space, _, op = base.partition("::")
        if space != "aten" or op.startswith(("sym_", "size", "stride", "storage", "is_", "_")):
            continue
        packet = getattr(torch.ops.aten, op, None)
        operator = getattr(packet, overload or "default", None)
        if operator is not None and hasattr(operator, "decompose"):
            names[operator] = base
    return names


def is_composite(function: object) -> bool:
    """Whether a function of torch's has the name of a composite operator, which rules may handle whole."""
    return f"aten::{getattr(function, '__name__', '')}" in _composites().values()


def _original(size: int | torch.SymInt) -> sympy.Expr:
    """The symbol that a size had before anything was known of it."""
    return sympy.sympify(size.node._expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)


# -- writes ---------------------------------------------------------------------------------------------


def _without_writes(graph: fx.Graph) -> None:
    """relu_(x) => relu(x), read wherever x was read from then on; NoPackedForm where a view shares x's memory, and
    where gradients are off: they go through x as if it was not written."""
    grad = True
    for node in list(graph.nodes):
        if node.target is set_grad_enabled:
            grad = node.args[0]
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        name, alias_infos = schema.name, [a.alias_info for a in schema.arguments]
        written = [i for i, info in enumerate(alias_infos) if info is not None and info.is_write]
        in_place = name.endswith("_") and not name.endswith("__") and "out" not in node.kwargs
        if not grad or written != [0] or not in_place:
            raise NoPackedForm(f"it writes to a tensor by {node.target}")
        target = node.args[0]
        parts = _part_of(node)
        base = parts[0].args[0] if parts else target
        if base.op == "placeholder" or not (parts or _owns_memory(node)):
            raise NoPackedForm(f"it writes to a tensor that others share, by {node.target}")
        plain = _without_write(schema)
        if plain is None or (name != "aten::copy_" and _promotes(node)):
            raise NoPackedForm(f"it writes to a tensor by {node.target}")
        later = _after(graph, node)
        node.target = plain
        whole = _put_back(graph, parts, node) if parts else node
        for user in list(base.users):
            if user in later:
                user.replace_input_with(base, whole)


def _without_copies(graph: fx.Graph) -> None:
    """diagonal_copy(x) => diagonal(x): where nothing is written, a view is what its copy is."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.endswith("_copy") and schema.name != "aten::narrow_copy":
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_copy"), None)
            node.target = getattr(packet, node.target._overloadname, node.target)


def _without_write(schema: torch.FunctionSchema) -> torch._ops.OpOverload | None:
    """The operator that gives what one writes: of the same types, since `pow_.Scalar` is `pow.Tensor_Scalar`."""
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-1], None)
    types = [str(a.type) for a in schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        overload_without = getattr(packet, overload)
        if [str(a.type) for a in overload_without._schema.arguments] == types:
            return overload_without
    return None


def _promotes(write: fx.Node) -> bool:
    """Whether the operator that does not write may give another type than the tensor that is written to has."""
    indices = write.args[1] if write.target is torch.ops.aten.index_put_.default else []
    sources = [x for x in write.all_input_nodes if x not in indices]
    tensors = [x.meta["val"] for x in sources if isinstance(x.meta.get("val"), torch.Tensor)]
    return any(torch.promote_types(tensors[0].dtype, t.dtype) != tensors[0].dtype for t in tensors[1:])


_PARTS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal.default: torch.ops.aten.diagonal_scatter.default,
}


def _part_of(write: fx.Node) -> list[fx.Node]:
    """The slices and rows, from the tensor that has memory on, whose last one is written to: `x[1:, 0] = 3`; none where
    it is no such part, or another view that is read later shares the memory."""
    parts: list[fx.Node] = []
    node = write.args[0]
    while isinstance(node, fx.Node) and node.target in _PARTS:
        if sum(not is_size(user) for user in node.users) > 1:
            return []
        parts.insert(0, node)
        node = node.args[0]
    if not parts or not isinstance(node, fx.Node) or _is_view(node):
        return []
    later = _after(write.graph, write)
    others = [user for user in node.users if user is not parts[0] and user not in later and _is_view(user)]
    return [] if any(r in later or _is_view(r) for user in others for r in user.users) else parts


def _put_back(graph: fx.Graph, parts: list[fx.Node], written: fx.Node) -> fx.Node:
    """The tensor with a part in place of its own."""
    part_node = written
    for part in reversed(parts):
        whole, *where = part.args
        with graph.inserting_after(part_node):
            part_node = graph.call_function(
                _PARTS[part.target], (whole, part_node, *where), dict(part.kwargs)
            )
        part_node.meta["val"] = whole.meta["val"]
    return part_node


def _owns_memory(write: fx.Node) -> bool:
    """Whether nothing but what is written to shows its memory: no view of it before, and where it is one, what it is a
    view of is read by nothing else."""
    node, later = write.args[0], _after(write.graph, write)
    if not isinstance(node, fx.Node) or any(_is_view(user) and user not in later for user in node.users):
        return False
    while _is_view(node):
        source = node.args[0]
        is_part = node.target is operator.getitem  # one of those of a split, which share nothing
        if not isinstance(source, fx.Node):
            return False
        if not is_part and any(user is not node and not is_size(user) for user in source.users):
            return False
        node = source
    return node.op != "placeholder"


def _is_view(node: fx.Node) -> bool:
    node = node.args[0] if node.target is operator.getitem and isinstance(node.args[0], fx.Node) else node
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns) or schema.name in (
        "aten::reshape", "aten::contiguous", "aten::to", "aten::type_as", "aten::flatten", "aten::expand_as",
        "aten::dropout", "aten::chunk", "aten::matrix_H", "aten::ravel",
    )  # fmt: skip


def _after(graph: fx.Graph, node: fx.Node) -> frozenset[fx.Node]:
    nodes = list(graph.nodes)
    return frozenset(nodes[nodes.index(node) + 1 :])


def _without_whole_slices(graph: fx.Graph) -> None:
    """x[:] => x: torch leaves them out where sizes are numbers."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.slice.Tensor:
            x, _, start, end, step = (*node.args, *(None, None, 1)[len(node.args) - 2 :])[:5]
            if start in (0, None) and (end is None or (isinstance(end, int) and end >= 2**62)) and step == 1:
                node.replace_all_uses_with(x)
                graph.erase_node(node)


# -- two graphs -----------------------------------------------------------------------------------------


def _same_nodes(sized: fx.Graph, fixed: fx.Graph, values: Values) -> bool:
    """Whether the first graph with these sizes is the second one."""
    ours = [n for n in sized.nodes if not is_size(n)]
    theirs = [n for n in fixed.nodes if not is_size(n)]
    if len(ours) != len(theirs):
        return False
    place = {n: i for i, n in enumerate(ours)}
    place.update({n: i for i, n in enumerate(theirs)})
    for a, b in zip(ours, theirs, strict=True):
        if a.op == "get_attr" and b.op == "get_attr" and not _same_numbers(_constant(a), _constant(b)):
            return False
        if a.op != b.op or (a.op != "placeholder" and a.target != b.target):
            return False
        if a.op != "placeholder" and _arguments(a, place, values) != _arguments(b, place, values):
            return False
        if _shapes(a, values) != _shapes(b, values):
            return False
    return True


def _constant(node: fx.Node) -> torch.Tensor:
    return getattr(node.graph.owning_module, str(node.target))


def _same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two constants are one; what is no number is itself here."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number made of sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _arguments(node: fx.Node, place: dict[fx.Node, int], values: Values) -> tuple[list[object], str]:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    arguments: list[object] = []
    for x in leaves:
        if isinstance(x, fx.Node):
            arguments.append(_number(x.meta["val"], values) if is_size(x) else ("node", place[x]))
        else:
            arguments.append(_number(x, values))
    return arguments, str(spec)


def _number(x: object, values: Values) -> object:
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        number = expression(x).subs(values)
        return str(number) if depends(number) else float(number)
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _shapes(node: fx.Node, values: Values) -> list[tuple[tuple[str, ...], torch.dtype]]:
    leaves = tree_flatten(node.meta.get("val"))[0]
    return [
        (tuple(str(expression(d).subs(values)) for d in x.shape), x.dtype)
        for x in leaves
        if isinstance(x, torch.Tensor)
    ]
