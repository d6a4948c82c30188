"""DGL: the Tree-LSTM by message passing in topological order, as in DGL's own Tree-LSTM example.

In: trees of the benchmark models. Out: scores or the summed loss; shares the parameters of the TreeLSTM.

    hand = DGLTreeLSTM(model)
    hand.loss(trees).backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Node, TreeLSTM


class DGLTreeLSTM(nn.Module):
    """The model over one DGL graph a minibatch; building the graph is part of it."""

    def __init__(self, model: TreeLSTM) -> None:
        super().__init__()
        self.model = model

    def graph(self, trees: Sequence[Node]) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
        """Edges from children to parents; leaf numbers, their words, labels of all nodes, root numbers."""
        nodes = [node for tree in trees for node in tree.postorder()]
        number = (
            {id(node): i for i, node in enumerate(nodes)} if len({*map(id, nodes)}) == len(nodes) else None
        )
        if number is None:
            raise ValueError("a tree stands in the minibatch twice")
        parents = [
            (number[id(node.left)], number[id(node.right)], i) for i, node in enumerate(nodes) if node.left
        ]
        children = torch.tensor(
            [child for left, right, _ in parents for child in (left, right)], dtype=torch.long
        )
        above = torch.tensor([parent for _, _, parent in parents], dtype=torch.long).repeat_interleave(2)
        leaves = [i for i, node in enumerate(nodes) if node.left is None]
        words = torch.stack([nodes[i].word for i in leaves if nodes[i].word is not None])
        labels = torch.stack([node.label for node in nodes])
        device = labels.device
        graph = dgl.graph((children, above), num_nodes=len(nodes)).to(device)
        roots = torch.tensor([number[id(tree)] for tree in trees], device=device)
        return graph, torch.tensor(leaves, device=device), words, labels, roots

    def states(self, graph: Any, leaves: Tensor, words: Tensor) -> Tensor:
        """h `[nodes, hidden]`."""
        h, c = self.model.leaf(self.model.embed(words))
        empty = h.new_zeros(graph.num_nodes(), h.shape[1])
        graph.ndata["h"], graph.ndata["c"] = empty.index_copy(0, leaves, h), empty.index_copy(0, leaves, c)
        levels = dgl.topological_nodes_generator(graph)[1:]
        if levels:
            dgl.prop_nodes(graph, levels, self._send, self._receive, None)
        return graph.ndata["h"]

    def forward(self, trees: Sequence[Node]) -> Tensor:
        """Scores `[trees, classes]` of the roots."""
        graph, leaves, words, _, roots = self.graph(trees)
        return self.model.out(self.states(graph, leaves, words)[roots])

    def loss(self, trees: Sequence[Node]) -> Tensor:
        """The sum of the losses of the trees: no dimensions."""
        graph, leaves, words, labels, roots = self.graph(trees)
        h = self.states(graph, leaves, words)
        if not self.model.all_nodes:
            h, labels = h[roots], labels[roots]
        return F.cross_entropy(self.model.out(h), labels, reduction="sum")

    def _send(self, edges: Any) -> dict[str, Tensor]:
        return {"h": edges.src["h"], "c": edges.src["c"]}

    def _receive(self, nodes: Any) -> dict[str, Tensor]:
        (hl, hr), (cl, cr) = nodes.mailbox["h"].unbind(1), nodes.mailbox["c"].unbind(1)
        h, c = self.model.cell(hl, cl, hr, cr)
        return {"h": h, "c": c}
