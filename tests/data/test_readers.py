"""CoNLL-U, IOB2, molecules and the generated treebank: what is read, and where a mistake is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fxbatch.data.conllu import read_conllu
from fxbatch.data.generated import WORDS, combine, generate_treebank
from fxbatch.data.molecules import read_molecules
from fxbatch.data.ner import entities, read_ner
from fxbatch.errors import DataError

CONLLU = """\
# sent_id = 1
# text = Don't go
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\tMood=Imp\t0\troot\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_
"""


def test_conllu(tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(CONLLU + "\n" + CONLLU)
    first, second = read_conllu(path)
    assert [t.form for t in first.tokens] == ["Do", "n't", "go"]
    assert [(t.upos, t.head, t.relation) for t in second.tokens] == [
        ("AUX", 3, "aux"),
        ("PART", 3, "advmod"),
        ("VERB", 0, "root"),
    ]
    assert first.comments == {"sent_id": "1", "text": "Don't go"}
    assert len(first) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2\tn't\tnot", "2\tn't", r"a\.conllu:5: expected 10 tab-separated columns, got 9"),
        ("2\tn't", "7\tn't", r"a\.conllu:5: expected word 2, got '7'"),
        ("3\tadvmod", "x\tadvmod", r"a\.conllu:5: expected a word's number in column 7 \(HEAD\), got 'x'"),
        ("3\tadvmod", "9\tadvmod", r"a\.conllu:5: word 2 \(n't\) has head 9 in a sentence of 3"),
        ("3\tadvmod", "2\tadvmod", r"has head 2"),
    ],
)
def test_malformed_conllu(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "a.conllu"
    assert old in CONLLU
    path.write_text(CONLLU.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        read_conllu(path)


def test_ner(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("Ann\tB-PER\nLee\tI-PER\nin\tO\n\n\nRome\tB-LOC\n")
    sentences = read_ner(path)
    assert [s.forms for s in sentences] == [("Ann", "Lee", "in"), ("Rome",)]
    assert entities(sentences[0].tags) == [("PER", 0, 2)]


def test_entities_of_adjacent_and_unbegun_tags() -> None:
    assert entities(["B-PER", "B-PER", "I-PER", "I-LOC", "O", "I-ORG"]) == [
        ("PER", 0, 1),
        ("PER", 1, 3),
        ("LOC", 3, 4),
        ("ORG", 5, 6),
    ]
    assert entities([]) == []


@pytest.mark.parametrize(
    ("line", "message"), [("Ann B-PER", "expected `token<TAB>tag`"), ("Ann\tPER", "expected a tag O, B-type")]
)
def test_malformed_ner(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.conll"
    path.write_text(f"in\tO\n{line}\n")
    with pytest.raises(DataError, match=rf"a\.conll:2: {message}"):
        read_ner(path)


def columns() -> dict[str, np.ndarray]:
    """Water, and carbon dioxide."""
    return {
        "z": np.array([8, 8, 6, 8], np.uint8),
        "aromatic": np.zeros(4, np.uint8),
        "charge": np.zeros(4, np.int8),
        "num_h": np.array([2, 0, 0, 0], np.uint8),
        "atom_ptr": np.array([0, 1, 4], np.int32),
        "bonds": np.array([[0, 1], [1, 2]], np.uint8),
        "bond_type": np.array([2, 2], np.uint8),
        "bond_ptr": np.array([0, 0, 2], np.int32),
        "y": np.array([[1.0], [np.nan]], np.float32),
        "targets": np.array(["t"]),
    }


def test_molecules(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **columns())
    molecules = read_molecules(tmp_path / "m.npz")
    water, dioxide = molecules
    assert (len(molecules), molecules.target_names, len(water), len(dioxide)) == (2, ("t",), 1, 3)
    assert dioxide.atoms.tolist() == [8, 6, 8]
    assert dioxide.neighbours() == [[(1, 2)], [(0, 2), (2, 2)], [(1, 2)]]
    assert water.neighbours() == [[]]
    assert molecules[-1].atoms.tolist() == [8, 6, 8]
    assert len(molecules[:1]) == 1
    with pytest.raises(IndexError, match="molecule 2 of 2"):
        molecules[2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("atom_ptr", np.array([0, 5, 4]), "atom_ptr doesn't rise from 0 to 4"),
        ("bond_ptr", np.array([0, 0, 1]), "bond_ptr doesn't rise from 0 to 2"),
        ("bond_ptr", np.array([0, 2]), "different numbers of molecules"),
        ("bonds", np.array([[0, 1], [1, 3]]), "molecule 1 has a bond to an atom that is not there"),
        ("charge", np.zeros(3), "the columns of atoms have different lengths"),
        ("bond_type", np.zeros(3), "bonds and bond_type have different lengths"),
        ("y", None, "no column 'y'"),
        ("z", np.array([None] * 4), "not a readable .npz file"),  # a pickle: refused, never loaded
    ],
)
def test_malformed_molecules(tmp_path: Path, name: str, value: np.ndarray | None, message: str) -> None:
    changed = columns() | {name: value}
    np.savez(tmp_path / "m.npz", **{k: v for k, v in changed.items() if v is not None})
    with pytest.raises(DataError, match=message):
        read_molecules(tmp_path / "m.npz")


def test_no_npz(tmp_path: Path) -> None:
    (tmp_path / "m.npz").write_text("hello")
    with pytest.raises(DataError, match=r"not a readable \.npz file"):
        read_molecules(tmp_path / "m.npz")


def test_generated_treebank_follows_its_rule() -> None:
    sizes = {"train": 60, "dev": 5, "test": 5}
    splits = generate_treebank(3, sizes)
    assert [str(t) for t in splits["train"]] == [str(t) for t in generate_treebank(3, sizes)["train"]]
    assert [str(t) for t in splits["train"]] != [str(t) for t in generate_treebank(4, sizes)["train"]]
    value = {word: v for v, words in WORDS.items() for word in words}
    for tree in splits["train"]:
        for node in tree.postorder():
            if node.is_leaf:
                assert node.label == value.get(node.word, 0) + 2
            else:
                expected = combine(node.left.label - 2, node.left.word, node.right.label - 2)
                assert node.label == expected + 2


def test_rule_of_the_generated_treebank() -> None:
    assert [combine(0, "not", 2), combine(0, "very", 1), combine(0, "hardly", 2)] == [-2, 2, 0]
    assert [combine(2, None, 1), combine(-2, "awful", -1), combine(1, "warm", -2)] == [2, -2, -1]


def test_the_real_files(whole_data: Path) -> None:
    assert len(read_conllu(whole_data / "ud_ewt" / "en_ewt-ud-dev.conllu.gz")) == 2001
    assert len(read_ner(whole_data / "ner" / "wikigold" / "wikigold.conll")) == 1696
    molecules = read_molecules(whole_data / "molecules" / "graphs_delaney.npz")
    assert (len(molecules), molecules.target_names) == (1128, ("logp",))
