"""Neural stack (Grefenstette et al. 2015) that reverses strings: LSTM cells that push and pop by fractions.

Training on strings of 4 to 10 symbols, hidden and embeddings of 64, as the repository's runs have them; it is written
for batches of strings of one length. Inference decodes until the end symbol, of 12 symbols at most.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

SYMBOLS, FIRST = 40, 3  # start, separator and end before them

SOURCE = Source(
    "cflamant/neural-stack",
    "52786dc8db20debd4d25439c5dc2611b834e0acc",
    folder="neural-stack",
    edits=(Edit("reverser.py", r"^from \. import dataloader.*$", "", "import"),),
    stubs={"tqdm": ()},
)


def build(load: Load) -> Driver:
    models = load("reverser")

    class Reverser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.LSTMandStack_Reverser(
                hidden_dim=64, embedding_dim=64, in_dim=SYMBOLS, out_dim=SYMBOLS, max_len=12
            )

        def forward(self, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
            scores = self.net(x, y) if self.training else self.net(x)
            return F.nll_loss(scores.squeeze(1), wanted) if self.training else scores.argmax(-1)

    return Driver(Reverser, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Start, symbols, separator; the symbols backwards, end: as one-hot rows `[T, 1, 40]`; the latter as numbers."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 11, (), generator=generator))
        symbols = torch.randint(FIRST, SYMBOLS, (length,), generator=generator)
        x = torch.cat([torch.tensor([0]), symbols, torch.tensor([1])])
        y = torch.cat([symbols.flip(0), torch.tensor([2])])
        rows = [F.one_hot(t, SYMBOLS).float().unsqueeze(1) for t in (x, y)]
        found.append((*rows, y))
    return found


MODEL = PublicModel("neural stack", "external memory", SOURCE, build, {"out": "list"})
