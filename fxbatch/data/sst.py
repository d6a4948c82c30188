r"""PTB-bracket trees, as the Stanford Sentiment Treebank has them: one binary tree per line, one label per node.

In: text such as `(3 (2 It) (4 works))`. Out: Trees with labels and words as they stand in the file;
`Vocabulary.encode` (vocabulary.py) makes tensors of both.

    tree = parse_tree("(3 (2 It) (4 works))")
    tree.label, tree.right.word        # 3, 'works'
    splits = read_sst(folder)          # {"train": [...], "dev": [...], "test": [...]}

No recursion: a tree may be as deep as memory allows. Escapes are those of the Penn Treebank: `-LRB-` and
`-RRB-` for brackets (also `-LSB-`, `-LCB-` ...), a backslash before `/` and `*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from fxbatch.data.lines import read_lines
from fxbatch.data.paths import file_in
from fxbatch.errors import DataError

Label = TypeVar("Label")
Word = TypeVar("Word")

CLASSES = 5
SPLITS = ("train", "dev", "test")

# Blanks and tabs separate, no other white space: the treebank has words with a no-break space in them.
_TOKEN = re.compile(r"[()]|[^ \t()]+")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
_ESCAPES = {text: name for name, text in _BRACKETS.items()}


class Tree(Generic[Label, Word]):
    """A node of a binary tree: a leaf has a word and no subtrees, an inner node has two and no word.

    Read from a file, `label` is an int and `word` a str; encoded, both are 0-dim int64 tensors.
    """

    __slots__ = ("label", "left", "right", "word")

    def __init__(
        self,
        label: Label,
        word: Word | None = None,
        left: Tree[Label, Word] | None = None,
        right: Tree[Label, Word] | None = None,
    ) -> None:
        self.label = label
        self.word = word
        self.left = left
        self.right = right

    @property
    def is_leaf(self) -> bool:
        return self.left is None

    def postorder(self) -> Iterator[Tree[Label, Word]]:
        """All nodes, subtrees before their parents, left before right."""
        pending: list[tuple[Tree[Label, Word], bool]] = [(self, False)]
        while pending:
            node, ready = pending.pop()
            if ready or node.left is None or node.right is None:
                yield node
            else:
                pending += [(node, True), (node.right, False), (node.left, False)]

    def leaves(self) -> Iterator[Tree[Label, Word]]:
        """The leaves, left to right."""
        return (node for node in self.postorder() if node.left is None)

    @property
    def nodes(self) -> int:
        """How many nodes the tree has."""
        return sum(1 for _ in self.postorder())

    @property
    def depth(self) -> int:
        """Edges on the longest path from the root to a leaf."""
        heights: list[int] = []
        for node in self.postorder():
            if node.left is None:
                heights.append(0)
            else:
                right = heights.pop()
                heights.append(1 + max(heights.pop(), right))
        return heights[0]

    def __str__(self) -> str:
        """The bracket text, which parses back: `str(parse_tree(s)) == s` for s with single spaces."""
        parts: list[str] = []
        pending: list[Tree[Label, Word] | str] = [self]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                parts.append(item)
            elif item.left is None or item.right is None:
                parts.append(f"({item.label} {escape_word(str(item.word))})")
            else:
                parts.append(f"({item.label} ")
                pending += [")", item.right, " ", item.left]
        return "".join(parts)

    def __repr__(self) -> str:
        text = str(self)
        return f"Tree({text if len(text) <= 60 else text[:57] + '...'})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled (and deep-copied) as columns: pickle's own recursion would end at depth 300."""
        nodes = list(self.postorder())
        return _from_columns, ([n.label for n in nodes], [n.word for n in nodes], [n.is_leaf for n in nodes])


def _from_columns(labels: list[Any], words: list[Any], leaf: list[bool]) -> Tree[Any, Any]:
    stack: list[Tree[Any, Any]] = []
    for label, word, is_leaf in zip(labels, words, leaf, strict=True):
        if is_leaf:
            stack.append(Tree(label, word))
        else:
            right = stack.pop()
            stack.append(Tree(label, word, stack.pop(), right))
    return stack.pop()


def unescape_word(word: str) -> str:
    r"""The word as it was written: `-LRB-` is `(`, `co-writer\/director` is `co-writer/director`."""
    return _BRACKETS.get(word, word).replace("\\/", "/").replace("\\*", "*")


def escape_word(word: str) -> str:
    r"""The inverse of `unescape_word`."""
    return _ESCAPES.get(word, word).replace("/", "\\/").replace("*", "\\*")


def parse_tree(text: str, *, classes: int = CLASSES, where: str = "tree") -> Tree[int, str]:
    """The tree that `text` describes; DataError with `where` and the column (from 1) otherwise."""

    def fail(position: int, message: str) -> DataError:
        return DataError(f"{where}:{position + 1}: {message}")

    # An open bracket is a frame: [label, word, left, right, its position].
    frames: list[list[Any]] = []
    root: Tree[int, str] | None = None
    for match in _TOKEN.finditer(text):
        token, position = match.group(), match.start()
        if root is not None:
            raise fail(position, f"text after the end of the tree: {_short(text[position:])}")
        if token == "(":
            if frames and frames[-1][0] is None:
                raise fail(position, f"expected a label 0-{classes - 1} after '(', got '('")
            if frames and frames[-1][1] is not None:
                raise fail(position, f"expected ')' after the word {frames[-1][1]!r}, got '('")
            if frames and frames[-1][3] is not None:
                raise fail(position, "a node has two subtrees, here a third begins")
            frames.append([None, None, None, None, position])
        elif not frames:
            raise fail(position, f"expected '(', got {_short(token)}")
        elif token == ")":
            node = _close(frames.pop(), fail, position)
            if not frames:
                root = node
            else:
                frames[-1][2 if frames[-1][2] is None else 3] = node
        elif frames[-1][0] is None:
            if not (token.isascii() and token.isdigit() and int(token) < classes):
                raise fail(position, f"expected a label 0-{classes - 1}, got {_short(token)}")
            frames[-1][0] = int(token)
        elif frames[-1][1] is not None or frames[-1][2] is not None:
            expected = "')'" if frames[-1][1] is not None or frames[-1][3] is not None else "'('"
            raise fail(position, f"expected {expected}, got the word {_short(token)}")
        else:
            frames[-1][1] = unescape_word(token)
    if frames:
        opened = frames[-1][4] + 1
        raise fail(len(text), f"the line ends inside the bracket opened at column {opened}: ')' is missing")
    if root is None:
        raise fail(0, "expected '(', got an empty line")
    return root


def _close(frame: list[Any], fail: Any, position: int) -> Tree[int, str]:
    label, word, left, right, _ = frame
    if label is None:
        raise fail(position, "expected a label after '(', got ')'")
    if word is None and left is None:
        raise fail(position, "a node without word and subtrees")
    if left is not None and right is None:
        raise fail(position, "a node has two subtrees, here there is one")
    return Tree(label, word, left, right)


def _short(text: str) -> str:
    return repr(text if len(text) <= 20 else text[:20] + "...")


def read_trees(path: Path, *, classes: int = CLASSES) -> list[Tree[int, str]]:
    """The trees of a file, one a line (empty lines are skipped), plain or gzip.

    DataError with file, line and column where one is malformed.
    """
    trees = [
        parse_tree(line, classes=classes, where=f"{path}:{number}")
        for number, line in read_lines(path)
        if line.strip()
    ]
    if not trees:
        raise DataError(f"{path}: no trees in this file")
    return trees


def read_sst(folder: Path) -> dict[str, list[Tree[int, str]]]:
    """The three splits of a treebank folder with train.txt, dev.txt, test.txt (or .txt.gz)."""
    return {split: read_trees(file_in(folder, f"{split}.txt")) for split in SPLITS}
