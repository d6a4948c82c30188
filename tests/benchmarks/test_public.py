"""What the task `public` does, on a stand-in beside this file: edits, comparison, figures, what is missing."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.public.model import Driver, find_model
from benchmarks.public.row import Figures, Size, compare_with_the_loop, measure
from benchmarks.public.sources import VARIABLE, Edit, EditError, SourceMissing
from benchmarks.registry import TASKS
from benchmarks.results import CaseResult
from benchmarks.task import Settings, Skip
from benchmarks.tasks import public
from tests.benchmarks import stand_in
from tests.benchmarks.stand_in import MODEL

NUMBERS = {"loop", "speed", "first", "begin", "memory", "long", "edits", "equal", "counted"}


@pytest.fixture(autouse=True)
def checkouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(stand_in.FOLDER))


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_row_has_all_figures_and_agrees_with_the_loop(mode: str) -> None:
    figures = measure(MODEL, mode, Size.quick())
    assert figures.failures == {} and figures.notes == {}
    assert set(figures.numbers) == NUMBERS
    assert figures.numbers["edits"] == 1 and figures.numbers["speed"] > 0
    assert figures.numbers["equal"] <= 1


def test_edits_are_made_in_a_copy_that_is_gone_afterwards() -> None:
    with MODEL.source.imported() as load:
        module = load("tree_sum")
        copy = Path(str(module.__file__))
        assert '"cpu"' in copy.read_text() and "size, True)" in copy.read_text()
    assert not copy.exists()
    assert "tree_sum" not in sys.modules and "somewhere" not in sys.modules
    assert '"cuda"' in (MODEL.source.place() / "tree_sum.py").read_text()


def test_an_edit_that_changes_nothing_is_an_error() -> None:
    source = dataclasses.replace(MODEL.source, edits=(Edit("tree_sum.py", "no such text", "", "torch"),))
    with pytest.raises(EditError, match=r"tree_sum\.py: nothing matches 'no such text'"), source.imported():
        pass


def test_what_differs_from_the_loop_is_told() -> None:
    with MODEL.source.imported() as load:
        driver, numbers = MODEL.build(load), itertools.count()

        def another_each_time() -> torch.nn.Module:
            module = driver.make()
            with torch.no_grad():
                module.get_parameter("out.bias").fill_(float(next(numbers)))
            return module

        figures = Figures()
        wrong = Driver(another_each_time, driver.instances)
        compare_with_the_loop(MODEL, wrong, "inference", Size.quick(), figures)
    assert "error 1" in figures.failures["values"]
    assert figures.numbers["equal"] == float("inf")


def test_without_the_repositories_the_task_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "MODELS", ("tests.benchmarks.stand_in:MODEL",))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SourceMissing, match="FXBATCH_PUBLIC is not set"):
        MODEL.source.place()
    with pytest.raises(Skip, match="nobody/trees@0123456789"):
        next(iter(public.cases(Settings(quick=True))))


def test_each_model_says_where_it_is_from_and_why_it_was_edited() -> None:
    models = [find_model(place) for place in public.MODELS]
    assert len({model.name for model in models}) == len(models)
    assert public.TASK in TASKS
    for model in models:
        assert model.source.repository.count("/") == 1 and len(model.source.commit) == 40
        assert {edit.because for edit in model.source.edits} <= {"torch", "import", "device", "fxbatch"}


def test_the_table_has_a_row_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "MODELS", ("tests.benchmarks.stand_in:MODEL",))
    numbers = dict(loop=10.0, speed=4.0, first=1.5, begin=0.5, memory=3.0, long=0.0, edits=0.0, equal=0.25)
    found = [
        CaseResult(
            mode, {"model": "stand-in", "kind": "tree", "mode": mode}, "instance", 3, {}, {}, [], {}, numbers,
            {"values": "minibatch 2 differs"} if mode == "inference" else {},
        )
        for mode in ("training", "inference")
    ]  # fmt: skip
    table, sources = public.tables(found, Settings())
    assert table.rows == [
        [
            "stand-in",
            "tree",
            "10 / 10",
            "4 / 4",
            "1.5 / 1.5",
            "0.5 / 0.5",
            "3 / 3",
            "0 / 0",
            "0.25 / minibatch 2 differs",
        ]
    ]
    assert sources.rows == [["stand-in", "nobody/trees@0123456789", "1 for device, 1 for fxbatch", 1]]
    assert "training: median 4, least 4; the first 30 at most 0.5, 1 of 1 below 1" in table.note
