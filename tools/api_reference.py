"""Write the reference of the public names from their docstrings: docs/api/*.md.

    python -m tools.api_reference                  # into docs/api
    python -m tools.api_reference --to elsewhere

One page per public name of fxbatch: its signature, its docstring, its example with the output. Errors and warnings have
a page each. In a docstring, lines that end in ":" begin a section, whose text is indented: `name: text` is an item of a
list, `>>>` an example. `tests/docs/test_api.py` runs the examples, and says when pages are not those of the docstrings.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fxbatch
from fxbatch import errors
from fxbatch.data.balanced_sampler import BalancedBatchSampler
from fxbatch.explanation import OperationRow, UnbatchedRow

ROOT = Path(__file__).resolve().parent.parent

# The names that have a page, with the words that the list of pages has for them.
PAGES: dict[str, tuple[tuple[str, Any], ...]] = {
    "Batch": (
        ("autobatch", fxbatch.autobatch),
        ("operation", fxbatch.operation),
        ("disabled", fxbatch.disabled),
        ("lazy", fxbatch.lazy),
    ),
    "Serve": (
        ("live", fxbatch.live),
        ("Server", fxbatch.Server),
        ("ServerStats", fxbatch.ServerStats),
    ),
    "Look inside": (
        ("explain", fxbatch.explain),
        ("Explanation", fxbatch.Explanation),
        ("OperationRow", OperationRow),
        ("UnbatchedRow", UnbatchedRow),
        ("compile_minibatch", fxbatch.compile_minibatch),
        ("Minibatch", fxbatch.Minibatch),
    ),
    "Data": (
        ("trace", fxbatch.trace),
        ("TracedDataset", fxbatch.TracedDataset),
        ("collate", fxbatch.collate),
        ("prefetch", fxbatch.prefetch),
        ("BalancedBatchSampler", BalancedBatchSampler),
    ),
}

# What the examples of all pages begin with.
PREAMBLE = """\
import torch
from torch import nn

import fxbatch


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(10, 4), nn.GRUCell(4, 4)

    @fxbatch.autobatch
    def forward(self, words):  # one sentence: a list of numbers
        state = torch.zeros(4)
        for word in words:
            state = self.cell(self.embed(torch.tensor(word)), state)
        return state


model, sentences = Reader(), [[1, 2, 3], [4]]
"""

_SECTION = re.compile(r"^(\w[\w ]*):$")
_ITEM = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def docstring(target: Any) -> str:
    """The docstring of a public name; of `fxbatch.trace`, which is a package as well, the function's."""
    return inspect.cleandoc(target.__doc__ or "")


def signature(name: str, target: Any) -> str:
    """`fxbatch.name(...)` with types and defaults, one argument per line where one line is too short.

    Of a function with overloads, what it returns depends on its arguments.
    """
    overloads = typing.get_overloads(target) if inspect.isfunction(target) else []
    known = inspect.signature(target)
    arguments = [_argument(p) for p in known.parameters.values() if p.name != "self"]
    if any(p.kind is p.KEYWORD_ONLY for p in known.parameters.values()):
        first = next(i for i, p in enumerate(known.parameters.values()) if p.kind is p.KEYWORD_ONLY)
        kinds = [p.kind for p in known.parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            arguments.insert(first, "*")
    text = f"{name}({', '.join(arguments)})"
    if not overloads and known.return_annotation not in (inspect.Signature.empty, "None", None):
        text += f" -> {known.return_annotation}"
    if len(text) > 100:
        head, tail = f"{name}(\n", text[text.rindex(")") :] if ") -> " in text else ")"
        text = head + "".join(f"    {argument},\n" for argument in arguments) + tail
    return text


def _argument(p: inspect.Parameter) -> str:
    """`name: type = default`."""
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    kind = f": {p.annotation}" if p.annotation is not p.empty else ""
    default = repr(p.default).replace("'", '"')
    return f"{stars}{p.name}{kind}" + (f" = {default}" if p.default is not p.empty else "")


def markdown(text: str) -> str:
    """A docstring as Markdown: paragraphs, sections as headings, items as lists, examples as blocks."""
    lines: list[str] = []
    section: list[str] | None = None
    for line in [*text.splitlines(), "end"]:
        if section is not None and (line.startswith("    ") or not line):
            section.append(line[4:])
            continue
        if section is not None:
            lines += [*_section(section), ""]
            section = None
        heading = _SECTION.match(line)
        if heading:
            lines += [f"## {heading[1]}", ""]
            section = []
        else:
            lines.append(line)
    return "\n".join(lines[:-1]).rstrip() + "\n"


def _section(lines: Sequence[str]) -> list[str]:
    text = "\n".join(lines).rstrip()
    if ">>>" in text:
        return ["```pycon", text, "```"]
    items: list[str] = []
    for line in text.splitlines():
        item = _ITEM.match(line)
        if item:
            items.append(f"* `{item[1]}`: {item[2]}")
        else:
            items.append(f"  {line.strip()}" if items else line)
    return items


def page(name: str, target: Any) -> str:
    """The page of one name."""
    place = "fxbatch" if hasattr(fxbatch, name) else target.__module__
    lines = [f"# {place}.{name}", ""]
    if not dataclasses.is_dataclass(target):
        lines += ["```python", signature(f"{place}.{name}", target), "```", ""]
    return "\n".join([*lines, ""]) + markdown(docstring(target))


def exceptions(warnings: bool) -> str:
    """The page of all errors, or of all warnings, in the order of their file."""
    classes = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, Exception) and issubclass(c, Warning) == warnings
    ]
    lines = [f"# {'Warnings' if warnings else 'Errors'}", ""]
    if not warnings:
        lines += [
            "All are in `fxbatch.errors`, most in `fxbatch`, and derive from `FxbatchError`. A message names what was",
            "expected and met, and your own line: `cell: input 1 takes f32[4], got f32[8] (model.py:31)`.",
            "What your forward raises is raised as it is, with a note that names the instance.",
            "",
        ]
    else:
        lines += [
            'All are in `fxbatch`. `warnings.simplefilter("error", fxbatch.LoopWarning)` makes one an error.',
            "",
        ]
    for c in classes:
        bases = ", ".join(f"`{base.__name__}`" for base in c.__bases__)
        lines += [f"## {c.__name__}", "", f"Derived from {bases}.", ""]
        lines += [markdown(docstring(c)).replace("\n## ", "\n### ")]
    return "\n".join(lines).rstrip() + "\n"


def summary(target: Any) -> str:
    return docstring(target).partition("\n")[0]


def contents() -> str:
    """The list of all pages, with what their examples begin with."""
    lines = [
        "# Reference",
        "",
        "One page per name. The options of `autobatch` have [a page](../options.md) with more about each, the",
        "combinators of `fxbatch.blocks` [another](../blocks.md). Made from the docstrings, by",
        "`python -m tools.api_reference`.",
        "",
    ]
    for title, names in PAGES.items():
        lines += [f"## {title}", "", "| name | |", "|---|---|"]
        lines += [f"| [`{name}`]({name}.md) | {summary(target)} |" for name, target in names]
        lines += [""]
    lines += ["## Errors and warnings", "", "[Errors](errors.md), [warnings](warnings.md).", ""]
    lines += ["## What the examples begin with", "", "```python", PREAMBLE.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """{file name: text} of all pages."""
    made = {f"{name}.md": page(name, target) for names in PAGES.values() for name, target in names}
    return {"README.md": contents(), **made, "errors.md": exceptions(False), "warnings.md": exceptions(True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all pages."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.api_reference", description="Write the reference of the public names again."
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "api", metavar="DIR")
    folder = parser.parse_args(arguments).to
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
