"""Named-entity files in IOB2: `token<TAB>tag` a line, an empty line between sentences; plain or gzip.

sentences = read_ner(find_data("ner") / "wnut17" / "train.conll")
sentences[0].forms, sentences[0].tags      # ('@paulwalk', ...), ('O', ...)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxbatch.data.lines import read_lines
from fxbatch.errors import DataError

_TAG = re.compile(r"O|[BI]-\S+")


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """Words and their tags, equally many."""

    forms: tuple[str, ...]
    tags: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.forms)


def read_ner(path: Path) -> list[TaggedSentence]:
    """The sentences of a file; DataError with file and line where it is malformed."""
    sentences: list[TaggedSentence] = []
    forms: list[str] = []
    tags: list[str] = []
    for number, line in read_lines(path):
        if line.strip():
            form, tag = _word(line, f"{path}:{number}")
            forms.append(form)
            tags.append(tag)
        elif forms:
            sentences.append(TaggedSentence(tuple(forms), tuple(tags)))
            forms, tags = [], []
    if forms:
        sentences.append(TaggedSentence(tuple(forms), tuple(tags)))
    if not sentences:
        raise DataError(f"{path}: no sentences in this file")
    return sentences


def _word(line: str, where: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2 or not columns[0]:
        raise DataError(f"{where}: expected `token<TAB>tag`, got {line[:40]!r}")
    form, tag = columns[0], columns[1].strip()
    if not _TAG.fullmatch(tag):
        raise DataError(f"{where}: expected a tag O, B-type or I-type, got {tag!r}")
    return form, tag


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first word, word after the last) of each entity that IOB2 tags describe.

    An I- that continues nothing of its type begins an entity, as the CoNLL 2003 scorer reads it.
    """
    found: list[tuple[str, int, int]] = []
    kind, start = "", 0
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind and (prefix != "I" or name != kind):
            found.append((kind, start, position))
            kind = ""
        if prefix != "O" and not kind:
            kind, start = name, position
    return found
