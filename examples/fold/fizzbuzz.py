"""Fizz buzz, learned: from a number's bits to "number", "fizz", "buzz" or "fizzbuzz".

In: an integer. Out: (loss, logits). Trained on 101 to 1023, tested on 1 to 100. After Fold's examples.

    python examples/fold/fizzbuzz.py --epochs 60
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.training import accuracy, console, fit
from torch import nn

import fxbatch.blocks as fb

BITS = 10


class Layers:
    """Two hidden layers and the logits."""

    def __init__(self, d: int = 256) -> None:
        self.hidden = [fb.FC(d), fb.FC(d)]
        self.logits = fb.FC(4, activation=None)


# [blocks
def build(layers: Layers, dtype: str = "float32") -> fb.Block:
    """The model: PyObjectType (an integer) -> (loss, logits)."""
    bits = fb.InputTransform(lambda i: [i >> d & 1 for d in range(BITS)]) >> fb.Vector(BITS, dtype)
    logits = fb.Pipe(bits, *layers.hidden, layers.logits)
    label = fb.InputTransform(fizzbuzz) >> fb.Scalar("int64")
    return fb.AllOf(logits, label) >> fb.AllOf(fb.Function(F.cross_entropy), fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one number."""
    x = torch.tensor([i >> d & 1 for d in range(BITS)], dtype=layers.logits.weight.dtype)
    for layer in layers.hidden:
        x = layer(x)
    logits = layers.logits(x)
    return F.cross_entropy(logits, torch.tensor(fizzbuzz(i))), logits


# plain]


def fizzbuzz(i: int) -> int:
    """0 for a number, 1 for fizz, 2 for buzz, 3 for fizzbuzz."""
    return (i % 3 == 0) + 2 * (i % 5 == 0)


def minibatch(instances: int = 20, seed: int = 0) -> tuple[nn.Module, list[int]]:
    """A model and the first numbers."""
    torch.manual_seed(seed)
    return fb.compile(build(Layers())), list(range(1, instances + 1))


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print 1 to 100 as the model says them, and its accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=120)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = fb.compile(build(Layers()))
    fit(model, list(range(101, 1024)), epochs=options.epochs, batch=128, lr=2e-3)
    numbers = list(range(1, 101))
    with torch.no_grad():
        said = model(numbers)[1].argmax(1).tolist()
    words = (str, lambda i: "fizz", lambda i: "buzz", lambda i: "fizzbuzz")
    console.print(" ".join(words[s](i) for i, s in zip(numbers, said, strict=True)))
    found = accuracy(model, numbers, [fizzbuzz(i) for i in numbers])
    console.print(f"accuracy on 1 to 100: {found:.2f}")
    return found


if __name__ == "__main__":
    main()
