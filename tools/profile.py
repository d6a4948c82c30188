"""Time a minibatch by phase and by operation; write a trace for Perfetto.

examples:
  fxbatch profile examples/tree_lstm.py:minibatch
  fxbatch profile model.py:minibatch --repeat 20 --trace trace.json
  fxbatch profile model.py:minibatch --no-backward --option schedule=depth
  fxbatch profile model.py:minibatch --format json | jq .phases

The phases of a minibatch:
  call                 what a decorated call does besides the others
  trace, merge         your Python runs for each instance, and calls are noted
  rewrite, schedule, plan    which calls share a launch, in which order
  compile              code is built for operations that are new
  constants            the instances' own tensors are put side by side
  forward, backward, parameter gradients    the batched launches
  results              results are copied into tensors of their own
  autograd             torch's engine, and adding gradients up
  zero gradients       model.zero_grad()
  other                the rest of the time

Times are means of --repeat minibatches, each without the phases inside it. Open
the trace at ui.perfetto.dev or chrome://tracing; its steps are named by
operation and batch size: `cell x37 forward`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from fxbatch.viz.describe import SCHEMA_VERSION

from .bench_target import step
from .dump import checked_folder
from .errors import CommandError, Status
from .forms import add_option_argument, parse_options, user_errors
from .run_target import Runnable
from .stopwatch import Stopwatch
from .target import add_target_arguments, load_target
from .terminal import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    add_option_argument(parser)
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="minibatches to time (default: 5)")
    parser.add_argument("--no-backward", action="store_true", help="forward only, without gradients")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace of one minibatch here"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(options: argparse.Namespace) -> int:
    if options.repeat < 1:
        raise CommandError(f"--repeat {options.repeat}: at least 1")
    if options.trace is not None:
        checked_folder(options.trace)
    model, instances = load_target(options.target, options.arg)
    if not len(instances):
        raise CommandError(f"{options.target} returned no instances", status=Status.MODEL)
    overrides = parse_options(options.option)
    if overrides.get("mode", "looped") != "looped" or overrides.get("backward", "compiled") != "compiled":
        raise CommandError("profile times mode=looped with backward=compiled only")
    target = Runnable.of(model, overrides)
    with user_errors(options.target):
        watch, loop = measure(target, instances, options.repeat, backward=not options.no_backward)
        if options.trace is not None:
            write_trace(target, instances, options.trace, backward=not options.no_backward)
    if options.format == "json":
        sys.stdout.write(json.dumps(_data(watch, options.repeat, loop, len(instances))) + "\n")
    else:
        whole = loop / options.repeat
        count = len(instances)
        output().print(
            f"{count} instances: {whole * 1e3:.2f} ms a minibatch, {count / whole:,.0f} instances/s"
        )
        for table in _tables(watch, options.repeat, loop, len(instances)):
            output().print(table)
        if options.trace is not None:
            output().print(f"trace: {options.trace}", markup=False, soft_wrap=True)
    return Status.OK


def measure(
    target: Runnable, instances: Sequence[Any], repeat: int, *, backward: bool
) -> tuple[Stopwatch, float]:
    """The stopwatch after `repeat` minibatches, and their seconds from outside. Warmed up before."""
    step(target, instances, backward=backward)
    step(target, instances, backward=backward)
    watch = Stopwatch(_device(target))
    with watch.instrumented():
        start = watch.now()
        for _ in range(repeat):
            step(target, instances, backward=backward, part=watch.phase)
        seconds = watch.now() - start
    return watch, seconds


def write_trace(target: Runnable, instances: Sequence[Any], file: Path, *, backward: bool) -> None:
    """A Chrome trace of one minibatch, with phases and steps by name."""
    activities = [ProfilerActivity.CPU]
    watch = Stopwatch(_device(target))
    if watch.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with (
        profile(activities=activities, acc_events=True) as profiler,  # torch 2.11 warns without
        watch.instrumented(),
    ):
        step(target, instances, backward=backward, part=watch.phase)
    profiler.export_chrome_trace(str(file))


def _device(target: Runnable) -> torch.device:
    module = target.module
    first = next(module.parameters(), None) if module is not None else None
    return first.device if first is not None else torch.device("cpu")


def _data(watch: Stopwatch, repeat: int, seconds: float, instances: int) -> dict[str, Any]:
    """Milliseconds a minibatch."""
    phases = {name: spent.seconds / repeat * 1e3 for name, spent in watch.phases.items()}
    phases["other"] = max(seconds / repeat * 1e3 - sum(phases.values()), 0.0)
    operations = [
        {
            "operation": name,
            "part": part,
            "milliseconds": spent.seconds / repeat * 1e3,
            "steps": spent.times / repeat,
            "calls": spent.calls / repeat,
        }
        for (name, part), spent in ((k.split("\t"), s) for k, s in watch.operations.items())
    ]
    operations.sort(key=lambda row: -float(str(row["milliseconds"])))
    return {
        "schema": "fxbatch",
        "version": SCHEMA_VERSION,
        "form": "profile",
        "instances": instances,
        "repeat": repeat,
        "milliseconds": seconds / repeat * 1e3,
        "phases": phases,
        "operations": operations,
    }


def _tables(watch: Stopwatch, repeat: int, seconds: float, instances: int) -> list[Table]:
    data = _data(watch, repeat, seconds, instances)
    whole = data["milliseconds"]
    phases = Table(box=None, pad_edge=False)
    for name, justify in (("phase", "left"), ("ms", "right"), ("share", "right")):
        phases.add_column(name, justify=justify)  # type: ignore[arg-type]  # literals
    for name, ms in data["phases"].items():
        phases.add_row(name, f"{ms:.3f}", f"{ms / whole:.1%}")
    rows = Table(box=None, pad_edge=False, title="by operation", title_justify="left")
    for name in ("operation", "part", "ms", "share", "steps", "calls", "µs a step"):
        rows.add_column(name, justify="left" if name in ("operation", "part") else "right")
    for row in data["operations"]:
        ms, steps = row["milliseconds"], row["steps"]
        rows.add_row(
            row["operation"],
            row["part"],
            f"{ms:.3f}",
            f"{ms / whole:.1%}",
            f"{steps:g}",
            f"{row['calls']:g}",
            f"{ms / steps * 1e3:.0f}",
        )
    return [phases, rows]
