"""A calculator: learn to evaluate expressions of digits, from their values alone.

In: an expression, `{"op": "+", "left": ..., "right": ...}` down to digits 0-9; the answer is its value modulo 10.
Out: (loss, logits of the answer). After the calculator of Fold's examples.

    python examples/fold/calculator.py --epochs 10
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.training import accuracy, console, fit
from torch import nn

import fxbatch.blocks as fb

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class Layers:
    """A vector for each digit, a layer for each operation, the answer's logits."""

    def __init__(self, d: int = 64) -> None:
        self.d = d
        self.digit = fb.Embedding(10, d, initializer=torch.nn.init.normal_)
        self.first = {op: fb.FC(2 * d) for op in OPERATIONS}
        self.second = {op: fb.FC(d, activation=torch.tanh) for op in OPERATIONS}
        self.answer = fb.FC(10, activation=None)


# [blocks
def build(layers: Layers, dtype: str = "float32") -> fb.Block:
    """The model: PyObjectType (an expression) -> (loss, logits)."""
    value = fb.ForwardDeclaration(fb.PyObjectType(), [layers.d, dtype], name="value")
    sides = fb.Record([("left", value()), ("right", value())]) >> fb.Concat()
    cases: dict[Any, Any] = {op: sides >> layers.first[op] >> layers.second[op] for op in OPERATIONS}
    cases["digit"] = fb.Scalar("int64") >> layers.digit
    value.resolve_to(fb.OneOf(lambda x: x["op"] if isinstance(x, dict) else "digit", cases))
    answer = fb.InputTransform(evaluate) >> fb.Scalar("int64")
    logits = value() >> layers.answer
    return fb.AllOf(logits, answer) >> fb.AllOf(fb.Function(F.cross_entropy), fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, expression: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one expression."""

    def value(x: Any) -> torch.Tensor:
        if not isinstance(x, dict):
            return layers.digit(torch.tensor(x))
        sides = torch.cat([value(x["left"]), value(x["right"])])
        return layers.second[x["op"]](layers.first[x["op"]](sides))

    logits = layers.answer(value(expression))
    return F.cross_entropy(logits, torch.tensor(evaluate(expression))), logits


# plain]


def evaluate(x: Any) -> int:
    """The value of an expression modulo 10."""
    if not isinstance(x, dict):
        return x
    return OPERATIONS[x["op"]](evaluate(x["left"]), evaluate(x["right"])) % 10


def random_expression(draw: random.Random, depth: int) -> Any:
    """An expression of at most this depth."""
    if depth == 0 or draw.random() < 0.3:
        return draw.randrange(10)
    left, right = (random_expression(draw, depth - 1) for _ in range(2))
    return {"op": draw.choice(list(OPERATIONS)), "left": left, "right": right}


def minibatch(instances: int = 8, depth: int = 2, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    """A model and random expressions."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    return fb.compile(build(Layers())), [random_expression(draw, depth) for _ in range(instances)]


def main(argv: Sequence[str] | None = None) -> float:
    """Train on expressions of depth 2, and print the accuracy on new ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=4000)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    draw = random.Random(0)
    expressions = [random_expression(draw, options.depth) for _ in range(options.instances + 400)]
    model = fb.compile(build(Layers()))
    fit(model, expressions[400:], epochs=options.epochs, batch=64, lr=3e-3)
    found = accuracy(model, expressions[:400], [evaluate(x) for x in expressions[:400]])
    console.print(f"right on {found:.3f} of 400 new expressions (guessing: 0.1)")
    return found


if __name__ == "__main__":
    main()
