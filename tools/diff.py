"""Compare two plans of one minibatch, side by side.

examples:
  fxbatch diff model.py:minibatch --a schedule=depth --b schedule=agenda
  fxbatch diff model.py:minibatch --a deduplicate=False --b deduplicate=True
  fxbatch diff model.py:minibatch --a fuse=True --b fuse=False -o diff.svg

Several options of one side are given with commas: schedule=depth,fuse=False.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fxbatch.ir import BROADCAST, INDEX, VIEW
from fxbatch.passes.schedule import lower_bound
from fxbatch.viz.describe import SCHEMA_VERSION
from fxbatch.viz.draw_schedule import draw_schedules
from fxbatch.viz.picture import SignatureKey, is_constant
from fxbatch.viz.svg import picture_to_svg

from .dump import write
from .errors import Status
from .forms import Forms, compile_model, forms_of, parse_options, short_title
from .target import add_target_arguments, load_target
from .terminal import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    for side in "ab":
        parser.add_argument(
            f"--{side}", required=True, metavar="KEY=VALUE,...", help=f"options of @autobatch of side {side}"
        )
    parser.add_argument("--format", choices=("text", "json", "svg"), default="text", help="default: text")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write here instead of standard output"
    )


def run(options: argparse.Namespace) -> int:
    sides = []
    for flag, text in (("--a", options.a), ("--b", options.b)):
        overrides = parse_options(text.split(","), flag)
        model, instances = load_target(options.target, options.arg)
        sides.append(forms_of(compile_model(options.target, model, instances, overrides), text))
    counts = [measure(side) for side in sides]
    if options.format == "svg":
        key = SignatureKey.of(*(side.program for side in sides))
        picture = draw_schedules(
            [(s.title, s.program, s.schedule) for s in sides], key, title=short_title(options.target)
        )
        write(picture_to_svg(picture, key) + "\n", options.output)
    elif options.format == "json":
        head = {"schema": "fxbatch", "version": SCHEMA_VERSION, "form": "diff"}
        data = {**head, "a": {"options": options.a, **counts[0]}, "b": {"options": options.b, **counts[1]}}
        write(json.dumps(data) + "\n", options.output)
    elif options.output is not None:
        write(_plain(options, counts), options.output)
    else:
        output().print(_table(options, counts))
        sys.stdout.flush()
    return Status.OK


def measure(side: Forms) -> dict[str, Any]:
    """Numbers of one side, over all phases; steps a signature under `signatures`."""
    calls = steps = indexed = read = copied = rows = bound = 0
    by_signature: dict[str, list[int]] = {}
    for phase in side.minibatch.phases:
        program, plan = phase.program, phase.plan
        launched = np.array([not is_constant(s) for s in program.signatures], dtype=bool)
        bound += lower_bound(program) - int((~launched)[np.unique(program.sig)].sum())
        for s, n in zip(plan.step_signature.tolist(), plan.step_rows.tolist(), strict=True):
            if launched[s]:
                calls, steps = calls + n, steps + 1
                row = by_signature.setdefault(str(program.signatures[s]), [0, 0, 0])
                row[0], row[1], row[2] = row[0] + n, row[1] + 1, max(row[2], n)
        sizes = np.array([t.numel * t.dtype.itemsize for t in plan.arenas], dtype=np.int64)
        index = plan.gather_kind == INDEX
        indexed += int(index.sum())
        read += int(np.isin(plan.gather_kind, (VIEW, BROADCAST)).sum())
        copied += int((sizes[plan.gather_arena] * plan.gather_rows)[index].sum()) if len(sizes) else 0
        rows = sum(int(c) * int(size) for c, size in zip(plan.capacity, sizes, strict=True))
    return {
        "phases": len(side.minibatch.phases),
        "calls": calls,
        "steps": steps,
        "lower_bound": bound,
        "gathers_elided": read,
        "gathers_indexed": indexed,
        "bytes_gathered": copied,
        "bytes_of_arenas": rows,
        "signatures": {k: {"calls": a, "steps": b, "largest": c} for k, (a, b, c) in by_signature.items()},
    }


def _rows(counts: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    a, b = counts
    found = [(k.replace("_", " "), a[k], b[k]) for k in a if k != "signatures"]
    for name in dict.fromkeys([*a["signatures"], *b["signatures"]]):
        steps = [side["signatures"].get(name, {}).get("steps", 0) for side in counts]
        found.append((f"steps of {name}", steps[0], steps[1]))
    return found


def _table(options: argparse.Namespace, counts: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for text in (options.a, options.b, "b - a"):
        table.add_column(text, justify="right")
    for name, a, b in _rows(counts):
        style = "" if a == b else "green" if b < a else "red"
        table.add_row(name, f"{a:,}", f"{b:,}", f"{b - a:+,}" if a != b else "=", style=style)
    return table


def _plain(options: argparse.Namespace, counts: list[dict[str, Any]]) -> str:
    lines = [f"\t{options.a}\t{options.b}"] + [f"{n}\t{a}\t{b}" for n, a, b in _rows(counts)]
    return "\n".join(lines) + "\n"
