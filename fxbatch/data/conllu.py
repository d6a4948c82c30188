"""Universal Dependencies treebanks: CoNLL-U files, plain or gzip.

In: a file of sentences, ten tab-separated columns a word. Out: Sentences of Tokens.

    sentences = read_conllu(find_data("ud_ewt") / "en_ewt-ud-dev.conllu.gz")
    [token.form for token in sentences[0].tokens]

Source: https://universaldependencies.org/format.html. Multiword ranges (`1-2`) and empty nodes (`8.1`) are
no words of the basic tree and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fxbatch.data.lines import read_lines
from fxbatch.errors import DataError

COLUMNS = 10


@dataclass(frozen=True, slots=True)
class Token:
    """A word of the basic tree; `head` is 0 for the root, else the number of a word, counted from 1."""

    form: str
    lemma: str
    upos: str
    xpos: str
    features: str
    head: int
    relation: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """The words of a sentence in order; `comments` are its `# key = value` lines."""

    tokens: tuple[Token, ...]
    comments: dict[str, str]

    def __len__(self) -> int:
        return len(self.tokens)


def read_conllu(path: Path) -> list[Sentence]:
    """The sentences of a file; DataError with file and line where it is malformed."""
    sentences: list[Sentence] = []
    tokens: list[Token] = []
    comments: dict[str, str] = {}
    numbers: list[int] = []
    for number, line in read_lines(path):
        if line.startswith("#") and not tokens:
            key, _, value = line[1:].partition("=")
            comments[key.strip()] = value.strip()
        elif not line.strip():
            if tokens:
                sentences.append(_sentence(tokens, comments, path, numbers))
            tokens, comments, numbers = [], {}, []
        else:
            token = _token(line, len(tokens) + 1, f"{path}:{number}")
            if token is not None:
                tokens.append(token)
                numbers.append(number)
    if tokens:
        sentences.append(_sentence(tokens, comments, path, numbers))
    if not sentences:
        raise DataError(f"{path}: no sentences in this file")
    return sentences


def _token(line: str, expected: int, where: str) -> Token | None:
    columns = line.split("\t")
    if len(columns) != COLUMNS:
        raise DataError(f"{where}: expected {COLUMNS} tab-separated columns, got {len(columns)}")
    number, form, lemma, upos, xpos, features, head, relation, _, _ = columns
    if "-" in number or "." in number:
        return None
    if number != str(expected):
        raise DataError(f"{where}: expected word {expected}, got {number!r} in column 1")
    if not head.isdecimal():
        raise DataError(f"{where}: expected a word's number in column 7 (HEAD), got {head!r}")
    return Token(form, lemma, upos, xpos, features, int(head), relation)


def _sentence(tokens: list[Token], comments: dict[str, str], path: Path, numbers: list[int]) -> Sentence:
    for position, token in enumerate(tokens, 1):
        if token.head > len(tokens) or token.head == position:
            found = f"word {position} ({token.form}) has head {token.head}"
            raise DataError(f"{path}:{numbers[position - 1]}: {found} in a sentence of {len(tokens)} words")
    return Sentence(tuple(tokens), comments)
