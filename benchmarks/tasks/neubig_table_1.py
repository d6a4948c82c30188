"""Neubig et al. 2017, table 1: training speed of four models on real data, by strategy.

In: Settings. Out: sentences a second.

    python -m benchmarks --task neubig-table-1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.competitors.batched_parser import BatchedParser
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.competitors.packed_lstm import PackedCharTagger, PackedTagger
from benchmarks.contenders import Training
from benchmarks.results import CaseResult, Plot, Series, Table
from benchmarks.stages import counted
from benchmarks.task import Case, Settings, Skip, Task
from benchmarks.workloads import ewt_parser, ewt_tagger, ner_tagger, parser_looks, spelled_looks, sst_trees

ONE, LOOP, HAND, OURS = "one by one", "one by one, embedding in the loop", "by hand", "fxbatch, agenda"
SCHEDULES = ("none", "depth", "agenda", "lookahead")
COLUMNS = (ONE, LOOP, *(f"fxbatch, {schedule}" for schedule in SCHEDULES), HAND)

# The paper's table, sentences a second: (CPU none, depth, agenda), (GPU none, depth, agenda).
PAPER = {
    "BiLSTM": ((16.8, 139.0, 156.0), (56.2, 337.0, 367.0)),
    "BiLSTM with characters": ((15.7, 93.8, 132.0), (43.2, 183.0, 275.0)),
    "Tree-LSTM": ((50.2, 348.0, 357.0), (76.5, 672.0, 661.0)),
    "transition-based parser": ((16.8, 61.0, 61.2), (33.0, 89.5, 90.1)),
}


# A model, its minibatches, the model by hand, and what a minibatch looks up where `losses_once` can't tell.
Made = tuple[Any, Any, Any, Any]


def cases(settings: Settings) -> Iterator[Case]:
    for name, make in MODELS.items():
        try:
            model, batches, hand, looks = make(settings)
        except Skip as skip:
            yield Case(name, {}, "sentence", 0, [], skipped={"all": str(skip)})
            continue
        train = Training(model, batches, update=1e-5)
        batch = len(batches[0])
        one = train.one_by_one(ONE) if looks is None else train.looked_up(partial(looks, model), ONE)
        contenders = [replace(one, limit=3), replace(train.loop(LOOP), limit=1)]
        for schedule in settings.size(SCHEDULES, ("agenda",)):
            found = train.batched(f"fxbatch, {schedule}", schedule=schedule)
            contenders.append(replace(found, limit=3) if schedule == "none" else found)
        contenders.append(train.by_hand(HAND, hand))
        yield Case(
            name, {"model": name, "batch": batch}, "sentence", batch, contenders, slow=(ONE, LOOP, HAND),
            reference=LOOP, numbers=lambda model=model, batches=batches: counted(model, "loss", batches[0]),
        )  # fmt: skip


def _tagger(settings: Settings) -> Made:
    hidden, embedding = settings.size(256, 8), settings.size(200, 8)
    model, batches = ewt_tagger(settings, hidden=hidden, embedding=embedding, batch=settings.size(64, 3))
    return model, batches, PackedTagger(model), None


def _characters(settings: Settings) -> Made:
    model, batches = ner_tagger(settings, hidden=settings.size(50, 8), batch=settings.size(64, 3))
    return model, batches, PackedCharTagger(model), spelled_looks


def _trees(settings: Settings) -> Made:
    hidden, embedding = settings.size(150, 8), settings.size(300, 8)
    model, batches, _ = sst_trees(settings, hidden=hidden, embedding=embedding, batch=settings.size(64, 3))
    return model, batches, LevelTreeLSTM(model), None


def _parser(settings: Settings) -> Made:
    model, batches = ewt_parser(settings, hidden=settings.size(125, 8), batch=settings.size(64, 3))
    return model, batches, BatchedParser(model), parser_looks


MODELS: dict[str, Callable[[Settings], Made]] = {
    "BiLSTM": _tagger,
    "BiLSTM with characters": _characters,
    "Tree-LSTM": _trees,
    "transition-based parser": _parser,
}


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    for case in found:
        rates = [case.count / case.entries[n].wall.median if n in case.entries else None for n in COLUMNS]
        over = case.ratio(ONE, OURS) or case.ratio(LOOP, OURS)
        paper = PAPER[case.name][1 if settings.device.type == "cuda" else 0]
        rows.append([case.name, *rates, over.median if over else None, paper[2] / paper[0]])
    columns = ["model", *COLUMNS, "agenda over one by one", "paper: agenda over none"]
    note = "Forward, backward and a step of SGD. The paper's gain is within DyNet, on its own machine."
    return [Table("Sentences a second, training", columns, rows, note)]


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
