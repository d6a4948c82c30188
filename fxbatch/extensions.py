"""Which extensions there are, and whether those of a checkout were compiled from the sources beside them.

Out of date, they fail anywhere, or run code that is no longer there. setup.py notes what it has compiled; `import
fxbatch` compares. An installed package has no setup.py beside it, and is as it was built.

    note({"trace/_fast": ["fxbatch/trace/_fast.c"]})   # by setup.py
    check()                                            # ImportError: ... run `make venv`
    missing()                                          # [] where all were compiled

setup.py and `fxbatch --version` run this file by its path, without importing torch.
"""

from __future__ import annotations

import json
import zlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

# Typed Python: these files are what one reads, and what runs where they are not compiled.
TYPED = (
    "passes/deduplicate",
    "passes/fuse_runs", "passes/gradients", "passes/plan", "passes/room", "passes/schedule", "passes/select",
    "passes/signature_graph", "ragged/row_places", "ragged/segment_loops", "runtime/operands", "runtime/pool",
    "trace/bare_parameters", "trace/places",
)  # fmt: skip
EXTENSIONS = ("codegen/_native", "trace/_fast", *TYPED)

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
_NOTES = _PACKAGE / "compiled_from.json"  # by extension: its sources, and the sum of their bytes


def missing() -> list[str]:
    """The extensions that were not compiled when fxbatch was installed."""
    return [name for name in EXTENSIONS if not (_PACKAGE / (name + EXTENSION_SUFFIXES[0])).exists()]


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
