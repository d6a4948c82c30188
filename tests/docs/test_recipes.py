"""Each recipe runs by itself; the page of options has them all."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields

import pytest

from fxbatch.runtime.options import Options
from tests.docs.pages import DOCS, ROOT, python_blocks, run


def recipes() -> dict[str, list[tuple[int, str]]]:
    """{heading: its blocks} of the page of recipes; "" has what all begin with."""
    page = DOCS / "recipes.md"
    text = page.read_text(encoding="utf-8")
    headings = [(m.start(), m[1]) for m in re.finditer(r"^## (.*)$", text, re.MULTILINE)]
    lines = [(0, ""), *((text.count("\n", 0, at) + 1, heading) for at, heading in headings)]
    parts: dict[str, list[tuple[int, str]]] = {}
    for line, source in python_blocks(page):
        parts.setdefault([heading for at, heading in lines if at < line][-1], []).append((line, source))
    return parts


@pytest.mark.parametrize("heading", [heading for heading in recipes() if heading])
def test_a_recipe_runs_alone(heading: str) -> None:
    names: dict[str, object] = {"__name__": "recipes"}
    run(DOCS / "recipes.md", recipes()[""], names)
    for line, source in recipes()[heading]:
        compile(source, heading, "exec")
        for needed in re.findall(
            r"^(?:from|import) (torch_geometric|beartype|fastapi|litserve|ray)\b", source, re.MULTILINE
        ):
            if importlib.util.find_spec(needed) is None:
                break  # a library that the tests do not depend on
        else:
            run(DOCS / "recipes.md", [(line, source)], names)


def test_there_are_recipes() -> None:
    assert len(recipes()) > 15


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
