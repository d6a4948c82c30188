"""Neubig et al. 2017, figure 2: where a training step of a BiLSTM labeller spends its time, by strategy.

In: Settings. Out: milliseconds of graph construction, forward, backward and update, a sentence.

    python -m benchmarks --task neubig-figure-2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.competitors.agenda import AgendaTagger
from benchmarks.competitors.packed_lstm import PackedTagger, PaddedTagger
from benchmarks.contenders import Training
from benchmarks.models import Labeller
from benchmarks.results import CaseResult, Plot, Series, Table
from benchmarks.stages import counted, staged
from benchmarks.task import Case, Settings, Task
from benchmarks.workloads import made_up_sentences

SCHEDULES = ("none", "depth", "agenda", "lookahead", "fold")
CONSTRUCTION = ("trace", "merge")
SCHEDULING = ("rewrite", "schedule", "plan")
PHASES = ("construction", "scheduling", "forward", "backward", "update")


def cases(settings: Settings) -> Iterator[Case]:
    batch, length = settings.size(64, 3), settings.size(40, 4)
    torch.manual_seed(settings.seed)
    model = Labeller(
        1000, 300, embedding=settings.size(200, 8), hidden=settings.size(256, 8), layers=2
    ).to(settings.device)  # fmt: skip
    train = Training(model, made_up_sentences(settings, length=length, batch=batch), update=1e-4)
    contenders = [replace(train.one_by_one("one by one"), limit=3)]
    for schedule in settings.size(SCHEDULES, ("none", "fold")):
        found = staged(train.batched(f"fxbatch, {schedule}", schedule=schedule))
        contenders.append(replace(found, limit=3) if schedule == "none" else found)
    contenders += [
        train.by_hand("DyNet's algorithm", AgendaTagger(model)),
        train.by_hand("by hand, padded", PaddedTagger(model)),
        train.by_hand("by hand, packed", PackedTagger(model)),
    ]
    yield Case(
        f"BiLSTM labeller, length {length}, batch {batch}, training", {"batch": batch, "length": length},
        "sentence", batch, contenders, slow=("one by one", "by hand, packed"), reference="one by one",
        numbers=None if settings.quick else lambda: counted(model, "loss", train.batches[0]),
    )  # fmt: skip


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    (case,) = found
    rows: list[list[str | int | float | None]] = []
    for name, entry in case.entries.items():
        phases = phases_of({p: s.median for p, s in entry.phases.items()})
        rows.append([name, *(phases[p] / case.count * 1e3 if p in phases else None for p in PHASES),
                     entry.wall.median / case.count * 1e3])  # fmt: skip
    note = (
        "Construction: the user's forward, recorded. One by one and by hand, construction is part of "
        "forward. Quoted from the paper (DyNet, its authors' machine): 193 ms a sentence without batching, "
        "16.9 ms by agenda; on a GPU 54.6 and 5.03 ms."
    )
    return [Table("Milliseconds a sentence", ["strategy", *PHASES, "all"], rows, note)]


def phases_of(seconds: dict[str, float]) -> dict[str, float]:
    """The figure's phases from those of a run."""
    found = {p: s for p, s in seconds.items() if p in PHASES}
    for name, parts in (("construction", CONSTRUCTION), ("scheduling", SCHEDULING)):
        if parts[0] in seconds:
            found[name] = sum(seconds[part] for part in parts)
    return found


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    (case,) = found
    names = [name for name in case.entries if name not in ("one by one", "fxbatch, none")]
    series = []
    for phase in PHASES:
        y = [
            phases_of({p: s.median for p, s in case.entries[n].phases.items()}).get(phase, 0.0) for n in names
        ]
        series.append(Series(phase, [float(i) for i in range(len(names))], [v / case.count * 1e3 for v in y]))
    labels = [name.replace(", ", ",\n") for name in names]
    return [Plot("A training step, ms a sentence", "", "ms", series, kind="bar", labels=labels)]


TASK = Task(
    name="neubig-figure-2",
    title="Neubig et al. figure 2: a BiLSTM labeller, by phase",
    explanation=(
        "Sentences of 40 words, vocabulary 1000, embeddings of 200, 2 layers of 256 a direction, 300 "
        "labels, batch 64, as in the paper. Every time step is one LSTM cell. `none` is fxbatch without "
        "batching: the cost of its machinery."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
