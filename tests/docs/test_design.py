"""The design page is true: its example prints what the page says, and the files that pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fxbatch_cli.main import main

from tests.docs.pages import DOCS, ROOT, python_blocks

PAGE = DOCS / "design.md"


def shown(page: str) -> list[tuple[str, str]]:
    """(command, what the page says that it prints) of each command that has its output below it."""
    return re.findall(r"^```sh\n(fxbatch [^\n]*)\n```\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def holds(printed: str, expected: str) -> bool:
    """Whether expected is what was printed; a line of "..." in it stands for any lines.

    holds("a\\nb\\nc", "a\\n...\\nc") is True
    """
    pieces = [re.escape(piece) for piece in re.split(r"^ *\.\.\.\n", expected, flags=re.MULTILINE)]
    return re.fullmatch(r"(?:.*\n)*".join(pieces), printed.rstrip("\n") + "\n") is not None


def test_the_comparison_can_fail() -> None:
    assert (
        holds("a\nb\nc\n", "a\n...\nc\n")
        and holds("a\nb\n", "a\nb\n")
        and holds("a\nb\nc\n", "...\nb\n...\n")
    )
    assert (
        not holds("a\nb\nc\n", "a\nc\n") and not holds("a\nb\n", "a\n...\nc\n") and not holds("a\nb\n", "a\n")
    )


def test_the_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, source),) = python_blocks(PAGE)
    (tmp_path / "example.py").write_text(source)
    commands = shown(PAGE.read_text())
    assert [command.split()[-1] for command, _ in commands] == ["merged", "schedule", "plan", "code"]
    for command, expected in commands:
        assert main(command.split()[1:]) == 0
        printed = capsys.readouterr().out
        assert holds(printed, expected), f"{command} prints\n{printed}\nwhere the page has\n{expected}"


def test_the_example_is_not_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(python_blocks(PAGE)[0][1])
    printed = []
    for stage in ("merged", "deduplicated", "fused"):
        assert main(["dump", "example.py:minibatch", "--stage", stage]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]


@pytest.mark.parametrize(
    "page", ["design", "extending", "extending-native", "gpu-notes", "compiled", "strategy"]
)
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(r"`([\w/.]+\.(?:py|c|h|md))`", (DOCS / f"{page}.md").read_text())
    folders = (ROOT, ROOT / "fxbatch", *(ROOT / "fxbatch").iterdir(), DOCS)
    made = {"example.py", "_native_operations.h"}  # by a reader, by setup.py
    assert [
        name for name in named if name not in made and not any((f / name).is_file() for f in folders)
    ] == []


def test_pages_keep_their_length() -> None:
    assert len(PAGE.read_text().splitlines()) <= 250
    assert len((DOCS / "benchmarks.md").read_text().splitlines()) <= 300


def slug(heading: str) -> str:
    """The anchor that a page of a repository gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_of_the_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            there = (page.parent / name) if name else page
            if not there.exists():
                broken.append(f"{page.name}: {target}")
            elif anchor:
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                if anchor not in map(slug, headings):
                    broken.append(f"{page.name}: {target}")
    assert broken == []
