"""A sized graph as one straight-line Python function over all instances.

In: a SizedGraph. Out: source and constants of `packed(z, inputs)`: what each node gives is held in one of four layouts,
by how many of its dimensions are the instance's own:

    whole    no instance dimension: parameters, and what is computed of them alone
    dense    [n, *shape]                       no dimension differs
    packed   [sum of T, *rest]                 one does; it is moved to the front
    padded   [n, longest T, longest S, *rest]  two do, in their order; inside the function only

A rule (`rules.py`) says how a kind of operator acts on these; what has no rule runs instance by instance, inside the
function (`Alone`), with its reason in `Lowered.alone`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from fxbatch.ragged.expressions import Shape, Size, UnknownExpressionError, column_source, depends, expression
from fxbatch.ragged.packed_column import DENSE, PACKED, PADDED, WHOLE
from fxbatch.ragged.padding import expanded
from fxbatch.ragged.symbolic import NoPackedForm, SizedGraph, is_size
from fxbatch.torch_private import (
    TreeSpec,
    set_grad_enabled,
    tree_flatten,
    tree_unflatten,
)

_LEADING = {WHOLE: 0, DENSE: 1, PACKED: 1, PADDED: 3}  # physical dimensions before the rest

_OF_MEMORY = ("as_strided", "as_strided_copy", "as_strided_scatter", "new_empty_strided", "set_")


class NoRule(Exception):
    """No rule fits a node; the message is the reason."""


@dataclass(frozen=True)
class Packed:
    """Where a tensor of the body is in the function: a name, and its layout."""

    name: str
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
        """Where dimension d is in the physical tensor."""
        d = d % max(self.rank, 1)
        if d in self.axes:
            return self.axes.index(d) + (1 if self.layout == PADDED else 0)
        return _LEADING[self.layout] + self.rest.index(d)


Emitted = Packed | Sequence[Packed | None] | None  # what a node gives; None for what is no tensor
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
class Lowered:
    """The function of a sized graph."""

    source: str
    constants: dict[str, object]
    outputs: list[Packed]
    lengths: list[Size]  # that the function asks for
    columns: list[Size]  # other numbers of each instance
    alone: dict[str, tuple[str, str]]  # by node: an operator that runs instance by instance, and why
    layouts: dict[str, str]  # by node of the graph: of what it gives
    random: bool  # whether it draws numbers
    by_values: bool = False  # whether a size depends on values


class Emitter:
    """Writes the function, node by node."""

    def __init__(self, graph: SizedGraph) -> None:
        self.graph = graph
        self.lines: list[str] = []
        self.constants: dict[str, object] = {"torch": torch, "np": np}
        self.env: dict[fx.Node, Emitted] = {}
        self.lengths_of: dict[Size, str] = {}
        self.columns_of: dict[Size, str] = {}
        self.alone: dict[str, tuple[str, str]] = {}
        self.written: dict[str, str] = {}  # code -> the name that holds what it gives
        self.random = False  # whether an operator has drawn numbers
        self.draws = False  # whether the operator that is written draws numbers: no two are the same then
        # Whether gradients were switched: equal code may give something else then.
        self.switched = False
        self.counted: dict[Size, str] = {}  # symbol of a size that depends on values -> its column
        self._count = 0
        self._names = {s: f"s{i}" for i, s in enumerate(graph.symbols)}

    # -- writing ------------------------------------------------------------------------------------

    def line(self, code: str) -> str:
        """A name for an expression: a new one, unless the same was written before."""
        if code.isidentifier():
            return code
        if code in self.written and not self.draws:
            return self.written[code]
        self._count += 1
        name = f"v{self._count}"
        self.lines.append(f"{name} = {code}")
        if not self.draws:
            self.written[code] = name
        return name

    def forget(self, lines: int, written: int) -> None:
        """Take back what was written since there were so many lines and names."""
        del self.lines[lines:]
        while len(self.written) > written:
            self.written.popitem()

    def switch(self, node: fx.Node) -> None:
        """Gradients on or off for what is written from now on."""
        if node.args[0] and not torch.is_grad_enabled():  # as it is where the call is
            raise NoPackedForm("it switches gradients on")
        self.lines.append(f"z.set_grad_enabled({self.const(node.args[0])})")
        self.written.clear()
        self.switched = True

    def is_read(self, node: fx.Node) -> bool:
        """Whether several nodes read it, or one that may be in other modes: its one reader can't take its place."""
        return len(node.users) > 1 or self.switched

    def const(self, value: object) -> str:
        """An expression for a Python object."""
        if type(value) in (int, bool, str, type(None)):
            return repr(value)
        for name, constant in self.constants.items():
            if constant is value:
                return name
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def lengths(self, e: object) -> str:
        """The Lengths of an expression (or of a number)."""
        e = expression(e) if isinstance(e, int) else e
        if source := self._by_values(e):
            return self.line(f"z.sized({source})")
        return self._numbered(e, self.lengths_of, "L")

    def rows_of(self, v: Packed) -> str:
        """The Lengths of a packed value."""
        return self.lengths(v.shape[v.axes[0]])

    def column(self, e: object) -> str:
        """A numpy column of an expression: one number per instance."""
        if source := self._by_values(e):
            return self.line(source)
        return self._numbered(e, self.columns_of, "c")

    def _numbered(self, e: object, names: dict[Size, str], letter: str) -> str:
        """The name of what the function is given of a size."""
        if e not in names:
            column_source(e, self._names)
            names[e] = f"{letter}{len(names)}"
        return names[e]

    def _by_values(self, e: object) -> str:
        """The source of a size that depends on values, "" of another."""
        unseen: set[sympy.Symbol] = getattr(e, "free_symbols", set()) - self._names.keys()
        if not unseen <= self.counted.keys():
            raise NoRule("a size that depends on values")
        names = {s: f"z.sizes[{i}]" for i, s in enumerate(self._names)}
        return column_source(e, {**names, **self.counted}) if unseen else ""

    def rows_where(self, mask: Packed, size: object) -> str:
        """The rows of all instances that a mask [T] picks; `size` is how many they are of an instance."""
        sizes = self.lengths(mask.shape[0])
        flags = mask.name if mask.layout == PACKED else self.line(f"{self.to_dense(mask).name}.reshape(-1)")
        if not getattr(size, "is_Symbol", False):
            raise NoRule("a mask")
        self.counted[size] = self.line(f"z.counted({sizes}, {flags})")
        return self.line(f"{flags}.nonzero().squeeze(1)")

    def packed(self, code: str, like: Packed | torch.Tensor, layout: str | None = None) -> Packed:
        """A new value of the shape and type of a traced tensor (or of another value)."""
        shape = like.shape if isinstance(like, Packed) else shape_of(like)
        layout = layout or layout_of(shape)
        return Packed(self.line(code), layout, shape, like.dtype)

    def by_elements(self, v: Packed, code: str, dtype: torch.dtype) -> Packed:
        """A new value of the shape and in the layout of another, element by element."""
        return Packed(self.line(code), v.layout, v.shape, dtype)

    def results(self, node: fx.Node, code: str, layout: str | None = None) -> Emitted:
        """The result or the results of a node, which `code` makes; None for what is no tensor."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return self.packed(code, val, layout)
        name = self.line(code)
        return tuple(
            self.packed(f"{name}[{i}]", t, layout) if isinstance(t, torch.Tensor) else None
            for i, t in enumerate(val)
        )

    # -- layouts --------------------------------------------------------------------------------------

    def to_dense(self, v: Packed) -> Packed:
        """A value that is the same for all instances, once an instance."""
        if v.layout != WHOLE:
            return v
        return Packed(self.line(f"{v.name}.expand(n, *{v.name}.shape)"), DENSE, v.shape, v.dtype)

    def spread(self, v: Packed, *, clear: Sequence[int] = ()) -> str:
        """[n, *shape] with the longest sizes in place of its own; padding repeats rows, or is zero along `clear`."""
        if v.layout in (WHOLE, DENSE):
            return v.name
        if v.layout == PACKED:
            size = self.rows_of(v)
            name = self.line(f"{size}.{'pad' if v.axes[0] in clear else 'spread'}({v.name})")
        else:
            name = self.hidden(v, clear)
        held = [*v.axes, *v.rest]
        return self.permuted(name, [0, *[1 + held.index(d) for d in range(v.rank)]])

    def permuted(self, name: str, order: Sequence[int]) -> str:
        """A tensor with its dimensions in another order, itself where it is the order that they have."""
        return name if list(order) == list(range(len(order))) else self.line(f"{name}.permute({list(order)})")

    def hidden(self, v: Packed, dims: Sequence[int], fill: str = "0") -> str:
        """A padded value whose padding along those of its own dimensions that are in `dims` is `fill`."""
        name = v.name
        for a in v.axes:
            if a in dims:
                name = self.line(f"{self.lengths(v.shape[a])}.hide({name}, {v.place(a)}, {fill})")
        return name

    def gathered_as(self, index: Packed, code: str, val: torch.Tensor) -> Packed:
        """The layout of `x[index]` with a padded index: the index's dimensions, then those of a picked row."""
        before = [*index.axes, *index.rest]
        after = [*own_dimensions(shape_of(val))]
        after += [d for d in range(len(shape_of(val))) if d not in after]
        if after[: len(before)] != before:
            raise NoRule("indices whose sizes change places")
        return self.packed(code, val)

    def gathered(self, name: str, like: Packed | torch.Tensor) -> Packed:
        """The value of a padded tensor [n, *shape]: the inverse of `spread`."""
        shape = like.shape if isinstance(like, Packed) else shape_of(like)
        axes = own_dimensions(shape)
        rest = [d for d in range(len(shape)) if d not in axes]
        name = self.permuted(name, [0, *[1 + d for d in (*axes, *rest)]])
        if len(axes) == 1:
            name = self.line(f"{self.lengths(shape[axes[0]])}.unpad({name})")
        return self.packed(name, like)

    def of_rows(self, name: str, d: int, val: torch.Tensor) -> Packed:
        """The value whose rows along dimension d these are, as many in each instance or not."""
        shape = shape_of(val)
        if d in own_dimensions(shape):
            return self.packed(name, val)
        name = self.line(f"{name}.reshape(n, {shape[d]}, *{name}.shape[1:])")
        return self.packed(name if d == 0 else f"{name}.movedim(1, {d + 1})", val)

    def leading(self, shape: tuple[object, ...]) -> list[str]:
        """The sizes of a value of the instances of this shape, before those of its other dimensions."""
        axes = own_dimensions(shape)
        if len(axes) == 1:
            return [f"{self.lengths(shape[axes[0]])}.total"]
        return ["n", *[f"{self.lengths(shape[d])}.longest" for d in axes]]

    def aligned(self, v: Packed, shape: tuple[object, ...]) -> str:
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
            name = self._squeezed(v.name, flat)
            return self._expanded(name, shape, axes) if layout == PADDED else name
        if v.layout == layout:
            return self.filled(v.name, _LEADING[layout], v.rank - len(axes), rest)
        if v.layout == DENSE:
            name = self._squeezed(v.name, [d + 1 for d in flat])
            if layout == PACKED:
                name = self.filled(name, 1, v.rank - len(flat), rest)
                return self.line(f"{self.lengths(shape[axes[0]])}.each({name})")
            name = self.line(f"{name}.unsqueeze(1).unsqueeze(1)")
            return self._expanded(self.filled(name, 3, v.rank - len(flat), rest), shape, axes)
        if v.layout != PACKED:
            raise NoRule("two sizes of its own meet one")
        name = self.line(f"{self.rows_of(v)}.spread({v.name})")
        name = self._squeezed(name, [2 + v.rest.index(d) for d in flat])
        name = self.line(f"{name}.unsqueeze({2 if mine[0] == axes[0] else 1})")
        other = axes[1] if mine[0] == axes[0] else axes[0]
        return self._expanded(self.filled(name, 3, v.rank - 1 - len(flat), rest), shape, (other,))

    def _expanded(self, name: str, shape: tuple[object, ...], dims: Sequence[int]) -> str:
        """A value as long as the padded ones of `shape` along some of their own dimensions."""
        axes = own_dimensions(shape)
        along = "".join(f"({self.lengths(shape[d])}, {1 + axes.index(d)}), " for d in dims)
        return self.line(f"{self.const(expanded)}({name}, [{along}], {1 + len(shape)})")

    def _squeezed(self, name: str, dims: Sequence[int]) -> str:
        return self.line(f"{name}.squeeze({tuple(dims)})") if dims else name

    def filled(self, name: str, leading: int, have: int, rest: int) -> str:
        """Insert dimensions of size 1 after the leading ones, until there are `rest`."""
        for _ in range(rest - have):
            name = self.line(f"{name}.unsqueeze({leading})")
        return name

    # -- nodes ------------------------------------------------------------------------------------------

    def value(self, x: object) -> Any:
        """An argument of a node in the emitted function: a Packed, an expression of sizes, or plain data."""
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

    def call(self, target: Operator, arguments: Arguments) -> str:
        """The source of a call of an operator, with these arguments by name."""
        schema = target._schema
        parts = []
        for a in schema.arguments:
            text = self.source(arguments[a.name])
            parts.append(f"{a.name}={text}" if a.kwarg_only else text)
        return f"{self.const(getattr(target, '_op', target))}({', '.join(parts)})"

    def source(self, x: object) -> str:
        """The source of one argument."""
        if isinstance(x, Code):
            return str(x)
        if isinstance(x, Packed):
            return x.name
        if isinstance(x, list):
            return f"[{', '.join(map(self.source, x))}]"
        if isinstance(x, tuple):
            return f"({', '.join(map(self.source, x))},)"
        if depends(x):
            raise NoRule("an argument that is a size of its own")
        return self.const(_plain(x))


class Code(str):
    """Source of an argument."""

    __slots__ = ()


def expression_or_number(x: object) -> Any:
    """A number; an expression where it differs between instances."""
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        e = expression(x)
        return e if depends(e) else _plain(e)
    return x


def _plain(e: sympy.Basic) -> Any:
    if getattr(e, "is_Integer", False):
        return int(e)
    return float(e) if getattr(e, "is_Float", False) or getattr(e, "is_Rational", False) else e


Rule = Callable[[Emitter, fx.Node], Emitted]
RuleOf = Callable[[torch._ops.OpOverload], Rule]


def lower(graph: SizedGraph, rule_of: RuleOf, alone: Rule, shared: int) -> Lowered:
    """The function of a graph. The last `shared` of its inputs are the same for all instances."""
    e = Emitter(graph)
    first_shared = len(graph.inputs) - shared
    outputs: list[Packed] = []
    for place, node in enumerate(graph.inputs):
        e.env[node] = e.packed(f"i{place}", node.meta["val"], WHOLE if place >= first_shared else None)
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            if not is_size(node):
                _lower_node(e, node, rule_of, alone)
        elif node.op == "get_attr":
            tensor = getattr(graph.module, str(node.target))
            e.env[node] = e.packed(e.const(tensor), tensor, WHOLE)
        elif node.op == "output":
            for x in tree_flatten(node.args[0])[0]:
                if not isinstance(x, fx.Node) or is_size(x):
                    raise NoPackedForm("it returns a size")
                value = e.env[x]
                assert isinstance(value, Packed)
                for a in value.axes:
                    size = e.lengths(value.shape[a])
                    if value.shape[a] not in e.lengths_of:
                        e.lines.append(f"z.keep({e.const(value.shape[a])}, {size})")
                if any(value.name == o.name and value is not o for o in outputs):
                    value = replace(value, name=e.line(f"{value.name}.clone()"))  # two tensors, here as there
                outputs.append(value)
    return _assembled(e, outputs)


def _lower_node(e: Emitter, node: fx.Node, rule_of: RuleOf, alone: Rule) -> None:
    if node.target is operator.getitem:
        e.env[node] = e.env[node.args[0]][node.args[1]]
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        if node.target is not set_grad_enabled:
            raise NoPackedForm(f"it calls {node.target}")
        e.switch(node)
        return
    if node.target._schema.name.removeprefix("aten::") in _OF_MEMORY:
        raise NoPackedForm(f"{node.target} asks for the memory of a tensor")
    before = len(e.lines), len(e.written)
    e.draws = _draws(node.target)
    e.random |= e.draws and not keeps_all(e, node)
    try:
        e.env[node] = rule_of(node.target)(e, node)
    except (NoRule, UnknownExpressionError) as error:
        e.forget(*before)
        e.alone[node.name] = str(node.target), str(error)
        try:
            e.env[node] = alone(e, node)
        except (NoRule, UnknownExpressionError) as worse:
            raise NoPackedForm(f"{node.target}: {worse}") from None


def _draws(target: torch._ops.OpOverload) -> bool:
    """Whether an operator may draw random numbers."""
    names = [target._schema.name, *[a.name for a in target._schema.arguments]]
    return torch.Tag.nondeterministic_seeded in target.tags or any("dropout" in name for name in names)


def keeps_all(e: Emitter, node: fx.Node) -> bool:
    """Whether dropout has nothing to do."""
    a = e.bound(node)
    probability = a.get("dropout_p", a.get("p", a.get("dropout")))
    return a.get("train") is False or (type(probability) in (int, float) and probability == 0)


def _freeing(lines: list[str], results: set[str], inputs: Sequence[str]) -> list[str]:
    """The lines without those that nobody reads; each name is deleted after the last line that reads it, so that its
    memory is used again."""
    statements = ast.parse("\n".join(lines)).body
    targets = [ast.unparse(x.targets[0]) if isinstance(x, ast.Assign) else "" for x in statements]
    tensors = {*inputs, *targets}
    left: list[str] = []
    read = set(results)
    for line, statement, target in zip(lines[::-1], statements[::-1], targets[::-1], strict=True):
        if target and target not in read:
            continue
        names = [x.id for x in ast.walk(statement) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]
        last = sorted(tensors.intersection(names) - read)
        if last:
            left.append(f"del {', '.join(last)}")
            read.update(last)
        left.append(line)
    return left[::-1]


def _assembled(e: Emitter, outputs: list[Packed]) -> Lowered:
    sizes, columns = list(e.lengths_of), list(e.columns_of)
    head = ["n = z.n"]
    head += [f"L{i} = z.lengths[{i}]" for i in range(len(sizes))]
    head += [f"c{i} = z.columns[{i}]" for i in range(len(columns))]
    inputs = [f"i{i}" for i in range(len(e.graph.inputs))]
    head += [f"{', '.join(inputs)}, = inputs", "del inputs[:]"] if inputs else []
    results = [o.name for o in outputs]
    body = [*head, *_freeing(e.lines, {*results}, inputs), f"return [{', '.join(results)}]"]
    source = "def packed(z, inputs):\n" + "\n".join("    " + line for line in body) + "\n"
    layouts = {node.name: value.layout for node, value in e.env.items() if isinstance(value, Packed)}
    return Lowered(source, e.constants, outputs, sizes, columns, e.alone, layouts, e.random, bool(e.counted))
