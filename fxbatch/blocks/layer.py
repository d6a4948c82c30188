"""`Layer`: an nn.Module over tensors whose parameters are made when its input type becomes known.

In: tensors of one instance (or with leading batch dimensions). Out: tensors.

    layer = fb.FC(4)                        # no parameters yet
    fb.Vector(3) >> layer                   # now weight [4, 3] and bias [4]
    (fb.Vector(3), fb.Vector(3)) >> fb.Record((layer, layer))     # one layer, two places
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxbatch.blocks.block import Typed
from fxbatch.blocks.infer import at_once, complain, give
from fxbatch.blocks.show import call_text
from fxbatch.blocks.types import ResultType, TensorType, TupleType
from fxbatch.errors import BlockTypeError


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
        from fxbatch.blocks.composition import Pipe

        return Pipe(self, rhs)

    def __rrshift__(self, lhs: Any) -> Any:
        from fxbatch.blocks.composition import Pipe

        return Pipe(lhs, self)

    def reads(self, *sources: Any) -> Any:
        """Within `Composition.scope()`: a Function of this layer that reads from these blocks."""
        from fxbatch.blocks.function import Function

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
    Other modules give what they give.

    Type: TupleType(t, s) -> TupleType(o, s) for cells; for other modules as for a Function.

    >>> ScopedLayer(nn.GRUCell(3, 4)).output_type
    TupleType(TensorType((4,), 'float32'), TensorType((4,), 'float32'))
    """

    def __init__(self, module: nn.Module, name: str | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise BlockTypeError(f"ScopedLayer takes an nn.Module, got {module!r}")
        super().__init__(name=name)
        self.module = module
        self._place = next((p.detach()[:0] for p in module.parameters()), self._place)
        self._cell = isinstance(module, nn.RNNCellBase)
        if isinstance(module, nn.RNNCellBase):
            dtype = module.weight_ih.dtype
            h = TensorType((module.hidden_size,), dtype)
            state: Any = (h, h) if isinstance(module, nn.LSTMCell) else h
            self.set_output_type((h, state))
            self.set_input_type((TensorType((module.input_size,), dtype), state))

    @property
    def state_size(self) -> Any:
        """Hidden size of a cell; None for other modules."""
        return self.module.hidden_size if isinstance(self.module, nn.RNNCellBase) else None

    def expression(self) -> str:
        return call_text("ScopedLayer", self.module)

    def make(self, input_type: ResultType) -> ResultType:
        from fxbatch.blocks.function import Function

        if self._cell:
            assert self.output_type is not None
            return self.output_type
        with at_once():
            found = Function(self.module).set_input_type(input_type).output_type
        assert found is not None
        return found

    def forward(self, *args: Any) -> Any:
        """Cells: `(input, state) -> (output, state)`; other modules: as they are."""
        if not self._cell:
            return self.module(*args)
        state = self.module(*args)
        return (state[0], state) if isinstance(state, tuple) else (state, state)


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


__all__ = ["Initializer", "Layer", "ScopedLayer", "TupleType", "initialize", "takes_vector"]
