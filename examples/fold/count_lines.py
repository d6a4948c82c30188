"""Lines of each example's model, in blocks and in plain PyTorch, as in Table 3 of Looks et al. 2017.

Lines between the marks `# [blocks` ... `# blocks]` and `# [plain` ... `# plain]`, without blank lines, comments
and docstrings.

    python examples/fold/count_lines.py
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from pathlib import Path

from fxbatch_examples.fold.training import console
from rich.table import Table

EXAMPLES = (
    "text_pipeline", "text2vec", "attention", "tree_lstm", "weave", "calculator", "fizzbuzz", "language_id",
)  # fmt: skip


def count(source: str, mark: str) -> int:
    """Lines of code between `# [mark` and `# mark]`; ValueError when there is no such part."""
    begin, end = f"# [{mark}", f"# {mark}]"
    if begin not in source or end not in source:
        raise ValueError(f"no part marked {mark!r}")
    part = source.split(begin, 1)[1].split(end, 1)[0]
    lines: dict[int, bool] = {}
    statement_begins = True
    skip = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(part).readline):
        if token.type == tokenize.NEWLINE:
            statement_begins = True
        elif token.type not in skip:
            docstring = statement_begins and token.type == tokenize.STRING
            statement_begins = False
            if not docstring:
                lines.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), True))
    return len(lines)


def table() -> list[tuple[str, int, int]]:
    """(example, lines in blocks, lines in plain PyTorch)."""
    folder = Path(__file__).parent
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in EXAMPLES}
    return [(name, count(s, "blocks"), count(s, "plain")) for name, s in sources.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    shown = Table("model", "lines, blocks", "lines, plain PyTorch (one instance)")
    for name, blocks, plain in table():
        shown.add_row(name, str(blocks), str(plain))
    console.print(shown)


if __name__ == "__main__":
    main()
