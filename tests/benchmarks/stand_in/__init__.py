"""A public model without a network: what the task `public` does is tested on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

FOLDER = Path(__file__).parent  # what FXBATCH_PUBLIC names in the tests

SOURCE = Source(
    "nobody/trees",
    "0123456789abcdef",
    edits=(
        Edit("tree_sum.py", r'"cuda"', '"cpu"', "device"),
        Edit("tree_sum.py", r"size\)$", "size, True)", "fxbatch"),
    ),
    stubs={"somewhere": ("Logger",)},
)


def build(load: Load) -> Driver:
    trees = load("tree_sum")

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = trees.TreeSum(4), nn.Linear(4, 1)
            assert self.net.device == "cpu"

        def forward(self, tree: Any) -> Tensor:
            return self.out(self.net(tree)).sum()

    return Driver(Score, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Small trees over vectors of four."""
    generator = torch.Generator().manual_seed(number)

    def grown(depth: int) -> Any:
        if depth == 0 or torch.rand((), generator=generator) < 0.3:
            return torch.randn(4, generator=generator)
        return grown(depth - 1), grown(depth - 1)

    return [((grown(3), grown(2)),) for _ in range(count)]


MODEL = PublicModel("stand-in", "tree", SOURCE, build)
