"""Blocks, and how they are put together: pipes, items of outputs, compositions that are any directed acyclic graph.

In: Python objects and tensors of ONE instance. Out: what the block makes of them. `fb.compile` runs a block on
a minibatch.

    block = fb.Map(fb.Scalar()) >> fb.Sum()
    block.output_type                       # TensorType((), 'float32')
    block.eval([1, 2, 3])                   # tensor(6.)

    c = fb.Composition()                    # x * x + 10 * x
    with c.scope():
        x = fb.Vector(3).reads(c.input)
        square = fb.Function(torch.mul).reads(x, x)
        ten_x = fb.Function(torch.mul).reads(fb.FromTensor(10 * torch.ones(3)), x)
        c.output.reads(fb.Function(torch.add).reads(square, ten_x))

Source: Looks et al. 2017, section 3.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxbatch.blocks.build import EAGER, Builder, Run, walk
from fxbatch.blocks.show import call_text, expression
from fxbatch.blocks.typed import Typed, complain, give, link, narrow
from fxbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
)
from fxbatch.errors import BlockTypeError, BlockValueError


class Block(Typed):
    """Base class of all blocks. Compose with `>>`; run one instance with `block.eval(x)`.

    A subclass states its type rule (`infer_types`) and how it runs (`build`).
    """

    def build(self, to: Builder) -> Run:
        """The function from the block's input to its output, over the handles of `to`."""
        raise NotImplementedError

    def runnable(self, to: Builder) -> Run:
        """`build`, after checking that the block's types are known."""
        if self.output_type is None or self.input_type is None:
            end = "input" if self.input_type is None else "output"
            raise complain(self, f"the {end} type is unknown: compose it, or call set_{end}_type()")
        return self.build(to)

    def metric(self) -> tuple[str, TensorType] | None:
        """The name and the type of one value of the metric that this block computes, None for most blocks."""
        return None

    def forward(self, x: Any = None) -> Any:
        """The output for one instance: tensors, tuples, lists (sequences), Python objects."""
        run = self.__dict__.get("_run")
        if run is None:
            resolve(self)
            run = self.__dict__["_run"] = self.runnable(EAGER)
        return run(x)

    def eval(self, inp: Any = ..., *, tolist: bool = False) -> Any:  # both meanings
        """`block.eval(x)`: the output for one instance, for tests and the REPL. `block.eval()`: evaluation mode.

        The output is a tensor, a tuple, a list for a sequence, `itertools.repeat` for a broadcast; with
        `tolist`, tensors become Python lists and numbers. With `Metric`s in the block: `(output, metrics)`,
        metrics being a dict from name to a tensor of all its values.

        >>> (Map(Scalar()) >> Sum()).eval([1, 2, 3])
        tensor(6.)
        """
        if inp is ...:
            return super().eval()
        with collecting_metrics() as found:
            result = self.forward(inp)
        t = self.output_type
        assert t is not None
        if tolist:
            result = _to_lists(t, result)
        names = metrics_of(self)
        if not names:
            return result
        values = {n: stack_metric(t, found.get(n, ([], []))[0], self.device) for n, t in names.items()}
        return result, {n: v.tolist() if tolist else v for n, v in values.items()}

    # -- composition --------------------------------------------------------------------------------

    def __rshift__(self, rhs: Any) -> Any:
        return Pipe(self, rhs)

    def __rrshift__(self, lhs: Any) -> Any:
        return Pipe(lhs, self)

    def reads(self, *sources: Any) -> Any:
        """Within `Composition.scope()`: read the input from these blocks or outputs; self."""
        current_composition(self).connect(sources, self)
        return self

    def __getitem__(self, key: Any) -> Output:
        """The output `key` of this block, or a slice of its outputs, for `reads`."""
        return Output(self, key)

    def __iter__(self) -> Iterator[Output]:
        if not isinstance(self.output_type, TupleType):
            raise BlockTypeError(f"{self!r} can't be unpacked: its output type is {self.output_type!r}")
        return iter([Output(self, i) for i in range(len(self.output_type))])


def _to_lists(t: ResultType, x: Any) -> Any:
    """A value of type t with its tensors as lists and numbers; Python objects stay as they are."""
    if isinstance(t, TensorType):
        return x.tolist()
    if isinstance(t, BroadcastSequenceType):
        return itertools.repeat(_to_lists(t.element_type, next(x)))
    if isinstance(t, SequenceType):
        return [_to_lists(t.element_type, y) for y in x]
    if isinstance(t, TupleType):
        return tuple([_to_lists(item, y) for item, y in zip(t, x, strict=True)])
    return x


class Output:
    """The i-th output of a block, a slice of its outputs, or a part of them: what `block[i]` is, for `reads`."""

    __slots__ = ("block", "key")

    def __init__(self, block: Block | Output, key: Any) -> None:
        self.block = block
        self.key = key

    @property
    def output_type(self) -> ResultType | None:
        """The type of this output, None while it is unknown."""
        t = self.block.output_type
        if isinstance(t, TupleType) and (is_index(self.key) or isinstance(self.key, slice)):
            return t[self.key]
        return None

    def __getitem__(self, key: Any) -> Output:
        return Output(self, key)

    def __iter__(self) -> Iterator[Output]:
        t = self.output_type
        if not isinstance(t, TupleType):
            raise BlockTypeError(f"{self!r} can't be unpacked: its type is {t!r}, no TupleType")
        return iter([self[i] for i in range(len(t))])

    def __repr__(self) -> str:
        return f"{self.block!r}[{self.key!r}]"


@functools.singledispatch
def convert_to_block(block_like: Any, input_type: ResultType | None = None) -> Block:
    """A block from a block-like.

    Block: itself. Layer, nn.Module, torch function: Function. Tensor or array: FromTensor. dict, list of
    (key, block) pairs, tuple or list of blocks: Record. Any other callable: InputTransform when its input
    (`input_type`) is known to be a Python object, Function when it is known to be tensors, else a BlockTypeError.
    """
    raise BlockTypeError(
        f"{block_like!r} is no block: a block is a Block, a layer or nn.Module, a tensor or array, a dict, "
        "tuple or list of blocks, or a function"
    )


@convert_to_block.register
def _(block: Block, input_type: ResultType | None = None) -> Block:
    return block


# -- metrics and types of a whole expression ---------------------------------------------------------


class collecting_metrics:  # used as `with collecting_metrics() as found`
    """Collects what `Metric` blocks of this context compute: name -> (values, labels)."""

    def __enter__(self) -> dict[str, tuple[list[Any], list[Any]]]:
        self.found: dict[str, tuple[list[Any], list[Any]]] = {}
        self.token = collected.set(self.found)
        return self.found

    def __exit__(self, *_: object) -> None:
        collected.reset(self.token)


collected: contextvars.ContextVar[dict[str, tuple[list[Any], list[Any]]] | None] = contextvars.ContextVar(
    "collected", default=None
)


def stack_metric(t: TensorType, values: list[Any], device: torch.device) -> torch.Tensor:
    """All values of a metric as one tensor [values, *shape]; [0, *shape] when there are none."""
    return torch.stack(values) if values else torch.zeros((0, *t.shape), dtype=t.dtype, device=device)


def metrics_of(root: Block) -> dict[str, TensorType]:
    """The metrics in an expression, sorted: name -> type of one value. BlockTypeError for a name with two types."""
    found: dict[str, TensorType] = {}
    for module in walk(root):
        metric = module.metric() if isinstance(module, Block) else None
        if metric is None:
            continue
        name, t = metric
        known = found.setdefault(name, t)
        if known != t:
            raise BlockTypeError(f"metric {name!r} has values of {known!r} and of {t!r}")
    return {name: found[name] for name in sorted(found)}


def resolve(root: Block) -> None:
    """Settle and check all types of an expression that is about to run.

    What nothing implies is assumed: the root's input is a Python object, an end of a composition that is not
    connected is VoidType. BlockTypeError names the first block whose type stays unknown.
    """
    parts = [m for m in walk(root) if isinstance(m, Typed)]
    for part in parts:
        if isinstance(part, Composition):
            part.assume_void_ends()
    if root.input_type is None:
        give(root, "input", PyObjectType(), root)
    for part in parts:
        part.infer_types()
    while any(part.complete_types() for part in parts):
        pass
    for part in parts:
        part.check()
    for part in parts:
        for side in ("input", "output"):
            if part.type_at(side) is None:
                raise complain(
                    part, f"the {side} type is unknown: nothing around it implies it; call set_{side}_type()"
                )


# -- items -------------------------------------------------------------------------------------------


def is_index(key: Any) -> bool:
    """Whether a key is an integer: an index into a tuple or sequence."""
    return hasattr(type(key), "__index__")


class GetItem(Block):
    """`x[key]`; the key may be a slice.

    Type: PyObjectType -> PyObjectType; TupleType -> its item, or the tuple of a slice's items; SequenceType(t) -> t,
    or itself for a slice. KeyError or IndexError where there is no such item: when the block is built for a tuple,
    else at run time.

    >>> ((Scalar(), OneHot(2)) >> GetItem(-1)).eval((3, 0))
    tensor([1., 0.])
    >>> (Map(Scalar()) >> GetItem(slice(1, None))).eval([1, 2, 3])
    [tensor(2.), tensor(3.)]
    """

    input_type_classes = (PyObjectType, TupleType, SequenceType)

    def __init__(self, key: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.key = key

    def expression(self) -> str:
        return call_text("GetItem", self.key)

    def infer_types(self) -> None:
        t, origin = self.input_type, self.origins.get("input")
        sliced = isinstance(self.key, slice)
        if t is None and not sliced and not is_index(self.key):
            give(self, "input", PyObjectType(), self)  # nothing else has other keys
        elif isinstance(t, PyObjectType):
            give(self, "output", t, self)
        elif isinstance(t, BroadcastSequenceType):
            raise complain(self, f"can't take items of an infinite sequence, {t!r}", origin)
        elif isinstance(t, (TupleType, SequenceType)) and not sliced and not is_index(self.key):
            raise complain(self, f"the items of {t!r} have integers as keys", origin)
        elif isinstance(t, SequenceType):
            give(self, "output", t if sliced else t.element_type, self)
        elif isinstance(t, TupleType):
            if not sliced and not -len(t) <= self.key < len(t):
                raise complain(self, f"there is no item {self.key} in {t!r}", origin)
            give(self, "output", t[self.key], self)

    def build(self, to: Builder) -> Run:
        key = self.key
        return lambda x: x[key]


class Identity(Block):
    """The input. Type: T -> T.

    >>> Identity().eval("as it is")
    'as it is'
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def infer_types(self) -> None:
        link(self, "input", self, "output")

    def build(self, to: Builder) -> Run:
        return lambda x: x


# -- blocks in a row ---------------------------------------------------------------------------------


class Pipe(Block):
    """Each block's output is the next one's input: `Pipe(a, b, c)` is `a >> b >> c`.

    Type: the first block's input -> the last block's output; neighbours agree. A block whose input type is
    VoidType ignores what it is given.

    >>> (Scalar() >> Function(torch.neg)).eval(3)
    tensor(-3.)
    """

    def __init__(self, *blocks: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        parts: list[Block] = []
        for like in blocks or (Identity(),):
            block = convert_to_block(like, parts[-1].output_type if parts else None)
            if type(block) is Pipe and block.name is None and not parts:
                parts.extend(block.parts)
            else:
                parts.append(block)
        self.part_names = [self.adopt(str(i), part) for i, part in enumerate(parts)]

    @property
    def parts(self) -> list[Block]:
        """The blocks, in order."""
        return [self._modules[n] for n in self.part_names]  # type: ignore[misc]  # adopted blocks

    def infer_types(self) -> None:
        parts = self.parts
        if isinstance(parts[0].input_type, VoidType):
            give(self, "input", VoidType(), parts[0], "input")
        link(self, "input", parts[0], "input")
        for a, b in itertools.pairwise(parts):
            link(a, "output", b, "input")
        link(parts[-1], "output", self, "output")

    def expression(self) -> str:
        return " >> ".join(expression(p) for p in self.parts)

    def build(self, to: Builder) -> Run:
        runs = [p.runnable(to) for p in self.parts]
        if len(runs) == 1:
            return runs[0]
        if len(runs) == 2:
            first, second = runs
            return lambda x: second(first(x))
        if len(runs) == 3:
            first, second, third = runs
            return lambda x: third(second(first(x)))

        def run(x: Any) -> Any:
            for r in runs:
                x = r(x)
            return x

        return run


# -- blocks in a graph -------------------------------------------------------------------------------


class _End(Identity):
    """The input or the output of a composition, as a block that others read or that reads others."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def expression(self) -> str:
        return f"Composition.{self.which}"


Source = Any  # the name of a node, or a tuple of Sources

_scopes: contextvars.ContextVar[tuple[Composition, ...]] = contextvars.ContextVar("scopes", default=())


def current_composition(block: Block) -> Composition:
    """The composition whose scope is open; AssertionError when there is none."""
    open_scopes = _scopes.get()
    if not open_scopes:
        raise AssertionError(f"{block!r}.reads() outside of a composition: use `with composition.scope():`")
    return open_scopes[-1]


class Composition(Block):
    """A directed acyclic graph of blocks, connected with `reads` within `scope()`, as often as it is entered.

    Type: that of `input` -> that of `output`; VoidType for an end that is not connected. A cycle is an error when the
    scope is left; a block that reads nothing and an output (not of VoidType) that nothing reads are errors when the
    composition is compiled or first run. Blocks run in the order in which the output reads them, depth first, then
    those that nothing reads, as they came: so metrics of one instance are in that order.

    Raises BlockTypeError, and of its kinds BlockValueError for an end or a wire that can't be.

    >>> c = Composition()
    >>> with c.scope():
    ...     x = Scalar().reads(c.input)
    ...     _ = c.output.reads(Function(torch.mul).reads(x, x))
    >>> c.eval(3)
    tensor(9.)
    """

    def __init__(self, children: Sequence[Any] | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        blocks = [convert_to_block(child) for child in children or ()]
        self.node_names: list[str] = []
        self._wires: dict[str, Source] = {}  # name of a reader -> what it reads, by name
        self._items: dict[Any, str] = {}  # (what, key) -> the GetItem that reads it
        self.adopt("_input", _End("input"))
        self.adopt("_output", _End("output"))
        for block in blocks:
            self._name_of(block)

    @property
    def input(self) -> Block:
        """A placeholder whose output is the composition's input."""
        return self._modules["_input"]  # type: ignore[return-value]  # adopted in __init__

    @property
    def output(self) -> Block:
        """A placeholder whose input is the composition's output."""
        return self._modules["_output"]  # type: ignore[return-value]  # adopted in __init__

    @property
    def parts(self) -> list[Block]:
        """The blocks in the composition, its two ends left out."""
        return [self._node(n) for n in self.node_names]

    @contextlib.contextmanager
    def scope(self) -> Iterator[Composition]:
        """Within it, `block.reads(...)` connects blocks of this composition."""
        token = _scopes.set((*_scopes.get(), self))
        try:
            yield self
        finally:
            _scopes.reset(token)
        self.order()

    def connect(self, a: Any, b: Any) -> None:
        """Make `b` read `a`: a block, an output `block[i]`, or a tuple or list of them.

        A tuple of one is that one; an empty one is no input, VoidType.
        """
        if isinstance(a, (tuple, list)) and len(a) == 1:
            a = a[0]
        b = convert_to_block(b)
        if b is self.input:
            raise BlockValueError(f"{self!r}: the composition's input can't read")
        connected = next((n for n in self._wires if self._modules[n] is b), None)
        if connected is not None:
            raise BlockValueError(
                f"{b!r} is already connected: it reads {self._text(self._wires[connected])}"
            )
        source = self._source(a)
        reader = self._name_of(b)
        self._wires[reader] = source
        self._changed()
        if isinstance(source, tuple) and source and not isinstance(b.type_at("input"), VoidType):
            narrow(b, "input", (TupleType, PyObjectType))
        self.infer_types()

    def _source(self, a: Any) -> Source:
        if isinstance(a, (tuple, list)):
            return tuple([self._source(x) for x in a])
        if isinstance(a, Output):
            whole = self._source(a.block)
            key = a.key
            place = (
                (whole, "slice", key.start, key.stop, key.step) if isinstance(key, slice) else (whole, key)
            )
            name = self._items.get(place)
            if name is None:
                name = self._items[place] = self._name_of(GetItem(key))
                self._wires[name] = whole
            return name
        block = convert_to_block(a)
        if block is self.output:
            raise BlockValueError(f"{self!r}: the composition's output can't be read")
        return self._name_of(block)

    def _name_of(self, block: Block) -> str:
        for name, module in self._modules.items():
            if module is block:
                return name
        if isinstance(block, _End):
            raise BlockValueError(f"{block!r} is the input or output of another composition than {self!r}")
        name = self.adopt(block.name or str(len(self.node_names)), block)
        self.node_names.append(name)
        return name

    def _node(self, name: str) -> Block:
        return self._modules[name]  # type: ignore[return-value]  # adopted blocks

    def _changed(self) -> None:
        """Forget how this and what holds it run."""
        pending: list[Typed] = [self]
        for part in pending:
            part.__dict__.pop("_run", None)
            pending.extend(w for w in part.watchers if not any(w is p for p in pending))

    # -- types --------------------------------------------------------------------------------------

    @property
    def input_type(self) -> ResultType | None:
        """The input type; VoidType after the scope when nothing reads the input, None while it is unknown."""
        known = self._types["input"]
        return VoidType() if known is None and self._is_wired() and not self._is_read() else known

    @property
    def output_type(self) -> ResultType | None:
        """The output type; VoidType after the scope when the output reads nothing, None while it is unknown."""
        known = self._types["output"]
        return VoidType() if known is None and self._is_wired() and "_output" not in self._wires else known

    def _is_wired(self) -> bool:
        """Whether blocks are connected, and no scope is open in which more could be."""
        return bool(self._wires) and not any(c is self for c in _scopes.get())

    def _is_read(self) -> bool:
        """Whether something reads the input."""
        return any(s == "_input" for source in self._wires.values() for s in _flat(source))

    def assume_void_ends(self) -> None:
        """Make an end VoidType that nothing connects and nothing implies."""
        for side, t in (("input", self.input_type), ("output", self.output_type)):
            if isinstance(t, VoidType):
                give(self, side, t, self)  # type: ignore[arg-type]  # a Side

    def infer_types(self) -> None:
        link(self, "input", self.input, "output")
        for reader, source in self._wires.items():
            self._infer_wire(source, self._node(reader))
        link(self.output, "output", self, "output")

    def _infer_wire(self, source: Source, reader: Block) -> None:
        if isinstance(source, str):
            link(self._node(source), "output", reader, "input")
            return
        self._infer_item(source, reader.type_at("input"), reader)
        giver = next((self._node(s) for s in _flat(source)), self)
        give(reader, "input", self._type_of(source), giver, "output")

    def _infer_item(self, source: Source, t: ResultType | None, reader: Block) -> None:
        """The type of the input, as far as the type that its reader takes implies it."""
        if isinstance(source, str):
            give(self._node(source), "output", t, reader, "input")
        elif isinstance(t, PyObjectType) or (isinstance(t, TupleType) and len(t) == len(source)):
            for s, item in zip(source, t if isinstance(t, TupleType) else [t] * len(source), strict=True):
                self._infer_item(s, item, reader)
        elif isinstance(t, TupleType):
            giver = next((self._node(s) for s in _flat(source)), self)
            raise complain(reader, f"takes {len(t)} items, {t!r}, but reads {len(source)}", giver)

    def _type_of(self, source: Source) -> ResultType | None:
        if isinstance(source, str):
            return self._node(source).type_at("output")
        types = [self._type_of(s) for s in source]
        if not types:
            return VoidType()
        return None if any(t is None for t in types) else TupleType(types)

    # -- checks -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise BlockTypeError for a cycle, a block that reads nothing, an output that nothing reads."""
        self.order()
        for name, block in zip(self.node_names, self.parts, strict=True):
            if name not in self._wires and not isinstance(block.input_type, VoidType):
                raise complain(self, f"{block!r} reads nothing: connect it with reads()", block)
        unused = [self._node(n) for n in self._unread()]
        unused = [b for b in unused if not isinstance(b.output_type, VoidType)]
        if unused:
            listed = ", ".join(map(repr, unused))
            raise complain(
                self, f"unused output: nothing reads {listed} (pipe into Void() to drop it)", unused[0]
            )
        if not self._wires and not isinstance(self.output_type, VoidType):
            raise complain(self, "the composition has no output: connect it with output.reads()")

    def _unread(self) -> list[str]:
        """The names of the blocks that nothing reads, as they came."""
        read = {s: True for source in self._wires.values() for s in _flat(source)}
        return [n for n in self.node_names if n not in read]

    def order(self) -> list[str]:
        """The names of the blocks, each after what it reads; BlockValueError for a cycle."""
        done: dict[str, bool] = {"_input": True}  # False while on the path
        result: list[str] = []
        for root in ["_output", *self._unread(), *self.node_names]:  # the last for those in a cycle alone
            path = [] if root in done else [root]
            pending = [_flat(self._wires.get(root, ()))]
            done.setdefault(root, False)
            while path:
                name = next(pending[-1], None)
                if name is None:
                    done[path[-1]] = True
                    result.append(path.pop())
                    pending.pop()
                elif name not in done:
                    done[name] = False
                    path.append(name)
                    pending.append(_flat(self._wires.get(name, ())))
                elif not done[name]:
                    cycle = [repr(self._modules[n]) for n in [*path[path.index(name) :], name]]
                    raise BlockValueError(f"cycle in a composition: {' reads '.join(cycle)}")
        return [n for n in result if n != "_output"]

    # -- text, running ------------------------------------------------------------------------------

    def _text(self, source: Source) -> str:
        if isinstance(source, str):
            return repr(self._modules[source])
        return f"({', '.join(self._text(s) for s in source)})"

    def expression(self) -> str:
        if not self._wires:
            return "Composition()"
        number = {name: f"%{i}" for i, name in enumerate(self.node_names)}
        number["_input"] = "input"

        def text(source: Source) -> str:
            if isinstance(source, str):
                return number[source]
            return ", ".join(f"({text(s)})" if isinstance(s, tuple) else text(s) for s in source)

        lines = []
        for name in self.node_names:
            reads = f".reads({text(self._wires[name])})" if name in self._wires else ""
            lines.append(f"{number[name]} = {expression(self._node(name))}{reads}")
        if "_output" in self._wires:
            lines.append(f"output.reads({text(self._wires['_output'])})")
        return f"Composition({'; '.join(lines)})"

    def build(self, to: Builder) -> Run:
        names = self.order()
        register = {"_input": 0} | {name: i + 1 for i, name in enumerate(names)}
        steps = []
        for name in names:
            block = self._node(name)
            read = None if isinstance(block.input_type, VoidType) else self._wires.get(name)
            steps.append((block.runnable(to), _reader(read, register)))
        result = _reader(self._wires.get("_output"), register)

        def run(x: Any) -> Any:
            values = [x]
            for step, read in steps:
                values.append(step(read(values)))
            return result(values)

        return run


def _flat(source: Source) -> Iterator[str]:
    if isinstance(source, str):
        yield source
    else:
        for s in source:
            yield from _flat(s)


def _reader(source: Source | None, register: dict[str, int]) -> Callable[[list[Any]], Any]:
    """From the registers of a running composition to what a block reads."""
    if not source:
        return lambda values: None
    if isinstance(source, str):
        i = register[source]
        return lambda values: values[i]
    if all(isinstance(s, str) for s in source):
        places = [register[s] for s in source]
        if len(places) == 2:
            a, b = places
            return lambda values: (values[a], values[b])
        return lambda values: tuple([values[p] for p in places])
    parts = [_reader(s, register) for s in source]
    return lambda values: tuple([part(values) for part in parts])
