"""Speech recognition by attention (Chorowski et al. 2015), convolutions, two layers of GRU, a decoder with a GRU cell.

One utterance of 60 to 100 frames of 40 numbers and 5 to 10 labels at a time. Inference: the repository's greedy
decoder, 12 labels at most. Dimension 128, two layers (the repository: 256, four).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

FREQUENCIES, LABELS = 40, 32
CONFIG = {
    "dropout": 0,
    "encoder": {
        "conv": [[8, 5, 16, 2], [8, 5, 8, 1]],
        "rnn": {"dim": 128, "bidirectional": True, "layers": 2},
    },
    "decoder": {"sample_prob": 0, "embedding_dim": 128, "log_t": True, "layers": 1},
}

SOURCE = Source(
    "awni/speech",
    "a5909a3e18c072150101aeaf9103e03b69e5b53b",
    folder="speech/models",
    edits=(Edit("seq2seq.py", r"from \. import model", "import model", "import"),),
)


def build(load: Load) -> Driver:
    models = load("seq2seq")

    class Recogniser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.Seq2Seq(FREQUENCIES, LABELS, CONFIG)

        def forward(self, frames: Any, labels: list[int]) -> Any:
            batch = ([frames], [labels])
            return self.net.loss(batch) if self.training else self.decode(batch)

        def decode(self, batch: Any) -> Tensor:
            x, y = self.net.collate(*batch)
            return self.net.infer_decode(self.net.encode(x), y[:, 0:1], int(y[0, -1]), 12)[1]

    return Driver(Recogniser, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Frames as an array, labels between a start and an end."""
    choose, random_numbers = random.Random(number), np.random.default_rng(number)
    found = []
    for _ in range(count):
        frames = random_numbers.standard_normal((choose.randint(60, 100), FREQUENCIES)).astype(np.float32)
        inner = [choose.randrange(LABELS - 2) for _ in range(choose.randint(5, 10))]
        found.append((frames, [LABELS - 1, *inner, LABELS - 2]))
    return found


MODEL = PublicModel("attention speech", "speech decoder", SOURCE, build, {"out": "list"})
