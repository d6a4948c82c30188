"""Graph convolution: the weave module, stacked, on molecules (Looks et al. 2017, section 3.6 and appendix B).

In: a molecule as (atom features, pair features, target): a sequence of n vectors, a sequence of n sequences of n
vectors, a number. Out: (squared error, prediction). With a for atoms and p for pairs, a module computes

    a'_i  = f_A(f_AA(a_i), sum_j f_PA(p_ij))                              (4)
    p'_ij = f_P(f_AP(a_i, a_j) + f_AP(a_j, a_i), f_PP(p_ij))              (5)

all f being fully connected layers with relu. Source: Kearnes et al. 2016.

    python examples/fold/weave.py --molecules 300 --epochs 8
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fxbatch_examples.fold.training import console, fit
from torch import nn

import fxbatch.blocks as fb
from fxbatch.data.molecules import Molecule, read_molecules
from fxbatch.data.paths import find_data

ELEMENTS = (6, 7, 8, 9, 15, 16, 17, 35, 53)
ATOM = len(ELEMENTS) + 4  # one of the elements or another, aromatic, charge, hydrogens
PAIR = 7  # bond type 1-4, the atom itself, 1 / distance in bonds, connected at all


def _layer(d: int) -> fb.FC:
    """A fully connected layer with small weights: sums over atoms and pairs grow with the molecule."""
    return fb.FC(d, initializer=lambda w: nn.init.xavier_uniform_(w, gain=0.5))


class WeaveLayers:
    """The six layers of a weave module, of d units each."""

    def __init__(self, d: int) -> None:
        self.a, self.p, self.aa, self.ap, self.pa, self.pp = (_layer(d) for _ in range(6))


class Layers:
    """The layers of a model of several modules."""

    def __init__(self, modules: int = 2, d: int = 24) -> None:
        self.weaves = [WeaveLayers(d) for _ in range(modules)]
        self.atom = _layer(2 * d)
        self.answer = fb.FC(1, activation=None, initializer=lambda w: nn.init.normal_(w, std=1e-3))


# [blocks
def weave(f: WeaveLayers) -> fb.Block:
    """Equations 4 and 5: (atoms, pairs) -> (atoms, pairs)."""
    module = fb.Composition(name="weave")
    with module.scope():
        a, p = module.input[0], module.input[1]
        from_pairs = fb.Map(fb.Map(f.pa) >> fb.Sum()).reads(p)
        atoms = fb.ZipWith(fb.Concat() >> f.a).reads(fb.Map(f.aa).reads(a), from_pairs)
        there = fb.Concat() >> f.ap
        back = fb.AllOf(fb.GetItem(1), fb.GetItem(0)) >> fb.Concat() >> f.ap
        both = fb.AllOf(there, back) >> fb.Function(torch.add)
        row = fb.AllOf(fb.GetItem(0) >> fb.Broadcast(), fb.GetItem(1)) >> fb.ZipWith(both)
        ends = fb.ZipWith(row).reads(a, fb.Broadcast().reads(a))
        update = fb.AllOf(fb.GetItem(0), fb.GetItem(1) >> f.pp) >> fb.Concat() >> f.p
        pairs = fb.ZipWith(fb.ZipWith(update)).reads(ends, p)
        module.output.reads(atoms, pairs)
    return module


def build(layers: Layers, dtype: str = "float32") -> fb.Block:
    """The model: PyObjectType -> (squared error, prediction)."""
    graph = fb.Record((fb.Map(fb.Vector(ATOM, dtype)), fb.Map(fb.Map(fb.Vector(PAIR, dtype)))))
    woven = fb.Pipe(*(weave(f) for f in layers.weaves))
    answer = woven >> fb.AllOf(fb.GetItem(0) >> fb.Map(layers.atom) >> fb.Sum(), fb.GetItem(1) >> fb.Void())
    answer = answer >> fb.GetItem(0) >> layers.answer
    error = fb.Function(torch.sub) >> fb.Function(torch.square) >> fb.Function(torch.sum)
    return (graph >> answer, fb.Vector(1, dtype)) >> fb.AllOf(error, fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, instance: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one molecule."""
    (atoms, pairs), target = instance
    dtype = layers.atom.weight.dtype
    a = [torch.tensor(x, dtype=dtype) for x in atoms]
    p = [[torch.tensor(x, dtype=dtype) for x in row] for row in pairs]
    n = range(len(a))
    for f in layers.weaves:
        sums = [torch.stack([f.pa(x) for x in row]).sum(0) for row in p]
        new_a = [f.a(torch.cat([f.aa(a[i]), sums[i]])) for i in n]
        p = [
            [
                f.p(torch.cat([f.ap(torch.cat([a[i], a[j]])) + f.ap(torch.cat([a[j], a[i]])), f.pp(p[i][j])]))
                for j in n
            ]
            for i in n
        ]
        a = new_a
    answer = layers.answer(torch.stack([layers.atom(x) for x in a]).sum(0))
    return (answer - torch.tensor(target, dtype=dtype)).square().sum(), answer


# plain]


def features(molecule: Molecule) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Atom vectors [n][ATOM] and pair vectors [n][n][PAIR] of a molecule."""
    n = len(molecule)
    atoms = []
    for z, aromatic, charge, hydrogens in zip(
        molecule.atoms.tolist(), molecule.aromatic.tolist(), molecule.charge.tolist(),
        molecule.hydrogens.tolist(), strict=True,
    ):  # fmt: skip
        one_hot = [float(z == e) for e in ELEMENTS] + [float(z not in ELEMENTS)]
        atoms.append([*one_hot, float(aromatic), float(charge), float(hydrogens)])
    distances = _distances(molecule)
    pairs = [[[0.0] * PAIR for _ in range(n)] for _ in range(n)]
    for i in range(n):
        pairs[i][i][4] = 1.0
        for j in range(n):
            if distances[i][j] > 0:
                pairs[i][j][5], pairs[i][j][6] = 1.0 / distances[i][j], 1.0
    for i, bonds in enumerate(molecule.neighbours()):
        for j, kind in bonds:
            pairs[i][j][kind - 1] = 1.0
    return atoms, pairs


def _distances(molecule: Molecule) -> list[list[int]]:
    """Bonds between each two atoms, 0 for an atom itself and -1 where there is no path."""
    neighbours = [[j for j, _ in bonds] for bonds in molecule.neighbours()]
    rows = []
    for start in range(len(neighbours)):
        row = [-1] * len(neighbours)
        row[start] = 0
        queue = [start]
        for i in queue:
            for j in neighbours[i]:
                if row[j] < 0:
                    row[j] = row[i] + 1
                    queue.append(j)
        rows.append(row)
    return rows


def read_instances(name: str, limit: int, target: int, folder: Path | None = None) -> list[Any]:
    """Molecules of `delaney` (ESOL) or `qm9` with a normalised target, spread over the file."""
    molecules = read_molecules((find_data("molecules") if folder is None else folder) / f"graphs_{name}.npz")
    stride = max(len(molecules) // limit, 1)
    chosen = [molecules[i] for i in range(0, len(molecules), stride)][:limit]
    chosen = [m for m in chosen if m.targets[target] == m.targets[target]]
    values = [float(m.targets[target]) for m in chosen]
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    return [(features(m), [(v - mean) / deviation]) for m, v in zip(chosen, values, strict=True)]


def minibatch(instances: int = 4, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    """A model and molecules with random features of 1 to 5 atoms."""
    torch.manual_seed(seed)
    drawn: list[Any] = []
    for number in range(instances):
        n = 1 + number % 5
        drawn.append(((torch.rand(n, ATOM).tolist(), torch.rand(n, n, PAIR).tolist()), [float(number)]))
    return fb.compile(build(Layers(2))), drawn


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print the root mean squared error on the last fifth, in deviations of the target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the molecules")
    parser.add_argument("--set", choices=("delaney", "qm9"), default="delaney")
    parser.add_argument("--target", type=int, default=0, help="column of the targets")
    parser.add_argument("--molecules", type=int, default=200)
    parser.add_argument("--modules", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    instances = read_instances(options.set, options.molecules, options.target, options.data)
    held = instances[::5]
    training = [x for i, x in enumerate(instances) if i % 5]
    model = fb.compile(build(Layers(options.modules)))
    fit(model, training, epochs=options.epochs, batch=16, lr=3e-3)
    with torch.no_grad():
        errors = torch.cat([model(held[i : i + 16])[0] for i in range(0, len(held), 16)])
    found = errors.mean().sqrt().item()
    console.print(
        f"root mean squared error on held-out molecules: {found:.3f} deviations (predicting the mean: 1.0)"
    )
    return found


if __name__ == "__main__":
    main()
