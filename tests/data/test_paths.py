"""Where a data set is looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbatch.data.paths import cache_folder, file_in, find_data, locate
from fxbatch.errors import DataError


def fill(folder: Path, suffix: str = "") -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (folder / f"{split}.txt{suffix}").write_text("(0 Bad)\n")
    return folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty world: its own working folder, cache folder and variable."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FXBATCH_DATA", str(tmp_path / "variable"))
    return tmp_path


def test_order_of_search(places: Path) -> None:
    assert locate("sst") is None
    cached = fill(places / "cache" / "fxbatch" / "sst")
    assert locate("sst") == cached
    fill(places / "here" / "data" / "sst")
    assert locate("sst") == Path("data/sst")
    from_variable = fill(places / "variable" / "sst")
    assert locate("sst") == from_variable
    given = fill(places / "given")
    assert locate("sst", given) == given


def test_gzip_and_plain_files_may_be_mixed(places: Path) -> None:
    folder = fill(places / "variable" / "sst", ".gz")
    (folder / "dev.txt").write_text("(1 So)\n")
    assert locate("sst") == folder
    assert file_in(folder, "dev.txt") == folder / "dev.txt"
    assert file_in(folder, "train.txt") == folder / "train.txt.gz"
    with pytest.raises(DataError, match=r"more\.txt: no such file"):
        file_in(folder, "more.txt")


def test_half_a_treebank_is_none(places: Path) -> None:
    (fill(places / "variable" / "sst") / "dev.txt").unlink()
    assert locate("sst") is None


def test_a_given_folder_is_never_passed_over(places: Path) -> None:
    fill(places / "cache" / "fxbatch" / "sst")
    with pytest.raises(DataError, match=r"empty: no sst here; expected train\.txt, dev\.txt, test\.txt"):
        locate("sst", places / "empty")


def test_find_data_names_what_was_searched(places: Path) -> None:
    with pytest.raises(DataError, match=r"sst was not found in .*FXBATCH_DATA.*\./data.*cache.*data get sst"):
        find_data("sst")
    with pytest.raises(DataError, match=r"ud_ewt was not found in .*universaldependencies"):
        find_data("ud_ewt")
    assert cache_folder() == places / "cache" / "fxbatch"
