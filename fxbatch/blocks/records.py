"""`Record`: each item of a dict, list or tuple to its own block.

In: a Python object with items, or a tuple of typed values. Out: the tuple of the blocks' outputs.

    fb.Record({"word": fb.Scalar("int64"), "rest": fb.Map(fb.Scalar())})

Source: Looks et al. 2017, section 3.2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from fxbatch.blocks.block import Block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.convert import convert_to_block
from fxbatch.blocks.infer import complain, give
from fxbatch.blocks.show import expression
from fxbatch.blocks.types import PyObjectType, TupleType, VoidType
from fxbatch.errors import BlockTypeError


class Record(Block):
    """Dispatch the items of the input to blocks: a dict, a list of (key, block) pairs, or blocks by position.

    Type: PyObjectType, or for blocks by position also TupleType -> TupleType of the blocks' outputs. The outputs
    are in order of the blocks; for a plain dict, in order of its sorted keys (OrderedDict keeps its order).

    >>> Record({"a": Scalar(), "b": OneHot(2)}).eval({"b": 1, "a": 5})
    (tensor(5.), tensor([0., 1.]))
    >>> Record((Scalar(), Scalar())).eval([1, 2])
    (tensor(1.), tensor(2.))
    """

    input_type_classes = (PyObjectType, TupleType, VoidType)

    def __init__(self, named_children: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        items = named_items(named_children, type(self).__name__)
        self.by_position = not isinstance(named_children, dict) and not _is_pairs(named_children)
        self.keys = [key for key, _ in items]
        parts = [convert_to_block(b) for _, b in items]
        self.part_names = [self.adopt(str(k), p) for k, p in zip(self.keys, parts, strict=True)]
        self.infer_types()

    @property
    def parts(self) -> list[Block]:
        """The blocks, in the order of the outputs."""
        return [self._modules[n] for n in self.part_names]  # type: ignore[misc]  # adopted blocks

    def infer_types(self) -> None:
        parts = self.parts
        self._infer_input(parts)
        if isinstance(self.output_type, TupleType) and len(self.output_type) == len(parts):
            for p, t in zip(parts, self.output_type, strict=True):
                give(p, "output", t, self, "output")
        types = [p.output_type for p in parts]
        if all(t is not None for t in types):
            give(self, "output", TupleType(*types), self)

    def _infer_input(self, parts: list[Block]) -> None:
        taken = self.input_type
        if isinstance(taken, TupleType):
            if not self.by_position:
                raise complain(
                    self, f"takes a Python object with keys, got {taken!r}", self.origins.get("input")
                )
            if len(taken) != len(parts):
                raise complain(
                    self,
                    f"takes {len(parts)} items, got {len(taken)} in {taken!r}",
                    self.origins.get("input"),
                )
            for p, t in zip(parts, taken, strict=True):
                if not isinstance(p.input_type, VoidType):
                    give(p, "input", t, self.origins.get("input", self))
        elif isinstance(taken, PyObjectType) or not self.by_position:
            give(self, "input", PyObjectType(), self)
            for p in parts:
                if not isinstance(p.input_type, VoidType):
                    give(p, "input", PyObjectType(), self)
        elif all(p.input_type is not None for p in parts):
            types = [p.input_type for p in parts]
            if parts and all(isinstance(t, VoidType) for t in types):
                give(self, "input", VoidType(), self)
            elif all(isinstance(t, (VoidType, PyObjectType)) for t in types):
                give(self, "input", PyObjectType(), self)
            elif not any(isinstance(t, VoidType) for t in types):
                give(self, "input", TupleType(*types), self)

    def place_of(self, part: Any) -> str:
        return next((f"[{k!r}]" for k, p in zip(self.keys, self.parts, strict=True) if p is part), "")

    def expression(self) -> str:
        if self.by_position:
            inner = ", ".join(expression(p) for p in self.parts)
            return f"({inner}{',' if len(self.parts) == 1 else ''})"
        pairs = zip(self.keys, self.parts, strict=True)
        return "{" + ", ".join(f"{k!r}: {expression(p)}" for k, p in pairs) + "}"

    def build(self, to: Builder) -> Run:
        pairs = [(k, p.runnable(to)) for k, p in zip(self.keys, self.parts, strict=True)]
        if isinstance(self.input_type, VoidType):
            return lambda x: tuple([run(None) for _, run in pairs])
        void = [isinstance(p.input_type, VoidType) for p in self.parts]
        if any(void):
            plan = [(k, run, v) for (k, run), v in zip(pairs, void, strict=True)]
            return lambda x: tuple([run(None if v else x[k]) for k, run, v in plan])
        if len(pairs) == 2:
            (k0, run0), (k1, run1) = pairs
            return lambda x: (run0(x[k0]), run1(x[k1]))
        return lambda x: tuple([run(x[k]) for k, run in pairs])


def _is_pairs(named: Any) -> bool:
    """Whether this is a list of (key, block) pairs, not of blocks."""
    return isinstance(named, list) and all(
        isinstance(x, (tuple, list)) and len(x) == 2 and _is_key(x[0]) for x in named
    )


def _is_key(x: Any) -> bool:
    return isinstance(x, Hashable) and not callable(x) and not isinstance(x, tuple)


def named_items(named: Any, what: str) -> list[tuple[Any, Any]]:
    """(key, block-like) pairs of a dict, a list of pairs, or a tuple or list of blocks."""
    if isinstance(named, OrderedDict):
        return list(named.items())
    if isinstance(named, dict):
        try:
            return [(k, named[k]) for k in sorted(named)]
        except TypeError:
            raise BlockTypeError(
                f"{what}: the keys {list(named)!r} of a dict have no order: use an OrderedDict or a list of pairs"
            ) from None
    if _is_pairs(named) and named:
        keys = [k for k, _ in named]
        if len(dict.fromkeys(keys)) != len(keys):
            raise BlockTypeError(f"{what}: the keys {keys!r} are not distinct")
        return [(k, b) for k, b in named]
    if isinstance(named, (tuple, list)):
        return list(enumerate(named))
    raise BlockTypeError(
        f"{what} takes a dict, a list of (key, block) pairs or a tuple of blocks, got {named!r}"
    )
