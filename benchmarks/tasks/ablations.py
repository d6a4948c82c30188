"""Ablations: each optimisation switched, in turn, on four workloads; what it gains or costs there.

In: Settings. Out: the time of a training step with one option changed over the time with the defaults.

    python -m benchmarks --task ablations
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.contenders import Training
from benchmarks.measure import Contender
from benchmarks.report import ratio_text
from benchmarks.results import CaseResult, Plot, Series, Table
from benchmarks.stages import counted
from benchmarks.task import Case, Settings, Skip, Task
from benchmarks.workloads import esol_molecules, ewt_tagger, sst_trees
from fxbatch.runtime.options import Options

BASE = "defaults"
DEFAULTS = Options()

# Option by option, every value but the default. The two at the end are slow to compile: full runs only.
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("schedule=depth", {"schedule": "depth"}),
    ("schedule=agenda", {"schedule": "agenda"}),
    ("schedule=lookahead", {"schedule": "lookahead"}),
    ("schedule=fold (pass-throughs)", {"schedule": "fold"}),
    ("deduplicate", {"deduplicate": not DEFAULTS.deduplicate}),
    ("fuse", {"fuse": not DEFAULTS.fuse}),
    ("native", {"native": not DEFAULTS.native}),
    ("backward=autograd", {"backward": "autograd"}),
)
SLOW_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mode=unrolled, backward=autograd", {"mode": "unrolled", "backward": "autograd"}),
    ("compile", {"compile": True}),
)


def changes(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """The changes of this run: those that differ from the defaults, `compile` where it is wanted."""
    known = {field.name: getattr(DEFAULTS, field.name) for field in dataclasses.fields(DEFAULTS)}
    all_changes = [*CHANGES, *(SLOW_CHANGES if settings.compiled else ())]
    return [(_label(name, change), change) for name, change in all_changes
            if any(known[option] != value for option, value in change.items())]  # fmt: skip


def _label(name: str, change: dict[str, Any]) -> str:
    if name in change:
        return f"{name} {'on' if change[name] else 'off'}"
    return name


def cases(settings: Settings) -> Iterator[Case]:
    hidden, embedding, batch = settings.size(150, 8), settings.size(300, 8), settings.size(64, 3)
    for bare in settings.size((False, True), (False,)):
        model, batches, source = sst_trees(
            settings, hidden=hidden, embedding=embedding, batch=batch, bare=bare
        )
        name = f"Tree-LSTM on {source}" + (", bare torch functions" if bare else "")
        yield ablation_case(name, Training(model, batches), settings, batch, "tree")
    if settings.quick:
        return
    try:
        tagger, sentences = ewt_tagger(settings, hidden=256, embedding=200, batch=batch)
        yield ablation_case("BiLSTM tagger on EWT", Training(tagger, sentences), settings, batch, "sentence")
        network, molecules = esol_molecules(settings, hidden=64, batch=batch)
        work = Training(network, molecules, method="forward")
        yield ablation_case("graph network on ESOL", work, settings, batch, "molecule")
    except Skip as skip:
        yield Case("real data", {}, "instance", 0, [], skipped={"all": str(skip)})


def ablation_case(name: str, work: Training, settings: Settings, batch: int, unit: str) -> Case:
    contenders: list[Contender] = [work.batched(BASE)]
    contenders += [work.batched(label, **options) for label, options in changes(settings)]
    return Case(
        f"{name}, training, batch {batch}", {"model": name, "batch": batch}, unit, batch, contenders,
        slow=tuple(c.name for c in contenders if c.name != BASE), reference=BASE,
        numbers=lambda: counted(work.model, work.method, work.batches[0]),
    )  # fmt: skip


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    names = list(dict.fromkeys(name for case in found for name in case.entries if name != BASE))
    rows: list[list[str | int | float | None]] = []
    for name in names:
        ratios = [case.ratio(name, BASE) for case in found]
        rows.append([name, *(ratio_text(r) if r else None for r in ratios)])
    defaults = ", ".join(f"{f.name}={getattr(DEFAULTS, f.name)!r}" for f in dataclasses.fields(DEFAULTS))
    note = (
        "The step's time with one option changed / with the defaults, pair by pair: above 1 the default is "
        f"faster. Defaults: {defaults}."
    )
    return [Table("Each option changed in turn", ["changed", *(case.name for case in found)], rows, note)]


def plots(found: Sequence[CaseResult], settings: Settings) -> list[Plot]:
    shown = [case for case in found if BASE in case.entries]
    names = list(dict.fromkeys(name for case in shown for name in case.entries if name != BASE))
    series = []
    for case in shown:
        pairs = [(float(i), r) for i, name in enumerate(names) if (r := case.ratio(name, BASE)) is not None]
        series.append(
            Series(case.name, [x for x, _ in pairs], [r.median for _, r in pairs], [r.low for _, r in pairs],
                   [r.high for _, r in pairs])
        )  # fmt: skip
    labels = [name.replace(" ", "\n").replace("=", "=\n") for name in names]
    return [
        Plot(
            "Time with one option changed / with the defaults", "", "ratio", series, kind="bar", labels=labels
        )
    ]


TASK = Task(
    name="ablations",
    title="Ablations: each optimisation in turn",
    explanation=(
        "A training step with one option of `@fxbatch.autobatch` changed, interleaved with the defaults. "
        "The compared models: a Tree-LSTM with its cells as modules and written out in bare torch functions "
        "(where fusion has to find the cell), a BiLSTM tagger, a graph network."
    ),
    cases=cases,
    tables=tables,
    plots=plots,
)
