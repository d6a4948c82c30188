"""Each recipe runs as it stands; the page of options has them all."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from fxbatch.runtime.options import Options
from tests.docs.pages import DOCS, ROOT, python_blocks, run


def test_the_recipes_run_in_order() -> None:
    page = DOCS / "recipes.md"
    blocks = python_blocks(page)
    assert len(blocks) > 10
    run(page, blocks, {"__name__": "recipes"})


def test_the_page_of_options_has_all_with_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", (DOCS / "options.md").read_text(), re.MULTILINE)
    defaults = {f.name: f.default if f.name != "compile_options" else None for f in fields(Options)}
    assert {name: eval(default) for name, default in rows} == defaults


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(page: object) -> None:
    text = page.read_text(encoding="utf-8")  # type: ignore[attr-defined]  # a Path
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link  # type: ignore[attr-defined]  # a Path
