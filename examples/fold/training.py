"""Shared by the examples: a plain PyTorch training loop over a compiled block.

In: an nn.Module from a list of instances to losses, instances. Out: the mean loss of each epoch.

    history = fit(model, instances, epochs=3)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

console = Console(highlight=False)


def fit(
    model: nn.Module,
    instances: Sequence[Any],
    *,
    epochs: int,
    batch: int = 32,
    lr: float = 1e-2,
    seed: int = 0,
) -> list[float]:
    """Train with Adam on `model(minibatch)[0].mean()`: the first output is a loss an instance."""
    order = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    shuffled, history = list(instances), []
    model.train()
    for epoch in range(epochs):
        order.shuffle(shuffled)
        total = 0.0
        for first in range(0, len(shuffled), batch):
            minibatch = shuffled[first : first + batch]
            optimizer.zero_grad()
            loss = model(minibatch)[0].mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item() * len(minibatch)
        history.append(total / len(shuffled))
        console.print(f"epoch {epoch + 1}: loss {history[-1]:.4f}")
    model.eval()
    return history


@torch.no_grad()
def accuracy(model: nn.Module, instances: Sequence[Any], labels: Sequence[int], batch: int = 256) -> float:
    """The fraction of instances whose second output (logits) is largest at the label."""
    model.eval()
    right = 0
    for first in range(0, len(instances), batch):
        guesses = model(list(instances[first : first + batch]))[1].argmax(1).tolist()
        right += sum(g == t for g, t in zip(guesses, labels[first : first + batch], strict=True))
    return right / max(len(instances), 1)
