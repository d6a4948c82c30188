"""A sized graph as one function over all instances.

In: a SizedGraph. Out: the fx graph of `packed(z, inputs)`: what each node gives is held in one of four layouts, by how
many of its dimensions are the instance's own:

    whole    no instance dimension: parameters, and what is computed of them alone
    dense    [n, *shape]                       no dimension differs
    packed   [sum of T, *rest]                 one does; it is moved to the front
    padded   [n, longest T, longest S, *rest]  two do, in their order; inside the function only

A rule (`rules.py`) says how a kind of operator acts on these, in calls of torch that a tape records as torch.fx does;
what has no rule runs instance by instance, inside the function (`Alone`), with its reason in `PackedGraph.alone`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import Argument, Target
from torch.fx.proxy import GraphAppendingTracer, Proxy

from fxbatch.ragged.expressions import (
    Shape,
    Size,
    UnknownExpressionError,
    column_of,
    columns_function,
    depends,
    expression,
)
from fxbatch.ragged.packed_column import DENSE, PACKED, PADDED, WHOLE
from fxbatch.ragged.padding import expanded
from fxbatch.ragged.symbolic import NoPackedForm, SizedGraph, is_size
from fxbatch.torch_private import TreeSpec, set_grad_enabled, tree_flatten, tree_unflatten

_LEADING = {WHOLE: 0, DENSE: 1, PACKED: 1, PADDED: 3}  # physical dimensions before the rest

_OF_MEMORY = ("as_strided", "as_strided_copy", "as_strided_scatter", "new_empty_strided", "set_")


class NoRule(Exception):
    """No rule fits a node; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of the body in the function, of all instances: what stands for it, and its layout."""

    rows: Proxy
    layout: str
    shape: Shape  # of one instance
    dtype: torch.dtype

    @property
    def axes(self) -> tuple[int, ...]:
        """The dimensions that differ between instances."""
        return () if self.layout == WHOLE else own_dimensions(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def rest(self) -> list[int]:
        """The other dimensions, in order."""
        return [d for d in range(self.rank) if d not in self.axes]

    def place(self, d: int) -> int:
        """Where dimension d is in the tensor of all instances."""
        d = d % max(self.rank, 1)
        return d if self.layout == WHOLE else place_in(self.shape, d)


Given = Packed | Sequence[Packed | None] | None  # what a node gives; None for what is no tensor
Arguments = dict[str, Any]  # of a node by name, defaults among them
Traced = Any  # what a node gave where it was traced: a tensor, or several
Operator = torch._ops.OpOverload | Callable[..., object]  # of aten, or a function that stands for one


def operator_of(node: fx.Node) -> torch._ops.OpOverload:
    """The operator that a node calls."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target


def name_of(node: fx.Node) -> str:
    """The name of the operator that a node calls, without its namespace."""
    return operator_of(node)._schema.name.rpartition("::")[2]


def own_dimensions(shape: Sequence[object]) -> tuple[int, ...]:
    """Dimensions whose size differs between instances."""
    return tuple(i for i, e in enumerate(shape) if depends(e))


def place_in(shape: Shape, d: int) -> int:
    """Where dimension d of a value of the instances of this shape is in the tensor of all."""
    axes, layout = own_dimensions(shape), layout_of(shape)
    if d in axes:
        return axes.index(d) + (1 if layout == PADDED else 0)
    return _LEADING[layout] + d - sum(a < d for a in axes)


def layout_of(shape: Sequence[object]) -> str:
    """The layout of a value of the instances that has this shape."""
    count = len(own_dimensions(shape))
    if count > 2:
        raise NoRule(f"a tensor with {count} sizes of its own")
    return (DENSE, PACKED, PADDED)[count]


def shape_of(tensor: torch.Tensor) -> Shape:
    """A traced tensor's shape: ints and expressions of sizes."""
    sizes = []
    for size in tensor.shape:
        e = expression(size)
        sizes.append(e if depends(e) else int(e))
    return tuple(sizes)


@dataclass
class PackedGraph:
    """The function of a sized graph."""

    module: fx.GraphModule  # of (z, inputs), a list that it empties
    outputs: list[Packed]
    lengths: list[Size]  # that the function asks for
    columns: list[Size]  # other numbers of each instance
    alone: dict[str, tuple[str, str]]  # by node: an operator that runs instance by instance, and why
    layouts: dict[str, str]  # by node of the graph: of what it gives
    random: bool  # whether it draws numbers
    by_values: bool = False  # whether a size depends on values

    @property
    def source(self) -> str:
        """The calls as Python."""
        return self.module.code.strip()


class PackedTape(GraphAppendingTracer):
    """Records what rules compute of packed values, call by call."""

    def __init__(self, sized: SizedGraph) -> None:
        super().__init__(fx.Graph())
        self.sized = sized
        self.z = Proxy(self.graph.placeholder("z"), self)  # the PackedMinibatch
        self.inputs = Proxy(self.graph.placeholder("inputs"), self)
        self.functions: dict[Callable[..., object], Callable[..., object]] = {}  # by what they are calls of
        self.tensors: dict[str, torch.Tensor] = {}  # that the body itself holds
        self.env: dict[fx.Node, Given] = {}
        self.lengths_of: dict[Size, int] = {}
        self.columns_of: dict[Size, int] = {}
        self.alone: dict[str, tuple[str, str]] = {}
        self.recorded: dict[object, fx.Node] = {}  # calls: an equal one is not made again
        self.random = False  # whether an operator has drawn numbers
        self.draws = False  # whether the operator whose rule runs draws numbers: no two are the same then
        # Whether gradients were switched: equal calls may give something else then.
        self.switched = False
        self.counted: dict[Size, Proxy] = {}  # symbol of a size that depends on values -> its column
        self.formulas: dict[Size, Callable[..., object]] = {}  # of sizes that depend on values
        self.staying: set[fx.Node] = set()  # calls that do something

    # -- recording ----------------------------------------------------------------------------------

    def create_node(
        self, kind: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument],
        name: str | None = None, type_expr: object = None,
    ) -> fx.Node:  # fmt: skip
        """A call: the one that was recorded, where there is an equal one."""
        key: object = kind, target, repr(args), repr(kwargs)
        if key in self.recorded and not self.draws:
            return self.recorded[key]
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        self.recorded[node if self.draws else key] = node
        return node

    def call(self, function: Callable[..., object], *args: object, **kwargs: object) -> Proxy:
        """What a function gives for these arguments: proxies, numbers, strings, types of torch, and lists of these."""
        if function not in self.functions:
            self.functions[function] = _named(function)
        return self.create_proxy("call_function", self.functions[function], args, kwargs)

    def stays(self, call: Proxy) -> Proxy:
        """A call that was just recorded for what it does: it stays where nobody reads what it gives, and is made again
        where it is met again."""
        self.staying.add(call.node)
        self.recorded.popitem()
        return call

    def forget(self, recorded: int) -> None:
        """Take back what was recorded since there were so many calls."""
        while len(self.recorded) > recorded:
            self.graph.erase_node(self.recorded.popitem()[1])

    def switch(self, node: fx.Node) -> None:
        """Gradients on or off for what is recorded from now on."""
        if node.args[0] and not torch.is_grad_enabled():  # as it is where the call is
            raise NoPackedForm("it switches gradients on")
        self.stays(self.call(set_grad_enabled, node.args[0]))
        self.recorded.clear()
        self.switched = True

    def is_read(self, node: fx.Node) -> bool:
        """Whether several nodes read it, or one that may be in other modes: its one reader can't take its place."""
        return len(node.users) > 1 or self.switched

    def lengths(self, e: object) -> Proxy:
        """The Lengths of an expression (or of a number)."""
        e = expression(e) if isinstance(e, int) else e
        if (column := self._by_values(e)) is not None:
            return self.z.sized(column)
        return self.z.lengths[_place(e, self.lengths_of, self.sized)]

    def rows_of(self, v: Packed) -> Proxy:
        """The Lengths of a packed value."""
        return self.lengths(v.shape[v.axes[0]])

    def column(self, e: object) -> Proxy:
        """A numpy column of an expression: one number per instance."""
        if (column := self._by_values(e)) is not None:
            return column
        return self.z.columns[_place(e, self.columns_of, self.sized)]

    def number(self, e: object, dtype: torch.dtype) -> Packed:
        """An expression as a tensor of one number an instance."""
        return Packed(self.z.tensor(self.column(e), dtype), DENSE, (), dtype)

    def _by_values(self, e: object) -> Proxy | None:
        """The column of a size that depends on values, None of another."""
        symbols: set[sympy.Symbol] = getattr(e, "free_symbols", set())
        if symbols <= set(self.sized.symbols):
            return None
        columns = {s: self.z.sizes[i] for i, s in enumerate(self.sized.symbols) if s in symbols}
        columns |= {s: x for s, x in self.counted.items() if s in symbols}
        if len(columns) < len(symbols):
            raise NoRule("a size that depends on values")
        if e not in self.formulas:
            self.formulas[e] = columns_function([e], list(columns))
        return self.call(self.formulas[e], *columns.values())[0]

    def rows_where(self, mask: Packed, size: object) -> Proxy:
        """The rows of all instances that a mask [T] picks; `size` is how many they are of an instance."""
        flags = mask.rows if mask.layout == PACKED else self.to_dense(mask).rows.reshape(-1)
        if not getattr(size, "is_Symbol", False):
            raise NoRule("a mask")
        self.counted[size] = self.z.counted(self.lengths(mask.shape[0]), flags)
        return flags.nonzero().squeeze(1)

    def packed(self, rows: Proxy, like: Packed | torch.Tensor, layout: str | None = None) -> Packed:
        """A value of the shape and type of a traced tensor (or of another value)."""
        shape = like.shape if isinstance(like, Packed) else shape_of(like)
        return Packed(_recorded(rows), layout or layout_of(shape), shape, like.dtype)

    def by_elements(self, v: Packed, rows: Proxy, dtype: torch.dtype) -> Packed:
        """A value of the shape and in the layout of another, element by element."""
        return Packed(_recorded(rows), v.layout, v.shape, dtype)

    def results(self, node: fx.Node, result: Proxy, layout: str | None = None) -> Given:
        """The result or the results of a node; None for what is no tensor."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return self.packed(result, val, layout)
        return tuple(
            self.packed(result[i], t, layout) if isinstance(t, torch.Tensor) else None
            for i, t in enumerate(val)
        )

    # -- layouts --------------------------------------------------------------------------------------

    def to_dense(self, v: Packed) -> Packed:
        """A value that is the same for all instances, once an instance."""
        if v.layout != WHOLE:
            return v
        rows = v.rows.unsqueeze(0).expand(self.z.n, *[-1] * v.rank)
        return Packed(rows, DENSE, v.shape, v.dtype)

    def spread(self, v: Packed, *, clear: Sequence[int] = ()) -> Proxy:
        """[n, *shape] with the longest sizes in place of its own; padding repeats rows, or is zero along `clear`."""
        if v.layout in (WHOLE, DENSE):
            return v.rows
        if v.layout == PACKED:
            size = self.rows_of(v)
            rows = size.pad(v.rows) if v.axes[0] in clear else size.spread(v.rows)
        else:
            rows = self.hidden(v, clear)
        order = [*v.axes, *v.rest]
        return permuted(rows, [0, *[1 + order.index(d) for d in range(v.rank)]])

    def hidden(self, v: Packed, dims: Sequence[int], fill: object = 0) -> Proxy:
        """A padded value whose padding along those of its own dimensions that are in `dims` is `fill`."""
        rows = v.rows
        for a in v.axes:
            if a in dims:
                rows = self.lengths(v.shape[a]).hide(rows, v.place(a), fill)
        return rows

    def gathered_as(self, index: Packed, rows: Proxy, val: torch.Tensor) -> Packed:
        """The layout of `x[index]` with a padded index: the index's dimensions, then those of a picked row."""
        before = [*index.axes, *index.rest]
        after = [*own_dimensions(shape_of(val))]
        after += [d for d in range(len(shape_of(val))) if d not in after]
        if after[: len(before)] != before:
            raise NoRule("indices whose sizes change places")
        return self.packed(rows, val)

    def gathered(self, padded: Proxy, like: Packed | torch.Tensor) -> Packed:
        """The value of a padded tensor [n, *shape]: the inverse of `spread`."""
        shape = like.shape if isinstance(like, Packed) else shape_of(like)
        axes = own_dimensions(shape)
        rest = [d for d in range(len(shape)) if d not in axes]
        rows = permuted(padded, [0, *[1 + d for d in (*axes, *rest)]])
        return self.packed(self.lengths(shape[axes[0]]).unpad(rows) if len(axes) == 1 else rows, like)

    def of_rows(self, rows: Proxy, d: int, val: torch.Tensor) -> Packed:
        """The value whose rows along dimension d these are, as many in each instance or not."""
        shape = shape_of(val)
        if d in own_dimensions(shape):
            return self.packed(rows, val)
        rows = self.call(torch.unflatten, rows, 0, (self.z.n, shape[d]))
        return self.packed(rows if d == 0 else rows.movedim(1, d + 1), val)

    def leading(self, shape: Shape) -> list[Proxy]:
        """The sizes of a value of the instances of this shape, before those of its other dimensions."""
        axes = own_dimensions(shape)
        if len(axes) == 1:
            return [self.lengths(shape[axes[0]]).total]
        return [self.z.n, *[self.lengths(shape[d]).longest for d in axes]]

    def aligned(self, v: Packed, shape: Shape) -> Proxy:
        """A value so that it broadcasts against another of `shape`, in that one's layout."""
        axes, layout = own_dimensions(shape), layout_of(shape)
        lead = len(shape) - v.rank
        rest = len(shape) - len(axes)
        mine = tuple(a + lead for a in v.axes)
        for a in mine:
            if a not in axes or shape[a] != v.shape[a - lead]:
                raise NoRule("sizes that are not known to be equal")
        # Own dimensions along which v has size 1.
        flat = [a - lead for a in axes if a >= lead and a not in mine]
        if any(v.shape[d] != 1 for d in flat):
            raise NoRule("a size of its own meets a fixed one")
        if v.layout == WHOLE:
            rows = _squeezed(v.rows, flat)
            return self._expanded(rows, shape, axes) if layout == PADDED else rows
        if v.layout == layout:
            return filled(v.rows, _LEADING[layout], v.rank - len(axes), rest)
        if v.layout == DENSE:
            rows = _squeezed(v.rows, [d + 1 for d in flat])
            if layout == PACKED:
                return self.lengths(shape[axes[0]]).each(filled(rows, 1, v.rank - len(flat), rest))
            rows = filled(rows.unsqueeze(1).unsqueeze(1), 3, v.rank - len(flat), rest)
            return self._expanded(rows, shape, axes)
        if v.layout != PACKED:
            raise NoRule("two sizes of its own meet one")
        rows = self.rows_of(v).spread(v.rows)
        rows = _squeezed(rows, [2 + v.rest.index(d) for d in flat])
        rows = rows.unsqueeze(2 if mine[0] == axes[0] else 1)
        other = axes[1] if mine[0] == axes[0] else axes[0]
        return self._expanded(filled(rows, 3, v.rank - 1 - len(flat), rest), shape, (other,))

    def _expanded(self, rows: Proxy, shape: Shape, dims: Sequence[int]) -> Proxy:
        """A value as long as the padded ones of `shape` along some of their own dimensions."""
        axes = own_dimensions(shape)
        along = [(self.lengths(shape[d]), 1 + axes.index(d)) for d in dims]
        return self.call(expanded, rows, along, 1 + len(shape))

    # -- nodes ------------------------------------------------------------------------------------------

    def value(self, x: object) -> Any:
        """An argument of a node: a Packed, an expression of sizes, or plain data."""
        if isinstance(x, fx.Node):
            return expression_or_number(x.meta["val"]) if is_size(x) else self.env[x]
        return expression_or_number(x)

    def leaves(self, node: fx.Node) -> tuple[list[Any], TreeSpec]:
        """The arguments of a node and the items of those that are lists, and what they are of (args, kwargs)."""
        leaves, spec = tree_flatten((list(node.args), dict(node.kwargs)))
        return [self.value(x) for x in leaves], spec

    def bound(self, node: fx.Node) -> Arguments:
        """The arguments of a node by name, defaults among them."""
        args, kwargs = tree_unflatten(*self.leaves(node))
        defaults = {a.name: a.default_value for a in node.target._schema.arguments}
        return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}

    def apply(self, target: Operator, arguments: Arguments) -> Proxy:
        """What an operator gives for these arguments by name."""
        args, kwargs = [], {}
        for a in target._schema.arguments:
            x = plain(arguments[a.name])
            if a.kwarg_only:
                kwargs[a.name] = x
            else:
                args.append(x)
        function = getattr(target, "_op", target)
        self.functions.setdefault(function, _named(function, target._schema.name.rpartition("::")[2]))
        return self.call(function, *args, **kwargs)


def plain(x: object) -> Any:
    """An argument of a call that is recorded."""
    if isinstance(x, Packed):
        return x.rows
    if isinstance(x, (list, tuple)):
        return type(x)(map(plain, x))
    if isinstance(x, Proxy):
        return x
    if depends(x):
        raise NoRule("an argument that is a size of its own")
    return _plain(x)


def permuted(x: Proxy, order: Sequence[int]) -> Proxy:
    """A tensor with its dimensions in another order, itself where it is the order that they have."""
    return x if list(order) == list(range(len(order))) else x.permute(*order)


def filled(x: Proxy, leading: int, have: int, rest: int) -> Proxy:
    """Insert dimensions of size 1 after the leading ones, until there are `rest`."""
    for _ in range(rest - have):
        x = x.unsqueeze(leading)
    return x


def _squeezed(x: Proxy, dims: Sequence[int]) -> Proxy:
    return x.squeeze(tuple(dims)) if dims else x


def _recorded(x: Proxy) -> Proxy:
    """What stands for an attribute, too, is a call."""
    return Proxy(x.node, x.tracer) if type(x) is not Proxy else x


def _named(function: Callable[..., object], name: str = "") -> Callable[..., object]:
    """A function under a name by which torch.fx can write calls of it."""
    called = functools.partial(function)
    name = name or getattr(function, "__name__", type(function).__name__)
    vars(called).update(__module__="packed", __name__=name.strip("<>_").lower())
    return called


def _place(e: object, places: dict[Size, int], sized: SizedGraph) -> int:
    """Where the function finds what it is given of a size."""
    if e not in places:
        column_of(e, dict.fromkeys(sized.symbols, 0))  # or there is none
        places[e] = len(places)
    return places[e]


def expression_or_number(x: object) -> Any:
    """A number; an expression where it differs between instances."""
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        e = expression(x)
        return e if depends(e) else _plain(e)
    return x


def _plain(e: object) -> object:
    if isinstance(e, sympy.Integer):
        return int(e)
    return float(e) if isinstance(e, (sympy.Float, sympy.Rational)) else e


Rule = Callable[[PackedTape, fx.Node], Given]
RuleOf = Callable[[torch._ops.OpOverload], Rule]


def lower(graph: SizedGraph, rule_of: RuleOf, alone: Rule, shared: int) -> PackedGraph:
    """The function of a graph. The last `shared` of its inputs are the same for all instances."""
    tape = PackedTape(graph)
    first_shared = len(graph.inputs) - shared
    outputs: list[Packed] = []
    for place, node in enumerate(graph.inputs):
        layout = WHOLE if place >= first_shared else None
        tape.env[node] = tape.packed(tape.stays(tape.inputs.pop(0)), node.meta["val"], layout)
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            if not is_size(node):
                _lower_node(tape, node, rule_of, alone)
        elif node.op == "get_attr":
            name = str(node.target)
            tape.tensors[name] = tensor = getattr(graph.module, name)
            tape.env[node] = tape.packed(tape.create_proxy("get_attr", name, (), {}), tensor, WHOLE)
        elif node.op == "output":
            for x in tree_flatten(node.args[0])[0]:
                if not isinstance(x, fx.Node) or is_size(x):
                    raise NoPackedForm("it returns a size")
                value = tape.env[x]
                assert isinstance(value, Packed)
                for a in value.axes:
                    size = tape.lengths(value.shape[a])
                    if value.shape[a] not in tape.lengths_of:
                        tape.stays(
                            tape.call(functools.partial(_keep, value.shape[a]), tape.z.sizes_by_values, size)
                        )
                if any(value.rows.node is o.rows.node and value is not o for o in outputs):
                    value = replace(value, rows=value.rows.clone())  # two tensors, here as there
                outputs.append(value)
    return _assembled(tape, outputs)


def _keep(e: Size, sizes: dict[Size, object], size: object) -> None:
    """Keep the size of a result that depends on values."""
    sizes[e] = size


def _lower_node(tape: PackedTape, node: fx.Node, rule_of: RuleOf, alone: Rule) -> None:
    if node.target is operator.getitem:
        tape.env[node] = tape.env[node.args[0]][node.args[1]]
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        if node.target is not set_grad_enabled:
            raise NoPackedForm(f"it calls {node.target}")
        tape.switch(node)
        return
    if node.target._schema.name.removeprefix("aten::") in _OF_MEMORY:
        raise NoPackedForm(f"{node.target} asks for the memory of a tensor")
    before = len(tape.recorded)
    tape.draws = _draws(node.target)
    tape.random |= tape.draws and not keeps_all(tape, node)
    try:
        tape.env[node] = rule_of(node.target)(tape, node)
    except (NoRule, UnknownExpressionError) as error:
        tape.forget(before)
        tape.alone[node.name] = str(node.target), str(error)
        try:
            tape.env[node] = alone(tape, node)
        except (NoRule, UnknownExpressionError) as worse:
            raise NoPackedForm(f"{node.target}: {worse}") from None


def _draws(target: torch._ops.OpOverload) -> bool:
    """Whether an operator may draw random numbers."""
    names = [target._schema.name, *[a.name for a in target._schema.arguments]]
    return torch.Tag.nondeterministic_seeded in target.tags or any("dropout" in name for name in names)


def keeps_all(tape: PackedTape, node: fx.Node) -> bool:
    """Whether dropout has nothing to do."""
    a = tape.bound(node)
    probability = a.get("dropout_p", a.get("p", a.get("dropout")))
    return a.get("train") is False or (type(probability) in (int, float) and probability == 0)


def _assembled(tape: PackedTape, outputs: list[Packed]) -> PackedGraph:
    graph = tape.graph
    graph.output([o.rows.node for o in outputs])
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node in tape.staying)
    layouts = {node.name: value.layout for node, value in tape.env.items() if isinstance(value, Packed)}
    tape.env.clear()  # what stands for the results refers to the tape
    tape.recorded.clear()
    return PackedGraph(
        fx.GraphModule(tape.tensors, graph), outputs, list(tape.lengths_of), list(tape.columns_of),
        tape.alone, layouts, tape.random, bool(tape.counted),
    )  # fmt: skip
