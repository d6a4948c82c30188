"""PyTorch Geometric: the graph network over molecules, a minibatch as one block-diagonal graph.

In: molecules of the example. Out: predictions; shares the parameters of examples.molecules.MoleculeNetwork.

    hand = PyGMolecules(model)
    predictions = hand(molecules)            # [molecules, targets]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MessagePassing, global_add_pool

from examples.molecules import Molecule, MoleculeNetwork


class Neighbours(MessagePassing):
    """The sum over the neighbours of relu(linear(atom) + bond)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(aggr="add")
        self.linear = linear

    def forward(self, states: Tensor, edge_index: Tensor, bonds: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.linear(states), bonds=bonds)

    def message(self, x_j: Tensor, bonds: Tensor) -> Tensor:
        return torch.relu(x_j + bonds)


class PyGMolecules(nn.Module):
    """The model over PyG's batches and message passing; building the batch is part of it."""

    def __init__(self, model: MoleculeNetwork) -> None:
        super().__init__()
        self.model = model
        self.neighbours = Neighbours(model.message.linear)

    def forward(self, molecules: Sequence[Molecule]) -> Tensor:
        """Predictions `[molecules, targets]`."""
        model, device = self.model, self.model.atom.weight.device
        graphs = []
        for molecule in molecules:
            bonds = torch.tensor(molecule.bonds, dtype=torch.long, device=device).view(-1, 2).T
            kinds = torch.stack(list(molecule.kinds)) if molecule.kinds else bonds[0]
            edges = torch.cat([bonds, bonds.flip(0)], 1)
            graphs.append(Data(x=torch.stack(list(molecule.atoms)), edge_index=edges, kind=kinds.repeat(2)))
        batch = Batch.from_data_list(graphs)
        first = states = model.atom(batch.x)
        bonds = model.bond(batch.kind)
        for _ in range(model.rounds):
            states = model.update(self.neighbours(states, batch.edge_index, bonds), states)
        return model.out(global_add_pool(model.readout(states, first), batch.batch, len(molecules)))
