"""Graph network over molecules, written for ONE molecule.

In: a molecule: features of its atoms, and its bonds. Out: a property of it. In each round every atom adds up
messages from its neighbours, as many as it has, and a GRU updates it: a gated graph network (Li et al. 2016;
message passing as in Gilmer et al. 2017). Molecules differ in everything: atoms, bonds, neighbours. ESOL
(solubility) or a QM9 target; root mean squared error. Without that data (`graphs_delaney.npz`, columns as in
fxbatch.data.molecules) it makes 600 small molecules by itself.

    model, molecules = minibatch()
    predictions = model(molecules)       # a list of molecules in, [molecules, targets] out
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fxbatch_examples.command import in_batches, loop_if, run, train_epoch, training_options
from torch import Tensor, nn

import fxbatch
from fxbatch.data.generated import generate_molecules
from fxbatch.data.molecules import Molecule as RawMolecule
from fxbatch.data.molecules import read_molecules
from fxbatch.data.paths import locate
from fxbatch.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Molecule:
    """Kinds of atoms and bonds (tensors without dimensions), bonds as pairs of atoms, targets `[targets]`."""

    atoms: Sequence[Tensor]
    bonds: Sequence[tuple[int, int]]
    kinds: Sequence[Tensor]
    target: Tensor

    def neighbours(self) -> list[list[tuple[int, int]]]:
        """For each atom the (atom, bond) pairs beside it."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.atoms]
        for bond, (begin, end) in enumerate(self.bonds):
            found[begin].append((end, bond))
            found[end].append((begin, bond))
        return found


class Message(nn.Module):
    """The message of an atom to a neighbour: `[hidden]` of the atom and of the bond to `[hidden]`."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, atom: Tensor, bond: Tensor) -> Tensor:
        return torch.relu(self.linear(atom) + bond)


class Readout(nn.Module):
    """The part of an atom in the molecule, gated (Li et al. 2016, equation 7)."""

    def __init__(self, hidden: int):
        super().__init__()
        self.gate = nn.Linear(2 * hidden, hidden)
        self.value = nn.Linear(hidden, hidden)

    def forward(self, last: Tensor, first: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(torch.cat([last, first], -1))) * torch.tanh(self.value(last))


class MoleculeNetwork(nn.Module):
    """Rounds of message passing, a gated sum over the atoms, two layers."""

    def __init__(self, atoms: int, bonds: int, targets: int, *, hidden: int = 64, rounds: int = 3):
        super().__init__()
        self.atom = nn.Embedding(atoms, hidden)
        self.bond = nn.Embedding(bonds, hidden)
        self.message = Message(hidden)
        self.update = nn.GRUCell(hidden, hidden)
        self.readout = Readout(hidden)
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, targets))
        self.rounds = rounds

    @fxbatch.autobatch
    def forward(self, molecule: Molecule) -> Tensor:
        """The prediction `[targets]`."""
        first = [self.atom(atom) for atom in molecule.atoms]
        bonds = [self.bond(kind) for kind in molecule.kinds]
        states = first
        for _ in range(self.rounds):
            updated = []
            for state, beside in zip(states, molecule.neighbours(), strict=True):
                messages = [self.message(states[atom], bonds[bond]) for atom, bond in beside]
                total = add(messages) if messages else torch.zeros_like(state)
                updated.append(self.update(total, state))
            states = updated
        return self.out(add([self.readout(*pair) for pair in zip(states, first, strict=True)]))


def add(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of one vector or more, pairwise: few additions wait for each other."""
    while len(vectors) > 1:
        pairs = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + list(vectors[len(pairs) * 2 :])
    return vectors[0]


def build(atoms: int, bonds: int, targets: int, *, hidden: int = 64, rounds: int = 3) -> MoleculeNetwork:
    """The model."""
    return MoleculeNetwork(atoms, bonds, targets, hidden=hidden, rounds=rounds)


def minibatch(
    *, molecules: int = 6, hidden: int = 8, seed: int = 0
) -> tuple[MoleculeNetwork, list[Molecule]]:
    """A small model and random molecules of 1 to 8 atoms: trees, some with a ring."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    instances = []
    for _ in range(molecules):
        n = chance.randint(1, 8)
        bonds = [(chance.randrange(atom), atom) for atom in range(1, n)]
        if n > 3 and (0, n - 1) not in bonds and chance.random() < 0.5:
            bonds.append((0, n - 1))
        kinds = torch.randint(0, 4, (len(bonds),)).unbind()
        instances.append(Molecule(torch.randint(0, 5, (n,)).unbind(), bonds, kinds, torch.randn(1)))
    return build(5, 4, 1, hidden=hidden, rounds=2), instances


def main(argv: Sequence[str] | None = None) -> float:
    """Train on 90 % of the molecules; root mean squared error on the rest after each epoch."""
    options = training_options(main.__doc__, "molecules", epochs=20)
    options.add_argument("--set", choices=("delaney", "qm9"), default="delaney", help="ESOL, or QM9")
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    molecules, sizes, scale = load_set(args)
    model = build(*sizes).to(args.device)
    return train(args, model, [(molecule, molecule.target) for molecule in molecules], scale)


def train(
    args: argparse.Namespace, model: nn.Module, data: Sequence[tuple[Any, Tensor]], scale: Tensor
) -> float:
    """Train `model(instances)`, which gives `[instances, targets]`; the error on the first tenth of the data."""
    shuffle = random.Random(args.seed)
    data = list(data)
    shuffle.shuffle(data)
    dev, train = data[: len(data) // 10], data[len(data) // 10 :]
    optimizer = torch.optim.Adam(model.parameters(), args.rate)

    def losses(batch: Sequence[tuple[Any, Tensor]]) -> Tensor:
        return errors(model, batch).mean(1)

    error = 0.0
    with loop_if(args.disabled):
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            model.train()
            _, seconds = train_epoch(epoch, in_batches(train, args.batch_size), losses, optimizer)
            model.eval()
            with torch.no_grad():
                error = (errors(model, dev).mean(0).sqrt() * scale).mean().item()
            print(f"epoch {epoch}: dev root mean squared error {error:.3f}, {seconds:.0f} s")
    return error


def errors(model: nn.Module, data: Sequence[tuple[Any, Tensor]]) -> Tensor:
    """Squared errors `[instances, targets]`."""
    predictions: Tensor = model([instance for instance, _ in data])
    return (predictions - torch.stack([target for _, target in data])).square()


def load_set(args: argparse.Namespace) -> tuple[list[Molecule], tuple[int, int, int], Tensor]:
    """`prepare` of the set that was asked for, or of generated molecules where no folder has it."""
    folder = locate("molecules", args.data)
    if folder is not None:
        return prepare(read_molecules(folder / f"graphs_{args.set}.npz")[: args.limit], args.device)
    print(
        f"no molecules/graphs_{args.set}.npz was found (--data takes the folder): training on 600 generated ones"
    )
    return prepare(generate_molecules(600)[: args.limit], args.device)


def prepare(
    molecules: Sequence[RawMolecule], device: str
) -> tuple[list[Molecule], tuple[int, int, int], Tensor]:
    """Molecules with standardised targets; how many atom kinds, bond kinds and targets; what 1.0 stands for.

    The kind of an atom is its element, charge, hydrogens and aromaticity. Molecules that lack a target
    are left out.
    """
    raw = [molecule for molecule in molecules if not np.isnan(molecule.targets).any()]
    kinds = [
        [f"{z} {a} {c} {h}" for z, a, c, h in zip(m.atoms, m.aromatic, m.charge, m.hydrogens, strict=True)]
        for m in raw
    ]
    atoms = Vocabulary.build((kind for molecule in kinds for kind in molecule), device=device)
    bonds = Vocabulary(["none", "1", "2", "3", "4"], device=device)
    targets = torch.tensor(np.stack([molecule.targets for molecule in raw]))
    scale = targets.std(0)
    targets = ((targets - targets.mean(0)) / scale).to(device)
    prepared = [
        Molecule(
            atoms.encode(kind),
            [(begin, end) for begin, end in m.bonds.tolist()],
            bonds.encode(map(str, m.bond_types.tolist())),
            target.clone(),
        )
        for m, kind, target in zip(raw, kinds, targets, strict=True)
    ]
    return prepared, (len(atoms), len(bonds), targets.shape[1]), scale.to(device)


if __name__ == "__main__":
    run(main)
