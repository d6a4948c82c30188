"""Models and trees of the tests of captured plans."""

from __future__ import annotations

import random

import torch
from torch import nn

import fxbatch
from fxbatch.runtime.cuda_graphs import GraphedPlans
from fxbatch.runtime.engine import Engine
from tests.models import Tree, TreeLSTM, random_tree


def tree_of(shape: int, words: int) -> Tree:
    """Trees of equal `shape` have one plan; `words` changes what is in the leaves."""
    tree = random_tree(random.Random(shape), 5 + shape)
    chance = random.Random(words)

    def again(node: Tree) -> Tree:
        word = None if node.word is None else torch.tensor(chance.randrange(8))
        return Tree(word, [again(child) for child in node.children])

    return again(tree)


def model_of(graphs: GraphedPlans) -> TreeLSTM:
    torch.manual_seed(0)
    model = TreeLSTM()
    with torch.no_grad():
        model([tree_of(0, 0)])
    engine_of(model).cuda_graphs = graphs
    return model


class Captured(TreeLSTM):
    """The same model, its plans captured; for a CUDA device."""

    @fxbatch.autobatch(cuda_graphs=True)
    def forward(self, tree: Tree) -> torch.Tensor:
        h, _ = self.encode(tree)
        return self.out(h)


def on_cuda(tree: Tree) -> Tree:
    """The tree with its words on the device."""
    return Tree(None if tree.word is None else tree.word.cuda(), [on_cuda(x) for x in tree.children])


def engine_of(model: nn.Module) -> Engine:
    (engine,) = model.__dict__["_fxbatch_engines"].values()
    return engine
