"""Where data sets are: the given folder, then `FXBATCH_DATA`, then `./data`, then the user's cache folder.

A data set is a folder of its name with known files in it. In: a data set's name. Out: its folder.

    find_data("sst")                    # PosixPath('data/sst'); DataError where none is found
    find_data("sst", "/my/treebanks")   # DataError where it is not there
    locate("sst")                       # the folder, or None
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fxbatch.errors import DataError, MissingDataError
from fxbatch.user_cache import cache_folder


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set that the examples use; each of `files` is there by one of its alternative names."""

    name: str
    title: str
    files: tuple[tuple[str, ...], ...]
    source: str


def _either(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name, f"{name}.gz") for name in names)


DATA_SETS = {
    d.name: d
    for d in (
        DataSet(
            "sst",
            "Stanford Sentiment Treebank (Socher et al. 2013)",
            _either("train.txt", "dev.txt", "test.txt"),
            "https://nlp.stanford.edu/sentiment/",
        ),
        DataSet(
            "ud_ewt",
            "Universal Dependencies, English Web Treebank",
            _either("en_ewt-ud-train.conllu", "en_ewt-ud-dev.conllu", "en_ewt-ud-test.conllu"),
            "https://universaldependencies.org/treebanks/en_ewt/",
        ),
        DataSet(
            "ner",
            "named entities: WikiNER sample, Wikigold, WNUT 17",
            (("wikigold/wikigold.conll",), ("wnut17/train.conll",)),
            "https://github.com/leondz/emerging_entities_17",
        ),
        DataSet(
            "molecules",
            "ESOL and QM9 molecules as graphs",
            (("graphs_delaney.npz",), ("graphs_qm9.npz",)),
            "https://moleculenet.org/",
        ),
    )
}


def search_folders(given: str | os.PathLike[str] | None = None) -> list[tuple[str, Path]]:
    """(why, folder) in the order of search; `given` alone where it is given."""
    if given is not None:
        return [("--data", Path(given))]
    folders = [("./data", Path("data")), ("cache", cache_folder())]
    if variable := os.environ.get("FXBATCH_DATA"):
        folders.insert(0, ("FXBATCH_DATA", Path(variable)))
    return folders


def locate(name: str, given: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of data set `name` with all of its files, or None where no searched folder has it.

    A searched folder has it as a subfolder `name`, or is that folder itself. When `given` is a folder that
    lacks it, that is a DataError: what the user named is never passed over silently.
    """
    data_set = DATA_SETS[name]
    for _, folder in search_folders(given):
        for candidate in (folder / name, folder):
            if all(any((candidate / f).is_file() for f in names) for names in data_set.files):
                return candidate
    if given is not None:
        wanted = ", ".join(names[0] for names in data_set.files)
        raise MissingDataError(f"{given}: no {name} here; expected {wanted} in it or in {Path(given) / name}")
    return None


def find_data(name: str, given: str | os.PathLike[str] | None = None) -> Path:
    """Like `locate`, but a DataError that names the searched folders where no folder has the data set."""
    folder = locate(name, given)
    if folder is None:
        searched = ", ".join(f"{folder} ({why})" for why, folder in search_folders())
        get = (
            "; `fxbatch data get sst` downloads it"
            if name == "sst"
            else f"; it comes from {DATA_SETS[name].source}"
        )
        raise MissingDataError(f"{name} was not found in {searched}{get}")
    return folder


def file_in(folder: Path, stem: str) -> Path:
    """`folder/stem` or `folder/stem.gz`, whichever is there; DataError where neither is."""
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / stem}: no such file (nor {stem}.gz)")
