"""A function of a set, written for ONE set of N elements: DeepSets (Zaheer et al. 2017, theorem 2).

In: a molecule as the bag of its atoms, kinds `[N]`, without bonds. Out: a property of it: `rho(sum of phi(atom))`.
All atoms of a minibatch are rows of one tensor (docs/sizes.md). ESOL (solubility), or QM9; root mean squared error.
Without that data it makes 600 small molecules by itself (see `molecules.py`). `graph_attention.py` has the bonds, too.

    model, sets = minibatch()
    predictions = model(sets)            # a list of [N] in, [sets, targets] out
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fxbatch_examples import molecules
from fxbatch_examples.command import run, training_options
from torch import Tensor, nn

import fxbatch


class DeepSets(nn.Module):
    """Each element by itself, a sum, and what the sum means."""

    def __init__(self, kinds: int, targets: int, *, hidden: int = 64):
        super().__init__()
        self.phi = nn.Sequential(
            nn.Embedding(kinds, hidden), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )
        self.rho = nn.Sequential(
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, targets),
        )

    @fxbatch.autobatch
    def forward(self, elements: Tensor) -> Tensor:
        """The prediction `[targets]` of a set of kinds `[N]`, which may be empty."""
        found: Tensor = self.rho(self.phi(elements).sum(0))
        return found


def build(kinds: int, targets: int, *, hidden: int = 64) -> DeepSets:
    """The model."""
    return DeepSets(kinds, targets, hidden=hidden)


def minibatch(*, sets: int = 6, hidden: int = 8, seed: int = 0) -> tuple[DeepSets, list[Tensor]]:
    """A small model and random sets of 0 to 7 elements."""
    torch.manual_seed(seed)
    return build(5, 1, hidden=hidden), [torch.randint(0, 5, (n % 8,)) for n in range(7, 7 + sets)]


def main(argv: Sequence[str] | None = None) -> float:
    """Train on 90 % of the molecules; root mean squared error on the rest after each epoch."""
    options = training_options(main.__doc__, "molecules", epochs=20)
    options.add_argument("--set", choices=("delaney", "qm9"), default="delaney", help="ESOL, or QM9")
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    raw, (kinds, _, targets), scale = molecules.load_set(args)
    data = [(torch.stack(list(molecule.atoms)), molecule.target) for molecule in raw]
    model = build(kinds, targets).to(args.device)
    return molecules.train(args, model, data, scale)


if __name__ == "__main__":
    run(main)
