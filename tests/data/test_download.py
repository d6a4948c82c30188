"""The download against a local server: progress, checksums, resuming, and every way to fail."""

from __future__ import annotations

import functools
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fxbatch.data import download
from fxbatch.data.download import SST_SHA256, download_sst
from fxbatch.errors import DataError

CONTENT = {name: f"(0 Bad) {name}\n".encode() * 5000 for name in ("train.txt", "dev.txt", "test.txt")}
EXPECTED = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


def archive(content: dict[str, bytes] = CONTENT) -> bytes:
    """A stored (not compressed) zip as the treebank's site has it, with more in it than we want."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as unzipped:
        unzipped.writestr("trees/README.txt", "more")
        unzipped.writestr("../../evil.txt", "outside")
        for name, data in content.items():
            unzipped.writestr(f"trees/{name}", data)
    return buffer.getvalue()


class Site:
    """What the server has and does; `requests` are the Range headers that it met."""

    def __init__(self) -> None:
        self.body = archive()
        self.tag = '"one"'
        self.break_after: int | None = None
        self.status = 200
        self.ranges = True
        self.requests: list[str | None] = []
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        site = self.site
        asked = self.headers.get("Range")
        site.requests.append(asked)
        if site.status != 200:
            self.send_error(site.status)
            return
        start = 0
        if asked and site.ranges and self.headers.get("If-Range") == site.tag:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(site.body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("ETag", site.tag)
        self.send_header("Content-Length", str(len(site.body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(site.body) - 1}/{len(site.body)}")
        self.end_headers()
        end = len(site.body) if site.break_after is None else start + site.break_after
        self.wfile.write(site.body[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, found))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}/trees.zip"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_downloads_checks_and_unpacks_three_files(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    download_sst(
        tmp_path / "sst",
        url=site.url,
        expected=EXPECTED,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert files(tmp_path) == CONTENT  # nothing beside or above, no .part left
    assert seen[0] == (0, len(site.body))
    assert seen[-1] == (len(site.body), len(site.body))
    assert seen == sorted(seen)


def test_nothing_to_do_asks_nobody(site: Site, tmp_path: Path) -> None:
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert site.requests == [None]


def test_a_damaged_file_is_fetched_again(site: Site, tmp_path: Path) -> None:
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    (tmp_path / "dev.txt").write_text("damaged")
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert files(tmp_path) == CONTENT


def test_an_interrupted_download_goes_on(site: Site, tmp_path: Path) -> None:
    site.break_after = 100_000
    with pytest.raises(DataError, match=r"ended after 100000 of \d+ bytes; run it again to go on"):
        download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert not (tmp_path / "train.txt").exists()
    site.break_after = None
    first: list[int] = []
    download_sst(
        tmp_path, url=site.url, expected=EXPECTED, on_progress=lambda done, total: first.append(done)
    )
    assert (site.requests[-1], first[0]) == ("bytes=100000-", 100_000)
    assert files(tmp_path) == CONTENT


@pytest.mark.parametrize("why", ["another archive", "no ranges", "no validator"])
def test_it_starts_afresh_when_it_can_not_go_on(site: Site, tmp_path: Path, why: str) -> None:
    site.break_after = 100_000
    site.tag = 'W/"weak"' if why == "no validator" else '"one"'
    with pytest.raises(DataError, match="run it again"):
        download_sst(tmp_path, url=site.url, expected=EXPECTED)
    site.break_after = None
    if why == "another archive":
        site.tag, site.body = '"two"', archive({**CONTENT, "more.txt": b"x" * 1000})
    site.ranges = why != "no ranges"
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert files(tmp_path) == CONTENT


def test_a_whole_part_is_used(site: Site, tmp_path: Path) -> None:
    (tmp_path / "trees.zip.part").write_bytes(site.body)
    (tmp_path / "trees.zip.part.etag").write_text(site.tag)
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert files(tmp_path) == CONTENT


def test_wrong_sums_leave_nothing(site: Site, tmp_path: Path) -> None:
    site.body = archive({**CONTENT, "test.txt": b"(0 Evil)\n"})
    with pytest.raises(
        DataError, match=r"test\.txt has sha256 [0-9a-f]{64}, expected " + EXPECTED["test.txt"]
    ):
        download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert files(tmp_path) == {}
    site.body, site.tag = archive(), '"two"'
    download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert files(tmp_path) == CONTENT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>moved</html>", "not a readable zip archive"),
        (archive({"train.txt": CONTENT["train.txt"]}), r"the archive has no dev\.txt"),
    ],
)
def test_something_else_than_the_archive(site: Site, tmp_path: Path, body: bytes, message: str) -> None:
    site.body = body
    with pytest.raises(DataError, match=message):
        download_sst(tmp_path, url=site.url, expected=EXPECTED)
    assert files(tmp_path) == {}


def test_the_server_refuses(site: Site, tmp_path: Path) -> None:
    site.status = 404
    with pytest.raises(DataError, match="the server answers 404 Not Found"):
        download_sst(tmp_path, url=site.url, expected=EXPECTED)


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no connection"):
        download_sst(tmp_path, url="http://127.0.0.1:9/trees.zip", expected=EXPECTED)
    with pytest.raises(DataError, match="not a URL"):
        download_sst(tmp_path, url="trees.zip", expected=EXPECTED)


def test_endless_answers_end(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LARGEST", 1 << 16)
    with pytest.raises(DataError, match="not the treebank"):
        download_sst(tmp_path, url=site.url, expected=EXPECTED)


def test_the_expected_sums_are_those_of_the_treebank(whole_data: Path) -> None:
    for name in ("dev.txt", "test.txt"):
        assert hashlib.sha256((whole_data / "sst" / name).read_bytes()).hexdigest() == SST_SHA256[name]
