"""Tree-based convolution over the syntax tree of a program (Mou et al. 2016), pooled into a class.

One tree of 10 to 40 nodes, a node's children as indices, features of 64, output 128, float64 as in the repository.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

FEATURES, CHILDREN, CLASSES = 64, 5, 10

SOURCE = Source(
    "bdqnghi/tbcnn-pytorch",
    "c593a463f7521499c1581a6b5eb52d85c86706ae",
    edits=(
        Edit(
            "utils/model.py",
            r"torch\.set_default_tensor_type\('torch\.cuda\.DoubleTensor'\)",
            "torch.set_default_dtype(torch.float64)",
            "device",
        ),
    ),
)


def build(load: Load) -> Driver:
    models = load("utils.model")

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = SimpleNamespace(cuda=False, num_features=FEATURES, output_size=128, n_classes=CLASSES)
            self.net = models.TBCNN(options)

        def forward(self, nodes: Tensor, children: Tensor, label: Tensor) -> Tensor:
            scores = self.net(nodes[None], children[None])
            return F.cross_entropy(scores, label) if self.training else scores.argmax()

    return Driver(Program, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Features `[N, 64]`, children `[N, 5]` with 0 for none, a class."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        size = int(torch.randint(10, 41, (), generator=generator))
        children = torch.zeros(size, CHILDREN, dtype=torch.float64)
        below = [0] * size
        for node in range(1, size):
            parents = [p for p in range(node) if below[p] < CHILDREN]
            parent = parents[int(torch.randint(len(parents), (), generator=generator))]
            children[parent, below[parent]] = node
            below[parent] += 1
        nodes = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        found.append((nodes, children, torch.randint(CLASSES, (1,), generator=generator)))
    return found


MODEL = PublicModel("TBCNN", "code encoder", SOURCE, build)
