"""One graph network written both ways, on `[N, d]` with edges and node by node: equal, and both batch."""

from __future__ import annotations

import torch
from torch import nn

import fxbatch
from tests.ragged.test_packed_forward import variants_of

Instance = tuple[torch.Tensor, torch.Tensor]


class OfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.message = nn.Linear(8, 8)
        self.update = nn.GRUCell(8, 8)
        self.out = nn.Linear(8, 2)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, graph: Instance) -> torch.Tensor:
        atoms, (source, target) = graph
        h = self.embed(atoms)
        for _ in range(2):
            messages = torch.relu(self.message(h))[source]
            h = self.update(torch.zeros_like(h).index_add(0, target, messages), h)
        return self.out(h.sum(0))


class OfNodes(OfRows):
    @fxbatch.autobatch(adaptive=False)
    def forward(self, graph: Instance) -> torch.Tensor:
        atoms, edges = graph
        pairs = list(zip(*edges.tolist(), strict=True))
        near = [[i for i, j in pairs if j == node] for node in range(len(atoms))]
        h = [self.embed(atom) for atom in atoms.unbind(0)]
        for _ in range(2):
            sent = [torch.relu(self.message(x)) for x in h]
            got = [sum((sent[i] for i in sources), torch.zeros(8)) for sources in near]
            h = [self.update(a, b) for a, b in zip(got, h, strict=True)]
        return self.out(sum(h[1:], h[0]))


def graph(n: int) -> Instance:
    return torch.randint(9, (n,)), torch.randint(n, (2, 2 * n))


def test_a_graph_network_written_both_ways() -> None:
    torch.manual_seed(0)
    rows, nodes = OfRows(), OfNodes()
    nodes.load_state_dict(rows.state_dict())
    for sizes in ((3, 5, 2), (1, 4, 7), (6, 6, 2)):
        batch = [graph(n) for n in sizes]
        found = [model(batch) for model in (rows, nodes)]
        gradients = [
            torch.autograd.grad(out.square().sum(), list(model.parameters()))
            for out, model in zip(found, (rows, nodes), strict=True)
        ]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*gradients)
    assert sum(v.calls for v in variants_of(rows)) > 1
    few, many = ([graph(5) for _ in range(n)] for n in (2, 16))
    launches = [fxbatch.explain(nodes, batch).launches_after for batch in (few, many)]
    assert launches[1] < 2 * launches[0]  # of 8 times as many instances
