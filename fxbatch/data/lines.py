"""Lines of a text file, plain or gzip, with their numbers; what is wrong with the file is a DataError.

for number, line in read_lines(Path("train.txt.gz")): ...
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from fxbatch.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 file; gzip is recognised by its first bytes."""
    number = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if zipped else raw
            for line in stream:
                number += 1
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}:{error.start + 1}: not UTF-8: {error.reason}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: broken gzip file: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error
