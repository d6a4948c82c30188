"""Costs and gains of batching policies and rewrites: microseconds per call, steps over the lower bound.

    python benchmarks/schedule_cost.py                 # a table, about 20 seconds
    python benchmarks/schedule_cost.py --json

Each figure is the best of several runs on one thread, in CPU time, on generated programs (seeds are fixed).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fxbatch.ir import Program
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.fold import add_pass_through_calls
from fxbatch.passes.fuse import Fuser
from fxbatch.passes.schedule import POLICIES, lower_bound
from fxbatch.passes.select import eliminate_dead
from tests.passes.fusion_models import Functions
from tests.programs import (
    bilstm_program,
    chain_program,
    lattice_program,
    random_tree,
    tree_lstm_program,
)


def workloads() -> dict[str, Program]:
    """Programs of the kinds that the project cares for, small, wide and narrow."""
    rng = random.Random(0)
    lengths = [rng.randrange(5, 40) for _ in range(64)]

    def trees(n: int, leaves: int) -> list[Any]:
        return [random_tree(rng, leaves) for _ in range(n)]

    return {
        "Tree-LSTM, 1 tree": tree_lstm_program(trees(1, 20)),
        "Tree-LSTM, 64 trees": tree_lstm_program(trees(64, 20)),
        "Tree-LSTM, 700 trees": tree_lstm_program(trees(700, 40)),
        "Tree-LSTM of functions, 64 trees": Functions().tree_lstm(trees(64, 20), True),
        "BiLSTM tagger, 64 sentences": bilstm_program(lengths),
        "lattice LSTM, 1 sentence": lattice_program(rng, lengths[:1]),
        "lattice LSTM, 64 sentences": lattice_program(rng, lengths),
        "chain of 5,000": chain_program(5000),
    }


def best_seconds(run: Callable[[Program], Any], program: Program, repeats: int) -> float:
    """The fastest of several runs in CPU time, on copies that have nothing cached."""
    found = []
    for _ in range(repeats):
        fresh = dataclasses.replace(program)
        start = time.thread_time()
        run(fresh)
        found.append(time.thread_time() - start)
    return min(found)


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row a workload and policy or rewrite."""
    rows = []
    rewrites: dict[str, Callable[[Program], Any]] = {
        "eliminate_dead": eliminate_dead,
        "deduplicate": deduplicate,
        "fuse": Fuser(),
        "fold's pass-throughs": add_pass_through_calls,
    }
    for name, program in workloads().items():
        bound = lower_bound(program)
        for policy in ("depth", "agenda", "lookahead"):
            seconds = best_seconds(POLICIES[policy], program, repeats)
            steps = len(POLICIES[policy](program))
            rows.append(_row(name, policy, program, seconds, steps=steps, ratio=steps / bound))
        for label, rewrite in rewrites.items():
            made = rewrite(program)
            after = len(made[0] if isinstance(made, tuple) else made)
            rows.append(_row(name, label, program, best_seconds(rewrite, program, repeats), after=after))
    return rows


def _row(name: str, what: str, program: Program, seconds: float, **more: Any) -> dict[str, Any]:
    calls = len(program)
    return {"workload": name, "calls": calls, "what": what, "us_a_call": seconds * 1e6 / calls, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = measure(options.repeats)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title="policies and rewrites")
    for column in ("workload", "calls", "what", "us a call", "ms", "steps", "steps / bound", "calls after"):
        table.add_column(column, justify="left" if column in ("workload", "what") else "right")
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        table.add_row(
            row["workload"], str(row["calls"]), row["what"], f"{row['us_a_call']:.2f}",
            f"{row['us_a_call'] * row['calls'] / 1000:.2f}", str(row.get("steps", "")), ratio,
            str(row.get("after", "")),
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
