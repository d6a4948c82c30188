"""Steps over the lower bound for real data and all examples, and what the best schedule of all would take.

    python -m benchmarks.schedule_ratio                    # 64 instances each, a minute or two
    python -m benchmarks.schedule_ratio --states 20000     # look longer for best schedules

A schedule at the lower bound is a best one. Elsewhere the best one is searched exhaustively (A*, component by
component of the signature graph), as far as so many states go; "at least" is what that has shown by then, or what
two of the largest instances need by themselves.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.schedule_cost import workloads
from benchmarks.task import Settings
from benchmarks.workloads import ewt_tagger, sst_trees
from examples import (
    bilstm_tagger,
    char_tagger,
    childsum_tree_lstm,
    language_model,
    lattice_lstm,
    mixture_of_experts,
    module_networks,
    molecules,
    parser,
    rnng,
    seq2seq,
)
from fxbatch.inspection import compile_minibatch
from fxbatch.ir import Program
from fxbatch.passes.schedule import POLICIES, lower_bound
from fxbatch.passes.signature_graph import survey
from tests.passes.reference import best_steps, sources
from tests.programs import lattice_program

BATCHING = ("depth", "agenda", "lookahead")


def example_models(n: int) -> dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    """A decorated callable of each example, and its arguments for n instances."""

    def loss(example: Any, **size: int) -> tuple[Any, tuple[Any, ...]]:
        model, instances = example.minibatch(**size)
        return model.loss, (instances,)

    def forward(example: Any, **size: int) -> tuple[Any, tuple[Any, ...]]:
        model, instances = example.minibatch(**size)
        return model, (instances,)

    def translate() -> tuple[Any, tuple[Any, ...]]:
        model, pairs = seq2seq.minibatch(pairs=n)
        return model, ([pair.source for pair in pairs], [pair.target for pair in pairs])

    return {
        "BiLSTM tagger": lambda: loss(bilstm_tagger, sentences=n),
        "tagger with characters": lambda: loss(char_tagger, sentences=n),
        "child-sum Tree-LSTM": lambda: loss(childsum_tree_lstm, trees=n),
        "language model": lambda: forward(language_model, sentences=n),
        "lattice LSTM": lambda: loss(lattice_lstm, strings=n),
        "mixture of experts": lambda: forward(mixture_of_experts, points=n),
        "module networks": lambda: forward(module_networks, questions=n),
        "molecules": lambda: forward(molecules, molecules=n),
        "parser": lambda: loss(parser, sentences=n),
        "RNNG (stack LSTM)": lambda: forward(rnng, trees=n),
        "sequence to sequence": translate,
    }


def phases(data: Path | None, n: int) -> Iterator[tuple[str, list[Program]]]:
    """The programs of a minibatch of n, a phase each, as they are scheduled."""
    settings = Settings(quick=True, data=data)
    trees, tree_batches, source = sst_trees(settings, hidden=8, embedding=8, batch=n)
    tagger, sentences = ewt_tagger(settings, hidden=8, embedding=8, batch=n)
    made: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
        f"Tree-LSTM on {source}": lambda: (trees.loss, (tree_batches[0],)),
        "BiLSTM tagger on EWT": lambda: (tagger.loss, (sentences[0],)),
    }
    for name, make in {**made, **example_models(n)}.items():
        torch.manual_seed(0)
        model, arguments = make()
        yield name, [phase.program for phase in compile_minibatch(model, *arguments).phases]
    yield "generated: lattice LSTM, 2 sentences", [lattice_program(random.Random(1), [29, 31])]
    for name, program in workloads().items():
        if name.startswith("lattice"):
            yield f"generated: {name}", [program]


def best_known(program: Program, states: int) -> tuple[int, bool]:
    """Steps of the best schedule; whether that is proven, or only that none has fewer."""
    found = survey(program)
    total, exact = 0, True
    for part in found.graph.parts:
        if len(part) == 1:
            total += int(found.longest[part[0]])
            continue
        calls = np.flatnonzero(np.isin(program.sig, part))
        steps, proven = steps_of(program, calls, states)
        if not proven:
            largest = np.argsort(-np.bincount(program.instance[calls]), kind="stable")[:4].tolist()
            for pair in itertools.combinations(largest, 2):  # with all others it can't be fewer
                mine = calls[np.isin(program.instance[calls], pair)]
                steps = max(steps, steps_of(program, mine, 5 * states)[0])
        total, exact = total + steps, exact and proven
    return total, exact


def steps_of(program: Program, calls: np.ndarray, states: int) -> tuple[int, bool]:
    """Steps of the best schedule of these calls alone, and whether that is proven."""
    number = {c: n for n, c in enumerate(calls.tolist())}
    before = sources(program)
    parents = [[number[p] for p in before[c] if p in number] for c in number]
    return best_steps(program.sig[calls].tolist(), parents, states)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--instances", type=int, default=64)
    arguments.add_argument("--states", type=int, default=10_000, help="look at so many states a component")
    arguments.add_argument("--data", type=Path, default=None)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"steps / lower bound, {options.instances} instances")
    names = ("calls", "phases", "bound", *BATCHING, "ratio", "best of all", "lookahead / best")
    table.add_column("workload")
    for column in names:
        table.add_column(column, justify="right")
    for name, programs in phases(options.data, options.instances):
        bound = sum(map(lower_bound, programs))
        steps = {policy: sum(len(POLICIES[policy](p)) for p in programs) for policy in BATCHING}
        ours = steps["lookahead"]
        found = [best_known(p, options.states) for p in programs] if ours > bound else [(bound, True)]
        best, exact = sum(n for n, _ in found), all(proven for _, proven in found)
        table.add_row(
            name, str(sum(map(len, programs))), str(len(programs)), str(bound),
            *(str(steps[policy]) for policy in BATCHING), f"{ours / bound:.3f}",
            str(best) if exact else f"at least {best}", f"{'' if exact else 'at most '}{ours / best:.3f}",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
