"""Graph network over molecules batched by hand: one block-diagonal graph, message passing by index.

In: molecules of the example. Out: predictions, in plain PyTorch with autograd. This is what PyG and DGL do.

    hand = BlockMolecules(model)             # shares the parameters of examples.molecules.MoleculeNetwork
    predictions = hand(molecules)            # [molecules, targets]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from examples.molecules import Molecule, MoleculeNetwork


class BlockMolecules(nn.Module):
    """The model's parameters, run on the disjoint union of the molecules."""

    def __init__(self, model: MoleculeNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, molecules: Sequence[Molecule]) -> Tensor:
        """Predictions `[molecules, targets]`."""
        model = self.model
        device = model.atom.weight.device
        atoms = torch.stack([atom for molecule in molecules for atom in molecule.atoms])
        kinds = [kind for molecule in molecules for kind in molecule.kinds]
        ends, offset = [], 0
        for molecule in molecules:
            ends += [(begin + offset, end + offset) for begin, end in molecule.bonds]
            offset += len(molecule.atoms)
        begin, end = torch.tensor(ends, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        source, target = torch.cat([begin, end]), torch.cat([end, begin])
        first = states = model.atom(atoms)
        bonds = model.bond(torch.stack(kinds)).repeat(2, 1) if kinds else states[:0]
        for _ in range(model.rounds):
            told = torch.relu(model.message.linear(states).index_select(0, source) + bonds)
            states = model.update(torch.zeros_like(states).index_add(0, target, told), states)
        given = model.readout(states, first)
        sizes = torch.tensor([len(molecule.atoms) for molecule in molecules], device=device)
        owner = torch.repeat_interleave(torch.arange(len(molecules), device=device), sizes)
        return model.out(given.new_zeros(len(molecules), given.shape[1]).index_add(0, owner, given))
