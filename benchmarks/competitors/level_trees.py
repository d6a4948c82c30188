"""Tree-LSTM batched by hand, level by level, in plain PyTorch with autograd; the traversal is part of it.

Levels are counted from the root, so that a node's children all stand exactly one level below, side by side:
a level's states in breadth-first order ARE the inputs of the level above, as a view. What is gathered is
only the interleaving of leaves (all computed at once) with inner nodes: one index a level for h, one for c.

    hand = LevelTreeLSTM(model)              # shares the parameters of a benchmarks.models.TreeLSTM
    hand.loss(trees).backward()              # the sum over the minibatch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Node, TreeLSTM


@dataclass(frozen=True)
class Levels:
    """A minibatch, level by level from the bottom.

    words `[leaves]`: the lowest level first. labels `[nodes]`: of these leaves, then of the inner nodes from
    the bottom up. levels: how many leaves, and where each node of the level in breadth-first order is found
    in its inner nodes + leaves. The top level holds the roots.
    """

    words: Tensor
    labels: Tensor
    levels: list[tuple[int, Tensor]]


def find_levels(trees: Sequence[Node], device: torch.device) -> Levels:
    """Walk the trees breadth first, all together."""
    level, found = list(trees), []
    while level:
        leaves = [node for node in level if node.left is None]
        inner = [node for node in level if node.left is not None]
        order, next_leaf, next_inner = [], len(inner), 0
        for node in level:
            if node.left is None:
                order.append(next_leaf)
                next_leaf += 1
            else:
                order.append(next_inner)
                next_inner += 1
        found.append((leaves, inner, order))
        level = [child for node in inner for child in (node.left, node.right) if child is not None]
    found.reverse()
    leaves = [leaf for leaves, _, _ in found for leaf in leaves]
    labelled = leaves + [node for _, inner, _ in found for node in inner]
    lengths = [len(order) for _, _, order in found]
    flat = torch.tensor([i for _, _, order in found for i in order], device=device).split(lengths)
    return Levels(
        torch.stack([leaf.word for leaf in leaves if leaf.word is not None]),
        torch.stack([node.label for node in labelled]),
        [(len(leaves), index) for (leaves, _, _), index in zip(found, flat, strict=True)],
    )


class LevelTreeLSTM(nn.Module):
    """The model's parameters, run level by level."""

    def __init__(self, model: TreeLSTM) -> None:
        super().__init__()
        self.model = model

    def states(self, batch: Levels) -> tuple[Tensor, list[Tensor]]:
        """h `[trees, hidden]` of the roots; h of all leaves, then of the inner nodes level by level."""
        h, c = self.model.leaf(self.model.embed(batch.words))
        counts = [leaves for leaves, _ in batch.levels]
        states, below = [h], None
        for leaf_h, leaf_c, (_, order) in zip(h.split(counts), c.split(counts), batch.levels, strict=True):
            level_h, level_c = leaf_h, leaf_c
            if below is not None:
                below_h, below_c = below
                hidden = below_h.shape[1]
                gates = self.model.cell.gates(below_h.view(-1, 2 * hidden))
                i, fl, fr, o, u = gates.chunk(5, 1)
                left, right = below_c.view(-1, 2, hidden).unbind(1)
                inner_c = (
                    torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(fl) * left + torch.sigmoid(fr) * right
                )
                inner_h = torch.sigmoid(o) * torch.tanh(inner_c)
                states.append(inner_h)
                level_h, level_c = torch.cat([inner_h, leaf_h]), torch.cat([inner_c, leaf_c])
            below = level_h.index_select(0, order), level_c.index_select(0, order)
        assert below is not None, "a minibatch has at least one tree"
        return below[0], states

    def forward(self, trees: Sequence[Node]) -> Tensor:
        """Scores `[trees, classes]` of the roots."""
        roots, _ = self.states(find_levels(trees, self.model.out.weight.device))
        return self.model.out(roots)

    def loss(self, trees: Sequence[Node]) -> Tensor:
        """The sum of the losses of the trees: no dimensions."""
        batch = find_levels(trees, self.model.out.weight.device)
        roots, states = self.states(batch)
        if self.model.all_nodes:
            return F.cross_entropy(self.model.out(torch.cat(states)), batch.labels, reduction="sum")
        labels = torch.stack([tree.label for tree in trees])
        return F.cross_entropy(self.model.out(roots), labels, reduction="sum")
