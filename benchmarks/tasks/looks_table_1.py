"""Looks et al. 2017, table 1: a Tree-LSTM on trees of 128 leaves, what dynamic batching costs and gains.

In: Settings. Out: the paper's table, for inference as in the paper, and for training.

    python -m benchmarks --task looks-table-1 --device cuda
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.competitors.equal_trees import EqualTreeLSTM
from benchmarks.competitors.fold import FoldTreeLSTM
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.contenders import Inference, Training
from benchmarks.measure import Contender
from benchmarks.models import TreeLSTM
from benchmarks.results import CaseResult, Plot, Series, Table
from benchmarks.task import Case, Settings, Task
from benchmarks.workloads import made_up_trees

MANUAL, DYNAMIC, FULL = "manual", "dynamic", "full dynamic"
ONE, HAND, FOLD, FOLD_HERE = "one by one", "by hand", "TorchFold's algorithm", "fxbatch, schedule fold"
# Its time a tree does not depend on the batch size: larger batches would only take longer to say so.
LARGEST_ONE_BY_ONE = {"cpu": 32, "cuda": 64}
# On a CPU, where a minibatch of the largest takes most of a minute, Fold's algorithm stands beside up to here.
LARGEST_FOLD = {"cpu": 128, "cuda": 1024}

# Quoted from the paper's table 1, GPU, state size 1024, inference: batch size -> seconds a batch (manual, dynamic, full
# dynamic), speed-up over one tree at a time.
PAPER = {
    1: (0.161, 0.038, 0.036, 4.47),
    32: (0.153, 0.061, 0.074, 68.79),
    64: (0.193, 0.093, 0.106, 96.40),
    128: (0.236, 0.164, 0.178, 115.05),
    256: (0.312, 0.323, 0.340, 120.86),
    512: (0.530, 0.715, 0.721, 114.15),
    1024: (0.978, 1.590, 1.617, 101.79),
}


def cases(settings: Settings) -> Iterator[Case]:
    sizes = (1024,) if settings.device.type == "cuda" else (256, 512)
    for state in settings.size(sizes, (16,)):
        for mode in ("inference", "training"):
            for batch in settings.size((1, 32, 64, 128, 256, 512, 1024), (3,)):
                yield make_case(settings, state, mode, batch, leaves=settings.size(128, 6))


def make_case(settings: Settings, state: int, mode: str, batch: int, *, leaves: int) -> Case:
    """One row of the table. Equal and different trees are two groups: each has its own minibatches."""
    sizes: dict[str, Any] = {"leaves": leaves, "hidden": state, "embedding": state, "batch": batch}
    model, equal = made_up_trees(settings, equal=True, all_nodes=False, **sizes)
    _, different = made_up_trees(settings, all_nodes=False, **sizes)
    kind = Training if mode == "training" else Inference
    contenders = [
        *in_group("equal", equal_shapes(kind(model, equal), model)),
        *in_group("different", different_shapes(kind(model, different), model)),
    ]
    skipped = {}
    largest_fold = LARGEST_FOLD[settings.device.type]
    if batch <= largest_fold:
        contenders += in_group("different", folds(kind(model, different), model))
    else:
        skipped |= dict.fromkeys((FOLD, FOLD_HERE), f"compared up to batch {largest_fold} on this device")
    largest = LARGEST_ONE_BY_ONE[settings.device.type]
    if batch <= largest:
        contenders += in_group("different", [replace(kind(model, different).one_by_one(ONE), limit=3)])
    else:
        skipped[ONE] = f"its time a tree does not depend on the batch size: see batch {largest}"
    return Case(
        f"state {state}, batch {batch}, {mode}",
        {"state": state, "batch": batch, "mode": mode, "leaves": leaves},
        "tree", batch, contenders, slow=(ONE, MANUAL, HAND), skipped=skipped, reference=HAND,
    )  # fmt: skip


def equal_shapes(work: Training | Inference, model: TreeLSTM) -> list[Contender]:
    return [work.by_hand(MANUAL, EqualTreeLSTM(model)), work.batched(DYNAMIC)]


def different_shapes(work: Training | Inference, model: TreeLSTM) -> list[Contender]:
    return [work.by_hand(HAND, LevelTreeLSTM(model)), work.batched(FULL)]


def folds(work: Training | Inference, model: TreeLSTM) -> list[Contender]:
    return [work.batched(FOLD_HERE, schedule="fold"), work.by_hand(FOLD, FoldTreeLSTM(model))]


def in_group(group: str, contenders: Sequence[Contender]) -> list[Contender]:
    return [replace(contender, group=group) for contender in contenders]


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    keys = dict.fromkeys((c.parameters["state"], c.parameters["mode"]) for c in found)
    return [_table(state, mode, [c for c in found if _key(c) == (state, mode)]) for state, mode in keys]


def _key(case: CaseResult) -> tuple[int, str]:
    return case.parameters["state"], case.parameters["mode"]


def _table(state: int, mode: str, cases: Sequence[CaseResult]) -> Table:
    beside = mode == "inference" and state == 1024
    columns = ["batch"]
    for name in (MANUAL, DYNAMIC, FULL):
        columns += [f"{name}, s a batch", "s a tree"]
    columns += ["cost ratio", "speed-up ratio", f"{HAND}, s a batch", f"over {HAND}"]
    columns += (
        ["paper: full dynamic, s a batch", "paper: cost ratio", "paper: speed-up ratio"] if beside else []
    )
    one = next((_seconds(c, ONE) / c.count for c in cases if _seconds(c, ONE)), None)
    rows: list[list[str | int | float | None]] = []
    for case in cases:
        row: list[str | int | float | None] = [case.count]
        for name in (MANUAL, DYNAMIC, FULL):
            seconds = _seconds(case, name)
            row += [seconds, seconds / case.count] if seconds else [None, None]
        manual, dynamic, full = (_seconds(case, name) for name in (MANUAL, DYNAMIC, FULL))
        row.append(dynamic / manual if manual and dynamic else None)
        row.append(one / (full / case.count) if one and full else None)
        over = case.ratio(HAND, FULL)
        row += [_seconds(case, HAND) or None, over.median if over else None]
        if beside:
            paper = PAPER.get(case.count)
            row += [paper[2], paper[1] / paper[0], paper[3]] if paper else [None, None, None]
        rows.append(row)
    note = (
        "Manual: trees of one shape, batched by hand; dynamic: fxbatch on them; full dynamic: fxbatch on "
        "trees of different shapes. Cost ratio: dynamic / manual. Speed-up ratio: one by one (a tree, at "
        "the smallest batch where it was timed) / full dynamic (a tree)."
    )
    if beside:
        note += " The paper's columns are quoted from its table 1 (its authors' GPU)."
    return Table(f"State {state}, {mode}", columns, rows, note)


def _seconds(case: CaseResult, name: str) -> float:
    return case.entries[name].wall.median if name in case.entries else 0.0


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    drawn = []
    for state, mode in dict.fromkeys(_key(c) for c in found):
        cases = [c for c in found if _key(c) == (state, mode)]
        names = list(dict.fromkeys(name for c in cases for name in c.entries))
        drawn.append(
            Plot(f"Trees a second, state {state}, {mode}", "batch size", "trees a second",
                 [throughput(name, cases) for name in names], log_x=True, log_y=True)
        )  # fmt: skip
    return drawn


def throughput(name: str, cases: Sequence[CaseResult]) -> Series:
    """A competitor's units a second over batch sizes, with quartiles."""
    shown = [c for c in cases if name in c.entries]
    walls = [c.entries[name].wall for c in shown]
    return Series(
        name,
        [float(c.parameters["batch"]) for c in shown],
        [c.count / w.median for c, w in zip(shown, walls)],
        [c.count / w.high for c, w in zip(shown, walls)],
        [c.count / w.low for c, w in zip(shown, walls)],
    )


TASK = Task(
    name="looks-table-1",
    title="Looks et al. table 1: Tree-LSTM on trees of 128 leaves",
    explanation=(
        "What dynamic batching costs where batching by hand is possible (trees of one shape), and what it "
        "gains where it is not. State size 1024 on a GPU as in the paper, 256 and 512 on a CPU. Each round "
        "has new trees."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
