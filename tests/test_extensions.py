"""An extension of a checkout that was compiled from other sources than those beside it is one clear error at import."""

from __future__ import annotations

import importlib.util
import shutil
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from fxbatch import extensions


@pytest.fixture
def checkout(tmp_path: Path) -> ModuleType:
    """The module in a checkout that has one extension, `trace/_fast`, built from one file."""
    folder = tmp_path / "fxbatch" / "trace"
    folder.mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    (folder / f"_fast{EXTENSION_SUFFIXES[0]}").touch()
    (folder / "_fast.c").write_text("int one;")
    source = Path(extensions.__file__)
    copy = shutil.copy(source, tmp_path / "fxbatch" / source.name)
    spec = importlib.util.spec_from_file_location("extensions_of_a_checkout", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.note({"trace/_fast": ["fxbatch/trace/_fast.c"]})
    return module


def test_sources_that_changed_are_an_error_that_says_what_to_run(
    checkout: ModuleType, tmp_path: Path
) -> None:
    checkout.check()
    (tmp_path / "fxbatch" / "trace" / "_fast.c").write_text("int other;")
    with pytest.raises(ImportError, match=r"trace/_fast.*run `make venv`"):
        checkout.check()
    checkout.note({"trace/_fast": ["fxbatch/trace/_fast.c"]})
    checkout.check()


def test_an_extension_of_before_there_were_notes_is_out_of_date(checkout: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "fxbatch" / "compiled_from.json").unlink()
    with pytest.raises(ImportError, match="trace/_fast"):
        checkout.check()


def test_what_was_not_built_or_is_installed_is_not_asked_for(checkout: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "fxbatch" / "trace" / "_fast.c").write_text("int other;")
    (tmp_path / "setup.py").rename(tmp_path / "elsewhere.py")
    checkout.check()
    (tmp_path / "elsewhere.py").rename(tmp_path / "setup.py")
    (tmp_path / "fxbatch" / "trace" / f"_fast{EXTENSION_SUFFIXES[0]}").unlink()
    checkout.check()


def test_building_heals_a_checkout_whose_source_was_removed(checkout: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "fxbatch" / "trace" / "_fast.c").unlink()
    with pytest.raises(ImportError, match="trace/_fast"):
        checkout.check()
    (tmp_path / "fxbatch" / "other.c").write_text("int one;")
    checkout.note({"other": ["fxbatch/other.c"]})
    checkout.check()
