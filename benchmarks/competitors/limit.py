"""The limit: the matrix products of a model as single large calls, forward and backward, and nothing else.

In: how many rows each matrix meets. Out: seconds are the caller's to take. No batching can be faster.

    limit = MatrixProducts([(nodes, model.cell.gates.weight), (leaves, model.leaf.gates.weight)])
    limit.forward_backward()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.models import Node, TreeLSTM


class MatrixProducts:
    """Rows `[n, in]` times each matrix `[out, in]`; for a step of training both gradients too."""

    def __init__(self, products: Sequence[tuple[int, Tensor]]) -> None:
        """`products`: (rows, matrix) pairs."""
        self.matrices = [matrix.detach() for _, matrix in products]
        self.inputs = [
            matrix.new_ones(rows, matrix.shape[1]) for (rows, _), matrix in zip(products, self.matrices)
        ]
        self.gradients = [
            matrix.new_ones(rows, matrix.shape[0]) for (rows, _), matrix in zip(products, self.matrices)
        ]

    @torch.no_grad()
    def forward(self) -> None:
        """The products."""
        for rows, matrix in zip(self.inputs, self.matrices, strict=True):
            rows @ matrix.T

    @torch.no_grad()
    def forward_backward(self) -> None:
        """The products, the gradients of the rows, and those of the matrices."""
        self.forward()
        for rows, matrix, gradient in zip(self.inputs, self.matrices, self.gradients, strict=True):
            gradient @ matrix
            gradient.T @ rows

    @property
    def multiplications(self) -> int:
        """Multiply-adds of `forward`."""
        return sum(
            rows.shape[0] * matrix.numel() for rows, matrix in zip(self.inputs, self.matrices, strict=True)
        )


def tree_limit(model: TreeLSTM, trees: Sequence[Node]) -> MatrixProducts:
    """The products of a Tree-LSTM on a minibatch."""
    leaves = sum(sum(1 for _ in tree.leaves()) for tree in trees)
    scored = 2 * leaves - len(trees) if model.all_nodes else len(trees)
    inner = leaves - len(trees)
    return MatrixProducts(
        [(leaves, model.leaf.gates.weight), (inner, model.cell.gates.weight), (scored, model.out.weight)]
    )
