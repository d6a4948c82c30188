"""The snippets of a page of the documentation: what they are, running them, and what they print.

    for line, source in python_blocks(ROOT / "README.md"): ...
    run_page(ROOT / "README.md", tmp_path)         # [] where every snippet prints what the page shows

A Python block whose first line is `# name.py` is a file of that name, and is only written. Any other Python block
runs, all of a page in one namespace. A `text` block right below is what it prints; where a block of shell commands has
one, its lines `fxbatch ...` and `python name.py` run.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fxbatch_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_SHARE = re.compile(r"recording takes \d+ % of a step")  # on a busy machine `explain` may say so
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?")
_VARIES = re.compile(r"\d (?:ms|s)\b|times as fast|largest error")


@dataclass(frozen=True)
class Snippet:
    """line: where its source begins; file: the name of the file that it is, or ""; expected: its output on the page."""

    line: int
    kind: str
    source: str
    expected: str | None

    @property
    def file(self) -> str:
        named = re.match(r"# (\w+\.py)\n", self.source)
        return named[1] if named and self.kind == "python" else ""

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a block of the shell that are run here."""
        lines = self.source.splitlines() if self.kind == "sh" else []
        words = [shlex.split(line, comments=True) for line in lines]
        return [w for w in words if w and (w[0] == "fxbatch" or (w[0] == "python" and w[1].endswith(".py")))]

    @property
    def runs(self) -> bool:
        return self.expected is not None if self.kind == "sh" else not self.file


def snippets(page: Path) -> list[Snippet]:
    """All snippets of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Snippet(text.count("\n", 0, m.start(2)) + 1, m[1], m[2], m[3]) for m in _FENCE.finditer(text)]


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the page, source) of each block marked as Python."""
    return [(s.line, s.source) for s in snippets(page) if s.kind == "python"]


def run(page: Path, blocks: list[tuple[int, str]], names: dict[str, object]) -> None:
    """Run blocks one after the other in one namespace; an error names the line of the page."""
    for line, source in blocks:
        _show_as_source(page, line, source)
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)


def _show_as_source(page: Path, line: int, source: str) -> None:
    """Let Python find the lines of a block as those of a file that is code alone, as it finds those of a notebook."""
    name = str(page)
    _, when, lines, _ = linecache.cache.get(name, (0, 0.0, [], name))  # type: ignore[misc]  # of four, once loaded
    before = list(lines) if when is None else []
    here = source.splitlines(keepends=True)
    before += ["\n"] * (line - 1 + len(here) - len(before))
    before[line - 1 : line - 1 + len(here)] = here
    linecache.cache[name] = (1, None, before, name)


def run_page(page: Path, folder: Path) -> list[str]:
    """Run every snippet of a page in a folder. A text for each that prints something else than the page shows."""
    names: dict[str, Any] = {"__name__": page.stem}
    failures = []
    with _inside(folder):
        for snippet in snippets(page):
            if snippet.file:
                (folder / snippet.file).write_text(snippet.source, encoding="utf-8")
            elif snippet.runs:
                printed = _printed(page, snippet, names)
                if snippet.expected is not None and not same(printed, snippet.expected):
                    failures.append(
                        f"{page.name}:{snippet.line} prints\n{printed}\nwhere the page has\n{snippet.expected}"
                    )
    return failures


def _printed(page: Path, snippet: Snippet, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if snippet.kind == "python":
            run(page, [(snippet.line, snippet.source)], names)
        for words in snippet.commands:
            if words[0] == "python":
                with mock.patch.object(sys, "argv", words[1:]):
                    runpy.run_path(words[1], run_name="__main__")
            else:
                errors = io.StringIO()
                with contextlib.redirect_stderr(errors):
                    status = main(words[1:])
                assert status in (0, 1), (words, errors.getvalue())  # 1: `check` says that something differs
    return out.getvalue()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """A terminal of 80 columns in a folder whose files can be imported, and are forgotten afterwards."""
    before = set(sys.modules)
    environment = mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"})
    with contextlib.chdir(folder), environment, mock.patch.object(sys, "path", [str(folder), *sys.path]):
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file and Path(file).is_relative_to(folder):
                    del sys.modules[name]


def same(printed: str, expected: str) -> bool:
    """Whether text is what a page shows. A line `...` stands for any lines; spaces at the ends of lines don't count.

    Whole numbers are equal; others may differ by 5 %, percentages by 5 points; a line that tells a time (ms, s, times
    as fast) or an error of rounding may have any numbers.
    """
    lines = [line.rstrip() for line in printed.rstrip("\n").split("\n") if not _SHARE.fullmatch(line)]
    pattern = [line.strip() for line in expected.rstrip("\n").split("\n")]
    shown = [line.rstrip() for line in expected.rstrip("\n").split("\n")]
    reach = {0}  # how many printed lines the pattern up to here may have taken
    for wanted, text in zip(pattern, shown):
        if wanted == "...":
            reach = set(range(min(reach), len(lines) + 1)) if reach else set()
        else:
            reach = {n + 1 for n in reach if n < len(lines) and _same_line(lines[n], text)}
    return len(lines) in reach


def _same_line(printed: str, expected: str) -> bool:
    blank = [" ".join(_NUMBER.sub("0", text).split()) for text in (printed, expected)]
    if blank[0] != blank[1]:
        return False
    pairs = zip(_NUMBER.findall(printed), _NUMBER.findall(expected))
    return bool(_VARIES.search(expected)) or all(_same_number(a, b) for a, b in pairs)


def _same_number(a: str, b: str) -> bool:
    if a == b:
        return True
    x, y = (float(text.strip("%").replace(",", "")) for text in (a, b))
    if a.endswith("%") and b.endswith("%"):
        return abs(x - y) <= 5
    return "." in a and "." in b and abs(x - y) <= 0.05 * abs(y)
