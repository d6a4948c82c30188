"""A target's minibatch and its forms, stage by stage: what `dump`, `draw` and `diff` show.

options = parser.parse_args(["examples/tree_lstm.py:minibatch", "--option", "schedule=depth"])
forms = forms_of(compile_model(options.target, model, instances, {}))
forms.stages["batched"]                    # a BatchedGraph
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fxbatch
from fxbatch.errors import FxbatchError
from fxbatch.ir import Plan, Program, Schedule
from fxbatch.passes.deduplicate import deduplicate, deduplicate_large
from fxbatch.passes.fold import batch_calls, insert_cats, insert_gathers, insert_pass_throughs
from fxbatch.passes.schedule import batch_by_depth
from fxbatch.passes.select import select_calls
from fxbatch.runtime.options import deduplication
from fxbatch.viz.draw_form import Form
from fxbatch.viz.packed_program import PackedProgram, packed_forward
from fxbatch.viz.report import Report, make_report

from .errors import CommandError, Status
from .run_target import model_arguments
from .target import _failed as describe_failure
from .target import add_target_arguments, users_output
from .terminal import doing, notices

NOT_PACKED = "a forward of tensors whose sizes differ by instance is, where it can be: docs/sizes.md"
STAGES = ("merged", "deduplicated", "fused", "pass-through", "batched", "gathered", "plan")


@dataclass(frozen=True, eq=False)
class Forms:
    """The forms of one phase of a minibatch. `program` is the one that `schedule` and `plan` run."""

    title: str
    minibatch: fxbatch.Minibatch
    merged: Program
    program: Program
    schedule: Schedule
    plan: Plan

    def stage(self, name: str) -> Form:
        """The form of a stage of STAGES."""
        options = self.minibatch.engine.options
        if name == "merged":
            return self.merged
        if name == "deduplicated":
            passes = deduplication(options)
            rewrite = {"deduplicate": deduplicate, "deduplicate_large": deduplicate_large}
            return rewrite[passes[0]](self.merged) if passes else self.merged
        if name == "fused":
            return self.program if options.schedule != "fold" else self.stage("deduplicated")
        if name == "plan":
            return self.plan
        if name == "batched":
            return batch_calls(self.program, self.schedule)
        fused = self.stage("fused")
        assert isinstance(fused, Program)
        carried = insert_pass_throughs(batch_calls(fused, batch_by_depth(fused)))
        return carried if name == "pass-through" else insert_cats(insert_gathers(carried))


def add_minibatch_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """TARGET, --arg, --option and --phase. optional: TARGET may be missing."""
    add_target_arguments(parser, optional=optional)
    add_option_argument(parser)
    parser.add_argument(
        "--phase",
        type=int,
        metavar="N",
        help="which phase, if instances wait for values (default: the largest)",
    )


def add_option_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of @autobatch instead of the model's: schedule=depth",
    )


def parse_options(pairs: Sequence[str], flag: str = "--option") -> dict[str, Any]:
    """{"schedule": "depth"} of ["schedule=depth"]; values are Python literals, else text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise CommandError(
                f"{flag} {pair!r} is not key=value", hint=f"for example: {flag} schedule=depth"
            )
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def pack_model(
    target: str, model: Any, instances: Sequence[Any], overrides: dict[str, Any]
) -> list[PackedProgram]:
    """The packed programs of the whole forward; none where it is recorded call by call."""
    if not len(instances):
        return []
    with user_errors(target):
        return packed_forward(model, *model_arguments(model, instances), **overrides)


def packed_report(title: str, programs: Sequence[PackedProgram]) -> Report:
    """A page with one stage per program."""
    stages = {f"packed{f' {i}' if i > 1 else ''}": p.program for i, p in enumerate(programs, 1)}
    report = make_report(short_title(title), stages, programs[0].program, programs[0].schedule)
    return dataclasses.replace(report, counts=programs[0].counts)


def compile_model(
    target: str, model: Any, instances: Sequence[Any], overrides: dict[str, Any]
) -> fxbatch.Minibatch:
    """`compile_minibatch`; what the user's forward raises ends the command with its line."""
    if not len(instances):
        raise CommandError(f"{target} returned no instances", status=Status.MODEL)
    with user_errors(target), doing(f"{len(instances)} instances: recording, batching, running"):
        return fxbatch.compile_minibatch(model, *model_arguments(model, instances), **overrides)


class user_errors:
    """`with user_errors(target):` around what runs the user's code: what it raises is a CommandError, status MODEL, and
    what it prints goes to standard error."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.output = users_output()

    def __enter__(self) -> None:
        self.output.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.output.__exit__(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, (CommandError, FxbatchError)):
            raise describe_failure(error, self.target) from error


def forms_of(minibatch: fxbatch.Minibatch, title: str = "", phase: int | None = None) -> Forms:
    """The forms of one phase: the given one, or else the one with most calls."""
    phases = minibatch.phases
    sizes = [len(p.program) for p in phases]
    number = sizes.index(max(sizes)) if phase is None else phase
    if not 0 <= number < len(phases):
        raise CommandError(f"--phase {number}: there are {len(phases)} phases, counted from 0")
    if len(phases) > 1 and phase is None:
        notices().print(
            f"instances wait for values: {len(phases)} phases; this is phase {number}, see --phase",
            soft_wrap=True,
        )
    chosen = phases[number]
    merged = minibatch.program if len(phases) == 1 else chosen.program
    return Forms(title, minibatch, merged, chosen.program, chosen.schedule, chosen.plan)


def program_of_instance(program: Program, instance: int) -> Program:
    """The calls of one instance alone."""
    if not 0 <= instance < program.instances:
        raise CommandError(f"--instance {instance}: there are {program.instances} instances, counted from 0")
    keep = program.instance == instance
    own = np.zeros(program.values, dtype=bool)
    own[program.known :] = np.repeat(keep, program.width[program.sig])
    outputs = program.outputs[own[program.outputs]]
    return select_calls(dataclasses.replace(program, outputs=outputs), keep)


def short_title(target: str) -> str:
    """The target without folders: a page is sent to others."""
    place, _, name = target.rpartition(":")
    return f"{Path(place).name if place.endswith('.py') else place}:{name}"
