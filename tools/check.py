"""Compare batched values and gradients with the loop, on your own model.

examples:
  fxbatch check examples/tree_lstm.py:minibatch --arg trees=8
  fxbatch check model.py:minibatch --option schedule=depth
  fxbatch check model.py:minibatch --format json
  fxbatch check model.py:minibatch && echo equal

Batched and loop run twice each, on copies of model and instances, from the same
globals and whatever else instances share. The referee is the loop in float64: a
batched tensor may be 4 times as far from it as the loop's own (the largest of
up to four draws), plus a few units in the last place.
If the loop gives something else the second time, that can't be compared; the
command says so, and the status is 1. Random operations are compared in eval().

Status 0: equal. Status 1: different, with the first operation and instance that
differ, or not comparable.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import fxbatch
from fxbatch.checking import (
    Key,
    Material,
    Outcome,
    RandomState,
    coarsest_of,
    first_difference,
    judge,
    name_of,
    outcome_of,
    parameter_users,
)
from fxbatch.judge import double_by_default
from fxbatch.runtime.run import Run
from fxbatch.shared_state import SharedState
from fxbatch.viz.describe import SCHEMA_VERSION

from .errors import CommandError, Status
from .forms import add_option_argument, compile_model, parse_options, user_errors
from .run_target import Runnable
from .target import add_target_arguments, load_target
from .terminal import notices, output

SHOWN = 10  # differences in the text
ROUNDS = 2  # the second time everything is cached


@dataclass
class Comparison:
    """The outcome of a comparison; `differences` is empty where batched equals the loop."""

    values: int = 0
    gradients: int = 0
    referee: str = "float64"
    worst: float = 0.0  # largest error as a share of what is allowed
    differences: list[str] = field(default_factory=list)
    instances: list[int] = field(default_factory=list)  # that differ
    parameters: list[str] = field(default_factory=list)  # whose gradients differ
    unrepeatable: list[str] = field(default_factory=list)  # what the loop gives otherwise from the same state
    changing: str = ""  # what the loop gives otherwise the second time, on the same module

    @property
    def equal(self) -> bool:
        return not self.differences and not self.unrepeatable


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
    target = Runnable.of(model, overrides)
    with user_errors(options.target):
        material = _copied(target, instances)
    shared = SharedState.of(target.decorated.fn, target.owner)
    minibatch = compile_model(options.target, model, instances, overrides)
    if target.module is not None and _is_random(minibatch):
        names = list(
            dict.fromkeys(o.signature.name for o in minibatch.operations if o.signature.operation.random)
        )
        notices().print(f"random operations ({', '.join(names)}): compared in eval()", soft_wrap=True)
        for module in (target.module, material.owner):
            module.eval()
        minibatch = compile_model(options.target, model, instances, overrides)
        if _is_random(minibatch):
            raise CommandError(
                f"{names[0]} draws random numbers in eval() too: batched and one by one can't be equal",
                hint="pass its random numbers in with the instance",
                status=Status.MODEL,
            )
    with user_errors(options.target):
        coarsest = coarsest_of([o.signature for o in minibatch.operations])
        found = compare(target, material, shared, seed=options.seed, coarsest=coarsest)
        place = _first(target, material, shared, minibatch, found, options) if found.differences else ""
    _report(options, found, place, len(instances))
    return Status.OK if found.equal else Status.DIFFERENCE


def _copied(target: Runnable, instances: Sequence[Any]) -> Material:
    """Model and instances as they are before anything has run."""
    try:
        return Material.of(target.owner, list(instances)).copy()
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise CommandError(
            f"model and instances can't be copied, so nothing can be run twice ({type(error).__name__}: {error})",
            hint="give what can't be copied a __deepcopy__",
            status=Status.MODEL,
        ) from error


def _is_random(minibatch: fxbatch.Minibatch) -> bool:
    return any(o.signature.operation.random for o in minibatch.operations)


def compare(
    target: Runnable, material: Material, shared: SharedState, *, seed: int = 0, coarsest: float = 0.0
) -> Comparison:
    """Values and gradients of the minibatch, against the loop. shared: what instances share, as both find it."""
    found = Comparison()
    batched = _run(target, material.copy(), shared, True, seed)
    loop = _run(target, material.copy(), shared, False, seed)
    again = _run(target, material.copy(), shared, False, seed)
    exact: Sequence[Outcome | None] = _exact(target, material, shared, seed, found) or [None] * ROUNDS

    def draw(n: int, number: int) -> tuple[Outcome, Outcome | None]:
        other = material.copy(seed=number)
        precise = _exact(target, other, shared, seed, found)
        return _run(target, other, shared, False, seed)[n], None if precise is None else precise[n]

    for n in range(ROUNDS):
        varying = judge(again[n], loop[n], exact[n], coarsest=coarsest).differences
        judgement = judge(batched[n], loop[n], exact[n], functools.partial(draw, n), coarsest=coarsest)
        found.worst = max(found.worst, judgement.worst)
        found.unrepeatable += [_line(n, key, d.message) for key, d in varying.items()]
        for key, judged in judgement.differences.items():
            if key not in varying:
                found.differences.append(_line(n, key, judged.message))
                _note_place(found, key)
    changing = judge(loop[1], loop[0], exact[0], coarsest=coarsest).differences
    found.changing = next((name_of(key) for key in changing), "")
    found.values = sum(map(len, loop[0].results))
    found.gradients = sum(g is not None for g in loop[0].gradients.values())
    return found


def _line(n: int, key: Key, message: str) -> str:
    what = f"gradient of {key}" if isinstance(key, str) else name_of(key)
    return f"{what}{', the second time' if n else ''}: {message}"


def _note_place(found: Comparison, key: Key) -> None:
    if isinstance(key, str):
        if key not in found.parameters:
            found.parameters.append(key)
    elif key[0] not in found.instances:
        found.instances.append(key[0])


def _run(
    target: Runnable, material: Material, shared: SharedState, batched: bool, seed: int
) -> list[Outcome]:
    """The results of the minibatch, run ROUNDS times in a row from here."""
    shared.restore()
    runnable, count = Runnable(target.decorated, material.owner), len(material.instances)
    outcomes = []
    for n in range(ROUNDS):
        RandomState.seed(seed + n)
        results = runnable.batched(material.instances) if batched else runnable.one_by_one(material.instances)
        outcomes.append(outcome_of(results, count, out="list", wanted=material.wanted, seed=seed))
    return outcomes


def _exact(
    target: Runnable, material: Material, shared: SharedState, seed: int, found: Comparison
) -> list[Outcome] | None:
    """The loop in float64; None, with the reason in `found.referee`, where it can't run so."""
    if target.owner is None:
        found.referee = "the loop itself: the model is a function, whose tensors have no float64 copy"
        return None
    try:
        with double_by_default():
            return _run(target, material.copy(double=True), shared, False, seed)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        line = " ".join(str(error).split())
        found.referee = f"the loop itself: no float64 run ({type(error).__name__}: {line[:120]})"
        return None


def _first(
    target: Runnable,
    material: Material,
    shared: SharedState,
    minibatch: fxbatch.Minibatch,
    found: Comparison,
    options: argparse.Namespace,
) -> str:
    """Which operation of which instance differs first, as far as that can be told."""
    prepared = [(phase.program, phase.schedule) for phase in minibatch.phases]
    place = first_difference(Run(minibatch.engine, grad=False), prepared)
    if place is not None:
        return str(place)
    if found.instances:
        asks = "do instances share something that changes while others wait?"
        return f"instance {found.instances[0]}, though every call agrees; {asks}"
    users: Sequence[str] = []
    if found.parameters and target.module is not None and not found.parameters[0].startswith("input "):
        signatures = [o.signature for o in minibatch.operations]
        users = parameter_users(signatures, found.parameters[0], target.module)
    culprit = f"; {found.parameters[0]} is read by {', '.join(users)}" if users else ""
    for i, instance in enumerate(material.instances):
        alone = Material.of(material.owner, [instance])
        if compare(target, alone, shared, seed=options.seed).differences:
            return f"instance {i} alone differs too, in gradients{culprit}"
    return f"in gradients of the whole minibatch only: each instance alone agrees{culprit}"


def _report(options: argparse.Namespace, found: Comparison, place: str, instances: int) -> None:
    if options.format == "json":
        data = {
            "schema": "fxbatch",
            "version": SCHEMA_VERSION,
            "form": "check",
            "equal": found.equal,
            "instances": instances,
            "values": found.values,
            "gradients": found.gradients,
            "referee": found.referee,
            "worst": found.worst,
            "first": place,
            "differences": found.differences,
            "unrepeatable": found.unrepeatable,
            "changing": found.changing,
        }
        sys.stdout.write(json.dumps(data) + "\n")
        return
    console = output()
    what = (
        f"{instances} instances, {found.values} values, {found.gradients} gradients; referee: {found.referee}"
    )
    if found.differences:
        console.print(f"[bold red]different[/]: {what}", soft_wrap=True)
        console.print(f"first: {place}", soft_wrap=True, markup=False)
        _print_some(found.differences, "differences")
    elif not found.unrepeatable:
        console.print(
            f"[bold green]equal[/]: {what}; largest error {found.worst:.0%} of what is allowed",
            soft_wrap=True,
        )
    if found.unrepeatable:
        headline = "[bold red]not comparable[/]: the loop gives something else when it runs again from the same state"
        console.print(headline if found.differences else f"{headline}; {what}", soft_wrap=True)
        _print_some(found.unrepeatable, "such results and gradients")
    elif found.changing:
        text = f"the loop gives something else when the same model runs again ({found.changing}): "
        console.print(text + "compared from the same state each time", soft_wrap=True, markup=False)


def _print_some(lines: Sequence[str], what: str) -> None:
    console = output()
    for line in lines[:SHOWN]:
        console.print(f"  {line}", soft_wrap=True, markup=False)
    if len(lines) > SHOWN:
        console.print(f"  ... {len(lines)} {what} in all")
