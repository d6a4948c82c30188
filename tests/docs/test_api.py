"""The reference is that of the docstrings, has every public name, and its examples print what they show."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re

import pytest
import torch
from fxbatch_cli import api_reference as reference
from torch import nn

import fxbatch
from fxbatch import errors
from tests.docs.pages import DOCS

FOLDER = DOCS / "api"
TARGETS = {name: target for names in reference.PAGES.values() for name, target in names}


@pytest.mark.parametrize("name", sorted(reference.pages()))
def test_a_page_is_that_of_the_docstrings(name: str) -> None:
    assert (FOLDER / name).read_text() == reference.pages()[name], "run: python -m tools.api_reference"


def test_there_are_no_other_pages() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(reference.pages())


def test_every_public_name_has_a_page() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(fxbatch.__all__) - raised <= set(TARGETS)
    both = reference.pages()["errors.md"] + reference.pages()["warnings.md"]
    assert all(f"## {name}\n" in both for name in raised)


def names() -> dict[str, object]:
    """What the examples begin with."""
    made: dict[str, object] = {}
    torch.manual_seed(0)
    exec(reference.PREAMBLE, made)
    return made


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_examples_print_what_they_show(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(
        reference.docstring(TARGETS[name]), names() | {"nn": nn}, name, name, 0
    )
    if name not in ("OperationRow", "UnbatchedRow"):
        assert len(test.examples) >= 1, f"{name} has no example"
    shown: list[str] = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=shown.append).failed == 0, (
        "".join(shown)
    )


@pytest.mark.parametrize("name", sorted(n for n, t in TARGETS.items() if dataclasses.is_dataclass(t)))
def test_fields_are_described(name: str) -> None:
    listed = reference.page(name, TARGETS[name]).partition("## Fields\n")[2].partition("\n## ")[0]
    described = set(re.findall(r"^\* `(\w+)`: ", listed, re.MULTILINE))
    fields = {f.name for f in dataclasses.fields(TARGETS[name])}
    internal = {"engine", "recording", "results", "values"} if name == "Minibatch" else set()
    assert fields - internal <= described
    assert all(hasattr(TARGETS[name], x) or x in fields for x in described)


@pytest.mark.parametrize("name", sorted(n for n, t in TARGETS.items() if not dataclasses.is_dataclass(t)))
def test_arguments_are_described(name: str) -> None:
    described = set(re.findall(r"^\* `(\w+)`: ", reference.page(name, TARGETS[name]), re.MULTILINE))
    arguments = set(inspect.signature(TARGETS[name]).parameters)
    unsaid = {"autobatch": {"fn", "unknown"}, "operation": {"target"}, "collate": {"model"}}.get(name, set())
    assert arguments - unsaid <= described
