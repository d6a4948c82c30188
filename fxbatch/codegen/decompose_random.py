"""Random fills of tensors, as draws that vmap makes anew for each row.

In: ATen calls of the per-instance body. Out: the same distribution from uniform or normal numbers.

    exponential(x, 2.0)  =>  -log1p(-rand(x.shape)) / 2.0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _unit(x: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), as many as x has, wide enough to take the logarithm of what is left to 1."""
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    return torch.rand(x.shape, dtype=wide, device=x.device)


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None or not x.dtype.is_floating_point:
        return NotImplemented
    return torch.rand(x.shape, dtype=x.dtype, device=x.device) * (high - low) + low


def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return torch.randn(x.shape, dtype=x.dtype, device=x.device) * std + mean


def log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> Tensor:
    return NotImplemented if generator is not None else normal_functional(x, mean, std).exp()


def exponential(x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return (-torch.log1p(-_unit(x)) / rate).to(x.dtype)


def cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return (torch.tan(math.pi * (_unit(x) - 0.5)) * sigma + median).to(x.dtype)


def geometric(x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """How many trials until the first success: 1, 2, ..."""
    if generator is not None:
        return NotImplemented
    return torch.ceil(torch.log1p(-_unit(x)) / math.log1p(-p)).clamp_min(1).to(x.dtype)


RANDOM_FILLS: dict[Any, Callable[..., Any]] = {
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal_functional,
    aten.log_normal.default: log_normal,
    aten.exponential.default: exponential,
    aten.cauchy.default: cauchy,
    aten.geometric.default: geometric,
}
