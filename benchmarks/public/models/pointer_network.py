"""Pointer network (Vinyals et al. 2015) that sorts: at each step a distribution over the positions of the input.

Sequences of 4 to 10 numbers, hidden 256, embeddings of 32, as the repository has them; one sequence at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

NUMBERS = 50

SOURCE = Source(
    "jojonki/Pointer-Networks",
    "5007dae391d0073d638f4c57ce10ea1a846ccfe3",
    edits=(
        Edit("pointer_network.py", r"\.squeeze\(\) +# \(L, bs\)", ".squeeze(-1)", "torch"),  # a batch of one
        Edit("pointer_network.py", r"range\(self\.answer_seq_len\)", "range(input.size(1))", "torch"),
    ),
)


def build(load: Load) -> Driver:
    networks = load("pointer_network")

    class Sort(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = networks.PointerNetwork(NUMBERS, 32, 256, 0, hidden_size=256)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.net(x.unsqueeze(0))
            return F.nll_loss(scores.view(-1, x.size(0)), y) if self.training else scores.argmax(2)

    return Driver(Sort, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Numbers, and the positions of the smallest, the next one, ..."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 11, (), generator=generator))
        x = torch.randint(NUMBERS, (length,), generator=generator)
        found.append((x, x.argsort()))
    return found


MODEL = PublicModel("pointer network", "pointer network", SOURCE, build, {"out": "list"})
