"""Tree-LSTM by hand, level by level, each level's arithmetic under torch.compile with dynamic sizes.

In: what LevelTreeLSTM takes. Out: the same. The traversal stays in Python, where it has to.

    hand = CompiledLevels(model)
    hand.loss(trees).backward()
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.competitors.level_trees import Levels, LevelTreeLSTM
from benchmarks.models import TreeLSTM


class CompiledLevels(LevelTreeLSTM):
    """The model's parameters; one compiled function for a level, one for all leaves."""

    def __init__(self, model: TreeLSTM, *, backend: str = "inductor") -> None:
        super().__init__(model)
        self.compiled_leaves = torch.compile(self._leaves, dynamic=True, backend=backend)
        self.compiled_level = torch.compile(self._level, dynamic=True, backend=backend)

    def _leaves(self, words: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.model.leaf(self.model.embed(words))
        return found

    def _level(self, h: Tensor, c: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """The inner nodes' states from those of the level below, gathered and composed."""
        hidden = h.shape[1]
        left, right = c.index_select(0, order).view(-1, 2, hidden).unbind(1)
        children = h.index_select(0, order).view(-1, 2, hidden)
        found: tuple[Tensor, Tensor] = self.model.cell(children[:, 0], left, children[:, 1], right)
        return found

    def states(self, batch: Levels) -> tuple[Tensor, list[Tensor]]:
        """h `[trees, hidden]` of the roots; h of all leaves, then of the inner nodes level by level."""
        h, c = self.compiled_leaves(batch.words)
        counts = [leaves for leaves, _ in batch.levels]
        states: list[Tensor] = [h]
        below: tuple[Tensor, Tensor, Tensor] | None = None
        for leaf_h, leaf_c, (_, order) in zip(h.split(counts), c.split(counts), batch.levels, strict=True):
            level_h, level_c = leaf_h, leaf_c
            if below is not None:
                inner_h, inner_c = self.compiled_level(*below)
                states.append(inner_h)
                level_h, level_c = torch.cat([inner_h, leaf_h]), torch.cat([inner_c, leaf_c])
            below = level_h, level_c, order
        assert below is not None, "a minibatch has at least one tree"
        return below[0].index_select(0, below[2]), states
