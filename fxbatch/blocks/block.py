"""The base of all blocks: an nn.Module with an input type, an output type, and a value for one instance.

In: Python objects and tensors of ONE instance. Out: what the block makes of them. `fb.compile` runs a block on
a minibatch.

    block = fb.Map(fb.Scalar()) >> fb.Sum()
    block.output_type                   # TensorType((), 'float32')
    block.eval([1, 2, 3])               # tensor(6.)

Source: Looks et al. 2017, section 3.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from fxbatch.blocks import infer
from fxbatch.blocks.build import EAGER, Builder, Run, metrics_of
from fxbatch.blocks.infer import Side, give
from fxbatch.blocks.show import call_text, expression
from fxbatch.blocks.types import ResultType, TensorType, TupleType, convert_to_type, map_tensors
from fxbatch.errors import BlockTypeError

_PACKAGE = __name__.rpartition(".")[0]
# What a block keeps beside its parameters, but a copy or a pickle leaves out: it is made again on demand.
_REMADE = ("_run",)


def _built_at() -> str:
    """The user's line that builds a block: `model.py:31`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame is not None else ""


class Typed(nn.Module):
    """What has an input type and an output type: blocks, and layers.

    `input_type_classes` and `output_type_classes`: kinds of types that the ends can have, () for any.
    """

    input_type_classes: ClassVar[tuple[type, ...]] = ()
    output_type_classes: ClassVar[tuple[type, ...]] = ()

    def __init__(self, *, input_type: Any = None, output_type: Any = None, name: str | None = None) -> None:
        super().__init__()
        if name is not None and (not isinstance(name, str) or not name):
            raise BlockTypeError(f"a name is a non-empty string, got {name!r}")
        self.name = name
        self.watchers: list[Typed] = []  # what infers again when a type of this becomes known
        self.origins: dict[str, Typed] = {}  # who told an end its type
        self.built_at = _built_at()
        self._input_type: ResultType | None = None
        self._output_type: ResultType | None = None
        self._place = torch.empty(0)  # follows .to(device); parameters are made there
        self._type_args: tuple[Any, ...] = ()
        if input_type is not None:
            self.set_input_type(input_type)
        if output_type is not None:
            self.set_output_type(output_type)

    # -- types --------------------------------------------------------------------------------------

    @property
    def input_type(self) -> ResultType | None:
        """The input type, None while it is unknown."""
        return self._input_type

    @property
    def output_type(self) -> ResultType | None:
        """The output type, None while it is unknown."""
        return self._output_type

    def type_at(self, side: Side) -> ResultType | None:
        """`input_type` or `output_type`."""
        return self._input_type if side == "input" else self._output_type

    def set_input_type(self, input_type: Any) -> Any:
        """Declare the input type (a type or its shorthand); self. BlockTypeError when it can't be."""
        if input_type is not None:
            give(self, "input", convert_to_type(input_type), self)
        return self

    def set_output_type(self, output_type: Any) -> Any:
        """Declare the output type (a type or its shorthand); self. BlockTypeError when it can't be."""
        if output_type is not None:
            give(self, "output", convert_to_type(output_type), self)
        return self

    def set_io_types(self, other: Typed) -> Any:
        """Make this and `other` agree on input and output type, from now on; self."""
        self.watch(other)
        other.watch(self)
        infer.link(other, "input", self, "input")
        infer.link(other, "output", self, "output")
        return self

    def settle(self, side: Side, t: ResultType, giver: Typed) -> None:
        """Take a type that has passed all checks, and infer what follows from it."""
        if side == "input":
            self._input_type = t
        else:
            self._output_type = t
        self.origins[side] = giver
        infer.again(self, *self.watchers)

    def infer_types(self) -> None:
        """The block's type rule: from what is known, tell ends and parts more (`give`, `link`)."""

    def watch(self, part: Typed) -> Any:
        """Infer again when a type of `part` becomes known; part."""
        if not any(w is self for w in part.watchers):
            part.watchers.append(self)
        return part

    # -- as a module --------------------------------------------------------------------------------

    def adopt(self, name: str, part: nn.Module) -> str:
        """Register a part under a name that a module attribute can have, and watch its types; the name."""
        name = name.replace(".", "_")
        if not name or hasattr(self, name):
            name = f"part_{name}"
        while name in self._modules:
            name += "_"
        self.add_module(name, part)
        if isinstance(part, Typed):
            self.watch(part)
        return name

    @property
    def device(self) -> torch.device:
        """Where the block makes its tensors: follows `.to(device)`."""
        return self._place.device

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """As for any module; floating point types follow (`.double()` makes a float64 expression)."""
        super()._apply(fn, recurse)
        self._place = fn(self._place)

        def follow(t: TensorType) -> TensorType:
            moved = fn(torch.empty(0, dtype=t.dtype, device=self._place.device))
            return t if moved.dtype == t.dtype else TensorType(t.shape, moved.dtype)

        self._input_type = None if self._input_type is None else map_tensors(self._input_type, follow)
        self._output_type = None if self._output_type is None else map_tensors(self._output_type, follow)
        self.__dict__.pop("_run", None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _REMADE}

    # -- text ---------------------------------------------------------------------------------------

    def expression(self) -> str:
        """The expression that builds this, without marks; see `show.expression`."""
        return call_text(type(self).__name__)

    def place_of(self, part: Typed) -> str:
        """Where a part stands in this block, for errors: `[2]`, `.element`, `['key']`."""
        for name, child in self._modules.items():
            if child is part:
                return f"[{name}]" if name.isdigit() else f".{name}"
        return ""

    def __repr__(self) -> str:
        return expression(self)


class Output:
    """The i-th output of a block, or a part of it: what `block[i]` is, for `reads`."""

    __slots__ = ("block", "key")

    def __init__(self, block: Block, key: Any) -> None:
        self.block = block
        self.key = key

    def __getitem__(self, key: Any) -> Output:
        from fxbatch.blocks.tuples import GetItem

        return Output(GetItem(self.key).reads(self.block), key)

    def __iter__(self) -> Iterator[Output]:
        t = self.block.output_type
        part = t[self.key] if isinstance(t, TupleType) and isinstance(self.key, int) else None
        if not isinstance(part, TupleType):
            raise BlockTypeError(f"{self!r} can't be unpacked: its type is {part!r}, no TupleType")
        return iter([self[i] for i in range(len(part))])

    def __repr__(self) -> str:
        return f"{self.block!r}[{self.key!r}]"


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
            raise infer.complain(self, f"the {end} type is unknown: compose it, or call set_{end}_type()")
        return self.build(to)

    def forward(self, x: Any = None) -> Any:
        """The output for one instance: tensors, tuples, lists (sequences), Python objects."""
        run = self.__dict__.get("_run")
        if run is None:
            from fxbatch.blocks.compiler import resolve

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
        names = metrics_of(self)
        if tolist:
            result = _to_list(result)
        if not names:
            return result
        values = {n: stack_metric(t, found.get(n, ([], []))[0], self.device) for n, t in names.items()}
        return result, {n: _to_list(v) if tolist else v for n, v in values.items()}

    # -- composition --------------------------------------------------------------------------------

    def __rshift__(self, rhs: Any) -> Any:
        from fxbatch.blocks.composition import Pipe

        return Pipe(self, rhs)

    def __rrshift__(self, lhs: Any) -> Any:
        from fxbatch.blocks.composition import Pipe

        return Pipe(lhs, self)

    def reads(self, *sources: Any) -> Any:
        """Within `Composition.scope()`: read the input from these blocks or outputs; self."""
        from fxbatch.blocks.composition import current_composition

        current_composition(self).connect(sources[0] if len(sources) == 1 else sources, self)
        return self

    def __getitem__(self, key: Any) -> Output:
        """The output `key` of this block, for `reads`."""
        return Output(self, key)

    def __iter__(self) -> Iterator[Output]:
        if not isinstance(self.output_type, TupleType):
            raise BlockTypeError(f"{self!r} can't be unpacked: its output type is {self.output_type!r}")
        return iter([Output(self, i) for i in range(len(self.output_type))])


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


def _to_list(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, (tuple, list)):
        return type(x)(_to_list(y) for y in x)
    return x
