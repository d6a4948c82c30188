"""Neubig et al. 2017, table 1: training speed of four models on real data, by strategy.

In: Settings. Out: sentences a second.

    python -m benchmarks --task neubig-table-1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.competitors.batched_parser import BatchedParser
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.competitors.packed_lstm import PackedCharTagger, PackedTagger
from benchmarks.contenders import SAMPLED, Batches, Looks, Training
from benchmarks.measure import Contender
from benchmarks.report import ratio_text
from benchmarks.results import CaseResult, Plot, Series, Table
from benchmarks.stages import counted
from benchmarks.task import Case, Settings, Skip, Task
from benchmarks.workloads import (
    ewt_parser,
    ewt_tagger,
    ner_tagger,
    parser_looks,
    spelled_looks,
    spelled_lookups,
    sst_trees,
)

ONE, HAND, OURS = "one by one", "by hand", "fxbatch, lookahead"
PARSER = "transition-based parser"
SCHEDULES = ("none", "depth", "agenda", "lookahead")
COLUMNS = (ONE, SAMPLED, *(f"fxbatch, {schedule}" for schedule in SCHEDULES), HAND)

# Times over one by one that a training step should reach.
GOALS = {
    "BiLSTM": 8.0,
    "BiLSTM with characters": 8.0,
    "Tree-LSTM": 20.0,
    PARSER: 5.0,
}


# Quoted from the paper's table 1, sentences a second: (none, depth, agenda) on its CPU, then on its GPU.
PAPER = {
    "BiLSTM": ((16.8, 139.0, 156.0), (56.2, 337.0, 367.0)),
    "BiLSTM with characters": ((15.7, 93.8, 132.0), (43.2, 183.0, 275.0)),
    "Tree-LSTM": ((50.2, 348.0, 357.0), (76.5, 672.0, 661.0)),
    PARSER: ((16.8, 61.0, 61.2), (33.0, 89.5, 90.1)),
}


@dataclass(frozen=True)
class Made:
    """A model, its minibatches, the model by hand, and how many words an instance looks up.

    looks: what a minibatch looks up, where `losses_once` can't tell.
    """

    model: Any
    batches: Batches[Any]
    hand: Any
    words: Callable[[Any], int]
    looks: Callable[[Any, Sequence[Any]], Looks] | None = None

    def one(self, train: Training) -> Contender:
        """The undecorated loss in a loop, what is embedded looked up once a minibatch."""
        return train.one_by_one(ONE) if self.looks is None else train.looked_up(self._looks, ONE)

    def _looks(self, batch: Sequence[Any]) -> Looks:
        assert self.looks is not None
        return self.looks(self.model, batch)


def cases(settings: Settings) -> Iterator[Case]:
    for name, make in MODELS.items():
        try:
            made = make(settings)
        except Skip as skip:
            yield Case(name, {}, "sentence", 0, [], skipped={"all": str(skip)})
            continue
        train = Training(made.model, made.batches, update=1e-5)
        batch = len(made.batches[0])
        contenders = [replace(made.one(train), limit=3), *train.sampled_loop(made.words, made.one)]
        for schedule in settings.size(SCHEDULES, ("lookahead",)):
            found = train.batched(f"fxbatch, {schedule}", schedule=schedule)
            contenders.append(replace(found, limit=1) if schedule == "none" else found)
        contenders.append(train.by_hand(HAND, made.hand))
        wanted = not settings.quick or name == PARSER  # counting compiles everything once more
        yield Case(
            name, {"model": name, "batch": batch}, "sentence", batch, contenders, slow=(ONE, SAMPLED, HAND),
            reference=ONE,
            numbers=partial(_count, made) if wanted else None,
        )  # fmt: skip


def _count(made: Made) -> dict[str, float]:
    return counted(made.model, "loss", made.batches[0])


def _tagger(settings: Settings) -> Made:
    hidden, embedding = settings.size(256, 8), settings.size(200, 8)
    model, batches = ewt_tagger(settings, hidden=hidden, embedding=embedding, batch=settings.size(64, 3))
    return Made(model, batches, PackedTagger(model), lambda sentence: len(sentence.words))


def _characters(settings: Settings) -> Made:
    model, batches = ner_tagger(settings, hidden=settings.size(50, 8), batch=settings.size(64, 3))
    return Made(model, batches, PackedCharTagger(model), spelled_lookups, spelled_looks)


def _trees(settings: Settings) -> Made:
    hidden, embedding = settings.size(150, 8), settings.size(300, 8)
    model, batches, _ = sst_trees(settings, hidden=hidden, embedding=embedding, batch=settings.size(64, 3))
    return Made(model, batches, LevelTreeLSTM(model), lambda tree: (tree.nodes + 1) // 2)


def _parser(settings: Settings) -> Made:
    model, batches = ewt_parser(settings, hidden=settings.size(125, 8), batch=settings.size(64, 3))
    return Made(model, batches, BatchedParser(model), lambda sentence: len(sentence.words), parser_looks)


MODELS: dict[str, Callable[[Settings], Made]] = {
    "BiLSTM": _tagger,
    "BiLSTM with characters": _characters,
    "Tree-LSTM": _trees,
    PARSER: _parser,
}


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    for case in found:
        rates = [case.count / case.entries[n].wall.median if n in case.entries else None for n in COLUMNS]
        over = case.ratio(ONE, OURS)
        goal = f">= {GOALS[case.name]:g}x"
        if over is not None:
            goal += " +" if over.median >= GOALS[case.name] else " -"
        none, _, agenda = PAPER[case.name][1 if settings.device.type == "cuda" else 0]
        rows.append([case.name, *rates, ratio_text(over) if over else None, goal, agenda / none])
    columns = ["model", *COLUMNS, "lookahead over one by one", "wanted", "paper: agenda over none"]
    note = (
        "Forward, backward and a step of SGD. `+` reached, `-` not (by the median). The last column is quoted "
        "from the paper's table 1: DyNet with and without batching, on its authors' machine and data."
    )
    return [Table("Sentences a second, training", columns, rows, note), *_batching(found)]


def _batching(found: Sequence[CaseResult]) -> list[Table]:
    """How much of a minibatch runs together: for the parser, whose phases follow its actions, above all."""
    rows: list[list[str | int | float | None]] = []
    for case in found:
        n = case.numbers
        if n:
            rows.append([case.name, n["phases"], n["phases"] / case.count, n["launches one by one"] / case.count,
                         n["steps"], n["launches one by one"] / n["steps"]])  # fmt: skip
    columns = ["model", "phases a minibatch", "phases a sentence", "calls a sentence", "steps a minibatch"]
    note = "All sentences of a minibatch share its phases. Mean batch size: calls a step."
    return [Table("Batching", [*columns, "mean batch size a step"], rows, note)] if rows else []


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    shown = [case for case in found if case.entries]
    series = []
    for name in COLUMNS:
        having = [(i, c) for i, c in enumerate(shown) if name in c.entries]
        walls = [c.entries[name].wall for _, c in having]
        series.append(
            Series(name, [float(i) for i, _ in having],
                   [c.count / w.median for (_, c), w in zip(having, walls)],
                   [c.count / w.high for (_, c), w in zip(having, walls)],
                   [c.count / w.low for (_, c), w in zip(having, walls)])
        )  # fmt: skip
    labels = [case.name for case in shown]
    return [
        Plot("Sentences a second", "", "sentences a second", series, kind="bar", labels=labels, log_y=True)
    ]


TASK = Task(
    name="neubig-table-1",
    title="Neubig et al. table 1: four models on real data",
    explanation=(
        "BiLSTM tagger (EWT), BiLSTM tagger that spells rare words (WikiNER), Tree-LSTM (SST) and "
        "transition-based parser (EWT; every action depends on the scores before it), batch 64. By hand: "
        "packed LSTMs; levels; all parsers of a minibatch in step."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
