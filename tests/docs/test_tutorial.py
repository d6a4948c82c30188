"""The tutorial runs as it stands, with the commands that it tells to run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fxbatch_cli.main import main

from tests.docs.pages import DOCS, python_blocks, run

PAGE = DOCS / "tutorial.md"


def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(PAGE)
    assert len(blocks) > 5
    (tmp_path / "tutorial.py").write_text("\n".join(source for _, source in blocks[:2]))
    names: dict[str, object] = {"__name__": "tutorial_page"}
    monkeypatch.setitem(sys.modules, "tutorial_page", type(sys)("tutorial_page"))
    run(PAGE, blocks, names)
    commands = [
        line.split()[1:]
        for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("fxbatch ")
    ]
    assert {words[0] for words in commands} == {"explain", "draw", "check", "bench"}
    for words in commands:
        assert main(words) == 0, (words, capsys.readouterr())
    assert (tmp_path / "page.html").is_file()
