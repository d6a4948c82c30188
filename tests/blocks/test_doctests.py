"""The examples in docstrings and in docs/blocks.md, docs/coming-from-fold.md run and give what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
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
    result = doctest.testfile(str(DOCS / page), module_relative=False, globs=dict(NAMES))
    assert result.failed == 0 and result.attempted > 5


def test_every_block_has_a_docstring_with_type_and_example() -> None:
    blocks = [v for k, v in NAMES.items() if k in fb.__all__ and callable(v)]
    for block in blocks:
        base = block in (fb.Block, fb.Typed, fb.Output, fb.Layer, fb.CompiledBlock, fb.ResultType)
        is_block = isinstance(block, type) and issubclass(block, fb.Typed) and not base
        if is_block:
            assert block.__doc__ and "Type:" in block.__doc__ and ">>>" in block.__doc__, block
