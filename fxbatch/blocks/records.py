"""Blocks side by side: `Record`, each item of a dict, list or tuple to its own block; `AllOf`, all of it to each.

In: a Python object with items, or a tuple of typed values. Out: the tuple of the blocks' outputs.

    fb.Record({"word": fb.Scalar("int64"), "rest": fb.Map(fb.Scalar())})
    fb.AllOf(fb.Scalar(), fb.OneHot(10))

Source: Looks et al. 2017, section 3.2.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn

from fxbatch.blocks.block import Block, Output, convert_to_block, is_index
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.show import call_text, expression
from fxbatch.blocks.typed import complain, give, give_nothing, link
from fxbatch.blocks.types import PyObjectType, ResultType, TupleType, VoidType
from fxbatch.errors import BlockTypeError, BlockValueError, UnorderedRecordError


class Record(Block):
    """Dispatch the items of the input to blocks: a dict, a list of (key, block) pairs, or blocks by position.

    Type: PyObjectType, or for blocks by position, and for keys that are integers or slices, also TupleType ->
    TupleType of the blocks' outputs. The outputs are in order of the blocks; for a plain dict, in order of its sorted
    keys, or of insertion where keys can't be sorted (OrderedDict keeps its order). In a composition `record[key]` is
    the output of the block with that key.

    UnorderedRecordError when a plain dict meets a tuple, else BlockTypeError.

    >>> Record({"a": Scalar(), "b": OneHot(2)}).eval({"b": 1, "a": 5})
    (tensor(5.), tensor([0., 1.]))
    >>> Record((Scalar(), Scalar())).eval([1, 2])
    (tensor(1.), tensor(2.))
    >>> Record([(0, Scalar()), (slice(1, 3), Vector(2))]).eval([1, 2, 3])
    (tensor(1.), tensor([2., 3.]))
    """

    input_type_classes = (PyObjectType, TupleType, VoidType)
    output_type_classes = (PyObjectType, TupleType)

    def __init__(self, named_children: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        items = named_items(named_children, type(self).__name__)
        self.by_position = not isinstance(named_children, dict) and not is_pairs(named_children)
        self.unordered = isinstance(named_children, dict) and not isinstance(named_children, OrderedDict)
        if self.unordered:
            items = _sorted(items)
        self.keys = [key for key, _ in items]
        parts = [convert_to_block(b) for _, b in items]
        self.part_names = [self.adopt(key_name(k), p) for k, p in zip(self.keys, parts, strict=True)]

    @property
    def parts(self) -> list[Block]:
        """The blocks, in the order of the outputs."""
        return [self._modules[n] for n in self.part_names]  # type: ignore[misc]  # adopted blocks

    def __getitem__(self, key: Any) -> Output:
        """The output of the block with this key, for `reads`; BlockValueError when there is none."""
        position = next((i for i, k in enumerate(self.keys) if k == key), None)
        if position is not None:
            return Output(self, position)
        in_range = is_index(key) and -len(self.keys) <= key < len(self.keys)
        if isinstance(key, slice) or (self.by_position and in_range):
            return Output(self, key)
        raise BlockValueError(f"{self!r} has no block with the key {key!r}, only {self.keys!r}")

    def infer_types(self) -> None:
        parts = self.parts
        self._infer_input(parts)
        infer_outputs(self, parts)

    def _infer_input(self, parts: list[Block]) -> None:
        taken = self.input_type
        if isinstance(taken, VoidType):
            for key, p in zip(self.keys, parts, strict=True):
                give_nothing(self, p, f"the block for {key!r}")
        elif isinstance(taken, TupleType):
            self._infer_from_tuple(taken, parts)
        elif isinstance(taken, PyObjectType):
            for p in parts:
                if not isinstance(p.input_type, VoidType):
                    give(p, "input", PyObjectType(), self)
        elif self.unordered or not all(map(_is_position, self.keys)):
            if any(isinstance(p.type_at("input"), PyObjectType) for p in parts):
                give(self, "input", PyObjectType(), self)
        elif parts and self.keys == list(range(len(parts))):
            types = [p.type_at("input") for p in parts]
            if all(isinstance(t, VoidType) for t in types):
                give(self, "input", VoidType(), self)
            elif not any(t is None or isinstance(t, VoidType) for t in types):
                give(self, "input", TupleType(types), self)

    def _infer_from_tuple(self, taken: TupleType, parts: list[Block]) -> None:
        origin = self.origins.get("input")
        if self.unordered:
            raise complain(
                self,
                f"takes a Python object with keys, got {taken!r}: the blocks of a plain dict have no order; use an "
                "OrderedDict, or a tuple of blocks",
                origin,
                UnorderedRecordError,
            )
        if not all(map(_is_position, self.keys)):
            raise complain(self, f"takes a Python object with the keys {self.keys!r}, got {taken!r}", origin)
        if len(taken) != len(parts) and not any(isinstance(k, slice) for k in self.keys):
            raise complain(self, f"takes {len(parts)} items, got {len(taken)} in {taken!r}", origin)
        for key, p in zip(self.keys, parts, strict=True):
            if is_index(key) and not -len(taken) <= key < len(taken):
                raise complain(self, f"there is no item {key!r} in {taken!r}", origin)
            if not isinstance(p.input_type, VoidType):
                give(p, "input", taken[key], self.origins.get("input", self))

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
        if parts:
            self.set_output_type_classes(TupleType, PyObjectType)

    @property
    def parts(self) -> list[Block]:
        """The blocks, in order."""
        return [self._modules[n] for n in self.part_names]  # type: ignore[misc]  # adopted blocks

    def infer_types(self) -> None:
        parts = self.parts
        if all(isinstance(p.type_at("input"), VoidType) for p in parts):
            give(self, "input", VoidType(), self)
        for p in parts:
            link(self, "input", p, "input")
        if parts:
            infer_outputs(self, parts)
        else:
            give(self, "output", VoidType(), self)

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


def infer_outputs(block: Block, parts: list[Block]) -> None:
    """The type rule of a block that gives the tuple of its parts' outputs, in both directions."""
    t = block.type_at("output")
    if isinstance(t, TupleType) and len(t) != len(parts):
        raise complain(block, f"gives {len(parts)} items, not {t!r}", block.origins.get("output"))
    if t is not None:
        for p, item in zip(parts, t if isinstance(t, TupleType) else [t] * len(parts), strict=True):
            give(p, "output", item, block, "output")
    types: list[ResultType] = [x for p in parts if (x := p.type_at("output")) is not None]
    if len(types) == len(parts):
        give(block, "output", TupleType(types), block)


# -- named blocks ------------------------------------------------------------------------------------


@convert_to_block.register(dict)
@convert_to_block.register(list)
@convert_to_block.register(tuple)
def _(named: Any, input_type: ResultType | None = None) -> Block:
    return Record(named)


def is_pairs(named: Any) -> bool:
    """Whether this is a list of (key, block) pairs, not of blocks."""
    return isinstance(named, list) and bool(named) and all(
        isinstance(x, (tuple, list)) and len(x) == 2 and not _holds_block(x[0]) for x in named
    )  # fmt: skip


def _holds_block(x: Any) -> bool:
    """Whether x is a block-like, and no key: blocks, modules and tensors are, and what holds them."""
    if isinstance(x, (tuple, list)):
        return any(map(_holds_block, x))
    return isinstance(x, (nn.Module, torch.Tensor, np.ndarray, dict))


def _is_position(key: Any) -> bool:
    """Whether a key is one that a tuple has: an integer or a slice."""
    return is_index(key) or isinstance(key, slice)


def _sorted(items: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """In order of the keys, or as they are where keys can't be compared."""
    try:
        return sorted(items, key=lambda item: item[0])
    except TypeError:
        return items


def key_name(key: Any) -> str:
    """A name for the block with this key, among the parts of another."""
    if isinstance(key, enum.Enum):
        return key.name
    if isinstance(key, slice):
        return f"{key.start}:{key.stop}" + (f":{key.step}" if key.step is not None else "")
    if callable(key):
        return str(getattr(key, "__name__", type(key).__name__))
    return str(key) if isinstance(key, (str, int, float, bytes, tuple, type(None))) else type(key).__name__


def named_items(named: Any, what: str) -> list[tuple[Any, Any]]:
    """(key, block-like) pairs of a dict, a list of pairs, or a tuple or list of blocks, as they come."""
    if isinstance(named, dict):
        return list(named.items())
    if is_pairs(named):
        return [(k, b) for k, b in named]
    if isinstance(named, (tuple, list)):
        return list(enumerate(named))
    raise BlockTypeError(
        f"{what} takes a dict, a list of (key, block) pairs or a tuple of blocks, got {named!r}"
    )
