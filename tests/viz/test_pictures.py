"""Pictures say what the forms say; SVG, DOT, JSON and PNG are well formed for any name."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from fxbatch.ir import Plan, Program
from fxbatch.passes.fold import batch_calls
from fxbatch.passes.schedule import batch_by_agenda, batch_by_depth
from fxbatch.viz import SCHEMA_VERSION, describe_form, form_to_dot, page_of, picture_to_svg, write_png
from fxbatch.viz.call_graph import call_graph, summarise
from fxbatch.viz.draw_form import draw_form
from fxbatch.viz.draw_program import draw_instances, draw_program
from fxbatch.viz.draw_schedule import draw_schedule, draw_schedules
from fxbatch.viz.palette import colour, oklch
from fxbatch.viz.picture import SignatureKey, shorten
from tests.programs import ProgramBuilder, chain_program, programs, random_tree, tree_lstm_program
from tests.viz.reports import forms_of, report_of

EVIL = "a<b>&\"'\\ \x00\n]]> \u202eé漢</script>"


@pytest.fixture
def trees() -> Program:
    rng = random.Random(0)
    return tree_lstm_program([random_tree(rng, n) for n in (4, 2, 6)])


@given(programs())
def test_any_program_has_all_pictures(program: Program) -> None:
    schedule = batch_by_agenda(program)
    forms = [program, schedule, batch_calls(program, schedule)]
    for form in forms:
        picture = draw_form(form, SignatureKey.of(program), title="t", program=program, schedule=schedule)
        ElementTree.fromstring(picture_to_svg(picture, SignatureKey.of(program)))
        json.dumps(describe_form(form, program))
        assert form_to_dot(form, program).startswith("digraph")


@given(programs())
def test_arrows_are_the_inputs(program: Program) -> None:
    picture = draw_program(program, SignatureKey.of(program))
    boxes = {b.id: i for i, b in enumerate(picture.boxes)}
    found = sorted((a.source, a.target) for a in picture.arrows)
    wanted = []
    for c in range(len(program)):
        for v in program.inputs[program.input_offsets[c] : program.input_offsets[c + 1]].tolist():
            known = v < program.known
            name = f"v{v}" if known else f"c{program.call_of_value[v - program.known]}"
            wanted.append((boxes[name], boxes[f"c{c}"]))
    assert found == sorted(wanted)


def test_summary_counts_every_call(trees: Program) -> None:
    graph = call_graph(trees)
    small = summarise(graph, 8)
    assert len(small.call) <= 8 < len(graph.call)
    assert small.count.sum() == len(trees)
    assert small.rows.sum() <= len(trees.inputs)
    assert summarise(graph, 1000) is graph


def test_deep_programs_are_summarised_too() -> None:
    program = chain_program(5000)
    picture = draw_program(program, SignatureKey.of(program), limit=300)
    assert len(picture.boxes) <= 300
    assert "5,002 calls" in picture.note


def test_instances_left_out_are_told(trees: Program) -> None:
    key = SignatureKey.of(trees)
    assert draw_instances(trees, key).note == ""
    assert draw_instances(trees, key, instances=[1]).note == "1 of 3 instances shown"


def test_timeline_boxes_are_steps(trees: Program) -> None:
    schedule = batch_by_depth(trees)
    picture = draw_schedule(trees, schedule, SignatureKey.of(trees))
    sizes = {b.step: dict(b.info)["batch size"] for b in picture.boxes}
    launched = {
        k: str(len(calls))
        for k, calls in enumerate(schedule.steps())
        if trees.signatures[trees.sig[calls[0]]].name != "constant"
    }
    assert sizes == launched
    rows = {trees.signatures[trees.sig[calls[0]]].name for calls in schedule.steps()} - {"constant"}
    assert len(picture.lanes) == len(rows)


def test_many_steps_share_boxes() -> None:
    program = chain_program(3000)
    picture = draw_schedule(program, batch_by_depth(program), SignatureKey.of(program), limit=100)
    assert len(picture.boxes) <= 110
    assert "3,000 steps" in picture.note


def test_two_schedules_share_the_scale(trees: Program) -> None:
    a, b = batch_by_depth(trees), batch_by_agenda(trees)
    key = SignatureKey.of(trees)
    picture = draw_schedules([("depth", trees, a), ("agenda", trees, b)], key)
    assert len([lane for lane in picture.lanes if "calls in" in lane.label]) == 2
    ids = [box.id for box in picture.boxes]
    assert len(ids) == len(set(ids))


def test_two_runs_of_a_model_have_the_same_colours(trees: Program) -> None:
    again = tree_lstm_program([(1, 2)])
    key = SignatureKey.of(trees, again)
    colours = [{s.name: key.colour(key.number(s)) for s in program.signatures} for program in (trees, again)]
    assert colours[0] == colours[1]
    assert sorted(colours[0].values()) == [-1, 0, 1, 2, 3]


def test_any_name_is_escaped(tmp_path: Path) -> None:
    build = ProgramBuilder()
    program = build.program(build.call(EVIL, build.constant(1), location=EVIL))
    page = page_of(report_of(program, title=EVIL))
    assert page.count("</script>") == 2  # the data's and the program's own
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data[1])["signatures"][1]["location"] == EVIL
    for form in forms_of(program).values():
        picture = draw_form(form, SignatureKey.of(program), title=EVIL, program=program)
        ElementTree.fromstring(picture_to_svg(picture, SignatureKey.of(program)))
    write_png(draw_program(program, SignatureKey.of(program)), SignatureKey.of(program), tmp_path / "a.png")


def test_page_needs_no_network(trees: Program) -> None:
    page = page_of(report_of(trees))
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_png_is_a_png(trees: Program) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib, of the extra `bench`")
    buffer = BytesIO()
    write_png(draw_program(trees, SignatureKey.of(trees)), SignatureKey.of(trees), buffer)
    assert buffer.getvalue()[:8] == b"\x89PNG\r\n\x1a\n"


def test_json_is_the_program(trees: Program) -> None:
    found = describe_form(trees)
    assert (found["schema"], found["version"], found["form"]) == ("fxbatch", SCHEMA_VERSION, "program")
    assert found["calls"]["signature"] == trees.sig.tolist()
    assert found["inputs"] == trees.inputs.tolist()
    assert found["results"] == trees.outputs.tolist()


def test_json_of_a_plan_has_its_indices(trees: Program) -> None:
    plan = forms_of(trees)["plan"]
    assert isinstance(plan, Plan)
    found = describe_form(plan, trees)
    given = [x for step in found["steps"] for i in step["inputs"] for x in i.get("indices", [])]
    assert given == plan.indices.tolist()
    assert sum(step["rows"] for step in found["steps"]) == len(trees)


def test_a_form_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="int is no form"):
        describe_form(3)


def test_colours_are_apart_and_legible() -> None:
    fills = [colour(i).fill for i in range(40)]
    assert len(set(fills)) == 40
    for dark in (False, True):
        for i in range(-1, 40):
            shade = colour(i, dark=dark)
            assert contrast(shade.fill, shade.text) > 4.5, (i, dark)
    assert oklch(1.0, 0.0, 0.0) == "#ffffff"


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2."""

    def luminance(text: str) -> float:
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_long_names_keep_both_ends() -> None:
    assert shorten("encoder.layers.0.attention", 13) == "encode…ention"
    assert shorten("cell") == "cell"


def test_the_legend_counts_what_each_stage_shows() -> None:
    program = tree_lstm_program([((0, 1), (0, 1)), (0, 1)])
    forms = forms_of(program)
    for shown in report_of(program).stages:
        name = "plan" if shown.name == "time" else shown.name  # of what ran
        form = forms.get(name, program)  # the trace shows the program
        batches = [] if isinstance(form, (Program, Plan)) else form.nodes("batch")
        calls = len(form) if isinstance(form, Program) else len(program)
        assert sum(row.calls for row in shown.rows) == calls, shown.name
        assert sum(row.steps for row in shown.rows) == (
            len(batch_by_depth(program)) if isinstance(form, Plan) else len(batches)
        ), shown.name
