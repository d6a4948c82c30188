"""Manual batching of trees of ONE shape (Looks et al. 2017, table 1): one tree's recursion on whole batches.

In: trees that all have the shape of the first. Out: scores or the summed loss. No scheduling is left to do:
this is the speed that dynamic batching is measured against.

    hand = EqualTreeLSTM(model)
    scores = hand(trees)                     # [trees, classes]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Node, State, TreeLSTM
from fxbatch.data.sst import Tree


def stack_trees(trees: Sequence[Node]) -> Node:
    """One tree whose words and labels are `[trees]`; ValueError where the shapes differ."""
    label = torch.stack([tree.label for tree in trees])
    if len({tree.left is None for tree in trees}) > 1:
        raise ValueError("manual batching takes trees of one shape")
    if trees[0].left is None:
        return Tree(label, torch.stack([tree.word for tree in trees if tree.word is not None]))
    left = stack_trees([tree.left for tree in trees if tree.left is not None])
    right = stack_trees([tree.right for tree in trees if tree.right is not None])
    return Tree(label, None, left, right)


class EqualTreeLSTM(nn.Module):
    """The model's parameters, run on trees of one shape."""

    def __init__(self, model: TreeLSTM) -> None:
        super().__init__()
        self.model = model

    def encode(self, tree: Node, states: list[tuple[Tensor, Tensor]]) -> State:
        """The state of the root; (h, label) of every node is added to `states`."""
        if tree.left is None or tree.right is None:
            h, c = self.model.leaf(self.model.embed(tree.word))
        else:
            h, c = self.model.cell(*self.encode(tree.left, states), *self.encode(tree.right, states))
        states.append((h, tree.label))
        return h, c

    def forward(self, trees: Sequence[Node]) -> Tensor:
        """Scores `[trees, classes]` of the roots."""
        return self.model.out(self.encode(stack_trees(trees), [])[0])

    def loss(self, trees: Sequence[Node]) -> Tensor:
        """The sum of the losses of the trees: no dimensions."""
        states: list[tuple[Tensor, Tensor]] = []
        self.encode(stack_trees(trees), states)
        wanted = states if self.model.all_nodes else states[-1:]
        scores = self.model.out(torch.cat([h for h, _ in wanted]))
        return F.cross_entropy(scores, torch.cat([label for _, label in wanted]), reduction="sum")
