"""The examples in docstrings and in docs/blocks.md, docs/coming-from-fold.md run and give what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fxbatch.blocks as fb

NAMES = {k: v for k, v in vars(fb).items() if not k.startswith("_")} | {"torch": torch, "nn": nn, "fb": fb}
MODULES = [m.name for m in pkgutil.iter_modules(fb.__path__)]
PAGES = ["blocks.md", "coming-from-fold.md"]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = importlib.import_module(f"fxbatch.blocks.{name}")
    assert doctest.testmod(module, extraglobs=NAMES).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_pages(page: str) -> None:
    result = doctest.testfile(
        str(DOCS / page), module_relative=False, globs=dict(NAMES), optionflags=doctest.ELLIPSIS
    )
    assert result.failed == 0 and result.attempted > 5


ROW = re.compile(r"^\| `(\w+)[^`]*` \| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


def table() -> list[tuple[str, str, str]]:
    """(block, example, what it gives) of each row of the table in blocks.md."""
    found = ROW.findall((DOCS / "blocks.md").read_text(encoding="utf-8"))
    return [(name, example, gives) for name, _, example, gives in found]


@pytest.mark.parametrize(("name", "example", "gives"), table())
def test_the_table_of_blocks(name: str, example: str, gives: str) -> None:
    assert name in NAMES and re.search(rf"\b{name}\b", example)
    assert repr(eval(example, dict(NAMES))) == gives


DIFFERENCE = re.compile(r"^\| `([^|]+)` \| ([^|]+) \| `([^`]+)` \|$", re.MULTILINE)


def differences() -> list[tuple[str, str]]:
    """(program, what it gives here) of each row under "What stays different"."""
    text = (DOCS / "coming-from-fold.md").read_text(encoding="utf-8").partition("## What stays different")[2]
    return [(program, here) for program, _, here in DIFFERENCE.findall(text)]


@pytest.mark.parametrize(("program", "here"), differences())
def test_the_list_of_differences(program: str, here: str) -> None:
    errors = {
        "BlockTypeError": fb.BlockTypeError,
        "BlockValueError": fb.BlockValueError,
        "ValueError": ValueError,
    }
    if here in errors:
        with pytest.raises(errors[here]):
            eval(program, dict(NAMES))
    else:
        assert repr(eval(program, dict(NAMES))) == here


def test_all_differences_are_found() -> None:
    assert len(differences()) >= 20


def blocks() -> list[str]:
    """The names of all blocks and layers that the package offers."""
    bases = (fb.Block, fb.Typed, fb.Layer)
    classes = [
        k for k, v in NAMES.items() if isinstance(v, type) and issubclass(v, fb.Typed) and v not in bases
    ]
    return [*classes, "Scalar", "Vector", "ZipWith"]


def test_every_block_is_in_the_table_and_has_a_docstring_with_type_and_example() -> None:
    listed = [name for name, _, _ in table()]
    assert sorted(listed) == sorted(blocks())
    for name in blocks():
        doc = NAMES[name].__doc__
        assert doc and "Type:" in doc and ">>>" in doc, name
