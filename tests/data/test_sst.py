r"""Bracket trees: what is read, and the line and column of what is not."""

from __future__ import annotations

import copy
import gzip
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxbatch.data.sst import Tree, parse_tree, read_sst, read_trees
from fxbatch.errors import DataError


def test_reads_labels_words_and_sides() -> None:
    tree = parse_tree("(3 (2 It) (4 (3 really) (4 works)))")
    assert (tree.label, tree.left.label, tree.left.word) == (3, 2, "It")
    assert [leaf.word for leaf in tree.leaves()] == ["It", "really", "works"]
    assert (tree.nodes, tree.depth, tree.is_leaf, tree.left.is_leaf) == (5, 2, False, True)


def test_a_single_leaf_is_a_tree() -> None:
    tree = parse_tree("(0 Bad)")
    assert (tree.label, tree.word, tree.is_leaf, tree.depth) == (0, "Bad", True, 0)


def test_escapes() -> None:
    tree = parse_tree(r"(2 (2 -LRB-) (2 (2 co-writer\/director) (2 (2 \*) (2 -RRB-))))")
    assert [leaf.word for leaf in tree.leaves()] == ["(", "co-writer/director", "*", ")"]
    assert str(tree) == r"(2 (2 -LRB-) (2 (2 co-writer\/director) (2 (2 \*) (2 -RRB-))))"


def test_no_break_spaces_belong_to_words() -> None:
    assert parse_tree("(2 7\u00a01\\/2)").word == "7\u00a01/2"


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "got an empty line"),
        ("hello", 1, "expected '(', got 'hello'"),
        (")", 1, "expected '(', got ')'"),
        ("(3 (2 a) (2 b)", 15, "inside the bracket opened at column 1: ')' is missing"),
        ("(3 (2 a) (2 b)))", 16, "text after the end of the tree: ')'"),
        ("(3 a) (2 b)", 7, "text after the end of the tree"),
        ("(7 a)", 2, "expected a label 0-4, got '7'"),
        ("(-1 a)", 2, "expected a label 0-4, got '-1'"),
        ("(x a)", 2, "expected a label 0-4, got 'x'"),
        ("(\u00b2 a)", 2, "expected a label 0-4"),
        ("((2 a) (2 b))", 2, "expected a label 0-4 after '('"),
        ("()", 2, "expected a label after '('"),
        ("(3)", 3, "a node without word and subtrees"),
        ("(3 (2 a))", 9, "a node has two subtrees, here there is one"),
        ("(3 (2 a) (2 b) (2 c))", 16, "a third begins"),
        ("(3 a b)", 6, "expected ')', got the word 'b'"),
        ("(3 a (2 b))", 6, "expected ')' after the word 'a'"),
        ("(3 (2 a) b)", 10, "expected '(', got the word 'b'"),
        ("(3 (2 a) (2 b) c)", 16, "expected ')', got the word 'c'"),
    ],
)
def test_malformed_trees_name_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_tree(text, where="dev.txt:12")
    assert str(caught.value).startswith(f"dev.txt:12:{column}: ")
    assert message in str(caught.value)


def trees() -> st.SearchStrategy[Tree[int, str]]:
    words = st.text(
        st.characters(codec="utf-8", exclude_characters=" \t\r\n\\()"), min_size=1, max_size=6
    ).filter(lambda w: not (w.startswith("-") and w.endswith("-")))
    labels = st.integers(0, 4)
    return st.recursive(
        st.builds(Tree, labels, words),
        lambda parts: st.builds(lambda label, a, b: Tree(label, None, a, b), labels, parts, parts),
        max_leaves=20,
    )


@settings(max_examples=40)
@given(trees())
def test_text_parses_back(tree: Tree[int, str]) -> None:
    again = parse_tree(str(tree))
    assert str(again) == str(tree)
    assert [leaf.word for leaf in again.leaves()] == [leaf.word for leaf in tree.leaves()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_depth_is_limited_by_memory_only(side: str) -> None:
    depth = 5_000  # five times what Python's stack takes
    text = "(1 (2 a) " * depth + "(1 b)" + ")" * depth
    if side == "left":
        text = "(1 " * depth + "(1 b)" + " (2 a))" * depth
    tree = parse_tree(text)
    assert tree.depth == depth
    assert str(tree) == text
    assert str(pickle.loads(pickle.dumps(tree))) == text
    assert copy.deepcopy(tree).nodes == 2 * depth + 1


def test_files_plain_and_gzip_with_empty_lines(tmp_path: Path) -> None:
    text = "(3 (2 It) (4 works))\r\n\n(0 Bad)\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "a.txt.gz"):
        assert [str(t) for t in read_trees(tmp_path / name)] == ["(3 (2 It) (4 works))", "(0 Bad)"]


def test_a_file_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "dev.txt"
    path.write_text("(0 Bad)\n\n(3 (2 It) (9 works))\n")
    with pytest.raises(DataError, match=r"dev\.txt:3:12: expected a label 0-4, got '9'"):
        read_trees(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no trees"),
        (b"(0 Bad)\n(0 \xff)\n", ":2:4: not UTF-8"),
        (gzip.compress(b"(0 Bad)\n" * 5000)[:-20], "broken gzip file"),
    ],
    ids=["empty", "not UTF-8", "broken gzip"],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "dev.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_trees(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_trees(tmp_path / "none.txt")
    with pytest.raises(DataError, match="can't be read"):
        read_trees(tmp_path)


def test_the_real_treebank(whole_data: Path) -> None:
    splits = read_sst(whole_data / "sst")
    assert {split: len(found) for split, found in splits.items()} == {
        "train": 8544,
        "dev": 1101,
        "test": 2210,
    }
    lines = (whole_data / "sst" / "dev.txt").read_text(encoding="utf-8").split("\n")
    assert [str(tree) for tree in splits["dev"]] == lines[:-1]
