"""Words to numbers: order, the unknown word, and one tensor a word."""

from __future__ import annotations

import pickle

import pytest
import torch

from fxbatch.data.sst import parse_tree
from fxbatch.data.vocabulary import UNKNOWN, Vocabulary


def test_frequent_words_first_ties_by_the_alphabet() -> None:
    vocabulary = Vocabulary.build(["b", "a", "c", "b", "c", "d"], min_count=1)
    assert vocabulary.words == (UNKNOWN, "b", "c", "a", "d")
    assert Vocabulary.build(["b", "a", "c", "b", "c", "d"], min_count=2).words == (UNKNOWN, "b", "c")


def test_unknown_words_and_case() -> None:
    vocabulary = Vocabulary.build(["film", "Film", "good"])
    assert [vocabulary.number(w) for w in ("Good", "film", "Film", "bad", "")] == [
        vocabulary.words.index("good"),
        vocabulary.words.index("film"),
        vocabulary.words.index("Film"),
        0,
        0,
    ]
    assert "good" in vocabulary
    assert "bad" not in vocabulary


def test_equal_words_are_one_tensor() -> None:
    vocabulary = Vocabulary.build(["a", "b"])
    tree = vocabulary.encode_tree(parse_tree("(3 (2 a) (3 (2 b) (2 a)))"))
    assert tree.left.word is tree.right.right.word
    assert tree.left.label is tree.right.left.label
    assert tree.left.word.shape == ()
    assert tree.left.word.dtype == torch.int64
    assert [int(leaf.word) for leaf in tree.leaves()] == [vocabulary.number(w) for w in ("a", "b", "a")]
    assert [int(node.label) for node in tree.postorder()] == [2, 2, 2, 3, 3]


def test_encoded_trees_are_pickled_small() -> None:
    vocabulary = Vocabulary.build([f"w{i}" for i in range(5000)])
    tree = vocabulary.encode_tree(parse_tree("(3 (2 w1) (3 (2 w2) (2 w1)))"))
    data = pickle.dumps(tree)
    assert len(data) < 5000  # no tensor drags the others' storage along
    again = pickle.loads(data)
    assert again.left.word is again.right.right.word
    assert int(again.left.word) == vocabulary.number("w1")


def test_a_vocabulary_has_each_word_once() -> None:
    with pytest.raises(ValueError, match="each word once"):
        Vocabulary(["a", "a"])
    with pytest.raises(ValueError, match="at least the unknown word"):
        Vocabulary([])


@pytest.mark.gpu
def test_on_a_device() -> None:
    vocabulary = Vocabulary.build(["a", "b"], device="cuda")
    tensor = vocabulary.tensor("a")
    assert (tensor.device.type, int(tensor), tensor.shape) == ("cuda", vocabulary.number("a"), ())
