"""The figures that the project holds itself to: speed against one by one and against batching by hand.

In: Settings. Out: a row a workload with what was reached beside what is wanted.

    python -m benchmarks --task figures --threads 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.competitors.block_molecules import BlockMolecules
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.competitors.limit import tree_limit
from benchmarks.competitors.packed_lstm import PackedTagger
from benchmarks.contenders import SAMPLED, Batches, Inference, Training
from benchmarks.measure import Clock, Contender
from benchmarks.models import Node, TreeLSTM
from benchmarks.optional import molecule_options, tagger_options, tree_options
from benchmarks.report import ratio_text
from benchmarks.results import CaseResult, Plot, Series, Spread, Table
from benchmarks.stages import counted, preparation_contenders
from benchmarks.task import Case, Settings, Skip, Task
from benchmarks.workloads import esol_molecules, ewt_tagger, made_up_trees, molecule_looks, sst_trees

LOOP, ONE, HAND, OURS = "one by one, embedding in the loop", "one by one", "by hand", "fxbatch"
LIMIT = "matrix products alone"


@dataclass(frozen=True)
class Goal:
    """The goal of a case: times faster than one by one, than by hand."""

    case: str
    one_by_one: float | None = None
    by_hand: float | None = None


GOALS = (
    Goal("Tree-LSTM on SST, hidden 150, batch 64, training", 25, 1.7),
    Goal("Tree-LSTM on SST, hidden 150, batch 64, inference", 9, 1.5),
    Goal("Tree-LSTM, 20 leaves, hidden 300, batch 64, training", 20, 1.35),
    Goal("Tree-LSTM, 20 leaves, hidden 300, batch 64, inference", 8, 1.3),
    Goal("Tree-LSTM, 20 leaves, hidden 300, batch 256, training", 20, 1.35),
    Goal("Tree-LSTM, 20 leaves, hidden 300, batch 256, inference", 8, 1.3),
    Goal("Tree-LSTM on SST, hidden 150, batch 1, training", 9, 3),
    Goal("Tree-LSTM on SST, hidden 150, batch 1, inference", 4, 2),
    Goal("Tree-LSTM, 20 leaves, hidden 150, batch 1, training", 9, 3),
    Goal("Tree-LSTM, 20 leaves, hidden 150, batch 1, inference", 4, 2),
    Goal("BiLSTM tagger on EWT, 2 layers of 256, batch 64, training", 10, 1.0),
)
# Largest values that are wanted: step over matrix products; share of preparation cold, with cached traces.
WANTED_LIMIT, WANTED_COLD, WANTED_WARM = 1.25, 0.10, 0.03


def cases(settings: Settings) -> Iterator[Case]:
    hidden, wide = settings.size(150, 16), settings.size(300, 16)
    for batch in settings.size((64, 1), (4,)):
        model, batches, source = sst_trees(settings, hidden=hidden, batch=batch, embedding=wide)
        name = f"Tree-LSTM on {source}, hidden {hidden}, batch {batch}"
        yield from tree_cases(name, model, batches, settings, batch)
    for batch, size in settings.size(((1, hidden), (64, wide), (256, wide)), ()):
        leaves = settings.size(20, 5)
        model, batches = made_up_trees(settings, leaves=leaves, hidden=size, batch=batch, embedding=wide)
        name = f"Tree-LSTM, {leaves} leaves, hidden {size}, batch {batch}"
        yield from tree_cases(name, model, batches, settings, batch)
    yield limit_case(settings, wide, settings.size(256, 4))
    yield preparation_case(settings, hidden, settings.size(64, 4), wide)
    for name, make in (("BiLSTM tagger on EWT", tagger_case), ("graph network on ESOL", molecule_case)):
        try:
            yield make(settings)
        except Skip as skip:
            yield Case(name, {}, "instance", 0, [], skipped={"all": str(skip)})


def tree_cases(
    name: str, model: TreeLSTM, batches: Batches[Node], settings: Settings, batch: int
) -> Iterator[Case]:
    """Training and inference of one Tree-LSTM."""
    hand = LevelTreeLSTM(model)
    train, infer = Training(model, batches), Inference(model, batches)
    hidden = model.cell.gates.in_features // 2
    # Compiling takes most of a minute: where the size is the usual one.
    more, skipped = tree_options(train, model, settings, compiled=batch == 64)
    one = train.one_by_one(ONE)
    one = replace(one, limit=5) if batch >= 64 else one
    loop = (
        [train.loop(LOOP)] if batch < 3 else train.sampled_loop(leaves_of, lambda work: work.one_by_one(ONE))
    )
    contenders = [*loop, one, train.by_hand(HAND, hand)]
    yield Case(
        f"{name}, training", {"hidden": hidden, "batch": batch, "mode": "training"}, "tree", batch,
        [*contenders, train.batched(OURS), *more], slow=(LOOP, SAMPLED, ONE, HAND), reference=ONE,
        skipped=skipped,
        numbers=None if settings.quick else lambda: counted(model, "loss", batches[0]),
    )  # fmt: skip
    more, skipped = tree_options(infer, model, settings, compiled=batch == 64)
    contenders = [infer.loop(LOOP), infer.one_by_one(ONE), infer.by_hand(HAND, hand), infer.batched(OURS)]
    yield Case(
        f"{name}, inference", {"hidden": hidden, "batch": batch, "mode": "inference"}, "tree", batch,
        [*contenders, *more], slow=(LOOP, ONE, HAND), reference=ONE, skipped=skipped,
    )  # fmt: skip


def leaves_of(tree: Node) -> int:
    """How many words a tree looks up."""
    return (tree.nodes + 1) // 2


def tagger_case(settings: Settings) -> Case:
    """The BiLSTM tagger, LSTM cells in a loop, against packed nn.LSTM."""
    hidden, batch = settings.size(256, 8), settings.size(64, 3)
    model, batches = ewt_tagger(settings, hidden=hidden, batch=batch, embedding=settings.size(200, 8))
    train = Training(model, batches)
    more, skipped = tagger_options(train, settings)
    return Case(
        f"BiLSTM tagger on EWT, 2 layers of {hidden}, batch {batch}, training",
        {"hidden": hidden, "batch": batch, "mode": "training"}, "sentence", batch,
        [train.one_by_one(ONE), train.by_hand(HAND, PackedTagger(model)), train.batched(OURS), *more],
        slow=(ONE, HAND), reference=ONE, skipped=skipped,
        numbers=None if settings.quick else lambda: counted(model, "loss", batches[0]),
    )  # fmt: skip


def molecule_case(settings: Settings) -> Case:
    """The graph network, messages along each bond, against block-diagonal message passing."""
    hidden, batch = settings.size(64, 8), settings.size(64, 3)
    model, batches = esol_molecules(settings, hidden=hidden, batch=batch)
    train, hand = Training(model, batches, method="forward"), BlockMolecules(model)
    more, skipped = molecule_options(train, settings)
    one = train.looked_up(lambda molecules: molecule_looks(model, molecules), ONE)
    return Case(
        f"graph network on ESOL, hidden {hidden}, batch {batch}, training",
        {"hidden": hidden, "batch": batch, "mode": "training"}, "molecule", batch,
        [one, train.contender(HAND, lambda molecules: hand(molecules).sum()), train.batched(OURS), *more],
        slow=(ONE, HAND), reference=ONE, skipped=skipped,
        numbers=None if settings.quick else lambda: counted(model, "forward", batches[0]),
    )  # fmt: skip


def limit_case(settings: Settings, hidden: int, batch: int) -> Case:
    """A step of training over its matrix products alone, each done once as one large product."""
    leaves = settings.size(20, 5)
    model, batches = made_up_trees(settings, leaves=leaves, hidden=hidden, batch=batch, embedding=hidden)
    limit = tree_limit(model, batches[0])

    def products(clock: Clock) -> None:
        limit.forward_backward()

    return Case(
        f"step over matrix products, hidden {hidden}, batch {batch}",
        {"hidden": hidden, "batch": batch, "mode": "training"}, "tree", batch,
        [Contender(LIMIT, products), Training(model, batches).batched(OURS)], slow=(LIMIT,),
    )  # fmt: skip


def preparation_case(settings: Settings, hidden: int, batch: int, embedding: int) -> Case:
    """Trace, merge, schedule and plan as a share of a step: with new trees, and with cached traces."""
    model, batches, source = sst_trees(settings, hidden=hidden, batch=batch, embedding=embedding)
    contenders = preparation_contenders(model, "loss", batches)
    return Case(
        f"preparation of a step, {source}, hidden {hidden}, batch {batch}",
        {"hidden": hidden, "batch": batch, "mode": "training"}, "tree", batch, contenders,
    )  # fmt: skip


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    rows: list[list[str | int | float | None]] = []
    goals = {goal.case: goal for goal in GOALS}
    for case in found:
        one, hand = case.ratio(ONE, OURS), case.ratio(HAND, OURS)
        if one is None and hand is None:
            continue
        goal = goals.get(case.name, Goal(case.name))
        rows.append([case.name, *_against(one, goal.one_by_one), *_against(hand, goal.by_hand)])
    for case in found:
        rows += _limit_rows(case)
    columns = ["workload", "over one by one", "wanted", "over by hand", "wanted "]
    note = (
        "How many times faster a step of fxbatch is, pair by pair of one interleaved run: median "
        "(quartiles). `+` reached, `-` not reached (by the median). One by one: the undecorated forward in "
        "a loop, the embedding looked up once a minibatch. By hand: level by level in plain PyTorch with "
        "autograd, traversal included; packed nn.LSTM for the tagger."
    )
    return [Table("Figures", columns, rows, note)]


def _against(spread: Spread | None, goal: float | None) -> list[str | int | float | None]:
    if spread is None:
        return [None, None]
    if goal is None:
        return [ratio_text(spread), None]
    return [f"{ratio_text(spread)} {'+' if spread.median >= goal else '-'}", f">= {goal:g}x"]


def _limit_rows(case: CaseResult) -> list[list[str | int | float | None]]:
    rows: list[list[str | int | float | None]] = []
    limit = case.ratio(LIMIT, OURS)
    if limit is not None:
        over = 1 / limit.median
        mark = "+" if over <= WANTED_LIMIT else "-"
        rows.append([case.name, None, None, f"{over:.3g} {mark}", f"<= {WANTED_LIMIT:g}"])
    for name, wanted in (("cold", WANTED_COLD), ("warm", WANTED_WARM), ("ready", WANTED_WARM)):
        entry = case.entries.get(name)
        if entry is not None and "preparation" in entry.phases:
            share = entry.phases["preparation"].median / entry.wall.median
            mark = "+" if share <= wanted else "-"
            rows.append([f"{case.name}, {name}", f"{share:.1%} {mark}", f"<= {wanted:.0%}", None, None])
    return rows


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    shown = [case for case in found if case.ratio(ONE, OURS) is not None]
    series = []
    for base in (ONE, HAND):
        pairs = [(i, r) for i, case in enumerate(shown) if (r := case.ratio(base, OURS)) is not None]
        series.append(
            Series(f"over {base}", [float(i) for i, _ in pairs], [r.median for _, r in pairs],
                   [r.low for _, r in pairs], [r.high for _, r in pairs])
        )  # fmt: skip
    labels = [case.name.replace(", ", "\n") for case in shown]
    return [Plot("Speed of fxbatch", "", "times faster", series, kind="bar", labels=labels, log_y=True)]


TASK = Task(
    name="figures",
    title="Figures: against one by one and by hand",
    explanation=(
        "Forward and backward of a minibatch (without the optimizer's step, which is the same for all), "
        "each round on instances that no earlier round had. `one by one, embedding in the loop` is what "
        "`fxbatch.disabled()` runs; eager PyTorch then makes a dense gradient of the whole embedding table "
        "for each word, so the fair comparison is `one by one`, which looks the words of a minibatch up at "
        "once."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
