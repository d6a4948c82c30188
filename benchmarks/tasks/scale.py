"""Scale: what a call costs in time and in memory, from 10 to 1,000,000 calls, stage by stage.

In: Settings. Out: microseconds and bytes a call by program size; trees a second by batch size 1 to 4,096.

    python -m benchmarks --task scale
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contenders import Batches, Training, decorated
from benchmarks.models import Node, TreeLSTM
from benchmarks.results import CaseResult, Plot, Series, Table
from benchmarks.stages import NAMES, staged
from benchmarks.task import Case, Settings, Task
from benchmarks.tasks.looks_table_1 import throughput
from benchmarks.workloads import made_up_trees

OURS = "fxbatch"
LEAVES = 20
CALLS_A_TREE = 3 * LEAVES  # constant, embedding, leaf cell a leaf; a cell an inner node; scores and loss
# Linear: a call of the largest program costs at most so many times one of a program of 10,000 calls.
LINEAR = 2.0
MOST_MEASURED_MEMORY = 100_000  # the interpreter's memory counter makes larger ones take minutes


def cases(settings: Settings) -> Iterator[Case]:
    for calls in settings.size((10, 100, 1_000, 10_000, 100_000, 1_000_000), (10, 1_000)):
        trees = max(1, calls // CALLS_A_TREE)
        leaves = LEAVES if calls >= CALLS_A_TREE else 2
        yield scale_case(settings, f"{calls:,} calls", trees, leaves, hidden=16)
    for batch in settings.size(tuple(2**k for k in range(13)), (4,)):
        model, batches = made_up_trees(
            settings, leaves=LEAVES, hidden=settings.size(150, 8), batch=batch, embedding=64
        )
        work = Training(model, batches).batched(OURS)
        yield Case(f"batch {batch}", {"batch": batch, "part": "batch size"}, "tree", batch, [work])


def scale_case(settings: Settings, name: str, trees: int, leaves: int, *, hidden: int) -> Case:
    """One program size; a small hidden size, so that what a call costs is not hidden by its products."""
    model, batches = made_up_trees(
        settings, leaves=leaves, hidden=hidden, embedding=hidden, batch=trees, all_nodes=False
    )
    work = staged(Training(model, batches).batched(OURS))
    large = trees * CALLS_A_TREE > 200_000
    return Case(
        name, {"part": "calls"}, "tree", trees, [replace(work, limit=3) if large else work],
        numbers=lambda: count_and_weigh(model, batches),
    )  # fmt: skip


def count_and_weigh(model: TreeLSTM, batches: Batches[Node]) -> dict[str, float]:
    """Calls of the program; bytes of recording, schedule and plan a call, and of the step's tensors."""
    batch = batches[0]
    run = decorated(model, "loss")
    run(batch)  # operations are compiled
    calls = calls_of(model, batch)
    found: dict[str, float] = {"calls": calls}
    if calls <= MOST_MEASURED_MEMORY:
        tracemalloc.start()
        try:
            loss = run(batch)
            found["bytes a call, Python and numpy, peak"] = tracemalloc.get_traced_memory()[1] / calls
            del loss
        finally:
            tracemalloc.stop()
    return found


def calls_of(model: TreeLSTM, trees: Sequence[Any]) -> int:
    """Calls that the program of a minibatch has.

    Each leaf's word, embedding and cell; each inner node's cell; a tree's label, scores and loss.
    """
    leaves = sum((tree.nodes + 1) // 2 for tree in trees)
    return 3 * leaves + (leaves - len(trees)) + 3 * len(trees)


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    sized = [case for case in found if case.parameters["part"] == "calls" and OURS in case.entries]
    rows: list[list[str | int | float | None]] = []
    memory = "bytes a call, Python and numpy, peak"
    for case in sized:
        calls = case.numbers.get("calls")
        if not calls:
            continue
        entry = case.entries[OURS]
        micro = [entry.phases[name].median / calls * 1e6 for name in NAMES]
        rest = [entry.phases[name].median / calls * 1e6 for name in ("forward", "backward")]
        rows.append([int(calls), *micro, sum(micro), *rest, entry.wall.median / calls * 1e6,
                     case.numbers.get(memory)])  # fmt: skip
    columns = ["calls", *NAMES, "preparation", "forward", "backward", "whole step", "bytes"]
    return [Table("Microseconds a call", columns, rows, linear_note(rows))]


def linear_note(rows: Sequence[Sequence[Any]]) -> str:
    """Whether a call of the largest program costs no more than LINEAR times one of 10,000 calls."""
    base = next((row for row in rows if row[0] >= 5_000), None)
    if base is None or rows[-1] is base:
        return "Training step, hidden 16, 20-leaf trees."
    place = len(NAMES) + 1
    factor = rows[-1][place] / base[place]
    said = "linear" if factor <= LINEAR else "NOT linear"
    return (
        f"Training step, hidden 16, 20-leaf trees. Preparation of {rows[-1][0]:,} calls costs {factor:.2f} "
        f"times as much a call as of {base[0]:,}: {said} (at most {LINEAR:g})."
    )


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    sized = [case for case in found if case.parameters["part"] == "calls" and case.numbers.get("calls")]
    calls = [case.numbers["calls"] for case in sized]
    series = []
    for name in (*NAMES, "forward", "backward"):
        spreads = [case.entries[OURS].phases[name].scaled(1e6 / n) for case, n in zip(sized, calls)]
        series.append(
            Series(
                name, calls, [s.median for s in spreads], [s.low for s in spreads], [s.high for s in spreads]
            )
        )
    batches = [case for case in found if case.parameters["part"] == "batch size"]
    return [
        Plot("Microseconds a call over program size", "calls", "µs a call", series, log_x=True, log_y=True),
        Plot("Trees a second over batch size", "batch size", "trees a second", [throughput(OURS, batches)],
             log_x=True, log_y=True),
    ]  # fmt: skip


TASK = Task(
    name="scale",
    title="Scale: cost a call, from 10 to 1,000,000 calls",
    explanation=(
        "Trace: the user's forward, recorded. Merge: the recording as columns. Rewrite, schedule, plan: the "
        "passes. Forward and backward: the kernels, and the loop that launches them."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
