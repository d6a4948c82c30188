"""The layers of TensorFlow Fold: fully connected, embedding, and their initial weights.

In: a vector, an integer. Out: a vector.

    fb.Vector(10) >> fb.FC(100) >> fb.FC(3, activation=None)
    fb.Scalar("int64") >> fb.Embedding(1000, 64)

Source: TensorFlow Fold's layers; Sussillo and Abbott 2014 (initial scale), Salimans and Kingma 2016 (weight
normalisation), Srivastava et al. 2014 (dropout).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxbatch.blocks.function import Layer, initialize, takes_vector
from fxbatch.blocks.show import call_text
from fxbatch.blocks.typed import complain, give
from fxbatch.blocks.types import ResultType, TensorType
from fxbatch.errors import BlockTypeError

# Factors of uniform unit scaling that keep the scale of activations through layers.
_SCALE = {F.relu: 1.43, torch.relu: 1.43, F.relu6: 1.43, torch.tanh: 1.15, F.tanh: 1.15, None: 1.0}


class FC(Layer):
    """A fully connected layer: `activation(normalization_fn(W x + b))`, dropout on input and output.

    Type: TensorType((n,), floating) -> TensorType((num_units_out,), the same dtype); float32, or the dtype that the
    layer was moved to, while nothing implies the input type.

    num_units_out: size of the output. activation: a function of tensors, None for a linear layer. initializer:
    a function like those of `nn.init`, or a tensor [num_units_out, n]; by default uniform in
    +-factor * sqrt(3 / n) for relu, relu6, tanh and linear, else a normal of deviation 0.01 truncated at two
    deviations. input_keep_prob, output_keep_prob: probability that dropout keeps an element (in training mode
    only). normalization_fn: applied before the activation. weight_norm: rows of W have the norms `scales`,
    which are learned, so that only their directions come from `weight`.

    >>> layer = FC(4)
    >>> (Vector(3) >> layer).output_type
    TensorType((4,), 'float32')
    >>> layer.weight.shape
    torch.Size([4, 3])
    """

    input_type_classes = (TensorType,)
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    scales: nn.Parameter | None

    def __init__(
        self,
        num_units_out: int,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = F.relu,
        initializer: Any = None,
        input_keep_prob: float | None = None,
        output_keep_prob: float | None = None,
        normalization_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        weight_norm: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(num_units_out, int) or num_units_out <= 0:
            raise BlockTypeError(f"FC: num_units_out is a positive integer, got {num_units_out!r}")
        self.num_units_out = num_units_out
        self.activation = activation
        self.initializer = initializer
        self.input_keep_prob = _probability("FC", "input_keep_prob", input_keep_prob)
        self.output_keep_prob = _probability("FC", "output_keep_prob", output_keep_prob)
        self.normalization_fn = normalization_fn
        self.weight_norm = weight_norm
        for parameter in ("weight", "bias", "scales"):
            self.register_parameter(parameter, None)

    def expression(self) -> str:
        return call_text(
            "FC",
            self.num_units_out,
            activation=(self.activation, F.relu),
            input_keep_prob=(self.input_keep_prob, None),
            output_keep_prob=(self.output_keep_prob, None),
            weight_norm=(self.weight_norm, False),
        )

    @property
    def output_size(self) -> int:
        """Number of output units."""
        return self.num_units_out

    @property
    def output_type(self) -> ResultType | None:
        """The output type, as it is and as it would be."""
        known = self._types["output"]
        return TensorType((self.num_units_out,), self._place.dtype) if known is None else known

    def complete_types(self) -> bool:
        assumed = self._types["output"] is None
        if assumed:
            give(self, "output", self.output_type, self)
        return assumed

    @property
    def weights(self) -> nn.Parameter | None:
        """The weights [num_units_out, n]; None before the input type is known."""
        return self.weight

    def make(self, input_type: ResultType) -> ResultType:
        t = takes_vector(self, input_type)
        n = t.shape[0]
        self.weight = self.new_parameter((self.num_units_out, n), t.dtype)
        self.bias = self.new_parameter((self.num_units_out,), t.dtype)
        nn.init.zeros_(self.bias)
        if self.weight_norm:
            self.scales = self.new_parameter((self.num_units_out,), t.dtype)
            nn.init.ones_(self.scales)
        if self.initializer is not None:
            initialize(self.weight, self.initializer, self)
        elif self.activation in _SCALE:
            bound = _SCALE[self.activation] * math.sqrt(3 / max(n, 1))
            nn.init.uniform_(self.weight, -bound, bound)
        else:
            nn.init.trunc_normal_(self.weight, std=0.01, a=-0.02, b=0.02)
        return TensorType((self.num_units_out,), t.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] to [..., num_units_out]."""
        assert self.weight is not None
        x = _dropout(x, self.input_keep_prob, self.training)
        w = self.weight
        if self.scales is not None:
            w = w * (self.scales / w.norm(dim=1)).unsqueeze(1)
        y = F.linear(x, w, self.bias)
        if self.normalization_fn is not None:
            y = self.normalization_fn(y)
        if self.activation is not None:
            y = self.activation(y)
        return _dropout(y, self.output_keep_prob, self.training)


def _probability(block: str, argument: str, p: float | None) -> float | None:
    if p is not None and not 0 < p <= 1:
        raise BlockTypeError(f"{block}: {argument} is a probability in (0, 1], got {p!r}")
    return p


def _dropout(x: torch.Tensor, keep: float | None, training: bool) -> torch.Tensor:
    return x if keep is None or keep == 1 or not training else F.dropout(x, 1 - keep, training=True)


class Embedding(Layer):
    """A table of vectors, looked up by an integer taken modulo `num_buckets`.

    Type: TensorType((), integer) -> TensorType((num_units_out,), dtype of the weights, float32 by default).

    num_buckets, num_units_out: shape of the table. initializer: a function like those of `nn.init`, or a tensor
    of the table's shape; by default uniform in +-sqrt(3 / num_buckets). trainable: whether the table is a
    parameter that learns. mod_inputs: with False, an integer outside the table is an error.

    >>> (Scalar("int64") >> Embedding(2, 3, initializer=torch.eye(2, 3))).eval(5)
    tensor([0., 1., 0.], grad_fn=<EmbeddingBackward0>)
    """

    input_type_classes = (TensorType,)

    def __init__(
        self,
        num_buckets: int,
        num_units_out: int,
        initializer: Any = None,
        name: str | None = None,
        trainable: bool = True,
        mod_inputs: bool = True,
    ) -> None:
        super().__init__(name=name)
        for argument, n in (("num_buckets", num_buckets), ("num_units_out", num_units_out)):
            if not isinstance(n, int) or n <= 0:
                raise BlockTypeError(f"Embedding: {argument} is a positive integer, got {n!r}")
        self.num_buckets, self.num_units_out, self.mod_inputs = num_buckets, num_units_out, mod_inputs
        table = None if initializer is None or callable(initializer) else torch.as_tensor(initializer)
        dtype = table.dtype if table is not None and table.is_floating_point() else torch.float32
        self.weight = self.new_parameter((num_buckets, num_units_out), dtype, trainable)
        if initializer is not None:
            initialize(self.weight, initializer, self)
        else:
            bound = math.sqrt(3 / num_buckets)
            nn.init.uniform_(self.weight, -bound, bound)
        self.set_output_type(TensorType((num_units_out,), dtype))

    def expression(self) -> str:
        return call_text(
            "Embedding", self.num_buckets, self.num_units_out, mod_inputs=(self.mod_inputs, True)
        )

    @property
    def weights(self) -> nn.Parameter:
        """The table [num_buckets, num_units_out]."""
        return self.weight

    def make(self, input_type: ResultType) -> ResultType:
        integer = isinstance(input_type, TensorType) and not (
            input_type.dtype.is_floating_point
            or input_type.dtype.is_complex
            or input_type.dtype == torch.bool
        )
        if not integer or input_type != TensorType((), input_type.dtype):  # type: ignore[attr-defined]
            raise complain(self, f"takes an integer scalar, got {input_type!r}", self.origins.get("input"))
        return TensorType((self.num_units_out,), self.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Integers [...] to [..., num_units_out]."""
        if x.dtype not in (torch.int32, torch.int64):
            x = x.to(torch.int64)
        if self.mod_inputs:
            x = torch.remainder(x, self.num_buckets)
        return F.embedding(x, self.weight)
