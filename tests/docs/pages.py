"""The Python blocks of a page of the documentation.

for line, source in python_blocks(ROOT / "README.md"): ...
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the page, source) of each block marked as Python."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in found]


def run(page: Path, blocks: list[tuple[int, str]], names: dict[str, object]) -> None:
    """Run blocks one after the other in one namespace; an error names the line of the page."""
    for line, source in blocks:
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
