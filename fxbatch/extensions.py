"""Whether the extensions of a checkout were compiled from the sources that lie beside them.

Out of date, they fail anywhere, or run code that is no longer there. setup.py notes what it has compiled; `import
fxbatch` compares. An installed package has no setup.py beside it, and is as it was built.

    note({"trace/_fast": ["fxbatch/trace/_fast.c"]})   # by setup.py
    check()                                            # ImportError: ... run `make venv`
"""

from __future__ import annotations

import json
import zlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
_NOTES = _PACKAGE / "compiled_from.json"  # by extension: its sources, and the sum of their bytes


def note(sources: dict[str, list[str]]) -> None:
    """These extensions have been compiled from what their sources hold now (paths are relative to the checkout)."""
    before: dict[str, list[Any]] = json.loads(_NOTES.read_text()) if _NOTES.exists() else {}
    kept = {name: found for name, found in before.items() if all((_CHECKOUT / p).exists() for p in found[1:])}
    kept.update({name: [_sum(paths), *paths] for name, paths in sources.items()})
    _NOTES.write_text(json.dumps(kept, indent=1))


def check() -> None:
    """An ImportError that names what is out of date."""
    if not (_CHECKOUT / "setup.py").exists():
        return
    unknown = {"trace/_fast": [-1]}  # compiled before there were notes
    notes: dict[str, list[Any]] = json.loads(_NOTES.read_text()) if _NOTES.exists() else unknown
    stale = [
        name
        for name, (compiled_from, *paths) in notes.items()
        if (_PACKAGE / (name + EXTENSION_SUFFIXES[0])).exists() and _sum(paths) != compiled_from
    ]
    if stale:
        raise ImportError(
            f"fxbatch in {_CHECKOUT} has sources newer than what was compiled of them ({', '.join(stale)}): run "
            "`make venv` there, or `python setup.py build_ext --inplace`"
        )


def _sum(paths: list[str]) -> int:
    """A checksum of the content of files."""
    found = 0
    for path in paths:
        try:
            found = zlib.crc32((_CHECKOUT / path).read_bytes(), found)
        except FileNotFoundError:
            found = -1
    return found
