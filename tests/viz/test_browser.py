"""The page in headless Chromium: what is shown is what the program says."""

from __future__ import annotations

import linecache
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxbatch.ir import Program
from fxbatch.passes.fold import batch_calls
from fxbatch.passes.schedule import batch_by_depth, depths
from fxbatch.viz.page import page_of
from fxbatch.viz.picture import is_constant
from fxbatch.viz.report import make_report
from tests.programs import ProgramBuilder, random_tree, tree_lstm_program
from tests.viz.browser import Browser, missing
from tests.viz.reports import forms_of, report_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def program() -> Program:
    rng = random.Random(1)
    return tree_lstm_program([random_tree(rng, n) for n in (5, 3, 7, 4)])


@pytest.fixture
def page(browser: Browser, program: Program, tmp_path: Path) -> Browser:
    return show(browser, page_of(report_of(program)), tmp_path)


def show(browser: Browser, page: str, folder: Path) -> Browser:
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    browser.errors()  # those of the page before
    browser.open(file)
    assert browser.run("return document.documentElement.dataset.ready") == "true"
    return browser


def stage(browser: Browser, name: str) -> None:
    browser.point(f"#tab-{name}", click=True)
    assert browser.run("return document.querySelector('[aria-selected=true]').dataset.stage") == name


def labels(browser: Browser, selector: str) -> list[str]:
    found = browser.run(
        "return Array.from(document.querySelectorAll(arguments[0])).map(t => t.textContent)",
        f"{selector} text:not(.sub)",
    )
    return sorted(found)


def test_every_stage_opens_and_shows_its_nodes(page: Browser, program: Program) -> None:
    for name, form in forms_of(program).items():
        stage(page, name)
        shown = page.run("return document.querySelectorAll('#graph .box').length")
        if isinstance(form, Program):
            assert shown == len(form), name
        elif name == "plan":
            assert shown == len(form.block_arena), name  # type: ignore[union-attr]  # a Plan
        else:
            assert shown == len(form.graph), name  # type: ignore[union-attr]  # a BatchedGraph
    assert page.errors() == []


def test_trace_shows_a_lane_an_instance(page: Browser, program: Program) -> None:
    stage(page, "trace")
    assert page.run("return document.querySelectorAll('#graph .lane').length") == program.instances
    assert page.run("return document.querySelectorAll('#graph .box').length") == len(program)


def test_batched_shows_names_and_batch_sizes(page: Browser, program: Program) -> None:
    stage(page, "batched")
    batched = batch_calls(program, batch_by_depth(program))
    wanted = sorted(program.signatures[n.signature].name for _, n in batched.nodes("batch")) + ["result"]
    assert labels(page, "#graph .box") == sorted(wanted)
    sizes = page.run(
        "return Array.from(document.querySelectorAll('#graph .box .sub')).map(t => t.textContent)"
    )
    assert sorted(sizes) == sorted(f"×{n.rows}" for _, n in batched.nodes())


def test_columns_read_from_leaves_to_root(page: Browser, program: Program) -> None:
    stage(page, "merged")
    places = page.run(
        "return Object.fromEntries(Array.from(document.querySelectorAll('#graph .box'))"
        ".map(g => [g.dataset.id, +g.querySelector('rect').getAttribute('x')]))"
    )
    depth = depths(program)
    by_depth: dict[int, list[float]] = {}
    for c, d in enumerate(depth.tolist()):
        by_depth.setdefault(d, []).append(places[f"c{c}"])
    for d in range(int(depth.max())):
        assert max(by_depth[d]) < min(by_depth[d + 1])


def test_hover_tells_signature_shapes_and_step(page: Browser, program: Program) -> None:
    stage(page, "merged")
    call = next(c for c in range(len(program)) if program.signatures[program.sig[c]].name == "cell")
    page.point(f'#graph [data-id="c{call}"]')
    card = page.run("return document.getElementById('card').innerText")
    assert str(program.signatures[program.sig[call]]) in card
    assert f"instance\n{program.instance[call]}" in card
    steps = batch_by_depth(program).steps()
    step = next(k for k, calls in enumerate(steps) if call in calls)
    assert f"step\n{step}" in card
    lit = page.run("return Array.from(document.querySelectorAll('#timeline .lit')).map(g => g.dataset.step)")
    assert lit == [str(step)]


def test_hover_tells_the_users_line(browser: Browser, tmp_path: Path) -> None:
    build = ProgramBuilder()
    program = build.program(build.call("cell", build.constant(1), location="model.py:31"))
    page = show(browser, page_of(report_of(program)), tmp_path)
    stage(page, "merged")
    page.point('#graph [data-id="c1"]')
    assert "line\nmodel.py:31" in page.run("return document.getElementById('card').innerText")


def test_timeline_is_the_schedule(page: Browser, program: Program) -> None:
    boxes = page.run(
        "return Array.from(document.querySelectorAll('#timeline .box')).map(g =>"
        "[+g.dataset.step, +g.querySelector('rect').getAttribute('width'), +g.dataset.sig])"
    )
    schedule = batch_by_depth(program)
    steps = schedule.steps()
    launched = [
        k for k, calls in enumerate(steps) if program.signatures[program.sig[calls[0]]].name != "constant"
    ]
    assert [b[0] for b in boxes] == launched
    for (_, wide, _), k in zip(boxes, launched, strict=True):
        assert wide == pytest.approx(boxes[0][1] * len(steps[k]) / len(steps[launched[0]]), abs=0.2)


def test_search_finds_and_counts(page: Browser, program: Program) -> None:
    stage(page, "merged")
    page.point("#search", click=True)
    page.type("leaf")
    wanted = sum(program.signatures[s].name == "leaf" for s in program.sig)
    assert page.run("return document.getElementById('found').textContent") == f"{wanted} found"
    assert page.run("return document.querySelectorAll('#graph .hit').length") == wanted
    page.type("\ue007")
    assert page.run("return document.querySelectorAll('.here').length") == 1


def test_wheel_zooms_and_drag_moves(page: Browser) -> None:
    stage(page, "merged")
    view = "return document.querySelector('#graph svg').getAttribute('viewBox').split(' ').map(Number)"
    before = page.run(view)
    page.wheel(800, 300, -300)
    after = page.run(view)
    assert after[2] < before[2]
    page.run("document.querySelector('#graph [data-zoom=fit]').click()")
    assert page.run(view)[2] > after[2]


def test_legend_lights_one_signature(page: Browser, program: Program) -> None:
    stage(page, "merged")
    page.run(
        "Array.from(document.querySelectorAll('#legend .row'))"
        ".find(r => r.innerText.includes('embed')).click()"
    )
    wanted = sum(program.signatures[s].name == "embed" for s in program.sig)
    assert page.run("return document.querySelectorAll('#graph .box.lit').length") == wanted


def test_dark_and_light(page: Browser) -> None:
    color = "return getComputedStyle(document.body).backgroundColor"
    first = page.run(color)
    page.point("#theme", click=True)
    assert page.run(color) != first


def test_keys_change_the_stage(page: Browser) -> None:
    page.type("2")
    assert page.run("return document.querySelector('[aria-selected=true]').dataset.stage") == "merged"
    page.type("\ue014")
    assert page.run("return document.querySelector('[aria-selected=true]').dataset.stage") == "deduplicated"


def test_names_of_users_are_text(browser: Browser, tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="window.owned=1"><!--TITLE-->@STYLE@'
    build = ProgramBuilder()
    program = build.program(build.call(evil, build.constant(1), location=evil))
    page = show(browser, page_of(report_of(program, title=evil)), tmp_path)
    stage(page, "merged")
    page.point('#graph [data-id="c1"]')
    assert evil in page.run("return document.getElementById('card').innerText")
    assert page.run("return window.owned") is None
    assert page.run("return document.images.length") == 0
    assert page.errors() == []


@pytest.mark.slow
def test_a_page_of_100_000_calls_holds_few_elements(browser: Browser, tmp_path: Path) -> None:
    rng = random.Random(0)
    program = tree_lstm_program([random_tree(rng, 20) for _ in range(1250)])
    assert len(program) == 100_000
    schedule = batch_by_depth(program)
    forms = {"merged": program, "batched": batch_calls(program, schedule)}
    text = page_of(make_report("large", forms, program, schedule))  # type: ignore[arg-type]  # forms
    page = show(browser, text, tmp_path)
    stage(page, "merged")
    page.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.run("return document.querySelectorAll('*').length") < 5_000, "it opens at once"
    assert len(text) < 20_000_000
    assert "100,000 calls" in page.run("return document.querySelector('#graph .note').textContent")


def test_the_legend_counts_the_boxes_of_the_stage(page: Browser, program: Program) -> None:
    for name, form in forms_of(program).items():
        stage(page, name)
        runs = page.run(
            "return Array.from(document.querySelectorAll('#legend .row')).filter(r => !r.hidden)"
            ".map(r => r.querySelector('.runs').textContent)"
        )
        assert runs and all(runs)
        if isinstance(form, Program):
            calls = sum(not is_constant(form.signatures[s]) for s in form.sig.tolist())
            assert sum(int(text) for text in runs if text != "data") == calls


def test_the_header_has_no_empty_band(page: Browser) -> None:
    """Title, counts and tools stand side by side at every width: a second row of its own would be empty."""
    for width in (700, 1000, 1400):
        page.run(f"document.body.style.width = '{width}px'")
        tops = page.run(
            "return ['h1', '.counts', '.tools'].map(s => document.querySelector('header ' + s)"
            ".getBoundingClientRect()).map(r => [r.top, r.bottom])"
        )
        assert max(top for top, _ in tops) < min(bottom for _, bottom in tops), width


# What stands beside one another on a page, and how far each reaches.
PLACES = """
    const shown = Array.from(document.querySelectorAll(
        'h1, .count, .search, #theme, [role=tab], #caption, .canvas, .note, .zoom, #timeline h2'));
    return shown.map(e => [e.id || e.className || e.tagName, e.getBoundingClientRect()])
        .filter(([, r]) => r.width && r.height).map(([n, r]) => [n, r.left, r.top, r.right, r.bottom])
"""


@pytest.mark.parametrize("height", [844, 664])
def test_on_a_phone_nothing_covers_anything(
    browser: Browser, program: Program, tmp_path: Path, height: int
) -> None:
    browser.resize(390, height)
    try:
        page = show(browser, page_of(report_of(program)), tmp_path)
        for name in page.run(
            "return Array.from(document.querySelectorAll('[role=tab]')).map(t => t.dataset.stage)"
        ):
            stage(page, name)
            places = page.run(PLACES)
            assert len(places) > 15
            for n, (a, left, top, right, bottom) in enumerate(places):
                assert 0 <= left < right <= 390 and 0 <= top < bottom <= height, (name, a)
                for b, left_, top_, right_, bottom_ in places[:n]:
                    apart = (
                        right <= left_ + 1 or right_ <= left + 1 or bottom <= top_ + 1 or bottom_ <= top + 1
                    )
                    assert apart, f"{name}: {a} covers {b}"
            canvas = page.run(
                "return document.querySelector('#graph .canvas').getBoundingClientRect().height"
            )
            assert canvas > 120, "the picture is to be seen"
    finally:
        browser.resize(0, 0)


def test_what_did_not_run_is_marked(browser: Browser, program: Program, page: Browser) -> None:
    idle = page.run("return Array.from(document.querySelectorAll('.idle')).map(t => t.dataset.stage)")
    assert idle == ["pass-through", "gathered"]
    for name in idle:
        stage(page, name)
        caption = page.run("return document.getElementById('caption').textContent")
        assert caption.startswith("This did not run (the schedule is depth). TensorFlow Fold's way: ")


def test_numbers_are_explained_on_hover(page: Browser) -> None:
    titles = dict(
        page.run(
            "return Array.from(document.querySelectorAll('.count')).map(c => [c.lastChild.textContent, c.title])"
        )
    )
    assert "longest chain" in titles["lower bound"]
    assert "not copied" in titles["gathers elided"]


def test_milliseconds_of_both_ways_on_one_axis(page: Browser) -> None:
    stage(page, "time")
    wide = dict(
        page.run(
            "return Array.from(document.querySelectorAll('#graph .box')).map(g =>"
            "[g.dataset.id, +g.querySelector('rect').getAttribute('width') + 1])"
        )
    )
    assert list(wide) == ["time-0-4 instances", "time-1-trace", "time-1-forward", "time-1-backward"]
    assert wide["time-0-4 instances"] == pytest.approx(12 * wide["time-1-trace"], abs=1)
    assert "one by one  12.0 ms" in page.run("return document.querySelector('#graph').textContent")
    page.point('#graph [data-id="time-1-forward"]')
    assert "milliseconds\n2.00" in page.run("return document.getElementById('card').innerText")


def test_the_source_has_calls_and_launches_at_each_line(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["import torch", "", "def f(x):", "    h = cell(x)", "    return h"]
    monkeypatch.setitem(
        linecache.cache,
        "/home/a/cells_here.py",
        (1, None, [f"{t}\n" for t in text], "/home/a/cells_here.py"),
    )
    build = ProgramBuilder()
    calls = [build.call("cell", build.constant(k), location="cells_here.py:4", instance=k) for k in range(3)]
    program = build.program(*calls)
    page = show(browser, page_of(report_of(program)), tmp_path)
    stage(page, "source")
    assert labels(page, "#graph .box") == ["3 → 1"]
    shown = page.run(
        "return Array.from(document.querySelectorAll('#graph .lane text')).map(t => t.textContent)"
    )
    assert shown[0] == "cells_here.py" and shown[-2].endswith("h\u00a0=\u00a0cell(x)") and len(shown) == 5
    assert page.errors() == []
