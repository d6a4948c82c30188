"""Feed-forward attention on the adding task (Looks et al. 2017, section 3.4 and appendix A).

In: pairs (sequence of (value, marker), target): add the two values whose marker is 1, in a sequence of any
length. Out: (squared error, prediction). Source of model and task: Raffel and Ellis 2016.

    python examples/fold/attention.py --length 20 --epochs 8
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.training import console, fit
from torch import nn

import fxbatch.blocks as fb


class Layers:
    """The layers of the model; hidden size d."""

    def __init__(self, d: int = 50) -> None:
        self.hidden = fb.FC(d, activation=F.leaky_relu, initializer=torch.nn.init.kaiming_uniform_)
        self.score = fb.FC(1, activation=torch.tanh)
        self.after = fb.FC(d, activation=F.leaky_relu, initializer=torch.nn.init.kaiming_uniform_)
        self.answer = fb.FC(1, activation=None)


# [blocks
def build(layers: Layers, dtype: str = "float32") -> fb.Block:
    """The model: PyObjectType -> (squared error, prediction)."""
    attention = fb.Composition(name="attention")
    with attention.scope():
        h = attention.input
        exp_e = fb.Map(fb.Function(layers.score) >> fb.Function(torch.exp)).reads(h)
        z = (fb.Sum() >> fb.Broadcast()).reads(exp_e)
        alpha = fb.ZipWith(fb.Function(torch.div)).reads(exp_e, z)
        attention.output.reads((fb.ZipWith(fb.Function(torch.mul)) >> fb.Sum()).reads(alpha, h))
    answer = fb.Map(fb.Vector(2, dtype) >> layers.hidden) >> attention >> layers.after >> layers.answer
    error = fb.Function(torch.sub) >> fb.Function(torch.square) >> fb.Function(torch.sum)
    return (answer, fb.Vector(1, dtype)) >> fb.AllOf(error, fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, instance: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one instance."""
    sequence, target = instance
    dtype = layers.hidden.weight.dtype
    h = [layers.hidden(torch.tensor(x, dtype=dtype)) for x in sequence]
    exp_e = [torch.exp(layers.score(x)) for x in h]
    z = torch.stack(exp_e).sum(0)
    c = torch.stack([e / z * x for e, x in zip(exp_e, h, strict=True)]).sum(0)
    answer = layers.answer(layers.after(c))
    return (answer - torch.tensor(target, dtype=dtype)).square().sum(), answer


# plain]


def adding_task(count: int, length: int, seed: int) -> list[Any]:
    """Sequences of 0.5 to 1.1 times `length` values in [0, 1], two of them marked, with their sum as target."""
    draw = random.Random(seed)
    instances = []
    for _ in range(count):
        n = max(draw.randint(length // 2, length + length // 10), 2)
        marked = draw.sample(range(n), 2)
        values = [draw.random() for _ in range(n)]
        sequence = [(v, float(i in marked)) for i, v in enumerate(values)]
        instances.append((sequence, [values[marked[0]] + values[marked[1]]]))
    return instances


def minibatch(instances: int = 8, length: int = 10, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    """A model and sequences of the adding task."""
    torch.manual_seed(seed)
    return fb.compile(build(Layers())), adding_task(instances, length, seed)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print the fraction of test sequences answered within 0.04."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--instances", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = fb.compile(build(Layers()))
    fit(model, adding_task(options.instances, options.length, 0), epochs=options.epochs, batch=50, lr=3e-3)
    test = adding_task(200, options.length, 1)
    with torch.no_grad():
        guesses = model(test)[1][:, 0].tolist()
    right = sum(abs(g - t[0]) < 0.04 for g, (_, t) in zip(guesses, test, strict=True)) / len(test)
    console.print(f"within 0.04 on {right:.3f} of {len(test)} test sequences")
    return right


if __name__ == "__main__":
    main()
