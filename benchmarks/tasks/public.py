"""Models of public repositories beside their own loop: others' code, unchanged but for the decorator and today's torch.

In: the folder that FXBATCH_PUBLIC names, with a checkout of each repository. Out: one row per model: training and
inference over the loop, the first minibatches, memory, and whether values and gradients are the loop's.

    FXBATCH_PUBLIC=~/public python -m benchmarks --task public
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.public.model import PublicModel, find_model
from benchmarks.public.row import MODES
from benchmarks.public.sources import VARIABLE, SourceMissing
from benchmarks.results import CaseResult, Table
from benchmarks.task import Case, Incomplete, Settings, Skip, Task

MODELS = tuple(
    f"benchmarks.public.models.{name}:MODEL"
    for name in (
        "rnng",
        "syntax_tree_gru",
        "neural_turing_machine",
        "alpha_npi",
        "pointer_network",
        "proof_derivations",
        "math_word_problems",
        "actor_critic",
        "coq_terms",
        "transducer",
        "neural_stack",
        "neurosat",
        "speech_attention",
        "signal_lstm",
        "tree_convolution",
        "code_generation",
        "concept_programs",
    )
)
LONGEST = 300  # seconds of a row's process


def cases(settings: Settings) -> Iterator[Case]:
    models = {place: find_model(place) for place in MODELS}
    lacking = missing(list(models.values()))
    if len(lacking) == len(models):
        raise Skip(
            f"{VARIABLE} names no folder with checkouts of these repositories, each in OWNER/NAME: {', '.join(lacking)}"
        )
    processes = ThreadPoolExecutor(settings.threads)  # each runs a row's process, which has one thread
    rows = {
        (place, mode): processes.submit(figures_of, place, mode, settings)
        for place, model in models.items()
        for mode in MODES
        if str(model.source) not in lacking
    }
    for place, model in models.items():
        for mode in MODES:
            there = (place, mode) in rows
            yield Case(
                f"{model.name}, {mode}",
                {"model": model.name, "kind": model.kind, "source": str(model.source), "mode": mode},
                "instance", settings.size(32, 3), [],
                skipped={} if there else {"row": f"{model.source} is not in ${VARIABLE}"},
                numbers=rows[place, mode].result if there else None,
            )  # fmt: skip


def missing(models: Sequence[PublicModel]) -> list[str]:
    """The repositories that are not there, as `owner/name@commit`."""
    found = []
    for model in models:
        try:
            model.source.place()
        except SourceMissing:
            found.append(str(model.source))
    return found


def figures_of(place: str, mode: str, settings: Settings) -> dict[str, float]:
    """The figures of a row, measured in a process of its own. Incomplete where something failed in it."""
    command = [sys.executable, "-m", "benchmarks.public.row", place, "--mode", mode]
    command += ["--quick"] if settings.quick else []
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=one_thread)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {LONGEST} s") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no words"])[-1])
    figures = json.loads(done.stdout.splitlines()[-1])
    if figures["failures"]:
        raise Incomplete(figures["numbers"], figures["failures"])
    return dict(figures["numbers"])


def tables(found: Sequence[CaseResult], settings: Settings) -> list[Table]:
    """A row a model, training / inference in each cell."""
    pairs: dict[str, dict[str, CaseResult]] = {}
    for case in found:
        pairs.setdefault(case.parameters["model"], {})[case.parameters["mode"]] = case
    rows: list[list[str | int | float | None]] = []
    for name, modes in pairs.items():
        both = [modes[mode] for mode in MODES if mode in modes]
        rows.append(
            [name, both[0].parameters["kind"], *[cell(both, key) for key in COLUMNS.values()], verdict(both)]
        )
    columns = ["model", "kind", *COLUMNS, "equal"]
    return [Table("Public models", columns, rows, f"{EXPLAINED} {summary(found)}"), sources(found)]


COLUMNS = {
    "loop, ms": "loop",
    "times as fast": "speed",
    "first call, s more": "first",
    "first 30, time over the loop's": "begin",
    "memory, MiB more": "memory",
    "calls recorded by Python": "long",
}
EXPLAINED = (
    "Training / inference. CPU time, one thread, minibatches of 32 new instances each, loop and decorated call in "
    "turns; training with backward and an SGD step. Equal: values and gradients of five minibatches with steps "
    "between them, always batched (`adaptive=False`), float64 as referee; the largest error as a share of the allowed."
)


def cell(both: Sequence[CaseResult], key: str) -> str:
    return " / ".join(number(case.numbers.get(key)) for case in both)


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 20 or value == int(value) else f"{value:.2g}"


def verdict(both: Sequence[CaseResult]) -> str:
    """The share of the allowed error that is used up, or what failed."""
    words = []
    for case in both:
        failed = "; ".join(text for _, text in sorted(case.failed.items()))
        words.append(failed or (number(case.numbers["equal"]) if "equal" in case.numbers else "–"))
    return " / ".join(words)


def summary(found: Sequence[CaseResult]) -> str:
    """Medians and worst ones, as the project's aims name them."""
    parts = []
    for mode in MODES:
        numbers = [c.numbers for c in found if c.parameters["mode"] == mode and "speed" in c.numbers]
        if not numbers:
            continue
        speeds, begins = sorted(n["speed"] for n in numbers), sorted(n["begin"] for n in numbers)
        below, longest = sum(b < 1 for b in begins), max(n["first"] for n in numbers)
        parts.append(
            f"{mode}: median {speeds[len(speeds) // 2]:.2g}, least {speeds[0]:.2g}; "
            f"the first 30 at most {begins[-1]:.2g}, {below} of {len(begins)} below 1; "
            f"first call at most {longest:.2g} s more"
        )
    return ". ".join(parts) + "."


def sources(found: Sequence[CaseResult]) -> Table:
    """Where each model is from, and what was edited."""
    rows: list[list[str | int | float | None]] = []
    for place in MODELS:
        model = find_model(place)
        edits = Counter(edit.because for edit in model.source.edits)
        reasons = ", ".join(f"{count} for {because}" for because, count in sorted(edits.items())) or "none"
        rows.append([model.name, str(model.source), reasons, model.forced])
    return Table(
        "Where they are from", ["model", "repository", "mechanical edits", "that fxbatch forced"], rows
    )


TASK = Task(
    name="public",
    title="Models of public repositories",
    explanation=(
        "Per-instance models that others have written, unchanged but for the decorator and what today's torch forces, "
        "beside their own loop over the instances."
    ),
    cases=cases,
    tables=tables,
)
