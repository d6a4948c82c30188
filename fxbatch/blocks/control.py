"""Blocks that choose and recur: `OneOf`, `Optional`, `ForwardDeclaration`; and `Metric`.

In: one instance's object. Out: what the chosen block gives.

    tree = fb.ForwardDeclaration(fb.PyObjectType(), fb.TensorType([]))
    leaf = fb.Scalar()
    pair = fb.Record((tree(), tree())) >> fb.Function(torch.add)
    tree.resolve_to(fb.OneOf(lambda x: isinstance(x, tuple), {False: leaf, True: pair}))

Source: Looks et al. 2017, sections 3.4 and 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxbatch.blocks.block import Block, collected, convert_to_block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.leaves import InputTransform, Zeros
from fxbatch.blocks.records import is_pairs, key_name, named_items
from fxbatch.blocks.show import call_text, expression, value_text
from fxbatch.blocks.typed import Typed, complain, give, give_nothing, link
from fxbatch.blocks.types import PyObjectType, ResultType, TensorType, TupleType, VoidType
from fxbatch.errors import BlockTypeError


class OneOf(Block):
    """Dispatch the input to one of several blocks, by a key that is computed from it.

    Type: a -> b, where all cases take a (with a `pre_block`, what that gives) and all give b.

    key_fn: a Python function of the input, or a block from it to a Python object. case_blocks: a dict, a list of
    (key, block) pairs, or a tuple of blocks with keys 0, 1, ... (-1 is the last); other keys are anything hashable:
    types, tuples, None. pre_block: applied to the input before the cases, after the key is taken. ValueError when
    there are no cases, KeyError at run time for a key that is no case.

    >>> shape = OneOf(GetItem("kind"), {"one": Record({"x": Scalar()}) >> GetItem(0), "none": Zeros([])})
    >>> shape.eval({"kind": "one", "x": 3}), shape.eval({"kind": "none"})
    (tensor(3.), tensor(0.))
    """

    def __init__(self, key_fn: Any, case_blocks: Any, pre_block: Any = None, name: str | None = None) -> None:
        super().__init__(name=name)
        items = named_items(case_blocks, "OneOf")
        if not items:
            raise ValueError("OneOf: there are no case blocks")
        self.by_position = not isinstance(case_blocks, dict) and not is_pairs(case_blocks)
        self.keys = [k for k, _ in items]
        try:
            distinct = len(dict.fromkeys(self.keys))
        except TypeError as e:
            raise BlockTypeError(f"OneOf: the keys {self.keys!r} are not all hashable: {e}") from None
        if distinct != len(items):
            raise BlockTypeError(f"OneOf: the keys {self.keys!r} are not distinct")
        block = isinstance(key_fn, Block) or not callable(key_fn)
        parts = [convert_to_block(b) for _, b in items]
        pre = None if pre_block is None else convert_to_block(pre_block)
        self.key = self.watch(convert_to_block(key_fn) if block else InputTransform(key_fn))
        self.pre_block: Block | None = None if pre is None else self.watch(pre)
        self.part_names = [self.adopt(key_name(k), p) for k, p in zip(self.keys, parts, strict=True)]

    @property
    def parts(self) -> list[Block]:
        """The case blocks, in order."""
        return [self._modules[n] for n in self.part_names]  # type: ignore[misc]  # adopted blocks

    def infer_types(self) -> None:
        pre = self.pre_block
        source: tuple[Block, Any] = (self, "input")
        give(self.key, "output", PyObjectType(), self)
        link(self, "input", self.key, "input")
        if pre is not None:
            link(self, "input", pre, "input")
            source = (pre, "output")
        for case in self.parts:
            link(*source, case, "input")
            link(case, "output", self, "output")

    def expression(self) -> str:
        if self.by_position:
            cases = "(" + ", ".join(expression(p) for p in self.parts) + ")"
        else:
            pairs = zip(self.keys, self.parts, strict=True)
            cases = "{" + ", ".join(f"{k!r}: {expression(p)}" for k, p in pairs) + "}"
        key = value_text(self.key.py_fn) if isinstance(self.key, InputTransform) else expression(self.key)
        pre = "" if self.pre_block is None else f", pre_block={expression(self.pre_block)}"
        return f"OneOf({key}, {cases}{pre})"

    def place_of(self, part: Typed) -> str:
        found = next((f"[{k!r}]" for k, p in zip(self.keys, self.parts, strict=True) if p is part), None)
        return super().place_of(part) if found is None else found

    def build(self, to: Builder) -> Run:
        key_of = self.key.runnable(to)
        pre = None if self.pre_block is None else self.pre_block.runnable(to)
        runs = [p.runnable(to) for p in self.parts]
        cases: dict[Any, Run] = dict(zip(self.keys, runs, strict=True))
        if self.by_position:
            cases |= {i - len(runs): run for i, run in enumerate(runs)}

        def run(x: Any) -> Any:
            key = key_of(x)
            try:
                case = cases[key]
            except KeyError:
                raise KeyError(f"{self!r} has no case {key!r}, only {self.keys!r}") from None
            return case(x if pre is None else pre(x))

        return run


class Optional(Block):
    """One block for an object, another for None.

    Type: PyObjectType -> b for `some_case` PyObjectType -> b and `none_case` VoidType -> b; by default zeros,
    and an empty sequence for a sequence type.

    >>> Optional(Scalar()).eval(None)
    tensor(0.)
    """

    input_type_classes = (PyObjectType,)

    def __init__(self, some_case: Any, none_case: Any = None, name: str | None = None) -> None:
        super().__init__(input_type=PyObjectType(), name=name)
        some, none = (
            convert_to_block(some_case),
            Zeros() if none_case is None else convert_to_block(none_case),
        )
        self.some_case, self.none_case = self.watch(some), self.watch(none)

    def infer_types(self) -> None:
        give_nothing(self, self.none_case, "the block for None")
        link(self, "input", self.some_case, "input")
        for case in (self.some_case, self.none_case):
            link(case, "output", self, "output")

    def expression(self) -> str:
        none = None if isinstance(self.none_case, Zeros) else self.none_case
        return call_text("Optional", self.some_case, none_case=(none, None))

    def build(self, to: Builder) -> Run:
        some, none = self.some_case.runnable(to), self.none_case.runnable(to)
        return lambda x: none(None) if x is None else some(x)


class ForwardDeclaration(Typed):
    """A block that is used before it is built, for recursion: `fwd()` is a reference, as often as needed.

    Type: what it is declared with, or what the block that it is resolved to has.

    >>> fwd = ForwardDeclaration(PyObjectType(), TensorType([]))
    >>> nest = OneOf(lambda x: isinstance(x, list), (Scalar(), Map(fwd()) >> Sum()))
    >>> fwd.resolve_to(nest)
    >>> nest.eval([1, [2, 3], []])
    tensor(6.)
    """

    def __init__(self, input_type: Any = None, output_type: Any = None, name: str | None = None) -> None:
        super().__init__(input_type=input_type, output_type=output_type, name=name)
        self._target: tuple[Block, ...] = ()

    @property
    def resolved(self) -> Block | None:
        """The block that it stands for, None before `resolve_to`."""
        return self._target[0] if self._target else None

    @property
    def target(self) -> Block:
        """The block that it stands for; BlockTypeError before `resolve_to`."""
        if not self._target:
            raise BlockTypeError(f"{self!r} was never resolved: call resolve_to(block){_at(self)}")
        return self._target[0]

    def __call__(self) -> Reference:
        """A new block that does what the declared one does."""
        return Reference(self)

    def resolve_to(self, target_block: Any) -> None:
        """Say which block it is. BlockTypeError when the types disagree, or when it is resolved already."""
        if self._target:
            raise BlockTypeError(f"{self!r} is already resolved to {self._target[0]!r}")
        target = convert_to_block(target_block)
        self.set_io_types(target)
        self._target = (target,)

    def infer_types(self) -> None:
        if self._target:
            link(self._target[0], "input", self, "input")
            link(self._target[0], "output", self, "output")

    def expression(self) -> str:
        return self.name or f"ForwardDeclaration({self.input_type}, {self.output_type})"


def _at(block: Typed) -> str:
    return f" (declared at {block.built_at})" if block.built_at else ""


class Reference(Block):
    """A use of a ForwardDeclaration; its parameters are those of the block it stands for, registered there."""

    def __init__(self, declaration: ForwardDeclaration) -> None:
        super().__init__()
        self._declaration = (declaration,)  # in a tuple: not registered as a part, recursion would not end
        self.set_io_types(declaration)

    @property
    def declaration(self) -> ForwardDeclaration:
        """The declaration that this refers to."""
        return self._declaration[0]

    @property
    def resolved(self) -> Block | None:
        """The block that it stands for, None before `resolve_to`."""
        return self.declaration.resolved

    def infer_types(self) -> None:
        link(self.declaration, "input", self, "input")
        link(self.declaration, "output", self, "output")

    def check(self) -> None:
        _ = self.declaration.target  # raises when it was never resolved

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.declaration._apply(fn, recurse=False)
        return super()._apply(fn, recurse)

    def expression(self) -> str:
        return f"{self.declaration.name or 'forward'}()"

    def build(self, to: Builder) -> Run:
        return to.recursive(self.declaration, lambda to: self.declaration.target.runnable(to))


@convert_to_block.register
def _(declaration: ForwardDeclaration, input_type: ResultType | None = None) -> Block:
    raise BlockTypeError(f"{declaration!r} is no block: a use of it is, call it{_at(declaration)}")


class Metric(Block):
    """Collect values under a name: as many an instance as the block is reached, each with an optional label.

    Type: TensorType, or TupleType(TensorType, PyObjectType) with a label -> VoidType. All uses of a name have one
    tensor type.

    >>> (Map(Scalar() >> Metric("seen")) >> Void()).eval([1, 2])
    (None, {'seen': tensor([1., 2.])})
    """

    input_type_classes = (TensorType, TupleType)
    output_type_classes = (VoidType,)

    def __init__(self, metric_name: str) -> None:
        super().__init__(output_type=VoidType())
        if not isinstance(metric_name, str):
            raise BlockTypeError(f"Metric takes a name, got {metric_name!r}")
        self.metric_name = metric_name

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, TupleType):
            labelled = len(t) == 2 and isinstance(t[0], TensorType) and isinstance(t[1], PyObjectType)
            if not labelled:
                raise complain(
                    self, f"takes (TensorType, PyObjectType), got {t!r}", self.origins.get("input")
                )

    @property
    def value_type(self) -> TensorType:
        """The type of one value."""
        t = self.input_type[0] if isinstance(self.input_type, TupleType) else self.input_type
        if not isinstance(t, TensorType):
            raise complain(self, "the input type is unknown: compose it, or call set_input_type()")
        return t

    def metric(self) -> tuple[str, TensorType]:
        return self.metric_name, self.value_type

    def expression(self) -> str:
        return call_text("Metric", self.metric_name)

    def build(self, to: Builder) -> Run:
        name, labelled = self.metric_name, isinstance(self.input_type, TupleType)

        def run(x: Any) -> None:
            found = collected.get()
            if found is not None:
                values, labels = found.setdefault(name, ([], []))
                values.append(x[0] if labelled else x)
                labels.append(x[1] if labelled else None)

        return run
