"""A small treebank and small molecules that are made on the spot, each with a rule that can be learnt.

In: a seed. Out: splits of Trees with labels 0-4, as in the Stanford treebank; molecules as `read_molecules` gives them.

    splits = generate_treebank(seed=0)          # {"train": [...], "dev": [...], "test": [...]}
    molecules = generate_molecules(600)

The rule of the trees. A word has a value from -2 to 2. A node's value is that of its parts added, kept within -2 to 2;
with `not` on the left it is the negative of the right part's, with `very` twice it, with `hardly` nothing.
The label is the value + 2. Words are drawn from sets of equal value, so that a model has both to learn the
words and to follow the tree.

The rule of the molecules, chains with branches and rings of carbon, nitrogen and oxygen: each atom counts for what its
element is worth, times the number of its bonds.
"""

from __future__ import annotations

import random

import numpy as np

from fxbatch.data.molecules import Molecule
from fxbatch.data.sst import SPLITS, Tree

WORDS = {
    -2: ("awful", "dreadful", "unwatchable", "insulting"),
    -1: ("dull", "slow", "muddled", "thin", "tired"),
    0: ("film", "story", "actor", "scene", "music", "plot", "it", "the"),
    1: ("warm", "witty", "solid", "clever", "lively"),
    2: ("superb", "brilliant", "dazzling", "moving"),
}
OPERATORS = ("not", "very", "hardly")
WORTH = {6: -0.4, 7: 0.3, 8: 0.5}  # of an atom of this element, for each of its bonds
SIZES = {"train": 2000, "dev": 300, "test": 600}


def generate_treebank(seed: int = 0, sizes: dict[str, int] = SIZES) -> dict[str, list[Tree[int, str]]]:
    """The three splits, always the same for the same seed; trees have 1 to 24 words."""
    draw = random.Random(seed)
    return {
        split: [generate_tree(draw, max(1, min(24, round(draw.gauss(9, 5))))) for _ in range(sizes[split])]
        for split in SPLITS
    }


def generate_tree(draw: random.Random, words: int) -> Tree[int, str]:
    """A tree of `words` words. Operators stand on the left of what they apply to."""
    if words == 1:
        value = draw.choices((-2, -1, 0, 1, 2), weights=(1, 2, 4, 2, 1))[0]
        return Tree(value + 2, draw.choice(WORDS[value]))
    if draw.random() < 0.25:
        operator = draw.choice(OPERATORS)
        right = generate_tree(draw, words - 1)
        left: Tree[int, str] = Tree(2, operator)
    else:
        split = draw.randint(1, words - 1)
        left, right = generate_tree(draw, split), generate_tree(draw, words - split)
    return Tree(combine(left.label - 2, left.word, right.label - 2) + 2, None, left, right)


def combine(left: int, word: str | None, right: int) -> int:
    """The value of a node from those of its parts; `word` is the left part's where that is a leaf."""
    if word == "not":
        return -right
    if word == "hardly":
        return 0
    return max(-2, min(2, 2 * right if word == "very" else left + right))


def generate_molecules(count: int, seed: int = 0) -> list[Molecule]:
    """Molecules of 3 to 20 atoms with one target, always the same for the same seed."""
    draw = random.Random(seed)
    return [_generate_molecule(draw, draw.randint(3, 20)) for _ in range(count)]


def _generate_molecule(draw: random.Random, atoms: int) -> Molecule:
    bonds = [(max(0, atom - draw.choice((1, 1, 1, 2, 3))), atom) for atom in range(1, atoms)]
    if atoms > 5 and draw.random() < 0.5:
        begin = draw.randrange(atoms - 5)
        bonds.append((begin, begin + 5))
    elements = draw.choices(list(WORTH), weights=(6, 1, 2), k=atoms)
    worth = sum(WORTH[elements[begin]] + WORTH[elements[end]] for begin, end in bonds)
    zero = np.zeros(atoms, dtype=np.uint8)
    return Molecule(
        atoms=np.array(elements, dtype=np.uint8),
        aromatic=zero,
        charge=zero.astype(np.int8),
        hydrogens=zero,
        bonds=np.array(bonds, dtype=np.uint8),
        bond_types=np.ones(len(bonds), dtype=np.uint8),
        targets=np.array([worth], dtype=np.float32),
    )
