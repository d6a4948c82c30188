"""Graph networks on `edge_index`, written for ONE molecule: GIN (Xu et al. 2019) and GAT (Velickovic et al. 2018).

In: a graph: kinds of its N atoms `[N]`, its edges `[2, E]` (each bond in both directions), kinds of the edges `[E]`.
Out: a property of it. All atoms of a minibatch are rows of one tensor (docs/sizes.md); nothing is padded. BatchNorm
in GIN's layers goes over the rows of the minibatch. ESOL (solubility) or QM9; root mean squared error. Without that
data it makes 600 small molecules by itself (see `molecules.py`).

    model, graphs = minibatch()
    predictions = model(graphs)          # a list of graphs in, [graphs, targets] out
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fxbatch_examples import molecules
from fxbatch_examples.command import run, training_options
from torch import Tensor, nn

import fxbatch

Graph = dict[str, Tensor]


class GinLayer(nn.Module):
    """Atoms add up what their neighbours and the bonds to them are; an MLP follows."""

    def __init__(self, hidden: int, bonds: int):
        super().__init__()
        self.bond = nn.Embedding(bonds, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )

    def forward(self, h: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        messages = torch.relu(h[edges[0]] + self.bond(kinds))
        return torch.relu(self.mlp(h.index_add(0, edges[1], messages)))


class GatLayer(nn.Module):
    """Atoms attend to their neighbours: a softmax over the edges that end at an atom, several heads."""

    def __init__(self, hidden: int, bonds: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.value = nn.Linear(hidden, hidden)
        self.score = nn.Linear(3 * hidden, heads)
        self.bond = nn.Embedding(bonds, hidden)

    def forward(self, h: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        scores = nn.functional.leaky_relu(
            self.score(torch.cat([h[source], h[target], self.bond(kinds)], 1)), 0.2
        )
        weights = scores.clamp(max=30.0).exp()
        total = torch.zeros(len(h), self.heads, dtype=h.dtype, device=h.device).index_add(0, target, weights)
        weights = weights / total[target]
        values = self.value(h)[source].view(len(source), self.heads, h.shape[1] // self.heads)
        attended = torch.zeros_like(h).index_add(0, target, (values * weights.unsqueeze(2)).flatten(1))
        return torch.relu(h + attended)


class GraphNetwork(nn.Module):
    """Layers of one kind, a sum over the atoms, two layers."""

    def __init__(
        self, atoms: int, bonds: int, targets: int, *, kind: str = "gin", hidden: int = 64, layers: int = 3
    ):
        super().__init__()
        layer = {"gin": GinLayer, "gat": GatLayer}[kind]
        self.atom = nn.Embedding(atoms, hidden)
        self.layers = nn.ModuleList(layer(hidden, bonds) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, targets))

    @fxbatch.autobatch(batch_norm="minibatch")
    def forward(self, graph: Graph) -> Tensor:
        """The prediction `[targets]`."""
        h = self.atom(graph["atoms"])
        for layer in self.layers:
            h = layer(h, graph["edges"], graph["kinds"])
        return self.out(h.sum(0))


def build(
    atoms: int, bonds: int, targets: int, *, kind: str = "gin", hidden: int = 64, layers: int = 3
) -> GraphNetwork:
    """The model."""
    return GraphNetwork(atoms, bonds, targets, kind=kind, hidden=hidden, layers=layers)


def graph_of(molecule: molecules.Molecule) -> Graph:
    """A molecule as a graph: each bond is two edges."""
    pairs = torch.tensor(molecule.bonds, dtype=torch.int64).reshape(-1, 2).t()
    kinds = torch.stack(list(molecule.kinds)) if molecule.kinds else torch.zeros(0, dtype=torch.int64)
    atoms = torch.stack(list(molecule.atoms))
    return {
        "atoms": atoms,
        "edges": torch.cat([pairs, pairs.flip(0)], 1).to(atoms.device),
        "kinds": torch.cat([kinds, kinds]).to(atoms.device),
    }


def minibatch(*, kind: str = "gat", graphs: int = 6, seed: int = 0) -> tuple[GraphNetwork, list[Graph]]:
    """A small model and random molecules of 1 to 8 atoms."""
    _, instances = molecules.minibatch(molecules=graphs, seed=seed)
    return build(5, 4, 1, kind=kind, hidden=8, layers=2), [graph_of(m) for m in instances]


def main(argv: Sequence[str] | None = None) -> float:
    """Train on 90 % of the molecules; root mean squared error on the rest after each epoch."""
    options = training_options(main.__doc__, "molecules", epochs=20)
    options.add_argument("--set", choices=("delaney", "qm9"), default="delaney", help="ESOL, or QM9")
    options.add_argument("--kind", choices=("gin", "gat"), default="gin")
    args = options.parse_args(argv)
    if args.disabled and args.kind == "gin":
        options.error("--disabled: GIN's BatchNorm goes over the minibatch, and the loop has none")
    torch.manual_seed(args.seed)
    raw, sizes, scale = molecules.load_set(args)
    model = build(*sizes, kind=args.kind).to(args.device)
    return molecules.train(args, model, [(graph_of(m), m.target) for m in raw], scale)


if __name__ == "__main__":
    run(main)
