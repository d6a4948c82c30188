"""A plugin of pytest: fxbatch as it is where it was installed without a C compiler. Nothing compiled is imported, and
neither is Cython: what has a Python source runs from it, and the rest is not there (with WITH_C=1 it is).

python -m pytest -p tests.without_extension tests/trace
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType


class SourcesOnly:
    """A finder of the modules of fxbatch, and of Cython's, that passes over compiled ones."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The source of a module; ModuleNotFoundError where it has none. None: not for this finder."""
        package, _, rest = name.partition(".")
        if package == "fxbatch" and rest:
            specs = (FileFinder(p, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name) for p in path or ())
            if spec := next(filter(None, specs), None):
                return spec
            if os.environ.get("WITH_C"):
                return None
        elif package != "cython":
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


assert "fxbatch" not in sys.modules, "to be loaded first, by -p"
sys.meta_path.insert(0, SourcesOnly)
