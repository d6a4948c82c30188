"""Neural module networks over program trees, written for ONE question about ONE picture.

In: a picture as features of its cells, and a program such as `exists(and(find(red), left_of(find(square))))`.
Out: the score of "yes". Each function of the program is a small network from attention maps to an attention
map or an answer, put together as the program says (Andreas et al. 2016). Pictures are drawn; the answers come
from executing the program.

    model, questions = minibatch()
    scores = model(questions)            # a list of questions in, [questions] out
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fxbatch_examples.command import device, positive, run
from rich.progress import track
from torch import Tensor, nn

import fxbatch

KINDS = ("red", "green", "blue", "square", "circle", "triangle")
SHIFTS = ("left_of", "right_of", "above", "below")
SIDE = 3  # a picture has SIDE x SIDE cells


@dataclass(frozen=True)
class Program:
    """A function of the program language and its arguments; `find` names a kind."""

    function: str
    arguments: tuple[Program, ...] = ()
    kind: int = 0

    def __str__(self) -> str:
        inside = KINDS[self.kind] if self.function == "find" else ", ".join(map(str, self.arguments))
        return f"{self.function}({inside})"


@dataclass(frozen=True)
class Question:
    """A picture `[cells, kinds]`, a program, and the answer, 0. or 1., a tensor without dimensions."""

    picture: Tensor
    program: Program
    answer: Tensor


class Find(nn.Module):
    """The cells `[cells]` where the picture shows the kind asked for."""

    def __init__(self, hidden: int):
        super().__init__()
        self.kind = nn.Embedding(len(KINDS), hidden)
        self.see = nn.Linear(len(KINDS), hidden)

    def forward(self, picture: Tensor, kind: Tensor) -> Tensor:
        return torch.sigmoid(self.see(picture) @ self.kind(kind))


class MapToMap(nn.Module):
    """A network from attention maps `[cells]` to one of the same size."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        cells = SIDE * SIDE
        self.layers = nn.Sequential(nn.Linear(inputs * cells, hidden), nn.ReLU(), nn.Linear(hidden, cells))

    def forward(self, *maps: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(torch.cat(maps)))


class Answer(nn.Module):
    """The score of "yes" from attention maps: no dimensions."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs * SIDE * SIDE, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, *maps: Tensor) -> Tensor:
        return self.layers(torch.cat(maps)).squeeze(0)


class ModuleNetwork(nn.Module):
    """One module a function; a program is run by recursion over its tree."""

    kinds: Tensor

    def __init__(self, *, hidden: int = 64):
        super().__init__()
        self.find = Find(hidden)
        self.functions = nn.ModuleDict({name: MapToMap(1, hidden) for name in (*SHIFTS, "not")})
        self.functions.update({name: MapToMap(2, hidden) for name in ("and", "or")})
        self.functions.update({"exists": Answer(1, hidden), "more": Answer(2, hidden)})
        self.register_buffer("kinds", torch.arange(len(KINDS)), persistent=False)

    def run(self, picture: Tensor, program: Program) -> Tensor:
        """The attention map `[cells]` or the answer of a program."""
        if program.function == "find":
            return self.find(picture, self.kinds[program.kind])
        arguments = [self.run(picture, argument) for argument in program.arguments]
        return self.functions[program.function](*arguments)

    @fxbatch.autobatch
    def forward(self, question: Question) -> Tensor:
        """The score of "yes": no dimensions."""
        return self.run(question.picture, question.program)


def build(*, hidden: int = 64) -> ModuleNetwork:
    """The model."""
    return ModuleNetwork(hidden=hidden)


def draw_program(chance: random.Random, depth: int) -> Program:
    """A random program for an attention map, at most `depth` functions deep."""
    function = chance.choice(("find", *SHIFTS, "not", "and", "or")) if depth > 1 else "find"
    if function == "find":
        return Program("find", kind=chance.randrange(len(KINDS)))
    inputs = 2 if function in ("and", "or") else 1
    return Program(function, tuple(draw_program(chance, depth - 1) for _ in range(inputs)))


def execute(picture: Sequence[Sequence[int]], program: Program) -> list[bool]:
    """The cells that a program stands for; `picture[cell]` holds the kinds that the cell shows."""
    if program.function == "find":
        return [program.kind in kinds for kinds in picture]
    maps = [execute(picture, argument) for argument in program.arguments]
    if program.function == "not":
        return [not cell for cell in maps[0]]
    if program.function in ("and", "or"):
        join = all if program.function == "and" else any
        return [join(cells) for cells in zip(*maps, strict=True)]
    row, column = {"left_of": (0, 1), "right_of": (0, -1), "above": (1, 0), "below": (-1, 0)}[
        program.function
    ]
    return [
        0 <= r + row < SIDE and 0 <= c + column < SIDE and maps[0][(r + row) * SIDE + c + column]
        for r in range(SIDE)
        for c in range(SIDE)
    ]


def draw_question(chance: random.Random, depth: int = 3, device: str = "cpu") -> Question:
    """A random picture, a program that asks about it, and the answer."""
    picture = [
        (chance.randrange(3), 3 + chance.randrange(3)) if chance.random() < 0.6 else ()
        for _ in range(SIDE * SIDE)
    ]
    function = chance.choice(("exists", "more"))
    arguments = tuple(draw_program(chance, depth) for _ in range(1 if function == "exists" else 2))
    counts = [sum(execute(picture, argument)) for argument in arguments]
    yes = counts[0] > (counts[1] if function == "more" else 0)
    features = [[float(kind in kinds) for kind in range(len(KINDS))] for kinds in picture]
    return Question(
        torch.tensor(features, device=device),
        Program(function, arguments),
        torch.tensor(float(yes), device=device),
    )


def minibatch(*, questions: int = 8, hidden: int = 8, seed: int = 0) -> tuple[ModuleNetwork, list[Question]]:
    """A small model and random questions."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    return build(hidden=hidden), [draw_question(chance) for _ in range(questions)]


@torch.no_grad()
def accuracy(model: ModuleNetwork, questions: Sequence[Question]) -> float:
    """The share of right answers."""
    wanted = torch.stack([question.answer for question in questions])
    return ((model(questions) > 0) == (wanted > 0.5)).float().mean().item()


def main(argv: Sequence[str] | None = None) -> float:
    """Train on drawn questions; the share of right answers after each epoch, the last one returned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="not used: pictures and questions are drawn")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--limit", type=positive, default=12800, help="questions an epoch")
    parser.add_argument("--batch-size", type=positive, default=128)
    parser.add_argument("--depth", type=positive, default=3)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one question at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed)
    model = build().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    dev = [draw_question(chance, args.depth, args.device) for _ in range(1000)]
    found = 0.0
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            total = 0.0
            for _ in track(range(0, args.limit, args.batch_size), description=f"epoch {epoch}"):
                batch = [draw_question(chance, args.depth, args.device) for _ in range(args.batch_size)]
                answers = torch.stack([question.answer for question in batch])
                loss = F.binary_cross_entropy_with_logits(model(batch), answers)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(batch)
            found = accuracy(model, dev)
            print(f"epoch {epoch}: loss a question {total / args.limit:.3f}, dev accuracy {found:.2%}")
    return found


if __name__ == "__main__":
    run(main)
