"""Targets: what can be named, what is passed, and a clear line for each mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fxbatch_cli.errors import CommandError, Status
from fxbatch_cli.target import load_target, parse_arguments

from fxbatch.decorator import InstanceArguments

SOURCE = """
import dataclasses
from dataclasses import dataclass

@dataclass
class Instance:
    n: int

def model(x):
    return x

def minibatch(count: int = 2, name="a"):
    return model, [Instance(i) for i in range(count)]

def one_tuple(): return (model,)
def nothing(): return None
def no_model(): return 3, []
def no_list(): return model, 5
def columns(): return model, [1, 2], (x for x in (None, 4))
def uneven(): return model, [1, 2], [3]
def generator(): return model, (i for i in range(3))

def fails():
    return deeper()

def deeper():
    raise ValueError("no\\nluck")

import fxbatch

@fxbatch.autobatch
def forward(tree):
    return tree

def one_tree():
    forward(3)

def collated():
    fxbatch.collate(["x" * 100] * 1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_models.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import json\ndef f(:\n")
    (tmp_path / "importing.py").write_text("import json\nimport no_such_module_anywhere\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_file_and_module_targets(folder: Path) -> None:
    for target in ("my_models.py:minibatch", f"{folder}/my_models.py:minibatch", "my_models:minibatch"):
        model, instances = load_target(target)
        assert model(7) == 7
        assert [i.n for i in instances] == [0, 1]


def test_arguments_are_passed(folder: Path) -> None:
    _, instances = load_target("my_models.py:minibatch", ["count=4", "name=b"])
    assert len(instances) == 4


def test_instances_may_be_any_iterable(folder: Path) -> None:
    assert load_target("my_models.py:generator")[1] == [0, 1, 2]


def test_a_list_for_each_argument(folder: Path) -> None:
    assert load_target("my_models.py:columns")[1] == [InstanceArguments((1, None)), InstanceArguments((2, 4))]


def test_values_are_literals_or_text() -> None:
    assert parse_arguments(["a=1", "b=1e-3", "c=[1, 2]", "d=text", "e=", "f=None", "g=x=y"]) == {
        "a": 1,
        "b": 1e-3,
        "c": [1, 2],
        "d": "text",
        "e": "",
        "f": None,
        "g": "x=y",
    }


@pytest.mark.parametrize(
    ("target", "arguments", "status", "message", "hint"),
    [
        ("my_models", [], Status.USAGE, "is not file.py:function", "examples/tree_lstm.py:minibatch"),
        (".", [], Status.USAGE, ". is a directory", "examples/tree_lstm.py:minibatch"),
        ("./:f", [], Status.USAGE, ". is a directory", "path/to/file.py:function"),
        ("my_models:", [], Status.USAGE, "is not file.py:function", ""),
        ("gone.py:f", [], Status.USAGE, "no file 'gone.py'", ""),
        ("gone.mod:f", [], Status.USAGE, "no module 'gone'", "path/to/file.py:function"),
        (
            "my_models.py:minibath",
            [],
            Status.USAGE,
            "no function 'minibath'",
            "did you mean my_models.py:minibatch?",
        ),
        ("my_models.py:xyz", [], Status.USAGE, "no function 'xyz'", "it has: model, minibatch"),
        (
            "my_models.py:minibatch",
            ["size=3"],
            Status.USAGE,
            "unexpected keyword argument 'size'",
            "count: int = 2",
        ),
        ("my_models.py:model", [], Status.USAGE, "missing a required argument: 'x'", "--arg"),
        ("my_models.py:minibatch", ["count"], Status.USAGE, "--arg 'count' is not key=value", ""),
        ("my_models.py:minibatch", ["count=1", "count=2"], Status.USAGE, "--arg count is given twice", ""),
        ("my_models.py:nothing", [], Status.MODEL, "returned NoneType, expected (model, instances)", ""),
        ("my_models.py:one_tuple", [], Status.MODEL, "returned tuple, expected (model, instances)", ""),
        ("my_models.py:no_model", [], Status.MODEL, "a model of type int, which can't be called", ""),
        ("my_models.py:uneven", [], Status.MODEL, "lists of 2, 1 instances", "one list for each argument"),
        ("my_models.py:no_list", [], Status.MODEL, "instances of type int, expected a list", "[instance]"),
        ("my_models.py:one_tree", [], Status.MODEL, "did you mean [tree]?", ""),
        ("my_models.py:one_tree", [], Status.MODEL, "(my_models.py:36)", ""),
        ("my_models.py:collated", [], Status.MODEL, "collate_fn=fxbatch.collate(model)", ""),
        ("my_models.py:fails", [], Status.MODEL, "ValueError: no luck (my_models.py:27)", "--traceback"),
        ("broken.py:f", [], Status.MODEL, "importing broken.py: SyntaxError", ""),
        (
            "importing.py:f",
            [],
            Status.MODEL,
            "No module named 'no_such_module_anywhere' (importing.py:2)",
            "",
        ),
        ("importing:f", [], Status.MODEL, "No module named 'no_such_module_anywhere' (importing.py:2)", ""),
        ("leaving.py:f", [], Status.MODEL, "SystemExit: 3 (leaving.py:2)", ""),
    ],
)
def test_mistakes(
    folder: Path, target: str, arguments: list[str], status: Status, message: str, hint: str
) -> None:
    with pytest.raises(CommandError) as caught:
        load_target(target, arguments)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.status == status


def test_a_file_named_like_a_library_does_not_replace_it(folder: Path) -> None:
    (folder / "json.py").write_text("def minibatch(): return print, []\n")
    import json

    load_target(f".{os.sep}json.py:minibatch")
    assert json.loads("[1]") == [1]
    assert __import__("json") is json
