"""`FractalNet`: ultra-deep networks without residuals, by a fractal expansion of one base layer.

In: a vector (what the base layer takes). Out: what the base layer gives.

    fb.Vector(8) >> fb.FractalNet(2, 3, lambda name: fb.FC(8, name=name))

A fractal block of depth 0 is a base layer f; of depth d it is mixer(f(x), g2(g1(x))), g1 and g2 being fractal
blocks of depth d - 1. Source: Larsson, Maire and Shakhnarovich 2016, section 3; TensorFlow Fold's layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxbatch.blocks.function import Function, Layer
from fxbatch.blocks.show import call_text
from fxbatch.blocks.typed import at_once
from fxbatch.blocks.types import ResultType
from fxbatch.errors import BlockTypeError


def average(base: torch.Tensor, recursive: torch.Tensor) -> torch.Tensor:
    """The element-wise mean: the join of the paper."""
    return (base + recursive) / 2


class FractalNet(Layer):
    """`num_fractal_blocks` fractal blocks of depth `fractal_block_depth` (B and C - 1 of the paper) in a row.

    Type: what the base layer takes -> what it gives. In a net of more than one layer the base layer must also
    take what it gives.

    base_layer_builder: from a name to a new base layer. mixer: joins two paths, the mean by default.
    drop_path: in training mode, drop paths at random, drawn anew for each use: with probability
    `p_local_drop_path` each join drops its base path with `p_drop_base_case`, its recursive path with
    `p_drop_recursive_case`, never both; otherwise one column of the whole net is kept and all others dropped.
    Where a path is dropped, nothing is mixed.

    >>> net = FractalNet(2, 2, lambda name: FC(4, name=name))
    >>> (Vector(3) >> net).output_type
    TensorType((4,), 'float32')
    """

    def __init__(
        self,
        num_fractal_blocks: int,
        fractal_block_depth: int,
        base_layer_builder: Callable[[str], Layer],
        mixer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        drop_path: bool = False,
        p_local_drop_path: float = 0.5,
        p_drop_base_case: float = 0.25,
        p_drop_recursive_case: float = 0.25,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if num_fractal_blocks < 1 or fractal_block_depth < 0:
            raise BlockTypeError("FractalNet: at least one fractal block, of depth 0 or more")
        probabilities = (p_local_drop_path, p_drop_base_case, p_drop_recursive_case)
        if not all(0 <= p <= 1 for p in probabilities) or p_drop_base_case + p_drop_recursive_case >= 1:
            raise BlockTypeError(
                "FractalNet: probabilities are in [0, 1] and p_drop_base_case + p_drop_recursive_case < 1, got "
                f"{probabilities}"
            )
        self.num_fractal_blocks, self.fractal_block_depth = num_fractal_blocks, fractal_block_depth
        self.mixer = mixer or average
        self.drop_path = drop_path
        self.p_local, self.p_base, self.p_recursive = probabilities
        self.written = call_text(
            "FractalNet",
            num_fractal_blocks,
            fractal_block_depth,
            base_layer_builder,
            drop_path=(drop_path, False),
        )
        self.blocks = nn.ModuleList(
            _fractal(base_layer_builder, fractal_block_depth, f"block{b}") for b in range(num_fractal_blocks)
        )

    def expression(self) -> str:
        return self.written

    def make(self, input_type: ResultType) -> ResultType:
        for block in self.blocks:
            assert isinstance(block, _Fractal)
            input_type = block.make(input_type)
        return input_type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the input type to one of the output type."""
        dropping = self.drop_path and self.training
        is_local = column = None
        if dropping:
            is_local = torch.rand((), device=x.device) < self.p_local
            column = torch.floor(torch.rand((), device=x.device) * (self.fractal_block_depth + 1))
        for block in self.blocks:
            x = block(x, self, is_local, column)
        return x


def _fractal(builder: Callable[[str], Layer], depth: int, name: str) -> _Fractal:
    """A fractal block of this depth, its base layers made by a builder."""
    base = builder(f"{name}_base")
    if not isinstance(base, nn.Module):
        raise BlockTypeError(f"FractalNet: base_layer_builder gives {base!r}, no layer")
    if depth == 0:
        return _Fractal(base, None, None)
    return _Fractal(base, *(_fractal(builder, depth - 1, f"{name}_{side}") for side in ("first", "second")))


class _Fractal(nn.Module):
    """One fractal block: a base layer, and for depth > 0 two fractal blocks of one less."""

    def __init__(self, base: nn.Module, first: _Fractal | None, second: _Fractal | None) -> None:
        super().__init__()
        self.base, self.first, self.second = base, first, second

    def make(self, t: ResultType) -> ResultType:
        """Give all base layers their types, in the order of the data."""
        out = _type_through(self.base, t)
        if self.first is None or self.second is None:
            return out
        recursive = self.second.make(self.first.make(t))
        if recursive != out:
            raise BlockTypeError(f"FractalNet: the base path gives {out!r}, the recursive path {recursive!r}")
        return out

    def forward(
        self, x: torch.Tensor, net: FractalNet, is_local: torch.Tensor | None, column: torch.Tensor | None
    ) -> torch.Tensor:
        """Both paths, mixed, or the one that drop-path keeps. Column 0 is the base path of this block."""
        base = self.base(x)
        if self.first is None or self.second is None:
            return base
        deeper = None if column is None else column - 1
        recursive = self.second(self.first(x, net, is_local, deeper), net, is_local, deeper)
        mixed = net.mixer(base, recursive)
        if is_local is None or column is None:
            return mixed
        u = torch.rand((), device=x.device)
        no_base, no_recursive = u < net.p_base, u >= 1 - net.p_recursive
        drop_base = torch.where(is_local, no_base, column > 0)
        drop_recursive = torch.where(is_local, no_recursive, column <= 0)
        return torch.where(drop_base, recursive, torch.where(drop_recursive, base, mixed))


def _type_through(base: Any, t: ResultType) -> ResultType:
    with at_once():
        found = (base if isinstance(base, Layer) else Function(base)).set_input_type(t).output_type
    assert found is not None
    return found
