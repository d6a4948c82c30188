"""Blocks made of blocks: pipes, all-of, and compositions that are any directed acyclic graph.

In: blocks. Out: one block, whose types follow from theirs.

    c = fb.Composition()                    # x * x + 10 * x
    with c.scope():
        x = fb.Vector(3).reads(c.input)
        square = fb.Function(torch.mul).reads(x, x)
        ten_x = fb.Function(torch.mul).reads(fb.FromTensor(10 * torch.ones(3)), x)
        c.output.reads(fb.Function(torch.add).reads(square, ten_x))

Source: Looks et al. 2017, section 3.2.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxbatch.blocks.block import Block, Output
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.convert import convert_to_block
from fxbatch.blocks.infer import complain, give, link
from fxbatch.blocks.show import call_text, expression
from fxbatch.blocks.tuples import GetItem
from fxbatch.blocks.types import ResultType, TupleType, VoidType
from fxbatch.errors import BlockTypeError


class Pipe(Block):
    """Each block's output is the next one's input: `Pipe(a, b, c)` is `a >> b >> c`.

    Type: the first block's input -> the last block's output; neighbours agree. A block whose input type is
    VoidType ignores what it is given.

    >>> (Scalar() >> Function(torch.neg)).eval(3)
    tensor(-3.)
    """

    def __init__(self, *blocks: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        if not blocks:
            blocks = (_identity(),)
        parts: list[Block] = []
        for like in blocks:
            block = convert_to_block(like, parts[-1].output_type if parts else None)
            flat = isinstance(block, Pipe) and block.name is None and type(block) is Pipe
            if isinstance(block, Pipe) and flat and not parts:
                parts.extend(block.parts)
            else:
                parts.append(block)
        self.part_names = [self.adopt(str(i), part) for i, part in enumerate(parts)]
        self.infer_types()

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


def _identity() -> Block:
    from fxbatch.blocks.leaves import Identity

    return Identity()


class AllOf(Block):
    """All blocks on the same input; the tuple of their outputs.

    Type: what the blocks take -> TupleType(their outputs); VoidType without blocks.

    >>> AllOf(Scalar(), OneHot(3)).eval(2)
    (tensor(2.), tensor([0., 0., 1.]))
    """

    def __init__(self, *blocks: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        parts = [convert_to_block(b) for b in blocks]
        self.part_names = [self.adopt(str(i), part) for i, part in enumerate(parts)]
        self.infer_types()

    @property
    def parts(self) -> list[Block]:
        """The blocks, in order."""
        return [self._modules[n] for n in self.part_names]  # type: ignore[misc]  # adopted blocks

    def infer_types(self) -> None:
        parts = self.parts
        if all(isinstance(p.input_type, VoidType) for p in parts):
            give(self, "input", VoidType(), self)
        for _ in range(2):  # the second round: what a later part implies reaches the earlier ones
            for p in parts:
                link(self, "input", p, "input")
        if not parts:
            give(self, "output", VoidType(), self)
            return
        if isinstance(self.output_type, TupleType) and len(self.output_type) == len(parts):
            for p, t in zip(parts, self.output_type, strict=True):
                give(p, "output", t, self, "output")
        types = [p.output_type for p in parts]
        if all(t is not None for t in types):
            give(self, "output", TupleType(*types), self)

    def expression(self) -> str:
        return call_text("AllOf", *self.parts)

    def build(self, to: Builder) -> Run:
        runs = [p.runnable(to) for p in self.parts]
        if not runs:
            return lambda x: None
        if len(runs) == 2:
            first, second = runs
            return lambda x: (first(x), second(x))
        return lambda x: tuple([r(x) for r in runs])


class _End(Block):
    """The input or the output of a composition, as a block that others read or that reads others."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def infer_types(self) -> None:
        link(self, "input", self, "output")

    def expression(self) -> str:
        return f"Composition.{self.which}"


Source = Any  # a Block, or a tuple of Sources

_scopes: contextvars.ContextVar[tuple[Composition, ...]] = contextvars.ContextVar("scopes", default=())


def current_composition(block: Block) -> Composition:
    """The composition whose scope is open; AssertionError when there is none."""
    open_scopes = _scopes.get()
    if not open_scopes:
        raise AssertionError(f"{block!r}.reads() outside of a composition: use `with composition.scope():`")
    return open_scopes[-1]


class Composition(Block):
    """A directed acyclic graph of blocks, connected with `reads` within `scope()`.

    Type: that of `input` -> that of `output`; VoidType for an end that is not connected. BlockTypeError when
    leaving the scope with a cycle, a block that reads nothing, or an output (not of VoidType) that nothing reads.

    >>> c = Composition()
    >>> with c.scope():
    ...     x = Scalar().reads(c.input)
    ...     _ = c.output.reads(Function(torch.mul).reads(x, x))
    >>> c.eval(3)
    tensor(9.)
    """

    def __init__(self, children: Sequence[Block] | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.node_names: list[str] = []
        self._wires: dict[str, Source] = {}  # name of a reader ("" for the output) -> what it reads, by name
        self.adopt("_input", _End("input"))
        self.adopt("_output", _End("output"))
        self._items: dict[tuple[str, Any], str] = {}
        for child in children or ():
            self._name_of(child)

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
        return [self._modules[n] for n in self.node_names]  # type: ignore[misc]  # adopted blocks

    @contextlib.contextmanager
    def scope(self) -> Iterator[Composition]:
        """Within it, `block.reads(...)` connects blocks of this composition; checked when it is left."""
        token = _scopes.set((*_scopes.get(), self))
        try:
            yield self
        finally:
            _scopes.reset(token)
        self.check()

    def connect(self, a: Any, b: Block) -> None:
        """Make `b` read `a`: a block, an output `block[i]`, or a tuple or list of them."""
        if b is self.input:
            raise BlockTypeError(f"{self!r}: the composition's input can't read")
        reader = self._name_of(b)
        if reader in self._wires:
            raise BlockTypeError(f"{b!r} is already connected: it reads {self._text(self._wires[reader])}")
        self._wires[reader] = self._source(a)
        self.infer_types()

    def _source(self, a: Any) -> Source:
        if isinstance(a, (tuple, list)):
            return tuple(self._source(x) for x in a)
        if isinstance(a, Output):
            whole = self._source(a.block)
            name = self._items.get((whole, a.key))
            if name is None:
                item = GetItem(a.key)
                name = self._items[(whole, a.key)] = self._name_of(item)
                self._wires[name] = whole
            return name
        block = convert_to_block(a)
        if block is self.output:
            raise BlockTypeError(f"{self!r}: the composition's output can't be read")
        return self._name_of(block)

    def _name_of(self, block: Block) -> str:
        for name, module in self._modules.items():
            if module is block:
                return name
        if isinstance(block, _End):
            raise BlockTypeError(f"{block!r} belongs to another composition")
        name = self.adopt(block.name or str(len(self.node_names)), block)
        self.node_names.append(name)
        return name

    # -- types --------------------------------------------------------------------------------------

    def infer_types(self) -> None:
        if not hasattr(self, "_items"):
            return
        link(self, "input", self.input, "output")
        for reader, source in self._wires.items():
            self._infer_wire(source, self._modules[reader])  # type: ignore[arg-type]  # adopted blocks
        link(self.output, "output", self, "output")

    def _infer_wire(self, source: Source, reader: Block) -> None:
        if isinstance(source, str):
            link(self._modules[source], "output", reader, "input")  # type: ignore[arg-type]  # adopted blocks
            return
        taken = reader.input_type
        if isinstance(taken, VoidType):
            return
        if isinstance(taken, TupleType) and len(taken) == len(source):
            for s, t in zip(source, taken, strict=True):
                self._infer_item(s, t, reader)
        found = self._type_of(source)
        giver = next((self._modules[s] for s in _flat(source)), self)
        give(reader, "input", found, giver, "output")  # type: ignore[arg-type]  # adopted blocks

    def _infer_item(self, source: Source, t: ResultType, reader: Block) -> None:
        if isinstance(source, str):
            give(self._modules[source], "output", t, reader, "input")  # type: ignore[arg-type]  # adopted blocks
        elif isinstance(t, TupleType) and len(t) == len(source):
            for s, item in zip(source, t, strict=True):
                self._infer_item(s, item, reader)

    def _type_of(self, source: Source) -> ResultType | None:
        if isinstance(source, str):
            return self._modules[source].output_type  # type: ignore[union-attr,return-value]  # adopted blocks
        types = [self._type_of(s) for s in source]
        return None if any(t is None for t in types) else TupleType(*types)

    # -- checks -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise BlockTypeError for a cycle, a block that reads nothing, an output that nothing reads."""
        self.order()
        read = [s for source in self._wires.values() for s in _flat(source)]
        if "_input" not in read:
            give(self, "input", VoidType(), self)
        if "_output" not in self._wires:
            give(self, "output", VoidType(), self)
        for name, block in zip(self.node_names, self.parts, strict=True):
            if name not in self._wires and not isinstance(block.input_type, VoidType):
                raise complain(self, f"{block!r} reads nothing: connect it with reads()", block)
        unused = [
            b
            for name, b in zip(self.node_names, self.parts, strict=True)
            if name not in read and not isinstance(b.output_type, VoidType)
        ]
        if unused:
            listed = ", ".join(map(repr, unused))
            raise complain(
                self, f"unused output: nothing reads {listed} (pipe into Void() to drop it)", unused[0]
            )

    def order(self) -> list[str]:
        """The names of the readers, each after what it reads; BlockTypeError for a cycle."""
        done: dict[str, bool] = {}  # False while on the path
        result: list[str] = []

        def visit(name: str, path: list[str]) -> None:
            if done.get(name):
                return
            if name in done:
                cycle = [repr(self._modules[n]) for n in [*path[path.index(name) :], name]]
                raise BlockTypeError(f"cycle in a composition: {' reads '.join(cycle)}")
            done[name] = False
            for s in _flat(self._wires.get(name, ())):
                visit(s, [*path, name])
            done[name] = True
            result.append(name)

        for name in [*self.node_names, "_output"]:
            visit(name, [])
        return [n for n in result if n not in ("_input", "_output")]

    # -- text, running ------------------------------------------------------------------------------

    def _text(self, source: Source) -> str:
        if isinstance(source, str):
            return repr(self._modules[source])
        return f"({', '.join(self._text(s) for s in source)})"

    def expression(self) -> str:
        if not self._wires:
            return "Composition()"
        number = {name: f"%{i}" for i, name in enumerate(self.order())}
        number["_input"] = "input"

        def text(source: Source) -> str:
            if isinstance(source, str):
                return number[source]
            return ", ".join(f"({text(s)})" if isinstance(s, tuple) else text(s) for s in source)

        lines = []
        for name in number:
            if name != "_input":
                reads = f".reads({text(self._wires[name])})" if name in self._wires else ""
                lines.append(f"{number[name]} = {expression(self._modules[name])}{reads}")  # type: ignore[arg-type]
        if "_output" in self._wires:
            lines.append(f"output.reads({text(self._wires['_output'])})")
        return f"Composition({'; '.join(lines)})"

    def build(self, to: Builder) -> Run:
        names = self.order()
        register = {"_input": 0} | {name: i + 1 for i, name in enumerate(names)}
        steps = []
        for name in names:
            block = self._modules[name]
            read = self._wires.get(name)
            dropped = read is None or isinstance(block.input_type, VoidType)  # type: ignore[union-attr]
            source = () if dropped else read
            steps.append((block.runnable(to), _reader(source, register)))  # type: ignore[union-attr,operator]
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
    if source is None:
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
