"""Download of the Stanford Sentiment Treebank from its own site, checked, resumable, never half there.

In: a folder, a URL. Out: train.txt, dev.txt and test.txt in that folder, with the expected sha256.

    download_sst(cache_folder() / "sst", on_progress=lambda done, total: ...)

The archive grows as `<name>.part` beside the files; an interrupted download goes on from its end when the
server can (and the archive is still the same one there), else from the start.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from fxbatch.errors import DataError

SST_URL = "https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
SST_SHA256 = {
    "train.txt": "e2f3f41b0b1e6d4dddc0effe3bfc2d27ed8928079aa9a03d652311614fc5feb7",
    "dev.txt": "0e9336aed6e4730e19f58d00a77b3f0297efdb755f7b5e598c98a05e3f97ea40",
    "test.txt": "6e54806dee95cf80cd918e7dfb3f6770f6df24bf826f289a4d1f709e1c8f6761",
}

LARGEST = 64 << 20  # bytes of one unpacked file: the treebank's largest has 2.2 MB
TIMEOUT = 30.0  # seconds without an answer
_CHUNK = 1 << 16

OnProgress = Callable[[int, int | None], None]


def download_sst(
    folder: Path,
    *,
    url: str = SST_URL,
    expected: Mapping[str, str] = SST_SHA256,
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Fill `folder` with the files named in `expected` (name -> sha256 in hex); nothing to do where they are.

    `on_progress` is called with bytes done and bytes in all (None where the server doesn't say). DataError
    on a failed connection, a broken archive or a wrong checksum; files with a wrong sum never appear.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url}: not a URL; expected one that begins with https:// or http://")
    if all(_sum_of(folder / name) == total for name, total in expected.items()):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = PurePosixPath(urllib.parse.urlsplit(url).path).name or "archive"
        archive = folder / f"{name}.part"
        fetch(url, archive, on_progress=on_progress)
        unpack(archive, folder, expected, source=url)
    except OSError as error:
        raise DataError(f"{folder}: can't be written: {error.strerror or error}") from error
    archive.unlink(missing_ok=True)
    _validator_file(archive).unlink(missing_ok=True)


def fetch(url: str, part: Path, *, on_progress: OnProgress) -> None:
    """Make `part` the whole of what `url` has, going on from its end where that is possible."""
    start = part.stat().st_size if part.exists() else 0
    validator = _read_text(_validator_file(part))
    request = urllib.request.Request(url, headers={"User-Agent": "fxbatch", "Accept-Encoding": "identity"})
    if start and validator:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", validator)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
            if goes_on and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise DataError(f"{url}: the server sent another range than it was asked for")
            if not goes_on:
                start = 0
            # Only a strong validator proves that two ranges are of one file.
            tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            _validator_file(part).write_text("" if tag.startswith("W/") else tag)
            length = response.headers.get("Content-Length")
            total = start + int(length) if length and length.isdigit() else None
            with part.open("ab" if goes_on else "wb") as stream:
                _copy(response, stream, start, total, on_progress)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            # What we have is as long as the file, or longer: let the checksums say what it is.
            return
        raise DataError(f"{url}: the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataError(f"{url}: no connection: {error.reason}") from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise DataError(f"{url}: the connection broke off ({error}); run it again to go on") from error
    except ValueError as error:  # such as http://[::1
        raise DataError(f"{url}: not a URL: {error}") from error
    if total is not None and part.stat().st_size != total:
        done = part.stat().st_size
        raise DataError(f"{url}: the connection ended after {done} of {total} bytes; run it again to go on")


def _copy(
    response: http.client.HTTPResponse, stream: object, done: int, total: int | None, on_progress: OnProgress
) -> None:
    on_progress(done, total)
    while chunk := response.read(_CHUNK):
        stream.write(chunk)  # type: ignore[attr-defined]  # a binary file
        done += len(chunk)
        if done > LARGEST:
            raise DataError(f"the archive is longer than {LARGEST >> 20} MB: not the treebank")
        on_progress(done, total)


def unpack(archive: Path, folder: Path, expected: Mapping[str, str], *, source: str) -> None:
    """Write the members of `archive` that `expected` names to `folder`, all of them checked before the first.

    A member counts by its file name, wherever it lies in the archive; nothing else is unpacked. A broken
    archive, or one with wrong sums, is deleted, so that the next attempt starts afresh.
    """
    try:
        contents = _read_members(archive, expected, source)
    except DataError:
        archive.unlink(missing_ok=True)
        _validator_file(archive).unlink(missing_ok=True)
        raise
    for name, content in contents.items():
        _write_atomically(folder / name, content)


def _read_members(archive: Path, expected: Mapping[str, str], source: str) -> dict[str, bytes]:
    contents = {}
    try:
        with zipfile.ZipFile(archive) as unzipped:
            members = {PurePosixPath(info.filename).name: info for info in unzipped.infolist()}
            for name in expected:
                if name not in members:
                    raise DataError(f"{source}: the archive has no {name}")
                with unzipped.open(members[name]) as stream:
                    contents[name] = stream.read(LARGEST + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{source}: not a readable zip archive: {error}") from error
    for name, content in contents.items():
        found = hashlib.sha256(content).hexdigest()
        if found != expected[name]:
            raise DataError(f"{source}: {name} has sha256 {found}, expected {expected[name]}")
    return contents


def _write_atomically(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _sum_of(path: Path) -> str:
    """The sha256 of a file in hex; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _validator_file(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
