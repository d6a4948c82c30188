"""The examples' `main`: small runs on generated files; batched ones end with the same figures as one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import (
    bilstm_tagger,
    char_tagger,
    childsum_tree_lstm,
    deep_sets,
    graph_attention,
    language_model,
    lattice_lstm,
    mixture_of_experts,
    module_networks,
    molecules,
    parser,
    rnng,
    seq2seq,
    transformer_parser,
    transformer_tagger,
)
from fxbatch.errors import DataError

LEXICON = {"DET": ("the", "a"), "NOUN": ("dog", "cat", "bird"), "VERB": ("sees", "likes")}
NAMES = {"LOC": ("Rome", "Oslo"), "PER": ("Ann", "Bob")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files in the real ones' formats."""
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(0)
    (folder / "ud_ewt").mkdir()
    for part in ("train", "dev", "test"):
        sentences = [conllu_sentence(chance) for _ in range(12)]
        (folder / "ud_ewt" / f"en_ewt-ud-{part}.conllu").write_text("".join(sentences))
    for name in ("wikiner10k/train", "wikigold/wikigold", "wnut17/train", "wnut17/dev", "wnut17/test"):
        path = folder / "ner" / f"{name}.conll"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(ner_sentence(chance) for _ in range(8)) + "\n")
    (folder / "molecules").mkdir()
    for name in ("delaney", "qm9"):
        write_molecules(folder / "molecules" / f"graphs_{name}.npz", chance)
    return folder


def conllu_sentence(chance: random.Random) -> str:
    """Subject, verb and sometimes an object."""
    words = [("DET", 2, "det"), ("NOUN", 3, "nsubj"), ("VERB", 0, "root")]
    if chance.random() < 0.5:
        words += [("DET", 5, "det"), ("NOUN", 3, "obj")]
    rows = []
    for number, (tag, head, relation) in enumerate(words, 1):
        form = chance.choice(LEXICON[tag])
        rows.append("\t".join(map(str, (number, form, form, tag, tag, "_", head, relation, "_", "_"))))
    return "\n".join(rows) + "\n\n"


def ner_sentence(chance: random.Random) -> str:
    rows = []
    for _ in range(chance.randint(2, 6)):
        kind = chance.choice(("LOC", "PER", "O"))
        rows.append(
            f"{chance.choice(NAMES[kind])}\tB-{kind}" if kind != "O" else f"{chance.choice('xyz')}\tO"
        )
    return "\n".join(rows)


def write_molecules(path: Path, chance: random.Random) -> None:
    """Chains of carbon and oxygen whose target is the number of oxygens."""
    sizes = [chance.randint(2, 6) for _ in range(20)]
    atoms = [[chance.choice((6, 8)) for _ in range(n)] for n in sizes]
    z = np.array([a for molecule in atoms for a in molecule], dtype=np.uint8)
    zero = np.zeros(len(z), dtype=np.uint8)
    bonds = [(i, i + 1) for n in sizes for i in range(n - 1)]
    np.savez(
        path,
        z=z,
        aromatic=zero,
        charge=zero.astype(np.int8),
        num_h=zero,
        atom_ptr=np.cumsum([0, *sizes]).astype(np.int32),
        bonds=np.array(bonds, dtype=np.uint8),
        bond_type=np.ones(len(bonds), dtype=np.uint8),
        bond_ptr=np.cumsum([0, *(n - 1 for n in sizes)]).astype(np.int32),
        y=np.array([[float(molecule.count(8))] for molecule in atoms], dtype=np.float32),
        targets=np.array(["oxygens"]),
    )


# What `main` trains batched here; each model's gradients are those of the loop in test_equality.py.
BATCHED: list[tuple[Callable[..., Any], list[str]]] = [
    (bilstm_tagger.main, ["--hidden", "8", "--limit", "6"]),
    (parser.main, ["--hidden", "8", "--limit", "6"]),
    (language_model.main, ["--hidden", "8"]),
    (molecules.main, ["--set", "qm9"]),
]
ONE_BY_ONE: list[tuple[Callable[..., Any], list[str]]] = [
    (char_tagger.main, ["--rare", "8", "--dropout", "0", "--held-out", "4"]),
    (graph_attention.main, ["--kind", "gat"]),
    (deep_sets.main, ["--set", "qm9"]),
    (transformer_tagger.main, ["--hidden", "8", "--layers", "1", "--dropout", "0", "--held-out", "4"]),
    (transformer_parser.main, ["--hidden", "8", "--layers", "1", "--limit", "6"]),
    (childsum_tree_lstm.main, ["--limit", "6"]),
    (seq2seq.main, ["--limit", "6", "--longest", "3"]),
    (lattice_lstm.main, ["--limit", "6"]),
    (module_networks.main, ["--limit", "6", "--depth", "2"]),
    (mixture_of_experts.main, ["--limit", "6"]),
    (rnng.main, ["--limit", "6"]),
]
FILES = [*BATCHED, *ONE_BY_ONE]


def short_name(value: Any) -> str:
    return value.__module__.rpartition(".")[2] if callable(value) else "options"


@pytest.mark.parametrize(("main", "options"), FILES, ids=short_name)
def test_training(
    data: Path, capsys: pytest.CaptureFixture[str], main: Callable[..., Any], options: list[str]
) -> None:
    options = ["--data", str(data), "--epochs", "1", "--batch-size", "4", *options]
    one_by_one = main([*options, "--disabled"])
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("epoch 1: ")
    if (main, options[6:]) in BATCHED:
        assert main(options) == pytest.approx(one_by_one, rel=1e-3, abs=1e-3)


def test_tagger_learns(data: Path) -> None:
    assert (
        bilstm_tagger.main(["--data", str(data), "--epochs", "10", "--batch-size", "4", "--hidden", "64"])
        == 1.0
    )


def test_missing_data_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ud_ewt"):
        bilstm_tagger.main(["--data", str(tmp_path)])
