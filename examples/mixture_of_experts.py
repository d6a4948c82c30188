"""Mixture of experts that routes on a value, written for ONE input.

In: a vector. Out: a prediction. A gate scores the experts and the forward takes the best one with a plain
`int(...argmax())`; only that expert runs, and inputs of one expert are batched together (Shazeer et al. 2017;
with one expert per input, Fedus et al. 2021). The task: a function with another rule in each quadrant.

    model, points = minibatch()
    predictions = model(points)          # a list of vectors in, [points, 1] out
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Sequence

import torch
from fxbatch_examples.command import device, positive, run
from rich.progress import track
from torch import Tensor, nn

import fxbatch


class MixtureOfExperts(nn.Module):
    """Layers of experts, one a layer for each input, weighted by the gate's probability."""

    def __init__(self, inputs: int, outputs: int, *, experts: int = 8, hidden: int = 64, layers: int = 2):
        super().__init__()
        self.enter = nn.Linear(inputs, hidden)
        self.gates = nn.ModuleList(nn.Linear(hidden, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, hidden))
                for _ in range(experts)
            )
            for _ in range(layers)
        )
        self.out = nn.Linear(hidden, outputs)

    @fxbatch.autobatch
    def forward(self, point: Tensor) -> Tensor:
        """The prediction `[outputs]` for a vector `[inputs]`."""
        state = self.enter(point)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(state).softmax(0)
            best = int(weights.argmax())
            state = state + weights[best] * experts[best](state)
        return self.out(state)


def build(*, experts: int = 8, hidden: int = 64, layers: int = 2) -> MixtureOfExperts:
    """The model for points of the plane."""
    return MixtureOfExperts(2, 1, experts=experts, hidden=hidden, layers=layers)


def minibatch(*, points: int = 16, hidden: int = 8, seed: int = 0) -> tuple[MixtureOfExperts, list[Tensor]]:
    """A small model and random points."""
    torch.manual_seed(seed)
    return build(experts=4, hidden=hidden), list(torch.randn(points, 2).unbind())


def target(points: Tensor) -> Tensor:
    """Another rule in each quadrant: points `[n, 2]` to values `[n, 1]`."""
    x, y = points[:, 0], points[:, 1]
    upper = torch.where(x > 0, torch.sin(3 * x), x * y)
    lower = torch.where(x > 0, -(x**2), (y - x).abs())
    return torch.where(y > 0, upper, lower).unsqueeze(1)


def main(argv: Sequence[str] | None = None) -> float:
    """Fit the function; mean squared error on fresh points after each epoch, the last one returned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="not used: the points are drawn")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--limit", type=positive, default=8192, help="points to train on")
    parser.add_argument("--batch-size", type=positive, default=128)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one point at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)
    points = torch.randn(args.limit + 1024, 2)
    values = target(points)
    data = list(zip(points.to(args.device).unbind(), values.to(args.device).unbind(), strict=True))
    train, dev = data[: args.limit], data[args.limit :]
    model = build().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    error = 0.0
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            batches = [train[i : i + args.batch_size] for i in range(0, len(train), args.batch_size)]
            for batch in track(batches, description=f"epoch {epoch}"):
                inputs, wanted = zip(*batch, strict=True)
                loss = (model(inputs) - torch.stack(wanted)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                inputs, wanted = zip(*dev, strict=True)
                error = (model(inputs) - torch.stack(wanted)).square().mean().item()
            print(f"epoch {epoch}: dev mean squared error {error:.4f}")
    return error


if __name__ == "__main__":
    run(main)
