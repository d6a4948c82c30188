"""The README, the tutorial and the page about sizes run as they stand, and print what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, run_page, same, snippets

PAGES = [ROOT / "README.md", DOCS / "tutorial.md", DOCS / "sizes.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    failures = run_page(page, tmp_path)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_output_of_every_snippet_is_shown(page: Path) -> None:
    ran = [s for s in snippets(page) if s.runs]
    assert len(ran) >= 2
    assert [s.line for s in ran if s.expected is None] == []


def test_the_readme_begins_with_a_model_and_the_commands_that_look_at_it() -> None:
    commands = [words[1] for s in snippets(PAGES[0]) if s.runs for words in s.commands]
    assert commands[:4] == ["train.py", "explain", "bench", "check"]


def test_output_that_differs_is_noticed() -> None:
    page = "64 trees, loss 1.62\n...\ndone in 12.5 ms\n"
    assert same("64 trees, loss 1.63  \nmore\ndone in 3.1 ms\n", page)
    assert same("64 trees, loss 1.62\ndone in 3.1 ms\n", page)
    for other in (
        "65 trees, loss 1.62\ndone in 3.1 ms\n",
        "64 trees, loss 1.90\ndone in 3.1 ms\n",
        "64 trees, loss 1.62\n",
    ):
        assert not same(other, page)
    assert not same("a\nb\n", "a\n") and not same("a\n", "a\nb\n") and not same("", "a\n")
    assert same("80% right", "83% right") and not same("60% right", "83% right")
