"""The supported versions on the page of promises and in the README are those of pyproject.toml."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def row(name: str) -> str:
    """What the table of supported versions says of this."""
    table = (DOCS / "promises.md").read_text().partition("## Supported versions")[2]
    (found,) = re.findall(rf"^\| {name} \| (.*) \|$", table, re.MULTILINE)
    return found


def pythons() -> list[str]:
    prefix = "Programming Language :: Python :: "
    return [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(f"{prefix}3.")]


def test_python() -> None:
    assert row("Python") == ", ".join(pythons())
    assert PROJECT["requires-python"] == f">={pythons()[0]}"


def test_torch() -> None:
    """`torch>=2.11,<2.16` is 2.11 to 2.15."""
    ((least, above),) = [
        re.findall(r"2\.(\d+)", d) for d in PROJECT["dependencies"] if d.startswith("torch>=")
    ]
    pinned = re.findall(r"^torch==(2\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert row("PyTorch") == f"2.{least} to 2.{int(above) - 1} (the tests run with {pinned})"


def test_the_readme() -> None:
    page = (ROOT / "README.md").read_text()
    assert f"Python {' or '.join(pythons())}, PyTorch {row('PyTorch').partition(' (')[0]}" in page


def test_the_page_of_dependencies() -> None:
    page = (DOCS / "dependencies.md").read_text()
    for dependency in PROJECT["dependencies"]:
        name, least = re.findall(r"^(\w+)>=([\d.]+)", dependency)[0]
        assert f"| {name} " in page, name
        assert name != "torch" or f"torch >= {least}" in page
