"""`Function`: a callable over tensors, or an nn.Module, as a block that the engine batches.

In: a nest of tensors (a tuple is splat into arguments). Out: a nest of tensors.

    (fb.Scalar(), fb.Scalar()) >> fb.Function(torch.add)
    fb.Vector(3) >> fb.Function(nn.Linear(3, 4))

The callable is written for ONE instance (no batch dimension), and must be a function of its tensors: it is run
once for each type and mode when a minibatch is recorded, not once an instance. Source: Looks et al. 2017,
section 3.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxbatch.blocks.block import Block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.infer import complain, give, link
from fxbatch.blocks.layer import Layer
from fxbatch.blocks.show import call_text, value_text
from fxbatch.blocks.types import ResultType, TensorType, TupleType, is_nest_of_tensors
from fxbatch.errors import BlockTypeError


class Function(Block):
    """A callable or nn.Module over tensors, batched by the engine.

    Type: a nest of tensors -> a nest of tensors, a nest being a tensor or a tuple of nests. The output type is
    found by running the callable once on zeros of the input type, as soon as that is known;
    `infer_output_type=False` waits for `set_output_type` instead. BlockTypeError when the callable raises.

    >>> ((Scalar(), Scalar()) >> Function(torch.add)).eval((1, 2))
    tensor(3.)
    """

    input_type_classes = (TensorType, TupleType)
    output_type_classes = (TensorType, TupleType)

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, infer_output_type: bool = True
    ) -> None:
        if not callable(fn) or isinstance(fn, Block):
            raise BlockTypeError(f"Function takes a callable over tensors, got {fn!r}")
        super().__init__(name=name)
        self.function = fn
        self.infer_output_type = infer_output_type
        self._tried: ResultType | None = None
        if isinstance(fn, Layer):
            self.watch(fn)
            self.infer_types()

    def expression(self) -> str:
        if isinstance(self.function, Layer):
            return value_text(self.function)
        return call_text("Function", self.function)

    def infer_types(self) -> None:
        for side, t in (("input", self.input_type), ("output", self.output_type)):
            if t is not None and not is_nest_of_tensors(t):
                raise complain(
                    self,
                    f"bad {side} type {t!r}: a Function is over tensors and tuples of tensors",
                    self.origins.get(side),
                )
        if isinstance(self.function, Layer):
            link(self, "input", self.function, "input")
            link(self.function, "output", self, "output")
        elif self.infer_output_type and self.input_type is not None and self._tried != self.input_type:
            self._tried = self.input_type
            give(self, "output", self._output_of(self.input_type), self)

    def _output_of(self, t: ResultType) -> ResultType:
        """The output type, from one run on zeros of the input type."""
        with _trial(self.function):
            zeros = _zeros(t, _device_of(self))
            try:
                result = self.function(*zeros) if isinstance(t, TupleType) else self.function(zeros)
            except BlockTypeError:
                raise
            except Exception as e:  # whatever the user's callable raises, with its context
                reason = f"{type(e).__name__}: {e}"
                raise complain(self, f"can't be applied to {t!r}: {reason}", self.origins.get("input")) from e
        try:
            return _type_of(result)
        except BlockTypeError as e:
            raise complain(self, f"applied to {t!r} gives {e}") from None

    def build(self, to: Builder) -> Run:
        assert self.input_type is not None and self.output_type is not None
        return to.call(self, self.function, self.input_type, self.output_type)


def _device_of(block: Function) -> torch.device:
    if isinstance(block.function, nn.Module):
        first = next(block.function.parameters(), None)
        if first is not None and not isinstance(first, nn.parameter.UninitializedParameter):
            return first.device
    return block.device


@contextlib.contextmanager
def _trial(fn: Any) -> Iterator[None]:
    """A run that leaves no trace: no gradients, evaluation mode, random numbers as before.

    A lazy module makes its parameters in this run, so there random numbers are drawn for good.
    """
    modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
    lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for m in modules for p in m.parameters())
    modes = [(m, m.training) for m in modules]
    state = torch.get_rng_state()
    try:
        for m, _ in modes:
            m.training = False
        with torch.no_grad():
            yield
    finally:
        for m, training in modes:
            m.training = training
        if not lazy:
            torch.set_rng_state(state)


def _zeros(t: ResultType, device: torch.device) -> Any:
    if isinstance(t, TupleType):
        return tuple(_zeros(x, device) for x in t.items)
    assert isinstance(t, TensorType)
    return torch.zeros(t.shape, dtype=t.dtype, device=device)


def _type_of(x: Any) -> ResultType:
    if isinstance(x, torch.Tensor):
        return TensorType.of(x)
    if isinstance(x, (tuple, list)):
        return TupleType(*(_type_of(y) for y in x))
    raise BlockTypeError(f"{type(x).__name__}, no tensor or tuple of tensors")
