"""Every cell of sizes and modes beside batching by hand and DyNet, each build of it in a process of its own.

In: Settings. Out: a row a cell: units a second, and how many times as fast as each peer, in CPU time.

    python -m benchmarks --task peers --threads 1 --dynet build/dynet-eigen --dynet build/dynet-mkl
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.competitors.packed_lstm import PackedTagger
from benchmarks.competitors.peer_process import PeerProcess
from benchmarks.competitors.peers import PeerUnavailable
from benchmarks.contenders import Batches, Inference, Training
from benchmarks.measure import Clock, Contender
from benchmarks.optional import DYNET
from benchmarks.report import ratio_text
from benchmarks.results import CaseResult, Spread, Table
from benchmarks.task import Case, Settings, Skip, Task
from benchmarks.workloads import ewt_tagger, made_up_trees, sst_trees

HAND, OURS = "by hand", "fxbatch"
SMALL = 8  # instances of a minibatch up to which level with the best peer is wanted, beyond it 1.5 times
WANTED_SMALL, WANTED_LARGE = 1.0, 1.5
# Instances of a turn at least, one minibatch after the other: a single small step after somebody else's finds all
# caches as that one left them, which no step of a training does.
TURN = 16


@dataclass(frozen=True)
class Cell:
    """trees: random ones of 20 leaves, the loss at the root; SST: a loss at every node; SST sparse: with sparse
    gradients of the table, as DyNet has them always; EWT: the BiLSTM tagger."""

    kind: str
    hidden: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.kind} H{self.hidden} b{self.batch}"

    @property
    def minibatches(self) -> int:
        """How many minibatches a turn has."""
        return -(-TURN // self.batch)

    def turn(self, number: int) -> range:
        """The minibatches of a turn."""
        return range(number * self.minibatches, (number + 1) * self.minibatches)


CELLS = (
    *(Cell("trees", hidden, batch) for hidden in (150, 300) for batch in (1, 8, 64, 256)),
    Cell("SST", 150, 1), Cell("SST sparse", 150, 1), Cell("SST", 150, 64), Cell("EWT", 256, 1), Cell("EWT", 256, 64),
)  # fmt: skip


def made(cell: Cell, settings: Settings) -> tuple[Any, Batches[Any]]:
    """The model and minibatches of a cell: the same in each process, by the seed."""
    model, batches = _made(cell, settings)
    batches.kept = cell.minibatches
    return model, batches


def _made(cell: Cell, settings: Settings) -> tuple[Any, Batches[Any]]:
    wide = settings.size(300, 6)
    if cell.kind == "trees":
        leaves = settings.size(20, 4)
        return made_up_trees(
            settings,
            leaves=leaves,
            hidden=cell.hidden,
            batch=cell.batch,
            embedding=wide,
            all_nodes=False,
        )
    if cell.kind in ("SST", "SST sparse"):
        model, batches, _ = sst_trees(settings, hidden=cell.hidden, batch=cell.batch, embedding=wide)
        model.embed.sparse = cell.kind == "SST sparse"
        return model, batches
    return ewt_tagger(settings, hidden=cell.hidden, batch=cell.batch, embedding=settings.size(200, 6))


class DyNetWork:
    """The work of DyNet's process."""

    def __init__(self, adapter: ModuleType, cell: Cell, settings: Settings) -> None:
        self.cell = cell
        model, self.batches = made(cell, settings)
        self.hand: Any = (adapter.DyNetTagger if cell.kind == "EWT" else adapter.DyNetTreeLSTM)(model)

    def prepare(self, number: int) -> None:
        for minibatch in self.cell.turn(number):
            self.batches.prepare(minibatch)

    def run(self, kind: str, number: int) -> None:
        for minibatch in self.cell.turn(number):
            if kind == "train":
                self.hand.loss(self.batches[minibatch])
            else:
                self.hand(self.batches[minibatch])

    def outcome(self, kind: str) -> dict[str, np.ndarray]:
        if kind == "infer":
            return {"result": self.hand(self.batches[0]).numpy()}
        self.hand.clear()
        loss = self.hand.loss(self.batches[0])
        gradients = {f"gradient of {n}": g.numpy() for n, g in self.hand.gradients().items()}
        return {"loss": np.array(loss, np.float32), **gradients}


def cases(settings: Settings) -> Iterator[Case]:
    cells = settings.size(CELLS, (Cell("trees", 5, 3), Cell("EWT", 5, 3)))
    for cell in cells:
        try:
            yield from cell_cases(cell, settings)
        except Skip as skip:
            yield Case(cell.name, {}, "instance", 0, [], skipped={"all": str(skip)})


def builds(settings: Settings) -> dict[str, Path | None]:
    """The folder of each DyNet by its contender's name; None: the one that is installed."""
    if not settings.peers:
        return {}
    return {f"{DYNET} {folder.name.removeprefix('dynet-')}": folder for folder in settings.dynet} or {
        DYNET: None
    }


def cell_cases(cell: Cell, settings: Settings) -> Iterator[Case]:
    """Training and inference of one cell. Who is not there is named with the reason."""
    model, batches = made(cell, settings)
    hand = PackedTagger(model) if cell.kind == "EWT" else LevelTreeLSTM(model)
    unit = "sentence" if cell.kind == "EWT" else "tree"
    with contextlib.ExitStack() as stack:
        skipped, peers = {}, {}
        for name, folder in builds(settings).items():
            try:
                process = PeerProcess("dynet", DyNetWork, cell, settings, folder=folder)
                peers[name] = stack.enter_context(process)
            except PeerUnavailable as error:
                skipped[name] = str(error)
        for work in (Training(model, batches), Inference(model, batches)):
            kind = "train" if isinstance(work, Training) else "infer"
            contenders = [in_turns(c, cell, batches) for c in (work.by_hand(HAND, hand), work.batched(OURS))]
            contenders += [peer.contender(name, kind) for name, peer in peers.items()]
            yield Case(
                f"{cell.name} {kind}", {"hidden": cell.hidden, "batch": cell.batch, "mode": kind}, unit,
                cell.batch * cell.minibatches, contenders, slow=(HAND, *peers), skipped=skipped, reference=HAND,
            )  # fmt: skip


def in_turns(contender: Contender, cell: Cell, batches: Batches[Any]) -> Contender:
    """The contender whose run is a turn."""

    def run(clock: Clock) -> None:
        for minibatch in cell.turn(clock.round):
            clock.round = minibatch
            contender.run(clock)

    def prepare(number: int) -> None:
        for minibatch in cell.turn(number):
            batches.prepare(minibatch)

    return replace(contender, run=run, prepare=prepare)


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    cells: dict[str, dict[str, list[str | int | float | None]]] = {}
    for case in found:
        cell, _, kind = case.name.rpartition(" ")
        if OURS in case.entries:
            cells.setdefault(cell, {})[kind] = shown(case)
    missing: list[str | int | float | None] = [None] * 4
    rows = [
        [name, *kinds.get("train", missing), *kinds.get("infer", missing)] for name, kinds in cells.items()
    ]
    note = (
        "Units: trees or sentences a second of CPU time. Ratios: the peer's CPU time over fxbatch's, round by round, "
        "median (quartiles); below 1 fxbatch loses; of several builds of DyNet the best, named. Least: the smallest "
        f"ratio, `+` as wanted (1 up to batch {SMALL}, {WANTED_LARGE} beyond), `-` not. Trees: 20 random leaves, "
        "embedding 300, loss at the root; SST: a loss at every node in training, root scores in inference (sparse: "
        "so are the gradients of its table of words, 22 MB, as DyNet's always are); EWT: two layers of 256 a "
        f"direction, all words. A turn is one minibatch, or as many as have {TURN} instances."
    )
    columns = ["units/s", HAND, DYNET, "least"]
    header = ["cell", *(f"training: {c}" for c in columns), *(f"inference: {c}" for c in columns)]
    return [Table("Beside the peers", header, rows, note)]


def shown(case: CaseResult) -> list[str | int | float | None]:
    """Units a second, the ratios to batching by hand and to the best DyNet, and the least with its mark."""
    ratios = {name: over(case, name) for name in case.entries if name == HAND or name.startswith(DYNET)}
    best = sorted((n for n in ratios if n != HAND), key=lambda name: ratios[name].median)[:1]
    texts = [ratio_text(ratios[HAND]) if HAND in ratios else None, None]
    for name in best:
        texts[1] = ratio_text(ratios[name]) + name.removeprefix(DYNET)
    least = min((r.median for r in ratios.values()), default=None)
    wanted = WANTED_SMALL if case.parameters["batch"] <= SMALL else WANTED_LARGE
    mark = None if least is None else f"{least:.2f} {'+' if least >= wanted else '-'}"
    return [case.count / case.entries[OURS].cpu.median, *texts, mark]


def over(case: CaseResult, peer: str) -> Spread:
    """The peer's CPU seconds over fxbatch's, round by round."""
    pairs = zip(case.entries[peer].cpu.samples, case.entries[OURS].cpu.samples, strict=False)
    return Spread.of([a / b for a, b in pairs])


TASK = Task(
    name="peers",
    title="Beside batching by hand and DyNet",
    explanation=(
        "Tree-LSTMs and the BiLSTM tagger at several sizes, in training and in inference, in CPU time. By hand and "
        "fxbatch share a process, each DyNet has one of its own; all take turns on the same new minibatches, and their "
        "results and gradients are compared first. DyNet's wheel (`pip install dyNET38`) is a slow build: "
        "docs/experiments.md says how good ones are built, which `--dynet DIR` names, each once."
    ),
    cases=cases,
    tables=tables,
)
