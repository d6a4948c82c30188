"""Print one stage of a minibatch: recorded calls, schedule, plan, or code.

examples:
  fxbatch dump examples/tree_lstm.py:minibatch --stage trace --instance 2
  fxbatch dump model.py:minibatch --stage batched --format dot -o batched.dot
  fxbatch dump model.py:minibatch --stage plan --format json | jq .steps
  fxbatch dump model.py:minibatch --stage code --option schedule=depth
  fxbatch dump model.py:minibatch --stage operation cell
  fxbatch dump examples/graph_attention.py:minibatch --stage packed

stages:
  trace            the calls of one instance
  merged           the calls of all instances
  deduplicated     ... equal calls are one
  fused            ... calls that always occur together are one
  schedule         the batched launches in their order
  plan             where in memory each launch reads and writes
  batched          the launches as a graph
  pass-through, gathered    stages of TensorFlow Fold's algorithm
  code             the generated source of all operations
  operation NAME   one operation: a call, forward, backward, weight gradients
  packed [NAME]    what runs on tensors with sizes of their own: types with *,
                   and what runs instance by instance, and why

docs/schema.md describes the JSON. PNG needs: pip install 'fxbatch[bench]'.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

from rich.highlighter import RegexHighlighter
from rich.syntax import Syntax
from rich.theme import Theme

from fxbatch.ir import Plan, Schedule
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.text import print_plan, print_schedule
from fxbatch.viz.describe import SCHEMA_VERSION, describe_form
from fxbatch.viz.describe_operation import describe_operation, operation_text, operation_to_dot
from fxbatch.viz.dot import form_to_dot
from fxbatch.viz.draw_form import Form, draw_form
from fxbatch.viz.draw_program import draw_instances
from fxbatch.viz.packed_program import PackedProgram, packed_submodules
from fxbatch.viz.page import page_of
from fxbatch.viz.picture import Picture, SignatureKey
from fxbatch.viz.png import write_png
from fxbatch.viz.report import make_report
from fxbatch.viz.svg import picture_to_svg
from fxbatch.viz.text_page import text_to_html, text_to_svg

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
    program_of_instance,
    short_title,
)
from .target import load_target
from .terminal import output

ALL_STAGES = ("trace", *STAGES, "schedule", "code", "packed", "operation")
NAMED = ("operation", "packed")  # stages that take a NAME
FORMATS = ("text", "json", "dot", "svg", "html", "png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_minibatch_arguments(parser, optional=True)  # argparse gives --stage all words that follow it
    parser.add_argument(
        "--stage",
        nargs="+",
        metavar="STAGE",
        help=f"{', '.join(ALL_STAGES[:-1])} or `operation NAME` (default: packed where the whole forward is, "
        "else merged)",
    )
    parser.add_argument(
        "--instance", type=int, metavar="N", help="of which instance the trace is (default: 0)"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write here instead of standard output"
    )


def run(options: argparse.Namespace) -> int:
    if options.target is None:
        options.target = _target_after_stage(options.stage)
    stage, name = _stage(options.stage or ["merged"])
    if options.format == "png" and options.output is None and sys.stdout.isatty():
        raise CommandError("a PNG is no text for a terminal", hint="give -o FILE")
    if options.instance is not None and stage != "trace":
        raise CommandError(
            f"--instance is of --stage trace; {stage} has all instances", hint="--stage trace --instance N"
        )
    model, data = load_target(options.target, options.arg)
    overrides = parse_options(options.option)
    packed = (
        pack_model(options.target, model, data, overrides) if stage == "packed" or not options.stage else []
    )
    if packed:
        return _dump_packed(options, packed, name)
    minibatch = compile_model(options.target, model, data, overrides)
    if stage == "packed":
        return _dump_packed(options, packed_submodules(minibatch), name)
    forms = forms_of(minibatch, options.target, options.phase)
    if stage in ("code", "operation"):
        text = _text_stage(forms, stage, name, options.format)
        write(text, options.output, language="python" if options.format == "text" else "")
        return 0
    if stage == "trace":
        form: Form = program_of_instance(forms.merged, options.instance or 0)
    else:
        form = forms.schedule if stage == "schedule" else forms.stage(stage)
    if options.format == "png":
        key = SignatureKey.of(forms.merged, forms.program)
        write_picture_png(_picture(forms, form, stage), key, options.output)
    else:
        write(_formatted(forms, form, stage, options.format), options.output)
    return 0


def _dump_packed(options: argparse.Namespace, packed: list[PackedProgram], name: str) -> int:
    """The packed programs in one of the formats; a picture of one of several needs its name."""
    if not packed:
        raise CommandError("nothing of it is packed", hint=NOT_PACKED)
    chosen = [p for p in packed if name in ("", p.name)]
    names = ", ".join(dict.fromkeys(p.name for p in packed))
    if not chosen:
        raise CommandError(f"nothing packed is called {name!r}", hint=f"there is: {names}")
    if options.format in ("svg", "png"):
        key = SignatureKey.of(chosen[0].program)
        picture = draw_form(chosen[0].program, key, title=f"{chosen[0].text}, {chosen[0].rows}")
        if len(chosen) > 1:
            raise CommandError("a picture is of one program", hint=f"--stage packed NAME, of {names}")
        if options.format == "png":
            write_picture_png(picture, key, options.output)
            return 0
        text = picture_to_svg(picture, key)
    elif options.format == "json":
        head = {"schema": "fxbatch", "version": SCHEMA_VERSION, "form": "packed"}
        text = json.dumps({**head, "programs": [p.describe() for p in chosen]})
    elif options.format == "html":
        text = page_of(packed_report(options.target, chosen))
    elif options.format == "dot":
        text = "\n".join(form_to_dot(p.program, p.program) for p in chosen)
    else:
        text = "\n\n".join(map(str, chosen))
    write(text + "\n", options.output)
    return 0


def _target_after_stage(words: list[str] | None) -> str:
    """TARGET where it stands last, behind the words of --stage: taken from them."""
    if not words or len(words) < 2 or (words[0] in NAMED and ":" not in words[-1]):
        raise CommandError("TARGET is missing", hint="see `fxbatch dump --help`")
    return words.pop()


def _stage(words: list[str]) -> tuple[str, str]:
    stage, name = words[0], " ".join(words[1:])
    if stage not in ALL_STAGES:
        close = difflib.get_close_matches(stage, ALL_STAGES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the stages are {', '.join(ALL_STAGES)}"
        raise CommandError(f"no stage {stage!r}", hint=hint)
    if stage not in NAMED and name:
        raise CommandError(f"--stage {stage} takes no name, got {name!r}")
    return stage, name


def _formatted(forms: Forms, form: Form, stage: str, format_: str) -> str:
    if format_ == "json":
        return json.dumps(describe_form(form, forms.program), indent=None) + "\n"
    if format_ == "dot":
        return form_to_dot(form, forms.program) + "\n"
    if format_ == "svg":
        return picture_to_svg(_picture(forms, form, stage), _key(forms, form)) + "\n"
    if format_ == "html":
        shown = {} if stage == "trace" else {stage: form}
        if stage == "trace":
            return page_of(
                make_report(short_title(forms.title), {"merged": form}, forms.program, forms.schedule)
            )
        return page_of(make_report(short_title(forms.title), shown, forms.program, forms.schedule))
    if isinstance(form, Schedule):
        return print_schedule(forms.program, form) + "\n"
    if isinstance(form, Plan):
        return print_plan(form, forms.program.signatures) + "\n"
    return f"{form}\n"


def _key(forms: Forms, form: Form) -> SignatureKey:
    key = SignatureKey.of(forms.merged, forms.program)
    program = getattr(form, "program", form)
    key.extend(getattr(program, "signatures", ()))
    return key


def _picture(forms: Forms, form: Form, stage: str) -> Picture:
    key = _key(forms, form)
    if stage == "trace":
        return draw_instances(form, key, title=short_title(forms.title))  # type: ignore[arg-type]  # a trace is a Program
    program = getattr(form, "program", form)
    schedule = forms.schedule if program is forms.program else None
    return draw_form(
        form, key, title=f"{short_title(forms.title)}, {stage}", program=forms.program, schedule=schedule
    )


def write_picture_png(picture: Picture, key: SignatureKey, file: Path | None) -> None:
    """To the file, or to standard output."""
    if file is None:
        write_png(picture, key, sys.stdout.buffer)
    else:
        checked_folder(file)
        write_png(picture, key, file)


def _text_stage(forms: Forms, stage: str, name: str, format_: str) -> str:
    if format_ == "png":
        raise CommandError(f"--stage {stage} is text; it has no PNG", hint="svg and html it has")
    if stage == "code":
        text, title = forms.minibatch.code, f"{forms.title}, code"
        data: dict[str, Any] = {
            "schema": "fxbatch",
            "version": SCHEMA_VERSION,
            "form": "code",
            "source": text,
        }
        if format_ == "dot":
            raise CommandError("--stage code has no DOT", hint="--stage operation NAME has")
        found: list[CompiledOperation] = []
    else:
        found = find_operations(forms, name)
        text = "\n\n".join(map(operation_text, found))
        title = f"{forms.title}, operation {name}"
        data = describe_operation(found[0])
        if len(found) > 1:
            data["others"] = [describe_operation(o) for o in found[1:]]
    if format_ == "dot":
        return "\n".join(map(operation_to_dot, found)) + "\n"
    if format_ == "json":
        return json.dumps(data) + "\n"
    return {"text": lambda: text + "\n", "svg": lambda: text_to_svg(title, text) + "\n"}.get(
        format_, lambda: text_to_html(title, text)
    )()


def find_operations(forms: Forms, name: str) -> list[CompiledOperation]:
    """The operations of that name, one a signature."""
    operations = forms.minibatch.operations
    names = list(dict.fromkeys(o.signature.name for o in operations))
    if not name:
        raise CommandError("--stage operation needs a NAME", hint=f"it has: {', '.join(names)}")
    found = [o for o in operations if o.signature.name == name]
    if not found:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(names)}"
        raise CommandError(f"no operation {name!r}", hint=hint)
    return found


class _FormHighlighter(RegexHighlighter):
    base_style = "form."
    highlights = [
        r"(?P<type>\b[a-z]+\d+\[[\d,*]*\])",
        r"(?P<value>\bv\d+\b)",
        r"(?P<signature>\bs\d+\b)",
        r"(?P<count>x\d+\b)",
        r"(?P<word>\b(?:batch|pass|gather|cat|result|known|return|step|view|index|broadcast|program|schedule|plan)\b)",
    ]


_THEME = Theme(
    {
        "form.type": "cyan",
        "form.value": "dim",
        "form.signature": "yellow",
        "form.count": "bold green",
        "form.word": "bold",
    }
)


def write(text: str, file: Path | None, language: str = "") -> None:
    """To the file; or to standard output, coloured on a terminal, and as it is in a pipe."""
    if file is not None:
        checked_folder(file)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"can't write {file}: {error.strerror}") from error
        return
    console = output()
    if not console.is_terminal or console.no_color or len(text) > 2_000_000:
        sys.stdout.write(text)
    elif language:
        console.print(
            Syntax(text.rstrip("\n"), language, theme="ansi_dark", background_color="default", word_wrap=True)
        )
    else:
        with console.use_theme(_THEME):
            console.print(_FormHighlighter()(text.rstrip("\n")), soft_wrap=True)


def checked_folder(file: Path) -> None:
    """CommandError where the folder of a file is missing."""
    if file.is_dir():
        raise CommandError(f"{file} is a folder", hint="-o takes a file")
    if not file.parent.is_dir():
        raise CommandError(f"no folder {file.parent}", hint="-o takes a file in a folder that exists")
