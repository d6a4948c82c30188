"""`fxbatch data`: list, where, get."""

from __future__ import annotations

from pathlib import Path

import pytest
from fxbatch_cli import data as data_command
from fxbatch_cli.main import main

from fxbatch.errors import DataError

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A world without data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FXBATCH_DATA", raising=False)
    return tmp_path


def test_list_and_where(empty: Path, capsys: Captured) -> None:
    assert main(["data", "list"]) == 0
    got = capsys.readouterr()
    assert [line.split()[0] for line in got.out.splitlines()] == ["name", "molecules", "ner", "sst", "ud_ewt"]
    assert got.out.count("not found") == 4
    assert "cache" in got.err
    assert main(["data", "where", "sst"]) == 3
    assert "data get sst" in capsys.readouterr().err

    folder = empty / "mine" / "sst"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (folder / f"{split}.txt").write_text("(0 Bad)\n")
    assert main(["data", "where", "sst", "--data", str(empty / "mine")]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["data", "list", "--data", str(empty / "mine")]) == 0
    assert capsys.readouterr().out.count("not found") == 3


def test_no_address_is_cut_at_80_columns(
    empty: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["data", "list"]) == 0
    got = capsys.readouterr()
    assert max(map(len, got.out.splitlines())) <= 80 and "…" not in got.out
    for name, data_set in data_command.DATA_SETS.items():
        assert f"{name}: {data_set.source}\n" in got.err


def test_get_fills_the_cache_and_prints_the_folder(
    empty: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str]] = []

    def download(folder: Path, *, url: str, on_progress: object) -> None:
        on_progress(5, 10)  # type: ignore[operator]
        asked.append((folder, url))

    monkeypatch.setattr(data_command, "download_sst", download)
    assert main(["data", "get", "sst"]) == 0
    assert main(["data", "get", "sst", "--to", "there", "--url", "http://mirror/x.zip"]) == 0
    assert asked == [
        (empty / "cache" / "fxbatch" / "sst", data_command.SST_URL),
        (Path("there"), "http://mirror/x.zip"),
    ]
    assert capsys.readouterr().out.splitlines() == [str(asked[0][0]), "there"]


def test_get_fails_with_status_3(empty: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(folder: Path, **options: object) -> None:
        raise DataError("http://x: no connection: refused")

    monkeypatch.setattr(data_command, "download_sst", download)
    assert main(["data", "get", "sst"]) == 3
    assert "fxbatch: http://x: no connection: refused" in capsys.readouterr().err
