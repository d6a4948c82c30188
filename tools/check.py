"""Compare batched values and gradients with the one-by-one loop, on your own model.

examples:
  fxbatch check examples/tree_lstm.py:minibatch --arg trees=8
  fxbatch check model.py:minibatch --option schedule=depth --option deduplicate=True
  fxbatch check model.py:minibatch --format json
  fxbatch check model.py:minibatch && echo equal

The loop in float64 is the referee: a batched tensor may be at most 4 times as far from it as the loop's own,
plus 16 units in the last place. Random operations can't be compared: such a model is checked in eval().
Exit status 0: equal. 1: different; the first operation and instance that differ are told.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import fxbatch
from fxbatch.viz.describe import SCHEMA_VERSION

from .compare import Comparison, compare
from .errors import CommandError, Status
from .forms import add_option_argument, compile_model, parse_options, user_errors
from .locate_difference import first_difference, parameter_users
from .run_target import Runnable
from .target import add_target_arguments, load_target
from .terminal import notices, output

SHOWN = 10  # differences in the text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    add_option_argument(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random gradients of the results (default: 0)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(options: argparse.Namespace) -> int:
    model, instances = load_target(options.target, options.arg)
    overrides = parse_options(options.option)
    minibatch = compile_model(options.target, model, instances, overrides)
    target = Runnable.of(model, overrides)
    if target.module is not None and _is_random(minibatch):
        names = list(
            dict.fromkeys(o.signature.name for o in minibatch.operations if o.signature.operation.random)
        )
        notices().print(f"random operations ({', '.join(names)}): compared in eval()", soft_wrap=True)
        target.module.eval()
        minibatch = compile_model(options.target, model, instances, overrides)
        if _is_random(minibatch):
            raise CommandError(
                f"{names[0]} draws random numbers in eval() too: batched and one by one can't be equal",
                hint="pass its random numbers in with the instance",
                status=Status.MODEL,
            )
    with user_errors(options.target):
        found = compare(target, instances, seed=options.seed)
        place = _first(target, minibatch, instances, found, overrides, options) if found.differences else ""
    _report(options, found, place, len(instances))
    return Status.DIFFERENCE if found.differences else Status.OK


def _is_random(minibatch: fxbatch.Minibatch) -> bool:
    return any(o.signature.operation.random for o in minibatch.operations)


def _first(
    target: Runnable,
    minibatch: fxbatch.Minibatch,
    instances: Sequence[Any],
    found: Comparison,
    overrides: dict[str, Any],
    options: argparse.Namespace,
) -> str:
    """Which operation of which instance differs first, as far as that can be told."""
    place = first_difference(minibatch)
    if place is not None:
        return str(place)
    if found.instances:
        return f"instance {found.instances[0]}; every call agrees, so its result is put together wrongly"
    users = []
    if found.parameters and target.module is not None:
        users = list(parameter_users(minibatch, found.parameters[0], target.module))
    culprit = f"; {found.parameters[0]} is read by {', '.join(users)}" if users else ""
    for i, instance in enumerate(instances):
        if compare(target, [instance], seed=options.seed).differences:
            return f"instance {i} alone differs too, in gradients{culprit}"
    return f"in gradients of the whole minibatch only: each instance alone agrees{culprit}"


def _report(options: argparse.Namespace, found: Comparison, place: str, instances: int) -> None:
    if options.format == "json":
        data = {
            "schema": "fxbatch",
            "version": SCHEMA_VERSION,
            "form": "check",
            "equal": not found.differences,
            "instances": instances,
            "values": found.values,
            "gradients": found.gradients,
            "referee": found.referee,
            "worst": found.worst,
            "first": place,
            "differences": found.differences,
        }
        sys.stdout.write(json.dumps(data) + "\n")
        return
    console = output()
    what = (
        f"{instances} instances, {found.values} values, {found.gradients} gradients; referee: {found.referee}"
    )
    if not found.differences:
        console.print(
            f"[bold green]equal[/]: {what}; largest error {found.worst:.0%} of what is allowed",
            soft_wrap=True,
        )
        return
    console.print(f"[bold red]different[/]: {what}", soft_wrap=True)
    console.print(f"first: {place}", soft_wrap=True, markup=False)
    for line in found.differences[:SHOWN]:
        console.print(f"  {line}", soft_wrap=True, markup=False)
    if len(found.differences) > SHOWN:
        console.print(f"  ... {len(found.differences)} differences in all")
