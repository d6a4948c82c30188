"""`Function`: a callable over tensors, or an nn.Module, as a block that the engine batches; `Layer`: an nn.Module whose
parameters are made when its input type becomes known.

In: a nest of tensors of one instance (a tuple is splat into arguments). Out: a nest of tensors.

    (fb.Scalar(), fb.Scalar()) >> fb.Function(torch.add)
    fb.Vector(3) >> fb.Function(nn.Linear(3, 4))
    layer = fb.FC(4)                                              # no parameters yet
    fb.Vector(3) >> layer                                         # now weight [4, 3] and bias [4]
    (fb.Vector(3), fb.Vector(3)) >> fb.Record((layer, layer))     # one layer, two places

The callable is written for ONE instance (no batch dimension), and must be a function of its tensors: it is run
once for each type and mode when a minibatch is recorded, not once an instance. Source: Looks et al. 2017,
section 3.1.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxbatch.blocks.block import Block, Pipe, convert_to_block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.leaves import InputTransform
from fxbatch.blocks.show import call_text, value_text
from fxbatch.blocks.typed import Typed, at_once, complain, give, link
from fxbatch.blocks.types import (
    PyObjectType,
    ResultType,
    TensorType,
    TupleType,
    convert_to_type,
    is_nest_of_tensors,
    map_tensors,
)
from fxbatch.errors import BlockTypeError


class Function(Block):
    """A callable or nn.Module over tensors, batched by the engine.

    Type: a nest of tensors -> a nest of tensors, a nest being a tensor or a tuple of nests, and holding at least one
    tensor. The output type is
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

    @property
    def tf_fn(self) -> Callable[..., Any]:
        """The callable: its name in TensorFlow Fold."""
        return self.function

    def expression(self) -> str:
        if isinstance(self.function, Layer):
            return value_text(self.function)
        return call_text("Function", self.function)

    def infer_types(self) -> None:
        for side, t in (("input", self.input_type), ("output", self.output_type)):
            if t is not None and not (is_nest_of_tensors(t) and list(t.terminal_types())):
                raise complain(
                    self,
                    f"bad {side} type {t!r}: a Function is over tensors and tuples of at least one tensor",
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
    try:
        for m, _ in modes:
            m.training = False
        with torch.no_grad(), contextlib.nullcontext() if lazy else _random_numbers_kept():
            yield
    finally:
        for m, training in modes:
            m.training = training


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Within it, random numbers may be drawn that don't count."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
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
        return TupleType([_type_of(y) for y in x])
    raise BlockTypeError(f"{type(x).__name__}, no tensor or tuple of tensors")


# -- callables as blocks ------------------------------------------------------------------------------


@convert_to_block.register(nn.Module)
def _(module: nn.Module, input_type: ResultType | None = None) -> Block:
    return Function(module)


@convert_to_block.register(Callable)  # type: ignore[call-overload]  # a class, whatever mypy takes it for
def _(fn: Callable[..., Any], input_type: ResultType | None = None) -> Block:
    if is_torch_function(fn):
        return Function(fn)
    if isinstance(input_type, PyObjectType):
        return InputTransform(fn)
    if input_type is not None:
        return Function(fn)
    name = getattr(fn, "__qualname__", repr(fn))
    raise BlockTypeError(
        f"{name} is a Python function whose input type is not known here: say InputTransform({name}) "
        f"for Python objects or Function({name}) for tensors"
    )


def is_torch_function(fn: Any) -> bool:
    """Whether fn is a function of PyTorch: `torch.add`, `torch.tanh`, `F.relu`."""
    if isinstance(fn, type):
        return False
    module = getattr(fn, "__module__", None) or ""
    owner = getattr(fn, "__objclass__", None) or getattr(fn, "__self__", None)
    return module.split(".")[0] == "torch" or owner in (torch.Tensor, torch._C) or _is_builtin(fn)


def _is_builtin(fn: Any) -> bool:
    return getattr(torch, getattr(fn, "__name__", ""), None) is fn


# -- layers -------------------------------------------------------------------------------------------


class Layer(Typed):
    """Base class of layers. `x >> layer` is `x >> Function(layer)`; a layer may stand in several places.

    A subclass says in `make(input_type)` which parameters it has and what its output type is.
    """

    def infer_types(self) -> None:
        if self.input_type is not None and not self.is_made:
            self.is_made = True
            give(self, "output", self.make(self.input_type), self)

    is_made = False  # whether the parameters exist

    def make(self, input_type: ResultType) -> ResultType:
        """Make the parameters for this input type; the output type."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_type is None:
            raise complain(
                self, "has no parameters yet: its input type is unknown; compose it, or set_input_type()"
            )
        return super().__call__(*args, **kwargs)

    def __rshift__(self, rhs: Any) -> Any:
        return Pipe(self, rhs)

    def __rrshift__(self, lhs: Any) -> Any:
        return Pipe(lhs, self)

    def reads(self, *sources: Any) -> Any:
        """Within `Composition.scope()`: a Function of this layer that reads from these blocks."""
        return Function(self).reads(*sources)

    def new_parameter(
        self, shape: tuple[int, ...], dtype: torch.dtype, trainable: bool = True
    ) -> nn.Parameter:
        """An uninitialised parameter where the layer lives."""
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=trainable)


class ScopedLayer(Layer):
    """An nn.Module as a layer; torch's RNN, GRU and LSTM cells get Fold's protocol of cells.

    A cell takes (input, state) and gives (output, state): for `nn.LSTMCell` the state is a pair (h, c) and the
    output is h; for `nn.RNNCell` and `nn.GRUCell` output and state are both h. Their types are known at once.
    Other modules give what they give; one with the attributes `output_size` and `state_size` is a cell of that
    protocol as it is, and gives vectors of these sizes.

    module: an nn.Module, or what makes one from the size of its input, when that becomes known: a class or function
    that takes the size first, with the other arguments here: `ScopedLayer(nn.GRUCell, hidden_size=16)`.

    Type: TupleType(t, s) -> TupleType(o, s) for cells; for other modules as for a Function.

    >>> ScopedLayer(nn.GRUCell(3, 4)).output_type
    TupleType(TensorType((4,), 'float32'), TensorType((4,), 'float32'))
    >>> cell = ScopedLayer(nn.LSTMCell, hidden_size=4)
    >>> (Map(Vector(3)) >> RNN(cell)).output_type[1]
    TupleType(TensorType((4,), 'float32'), TensorType((4,), 'float32'))
    """

    def __init__(
        self, module: nn.Module | Callable[..., nn.Module], name: str | None = None, **arguments: Any
    ) -> None:
        if not callable(module) or (isinstance(module, nn.Module) and arguments):
            raise BlockTypeError(
                f"ScopedLayer takes an nn.Module, or a class of modules and its arguments, got {module!r}"
            )
        super().__init__(name=name)
        self.module: nn.Module | None = None
        self._make: Callable[[int], nn.Module] | None = None
        if isinstance(module, nn.Module):
            self.module = example = module
        else:
            self._make = functools.partial(module, **arguments)
            with _random_numbers_kept():  # what it is like: the module itself waits for the size of its input
                example = self._make(1)
            if not isinstance(example, nn.Module):
                raise BlockTypeError(f"ScopedLayer: {value_text(module)} makes {example!r}, no nn.Module")
        self._place = next((p.detach()[:0].clone() for p in example.parameters()), self._place)
        self._is_torch_cell = isinstance(example, nn.RNNCellBase)
        self._sizes = _sizes_of(example)
        self._shown = value_text(example if self._make is None else module)
        if self._sizes is not None:
            self.set_output_type(map_tensors(convert_to_type(self._sizes), self._of_its_dtype))
        if isinstance(self.module, nn.RNNCellBase):
            assert isinstance(self.output_type, TupleType)
            element = self._of_its_dtype(TensorType((self.module.input_size,)))
            self.set_input_type((element, self.output_type[1]))

    def _of_its_dtype(self, t: TensorType) -> TensorType:
        return TensorType(t.shape, self._place.dtype)

    @property
    def state_size(self) -> Any:
        """The sizes of a cell's state, as the shorthand of its type: 4, or (4, 4); None for other modules."""
        return None if self._sizes is None else self._sizes[1]

    @property
    def output_size(self) -> Any:
        """The size of a cell's output, as the shorthand of its type; None for other modules."""
        return None if self._sizes is None else self._sizes[0]

    def expression(self) -> str:
        return f"ScopedLayer({self._shown})"

    def make(self, input_type: ResultType) -> ResultType:
        if self.module is None:
            assert self._make is not None
            size = self._input_size(input_type)
            self.module = self._make(size).to(device=self._place.device, dtype=self._place.dtype)
            self._make = None
        if self._is_torch_cell:
            assert self.output_type is not None
            expected = TupleType(
                self._of_its_dtype(TensorType((self.module.input_size,))),
                self.output_type[1],  # type: ignore[index]  # a pair
            )
            if input_type != expected:
                raise complain(self, f"takes {expected!r}, got {input_type!r}", self.origins.get("input"))
            return self.output_type
        with at_once():
            found = Function(self.module).set_input_type(input_type).output_type
        assert found is not None
        return found

    def _input_size(self, t: ResultType) -> int:
        """The number of elements of the vector that a module takes, the first of a tuple."""
        first = t[0] if isinstance(t, TupleType) and len(t) else t
        if not isinstance(first, TensorType) or not first.shape:
            raise complain(self, f"there is no size of the input in {t!r}", self.origins.get("input"))
        return first.shape[-1]

    def forward(self, *args: Any) -> Any:
        """Cells: `(input, state) -> (output, state)`; other modules: as they are."""
        assert self.module is not None
        if not self._is_torch_cell:
            return self.module(*args)
        state = self.module(*args)
        return (state[0], state) if isinstance(state, tuple) else (state, state)


def _sizes_of(module: nn.Module) -> tuple[Any, Any] | None:
    """The sizes of output and state of a cell, None for other modules."""
    if isinstance(module, nn.RNNCellBase):
        n = module.hidden_size
        return n, (n, n) if isinstance(module, nn.LSTMCell) else n
    if hasattr(module, "output_size") and hasattr(module, "state_size"):
        return module.output_size, module.state_size
    return None


Initializer = Callable[[torch.Tensor], Any] | torch.Tensor


def initialize(parameter: torch.Tensor, initializer: Any, block: Typed) -> None:
    """Fill a parameter from a tensor or array of its shape, or by a function like those of `nn.init`.

    A function may write in place (`nn.init.orthogonal_`) or give a tensor of the shape.
    """
    with torch.no_grad():
        if callable(initializer):
            found = initializer(parameter)
            if isinstance(found, torch.Tensor) and found is not parameter:
                _copy(parameter, found, block)
        else:
            _copy(parameter, torch.as_tensor(initializer), block)


def _copy(parameter: torch.Tensor, source: torch.Tensor, block: Typed) -> None:
    if source.shape != parameter.shape:
        raise ValueError(
            f"{block!r}: the initial weights are {list(source.shape)}, not {list(parameter.shape)}"
        )
    parameter.copy_(source)


def takes_vector(block: Typed, t: ResultType) -> TensorType:
    """t, checked to be a floating point vector type."""
    if not isinstance(t, TensorType) or t.ndim != 1 or not t.dtype.is_floating_point:
        raise complain(block, f"takes a floating point vector, got {t!r}", block.origins.get("input"))
    return t
