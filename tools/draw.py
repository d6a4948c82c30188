"""Draw a minibatch: one HTML page with all stages, or a picture for a paper.

examples:
  fxbatch draw examples/tree_lstm.py:minibatch --arg trees=8
  fxbatch draw model.py:minibatch -o page.html --option schedule=depth
  fxbatch draw model.py:minibatch --format svg --stage batched -o batched.svg
  fxbatch draw model.py:minibatch --format png --stage schedule
  fxbatch draw model.py:minibatch --instances 0,3,5
  fxbatch draw examples/graph_attention.py:minibatch

The first writes minibatch.html. The page needs no other file: open it from
disk, send it by mail. `fxbatch dump --help` lists the stages. PNG needs:
pip install 'fxbatch[bench]'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxbatch.ir import Program
from fxbatch.viz.draw_form import Form
from fxbatch.viz.draw_form import draw_form as draw
from fxbatch.viz.draw_program import draw_instances
from fxbatch.viz.packed_program import PackedProgram, packed_submodules
from fxbatch.viz.page import page_of
from fxbatch.viz.picture import Picture, SignatureKey
from fxbatch.viz.report import make_report
from fxbatch.viz.svg import picture_to_svg

from .bench_target import measure
from .dump import write, write_picture_png
from .errors import CommandError
from .forms import (
    NOT_PACKED,
    STAGES,
    Forms,
    add_minibatch_arguments,
    compile_model,
    forms_of,
    pack_model,
    packed_report,
    parse_options,
    short_title,
    user_errors,
)
from .profile import measure as measure_parts
from .run_target import Runnable
from .target import load_target
from .terminal import notices

ROUNDS = 3  # of each way, for the picture of milliseconds
Times = dict[str, dict[str, float]]
LARGE = 2_000  # steps; above, stages that insert nodes for every depth are left out of the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_minibatch_arguments(parser)
    parser.add_argument("--format", choices=("html", "svg", "png"), default="html", help="default: html")
    parser.add_argument(
        "--stage",
        choices=("trace", *STAGES, "schedule", "packed"),
        metavar="STAGE",
        help=f"of svg and png: trace, {', '.join(STAGES)}, schedule or packed (default: packed where the whole "
        "forward is, else merged)",
    )
    parser.add_argument(
        "--instances", metavar="N,N,...", help="which instances are drawn one by one (default: the first few)"
    )
    parser.add_argument(
        "--no-times", action="store_true", help="of a page: without milliseconds, which take ten runs"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: FUNCTION.FORMAT; - is standard output"
    )


def run(options: argparse.Namespace) -> int:
    model, data = load_target(options.target, options.arg)
    overrides = parse_options(options.option)
    packed = pack_model(options.target, model, data, overrides) if options.stage in (None, "packed") else []
    if packed:
        return _draw_packed(options, packed)
    forms = forms_of(compile_model(options.target, model, data, overrides), options.target, options.phase)
    within = {f"packed {p.name}": p.program for p in packed_submodules(forms.minibatch)}
    if options.stage == "packed" and not within:
        raise CommandError("nothing of it is packed", hint=NOT_PACKED)
    instances = _instances(options.instances, forms.merged)
    file = _file(options)
    if options.format == "html":
        write(
            page_of(
                make_report(
                    short_title(options.target),
                    {**_stages(forms), **within},
                    forms.program,
                    forms.schedule,
                    instances=instances,
                    times=None if options.no_times else _times(options.target, model, data, overrides),
                )
            ),
            file,
        )
    else:
        if options.stage == "packed":
            raise CommandError("only submodules of it are packed", hint="--format html has them")
        picture, key = _picture(forms, options.stage or "merged", instances)
        if options.format == "png":
            write_picture_png(picture, SignatureKey.of(forms.merged, forms.program), file)
        else:
            write(picture_to_svg(picture, key) + "\n", file)
    return _wrote(file)


def _times(target: str, model: Any, data: Sequence[Any], overrides: dict[str, Any]) -> Times:
    """Milliseconds of the loop and of the batch, these by part; none where parts can't be told apart."""
    runnable = Runnable.of(model, overrides)
    options = runnable.decorated.options
    if options.mode != "looped" or options.backward != "compiled":
        return {}
    with user_errors(target):
        whole = measure(runnable, data, rounds=ROUNDS, backward=True)
        watch, _ = measure_parts(runnable, data, ROUNDS, backward=True)
    seconds = {name: spent.seconds for name, spent in watch.phases.items() if spent.seconds}
    batched = statistics.median(whole.batched) * 1e3 / sum(seconds.values())
    alone = statistics.median(whole.one_by_one) * 1e3
    return {
        "one by one": {f"{len(data)} instances": alone},
        "batched": {name: s * batched for name, s in seconds.items()},
    }


def _draw_packed(options: argparse.Namespace, packed: list[PackedProgram]) -> int:
    file = _file(options)
    if options.format == "html":
        write(page_of(packed_report(options.target, packed)), file)
    else:
        key = SignatureKey.of(packed[0].program)
        title = f"{short_title(options.target)}, packed, {packed[0].rows}"
        picture = draw(packed[0].program, key, title=title)
        if options.format == "png":
            write_picture_png(picture, key, file)
        else:
            write(picture_to_svg(picture, key) + "\n", file)
    return _wrote(file)


def _file(options: argparse.Namespace) -> Path | None:
    """Where to write; None for standard output."""
    name = options.target.rpartition(":")[2]
    file: Path = options.output or Path(f"{name}.{options.format}")
    return None if str(file) == "-" else file


def _wrote(file: Path | None) -> int:
    if file is not None:
        print(file)
        sys.stdout.flush()
    return 0


def _stages(forms: Forms) -> dict[str, Form]:
    found: dict[str, Form] = {}
    for name in STAGES:
        if name in ("pass-through", "gathered") and len(forms.schedule) > LARGE:
            notices().print(f"{len(forms.schedule):,} steps: the page has no stage {name}", soft_wrap=True)
            continue
        found[name] = forms.stage(name)
    return found


def _picture(forms: Forms, stage: str, instances: list[int] | None) -> tuple[Picture, SignatureKey]:
    key = SignatureKey.of(forms.merged, forms.program)
    title = f"{short_title(forms.title)}, {stage}"
    if stage == "trace":
        same = forms.schedule if forms.merged is forms.program else None
        return draw_instances(forms.merged, key, instances=instances, title=title, schedule=same), key
    form = forms.schedule if stage == "schedule" else forms.stage(stage)
    program = getattr(form, "program", form)
    if isinstance(program, Program):
        key.extend(program.signatures)
    schedule = forms.schedule if program is forms.program else None
    return draw(form, key, title=title, program=forms.program, schedule=schedule), key


def _instances(text: str | None, program: Program) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise CommandError(
            f"--instances {text!r} is no list of numbers", hint="for example: --instances 0,3"
        ) from error
    wrong = [i for i in found if not 0 <= i < program.instances]
    if wrong:
        raise CommandError(f"no instance {wrong[0]}: there are {program.instances}, counted from 0")
    return found
