"""Code of a public repository: where it lies, and a temporary copy of it with the edits that today's torch forces.

In: the folder that FXBATCH_PUBLIC names, with a checkout in `OWNER/NAME` of each repository. Out: modules.

    edit = Edit("rnng/models.py", r"\\.data\\[0\\]", ".item()", "torch")
    source = Source("kmkurn/pytorch-rnng", "9861a9b", folder="src", edits=(edit,))
    with source.imported() as load:
        models = load("rnng.models")
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "FXBATCH_PUBLIC"


class SourceMissing(Exception):
    """A repository is not there; the message says which, and where it is looked for."""


class EditError(Exception):
    """An edit that changes nothing: the checkout is another one than the edit was written for."""


@dataclass(frozen=True)
class Edit:
    """A mechanical change of all places in a file that match.

    because: "torch" (today's torch or Python refuses or has renamed it), "import" (a package that the model itself
    does not need), "device" (cuda), or "fxbatch": what a user of fxbatch would have to change, and nobody else.
    """

    file: str
    pattern: str
    replacement: str
    because: str

    def apply(self, text: str) -> str:
        """The text with the edit. EditError where nothing matches."""
        edited, count = re.subn(self.pattern, self.replacement, text, flags=re.MULTILINE)
        if not count:
            raise EditError(f"{self.file}: nothing matches {self.pattern!r}")
        return edited


@dataclass(frozen=True)
class Source:
    """A repository on GitHub at a commit. folder: what is put on the path of imports; stubs: modules that the code
    imports and the model does not use, with the names that it takes from them."""

    repository: str
    commit: str
    folder: str = ""
    edits: tuple[Edit, ...] = ()
    stubs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:10]}"

    def place(self) -> Path:
        """The folder of the checkout. SourceMissing where there is none."""
        root = os.environ.get(VARIABLE)
        if not root:
            raise SourceMissing(f"{VARIABLE} is not set; it names a folder with {self} in {self.repository}")
        place = Path(root) / self.repository / self.folder
        if not place.is_dir():
            raise SourceMissing(f"{self} is not in {root}")
        return place

    @contextlib.contextmanager
    def imported(self) -> Iterator[Callable[[str], types.ModuleType]]:
        """Gives a function that imports a module of an edited copy, which is there until the block ends."""
        place = self.place()
        with tempfile.TemporaryDirectory(prefix="fxbatch-public-") as copy:
            shutil.copytree(place, copy, dirs_exist_ok=True, ignore=_other_than_code)
            for edit in self.edits:
                path = Path(copy) / edit.file
                path.write_text(edit.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
            before = set(sys.modules)
            sys.path.insert(0, copy)
            try:
                for name, attributes in self.stubs.items():
                    sys.modules[name] = _stub(name, attributes)
                yield importlib.import_module
            finally:
                sys.path.remove(copy)
                for name in set(sys.modules) - before:
                    origin = getattr(sys.modules[name], "__file__", None) or ""
                    if name in self.stubs or origin.startswith(copy):
                        del sys.modules[name]


def _stub(name: str, attributes: tuple[str, ...]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (), {}))
    return module


def _other_than_code(folder: str, names: list[str]) -> list[str]:
    """The files that are not copied: all but Python and the small texts that programs read (grammars, vocabularies)."""
    kept = (".py", ".json", ".txt", ".ebnf", ".gr")
    return [
        n
        for n in names
        if n == ".git" or (not n.endswith(kept) and not os.path.isdir(os.path.join(folder, n)))
    ]
