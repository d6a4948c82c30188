"""PyTorch's example of sine waves: two LSTM cells step through a signal in float64, and then on by themselves.

Signals of 20 to 40 numbers and 5 more to foresee, one at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

SOURCE = Source(
    "pytorch/examples",
    "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    folder="time_sequence_prediction",
)


def build(load: Load) -> Driver:
    train = load("train")

    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = train.Sequence().double()

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return F.mse_loss(self.net(x[None, :-1]), x[None, 1:])
            return self.net(x[None], future=5)

    return Driver(Signal, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Sine waves of some length and phase."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        length = int(torch.randint(20, 41, (), generator=generator))
        phase = torch.rand((), generator=generator, dtype=torch.float64)
        found.append(((torch.arange(length).double() / 5 + 6 * phase).sin(),))
    return found


MODEL = PublicModel("sine waves", "signal decoder", SOURCE, build, {"out": "list"})
