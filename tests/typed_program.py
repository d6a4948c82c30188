"""A user's program, as `mypy --strict` sees it (test_types.py). A line that ends in `# error` is a mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxbatch


@dataclass(frozen=True)
class Tree:
    word: int
    children: tuple[Tree, ...] = ()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.cell = nn.Linear(4, 4)

    def encode(self, tree: Tree) -> Tensor:
        h: Tensor = self.embed(torch.tensor(tree.word))
        for child in tree.children:
            h = h + similar(self.encode(child), h)
        return torch.tanh(h)

    @fxbatch.autobatch
    def forward(self, tree: Tree) -> tuple[Tensor, Tensor]:
        h = self.encode(tree)
        return h, h.sum()

    @fxbatch.autobatch(out="list", shared=("width",))
    def beam(self, tree: Tree, width: int = 3) -> list[int]:
        return [int(x) for x in self.encode(tree)][:width]

    @fxbatch.autobatch(out="list", return_exceptions=True)
    def safely(self, tree: Tree) -> Tensor:
        return self.encode(tree)

    @fxbatch.autobatch(adaptive=False, schedule="depth")
    def pairs(self, source: Sequence[Tensor], target: Tensor) -> dict[str, Tensor]:
        return {"score": torch.stack(list(source)).sum() + target}

    @fxbatch.autobatch
    def count(self, tree: Tree) -> int:
        return len(tree.children)


class Doubled(Model):
    @fxbatch.autobatch
    def forward(self, tree: Tree) -> tuple[Tensor, Tensor]:
        h, total = Model.forward.__wrapped__(self, tree)  # of one tree
        return 2 * h, total


@fxbatch.operation
def similar(query: Tensor, key: Tensor) -> Tensor:
    return torch.dot(query, key)


@fxbatch.autobatch
def norm(x: Tensor) -> Tensor:
    return x.square().sum()


@fxbatch.autobatch(out="list", shared="prefix")
def names(tree: Tree, prefix: str = "") -> str:
    return f"{prefix}{tree.word}"


model, trees = Model(), [Tree(1), Tree(2, (Tree(3),))]
assert_type(model.forward(trees), tuple[Tensor, Tensor])
assert_type(model.forward(tuple(trees)), tuple[Tensor, Tensor])
assert_type(model.forward(tree=trees), tuple[Tensor, Tensor])
assert_type(Model.forward(model, trees), tuple[Tensor, Tensor])
assert_type(Doubled().forward(trees), tuple[Tensor, Tensor])
assert_type(model.beam(trees), list[list[int]])
assert_type(model.beam(trees, width=2), list[list[int]])
assert_type(model.safely(trees), list[Tensor | Exception])
rows = list(torch.randn(3, 4))
assert_type(model.pairs([rows, rows], torch.randn(2, 4)), dict[str, Tensor])
assert_type(model.count(trees), Tensor)
assert_type(norm(rows), Tensor)
assert_type(norm(torch.randn(3, 4)), Tensor)
assert_type(names(trees, prefix="w"), list[str])
assert_type(similar(*rows[:2]), Tensor)

for batch in DataLoader(trees, batch_size=2, collate_fn=list):  # type: ignore[arg-type]  # torch wants a Dataset
    losses, _ = model(batch)
    losses.sum().backward()
with torch.no_grad(), fxbatch.disabled():
    assert_type(model.forward(trees)[0].mean(), Tensor)
explanation = fxbatch.explain(model, trees)
assert_type(explanation.launches_after, int)
print(fxbatch.compile_minibatch(model, trees).schedule)
traced = fxbatch.trace(model, trees[0])
dataset = fxbatch.TracedDataset(model, trees)
loader = DataLoader(dataset, batch_size=2, collate_fn=fxbatch.collate(model))
for minibatch in fxbatch.prefetch(model, loader):
    assert_type(model.forward(minibatch), tuple[Tensor, Tensor])

model.forward(Tree(1))  # error
model.forward([1, 2])  # error
model.beam(3)  # error
norm(rows).missing()  # error
fxbatch.autobatch(schedule="widest")  # error
