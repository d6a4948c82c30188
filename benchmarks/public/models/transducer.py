"""RNN transducer for speech (Graves 2012): an encoder of frames, a network of the labels so far, and a joint one.

Inference: the repository's greedy decoder, one utterance at a time, each label chosen by value. Training: the joint
network over all frames and labels, with cross entropy along the diagonal in place of the compiled transducer loss.
Utterances of 8 to 20 frames of 40 numbers, hidden 128.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

FRAME, LABELS, HIDDEN = 40, 30, 128

SOURCE = Source(
    "HawkAaron/E2E-ASR",
    "91d6b96bd605a9bc8e62b4a5903ec2056fa0f88d",
    edits=(
        Edit("model.py", r"self\.loss\(out, ys\.int\(\), xlen, ylen\)", "out", "import"),
        Edit("model.py", r", volatile=True", "", "torch"),
    ),
    stubs={
        "warprnnt_pytorch": ("RNNTLoss",),
        "ctc_decoder": ("decode",),
        "DataLoader": ("rephone",),
    },
)


def build(load: Load) -> Driver:
    models = load("model")

    class Recogniser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.Transducer(FRAME, LABELS, HIDDEN, 1, dropout=0.0)

        def forward(self, frames: Tensor, labels: Tensor) -> Any:
            if not self.training:
                return self.net.greedy_decode(frames.unsqueeze(0))
            scores = self.net(frames.unsqueeze(0), labels.unsqueeze(0), len(frames), len(labels))[0]
            path = torch.arange(len(frames)) * (len(labels) + 1) // len(frames)
            along = scores[torch.arange(len(frames)), path]
            return F.cross_entropy(along, F.pad(labels, (0, 1))[path])

    return Driver(Recogniser, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Frames `[T, 40]` and half as many labels."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        length = int(torch.randint(8, 21, (), generator=generator))
        frames = torch.randn(length, FRAME, generator=generator)
        found.append((frames, torch.randint(1, LABELS, (length // 2,), generator=generator)))
    return found


MODEL = PublicModel("RNN transducer", "speech decoder", SOURCE, build, {"out": "list"})
