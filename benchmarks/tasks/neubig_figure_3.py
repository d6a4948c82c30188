"""Neubig et al. 2017, figure 3: Tree-LSTM throughput over batch sizes, against Fold's literal algorithm.

In: Settings. Out: trees a second for batch sizes 1 to 256, training.

    python -m benchmarks --task neubig-figure-3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.competitors.agenda import AgendaTreeLSTM
from benchmarks.competitors.fold import FoldTreeLSTM
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.contenders import Training
from benchmarks.results import CaseResult, Plot, Table
from benchmarks.task import Case, Settings, Task
from benchmarks.tasks.looks_table_1 import throughput
from benchmarks.workloads import sst_trees

OURS, LITERAL, FOLD = "fxbatch", "fxbatch, schedule fold", "TorchFold's algorithm"
DYNET, HAND, ONE = "DyNet's algorithm", "by hand", "one by one"
LARGEST_ONE_BY_ONE = 64


def cases(settings: Settings) -> Iterator[Case]:
    hidden, embedding = settings.size(150, 8), settings.size(300, 8)
    for batch in settings.size((1, 2, 4, 8, 16, 32, 64, 128, 256), (4,)):
        model, batches, source = sst_trees(settings, hidden=hidden, batch=batch, embedding=embedding)
        train = Training(model, batches)
        contenders = [
            train.batched(OURS),
            train.batched(LITERAL, schedule="fold"),
            train.by_hand(FOLD, FoldTreeLSTM(model)),
            train.by_hand(DYNET, AgendaTreeLSTM(model)),
            train.by_hand(HAND, LevelTreeLSTM(model)),
        ]
        skipped = {}
        if batch <= LARGEST_ONE_BY_ONE:
            contenders.append(replace(train.one_by_one(ONE), limit=3))
        else:
            skipped[ONE] = (
                f"its time a tree does not depend on the batch size: see batch {LARGEST_ONE_BY_ONE}"
            )
        yield Case(
            f"{source}, hidden {hidden}, batch {batch}", {"hidden": hidden, "batch": batch}, "tree", batch,
            contenders, slow=(FOLD, DYNET, HAND, ONE), skipped=skipped, reference=HAND,
        )  # fmt: skip


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    names = (OURS, LITERAL, FOLD, DYNET, HAND, ONE)
    rows: list[list[str | int | float | None]] = []
    for case in found:
        rates = [case.count / case.entries[n].wall.median if n in case.entries else None for n in names]
        rows.append([case.count, *rates])
    return [Table("Trees a second, training", ["batch", *names], rows)]


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    names = list(dict.fromkeys(name for case in found for name in case.entries))
    series = [throughput(name, found) for name in names]
    return [
        Plot(
            "Trees a second over batch sizes", "batch size", "trees a second", series, log_x=True, log_y=True
        )
    ]


TASK = Task(
    name="neubig-figure-3",
    title="Neubig et al. figure 3: throughput over batch sizes, against Fold",
    explanation=(
        "Training a Tree-LSTM on SST. `TorchFold's algorithm` batches by depth and operation in plain "
        "PyTorch; `fxbatch, schedule fold` is the algorithm of Looks et al. with its pass-throughs, on this "
        "project's runtime; `DyNet's algorithm` batches function by function by agenda in plain PyTorch."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
