"""The first records of real data: tests read files in the real formats, and parse no more of them than they use.

sample(Path("data"), folder)      # folder/sst/train.txt, folder/ud_ewt/en_ewt-ud-train.conllu, ...
"""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path

from fxbatch.data.lines import read_lines
from fxbatch.data.paths import file_in
from fxbatch.errors import DataError

_RECORDS = 400  # of a file: a line each of trees, lines up to an empty one elsewhere
_FILES = {
    "sst": ("train.txt", "dev.txt", "test.txt"),
    "ud_ewt": ("en_ewt-ud-train.conllu", "en_ewt-ud-dev.conllu", "en_ewt-ud-test.conllu"),
    "ner": tuple(
        f"{part}.conll"
        for part in ("wikiner10k/train", "wikigold/wikigold", "wnut17/train", "wnut17/dev", "wnut17/test")
    ),
}


def sample(whole: Path, folder: Path) -> None:
    """Write the first records of the data sets that `whole` has; what is read without parsing is linked."""
    for name, files in _FILES.items():
        for file in files:
            with contextlib.suppress(DataError):  # a part that is not there
                text = _first(file_in(whole / name, file), blocks=name != "sst")
                target = folder / name / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
    if (whole / "molecules").is_dir():
        (folder / "molecules").symlink_to((whole / "molecules").resolve())


def _first(path: Path, *, blocks: bool) -> str:
    """The first records; of trees, which are sorted by their label, some from all over the file."""
    lines = [line for _, line in read_lines(path)]
    if not blocks:
        return "".join(f"{line}\n" for line in lines[:: max(len(lines) // _RECORDS, 1)])
    ends = islice((k for k, line in enumerate(lines) if not line.strip()), _RECORDS - 1, None)
    return "".join(f"{line}\n" for line in lines[: next(ends, len(lines)) + 1])
