"""Neural Turing machine (Graves et al. 2014) on the copy task: a sequence in, then the same out.

The repository trains it with a batch of one by default. Sequences of 4 to 12 rows of 8 bits, memory of 128 rows of
20, controller of 100, as the repository has them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

WIDTH = 8

SOURCE = Source("loudinthecloud/pytorch-ntm", "3c64937cb075e737528ff7ecf02b2c1c6d8347a1")


def build(load: Load) -> Driver:
    aio = load("ntm.aio")

    class Copy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = aio.EncapsulatedNTM(WIDTH + 1, WIDTH, 100, 1, 1, 128, 20)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.net.init_sequence(1)
            for i in range(x.size(0)):
                self.net(x[i])
            out = torch.zeros(y.size())
            for i in range(y.size(0)):
                out[i], _ = self.net()
            return F.binary_cross_entropy(out, y) if self.training else out

    return Driver(Copy, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """The rows and the mark behind them, `[T + 1, 1, 9]`, and the rows."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 13, (), generator=generator))
        rows = torch.randint(2, (length, 1, WIDTH), generator=generator).float()
        x = torch.zeros(length + 1, 1, WIDTH + 1)
        x[:length, :, :WIDTH] = rows
        x[length, :, WIDTH] = 1.0
        found.append((x, rows))
    return found


MODEL = PublicModel("neural Turing machine", "external memory", SOURCE, build, {"out": "list"})
