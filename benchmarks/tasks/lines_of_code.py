"""Looks et al. 2017, table 3: lines of code of models, fxbatch against plain PyTorch that batches by hand.

In: the sources of the examples and competitors, which are what is measured elsewhere. Out: their lines.

    count_lines("def f(x):\\n    # double\\n    return 2 * x\\n", ["f"])          # 2
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import CaseResult, Table
from benchmarks.task import Case, Settings, Task

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Model:
    """A model in both forms: for each, the objects of source files that a user would have to write."""

    name: str
    fxbatch: dict[str, list[str]]
    by_hand: dict[str, list[str]]
    paper: tuple[int, int] | None = None  # quoted from table 3: TensorFlow Fold, the original's code


_TREE = "benchmarks/models.py"
_LEVELS = "benchmarks/competitors/level_trees.py"

MODELS = (
    Model(
        "Tree-LSTM",
        {"examples/tree_lstm.py": ["Leaf", "Composer", "TreeLSTM"]},
        {
            _TREE: ["LeafCell", "NodeCell.__init__", "TreeLSTM.__init__"],
            _LEVELS: ["Levels", "find_levels", "LevelTreeLSTM"],
        },
        (119, 219),
    ),
    Model(
        "graph network",
        {"examples/molecules.py": ["Message", "Readout", "MoleculeNetwork", "add"]},
        {
            "examples/molecules.py": ["Message.__init__", "Readout.__init__", "MoleculeNetwork.__init__"],
            "benchmarks/competitors/block_molecules.py": ["BlockMolecules"],
        },
        (32, 44),
    ),
    Model(
        "BiLSTM tagger",
        {"examples/bilstm_tagger.py": ["Tagger", "states", "sum_losses"]},
        {
            "examples/bilstm_tagger.py": ["Tagger.__init__"],
            "benchmarks/competitors/packed_lstm.py": [
                "PackedBiLSTM.forward", "PackedTagger.scores", "PackedTagger.forward", "PackedTagger.loss",
            ],
        },
    ),
    Model(
        "BiLSTM tagger with characters",
        {"examples/char_tagger.py": ["CharTagger", "states"]},
        {
            "examples/char_tagger.py": ["CharTagger.__init__"],
            "benchmarks/competitors/packed_lstm.py": [
                "PackedBiLSTM.forward", "PackedCharTagger.vectors", "PackedCharTagger.loss",
            ],
        },
    ),
    Model(
        "transition-based parser",
        {"examples/parser.py": ["Configuration", "Classifier", "Parser", "states"]},
        {
            "examples/parser.py": [
                "Configuration", "Classifier.__init__", "Classifier.score", "Parser.__init__", "Parser.judge",
            ],
            "benchmarks/competitors/batched_parser.py": [
                "BatchedParser.encode", "BatchedParser.scores", "BatchedParser.loss", "BatchedParser.forward",
            ],
        },
    ),
)  # fmt: skip


def count_lines(source: str, names: Sequence[str]) -> int:
    """Lines of the named classes, functions and methods (`Class.method`) that hold code.

    Blank lines, comments and docstrings don't count; decorators do. KeyError for a name that is not there.
    """
    found = dict(_objects(ast.parse(source), ""))
    wanted: dict[int, None] = {}
    for name in names:
        node = found[name]
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        documented = [n for n in ast.walk(node) if _is_docstring(n)]
        skipped = {
            line for doc in documented for line in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1)
        }
        for line in range(first, (node.end_lineno or first) + 1):
            if line not in skipped:
                wanted[line] = None
    return sum(line in wanted for line in _code_lines(source))


_Object = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _objects(tree: ast.AST, prefix: str) -> Iterator[tuple[str, _Object]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Object):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _objects(node, f"{prefix}{node.name}.")


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _code_lines(source: str) -> list[int]:
    """The numbers of the lines that hold a token other than a comment, each once."""
    without = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: dict[int, None] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in without:
            lines.update(dict.fromkeys(range(token.start[0], token.end[0] + 1)))
    return list(lines)


def count_model(parts: dict[str, list[str]]) -> int:
    """The lines of all parts."""
    return sum(count_lines((ROOT / path).read_text(encoding="utf-8"), names) for path, names in parts.items())


def cases(settings: Settings) -> Iterator[Case]:
    for model in MODELS:
        yield Case(
            model.name, {"model": model.name}, "model", 1, [],
            numbers=lambda model=model: {
                "fxbatch": count_model(model.fxbatch), "by hand": count_model(model.by_hand),
            },
        )  # fmt: skip


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    papers = {model.name: model.paper for model in MODELS}
    for case in found:
        if case.numbers:
            ours, hand = int(case.numbers["fxbatch"]), int(case.numbers["by hand"])
            rows.append([case.name, ours, hand, ours / hand, *(papers.get(case.name) or (None, None))])
    columns = ["model", "fxbatch", "by hand", "ratio", "paper: Fold", "paper: original"]
    note = (
        "Lines with code of the classes and functions that make the model and its minibatch: no imports, "
        "blank lines, comments, docstrings, no reading of data. By hand includes the parameters' "
        "definitions, which both share."
    )
    return [Table("Lines of code", columns, rows, note)]


TASK = Task(
    name="lines-of-code",
    title="Looks et al. table 3: lines of code",
    explanation=(
        "The models that the other tasks measure, in both forms. The paper's columns, quoted from its table "
        "3, are its own models in TensorFlow Fold and their authors' code; they are not the same models, and "
        "stand here for the ratio."
    ),
    cases=cases,
    tables=tables,
)
