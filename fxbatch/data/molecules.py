"""Molecules as graphs without hydrogens, from .npz columns: ESOL (`delaney`) and QM9.

In: `graphs_<name>.npz` with one array per column (`atom_ptr[m] : atom_ptr[m + 1]` are the atoms of molecule m).
Out: Molecules, numpy views of those columns: nothing is copied.

    molecules = read_molecules(find_data("molecules") / "graphs_delaney.npz")
    molecules[0].atoms                  # uint8 [atoms]: atomic numbers
    molecules[0].neighbours()[3]        # [(4, 1), (2, 4)]: (atom, bond type) of atom 3's bonds
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from fxbatch.errors import DataError

ATOM_COLUMNS = ("z", "aromatic", "charge", "num_h")
COLUMNS = (*ATOM_COLUMNS, "atom_ptr", "bonds", "bond_type", "bond_ptr", "y", "targets")
AROMATIC = 4  # the bond type; 1, 2, 3 are single, double, triple


@dataclass(frozen=True, slots=True, eq=False)
class Molecule:
    """One molecule: columns of its n atoms and m bonds."""

    atoms: np.ndarray  # uint8 [n]: atomic numbers
    aromatic: np.ndarray  # uint8 [n]: 1 in an aromatic ring
    charge: np.ndarray  # int8 [n]: formal charges
    hydrogens: np.ndarray  # uint8 [n]: hydrogens at the atom
    bonds: np.ndarray  # uint8 [m, 2]: begin and end
    bond_types: np.ndarray  # uint8 [m]: 1, 2, 3, or 4 for aromatic
    targets: np.ndarray  # float32 [targets], NaN where missing

    def __len__(self) -> int:
        return len(self.atoms)

    def neighbours(self) -> list[list[tuple[int, int]]]:
        """For each atom its (neighbour, bond type), in the order of the bonds."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(len(self.atoms))]
        for (begin, end), kind in zip(self.bonds.tolist(), self.bond_types.tolist(), strict=True):
            found[begin].append((end, kind))
            found[end].append((begin, kind))
        return found


class Molecules(Sequence[Molecule]):
    """The molecules of a file; `target_names` names the columns of `Molecule.targets`."""

    def __init__(self, columns: dict[str, np.ndarray], target_names: tuple[str, ...]) -> None:
        self._columns = columns
        self.target_names = target_names

    def __len__(self) -> int:
        return len(self._columns["atom_ptr"]) - 1

    @overload
    def __getitem__(self, index: int) -> Molecule: ...
    @overload
    def __getitem__(self, index: slice) -> list[Molecule]: ...
    def __getitem__(self, index: int | slice) -> Molecule | list[Molecule]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"molecule {index} of {len(self)}")
        index %= len(self)
        c = self._columns
        atoms = slice(c["atom_ptr"][index], c["atom_ptr"][index + 1])
        bonds = slice(c["bond_ptr"][index], c["bond_ptr"][index + 1])
        z, aromatic, charge, hydrogens = (c[name][atoms] for name in ATOM_COLUMNS)
        return Molecule(
            z, aromatic, charge, hydrogens, c["bonds"][bonds], c["bond_type"][bonds], c["y"][index]
        )

    def __iter__(self) -> Iterator[Molecule]:
        return (self[i] for i in range(len(self)))


def read_molecules(path: Path) -> Molecules:
    """The molecules of a file; DataError where a column is missing or they contradict each other."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            missing = [name for name in COLUMNS if name not in stored]
            if missing:
                raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(stored.files)}")
            columns = {name: stored[name] for name in COLUMNS}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a readable .npz file: {error}") from error
    _check(path, columns)
    return Molecules(columns, tuple(str(name) for name in columns["targets"]))


def _check(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Lengths agree, pointers ascend, bonds stay inside their molecule."""
    atom_ptr, bond_ptr = columns["atom_ptr"].astype(np.int64), columns["bond_ptr"].astype(np.int64)
    for name, pointers, rows in (
        ("atom_ptr", atom_ptr, len(columns["z"])),
        ("bond_ptr", bond_ptr, len(columns["bonds"])),
    ):
        if not len(pointers) or pointers[0] != 0 or pointers[-1] != rows or (np.diff(pointers) < 0).any():
            raise DataError(f"{path}: {name} doesn't rise from 0 to {rows}")
    if len(bond_ptr) != len(atom_ptr) or len(columns["y"]) != len(atom_ptr) - 1:
        raise DataError(f"{path}: atom_ptr, bond_ptr and y are of different numbers of molecules")
    if any(len(columns[name]) != len(columns["z"]) for name in ATOM_COLUMNS):
        raise DataError(f"{path}: the columns of atoms have different lengths")
    if len(columns["bond_type"]) != len(columns["bonds"]):
        raise DataError(f"{path}: bonds and bond_type have different lengths")
    sizes = np.repeat(np.diff(atom_ptr), np.diff(bond_ptr))
    outside = np.flatnonzero((columns["bonds"] >= sizes[:, None]).any(axis=1))
    if len(outside):
        molecule = int(np.searchsorted(bond_ptr, outside[0], side="right")) - 1
        raise DataError(f"{path}: molecule {molecule} has a bond to an atom that is not there")
