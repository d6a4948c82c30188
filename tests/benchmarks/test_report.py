"""Results to JSON and back, reports, comparison with an earlier run, the command line."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import pytest
import torch

from benchmarks.command import UsageError, add_arguments, choose_tasks, main, settings_of
from benchmarks.compare import changes, compare_runs
from benchmarks.docs_page import NOT_ON_THE_PAGE, DocsError, measuring_command, update_page
from benchmarks.machine import describe_machine, resident_bytes
from benchmarks.plots import can_draw, draw_svg
from benchmarks.registry import TASKS
from benchmarks.report import number_text, read_run, seconds_text, to_html, to_markdown, write_report
from benchmarks.results import (
    CaseResult,
    Entry,
    Plot,
    Ratio,
    ResultsError,
    RunResult,
    Series,
    Spread,
    Table,
    TaskResult,
    check_schema,
)  # fmt: skip
from benchmarks.tasks.lines_of_code import MODELS, count_lines, count_model


def make_run(factor: float = 1.0, *, spread: float = 0.01) -> RunResult:
    def entry(seconds: float) -> Entry:
        samples = [seconds * (1 - spread), seconds, seconds * (1 + spread)]
        return Entry(Spread.of(samples), Spread.of(samples), phases={"forward": Spread.of(samples)})

    slow, fast = entry(0.2), entry(0.1 * factor)
    ratio = Ratio("loop", "fxbatch", Spread.of([2.0 / factor] * 3))
    case = CaseResult(
        "batch 4", {"batch": 4, "mode": "training"}, "tree", 4, {"loop": slow, "fxbatch": fast},
        {"peer": "not installed"}, [ratio], {"fxbatch": 0.1}, {"steps": 7}, {"other": "differs | here"},
    )  # fmt: skip
    plot = Plot(
        "Trees", "batch", "trees", [Series("fxbatch", [1, 4], [10, 30], [9, 28], [11, 33])], log_x=True
    )
    table = Table("Own <table>", ["a", "b"], [["x", 1], ["y", None]], "a `note`")
    task = TaskResult("t", "Task <one>", "What it is.\n\nMore.", [case], [table], [plot])
    skipped = TaskResult("s", "Other", "", [], [], [], skipped="no data")
    machine = describe_machine(torch.device("cpu"), threads=1)
    return RunResult(
        "2026-01-31T12:00:00+00:00", "test --quick",
        {"quick": True, "repeats": 3, "warmup": 1, "budget": 2.0, "seed": 0}, machine, [task, skipped], 1.5,
    )  # fmt: skip


def test_json_comes_back() -> None:
    run = make_run()
    again = RunResult.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert again.failures == ["t, batch 4: other: differs | here"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "other", "format is 'other'"),
        (["version"], 99, "version is 99"),
        (["tasks", 0, "cases", 0, "count"], "4", r"tasks\[0\]\.cases\[0\]\.count: expected int, got str"),
        (["tasks", 0, "cases", 0, "count"], True, r"count: expected int, got bool"),
        (["tasks", 0, "cases"], {}, r"tasks\[0\]\.cases: expected a list, got dict"),
        (
            ["tasks", 0, "cases", 0, "entries", "loop", "wall"],
            None,
            r"entries\.loop\.wall: expected an object",
        ),
        (["tasks", 0, "extra"], 1, r"tasks\[0\]: wrong keys: not extra"),
    ],
)
def test_other_forms_are_refused(path: list, value: object, message: str) -> None:
    data = copy.deepcopy(make_run().to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ResultsError, match=message):
        check_schema(data)


def test_markdown_says_everything() -> None:
    text = to_markdown(make_run())
    wanted = [
        "Command: `test --quick`", "| peer | skipped: not installed |", "FAILED: differs \\| here",
        "2x (2-2)", "**Own <table>**", "Skipped: no data", "forward", "steps",
    ]  # fmt: skip
    assert [words for words in wanted if words not in text] == []


def test_html_is_escaped_and_whole() -> None:
    run = make_run()
    text = to_html(run, plots={"plots/t-trees.svg": "<svg id='x'></svg>"})
    assert "Task &lt;one&gt;" in text and "<one>" not in text
    assert "<svg id='x'></svg>" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_report_files_and_back(tmp_path: Path) -> None:
    run = make_run()
    files = write_report(run, tmp_path)
    assert read_run(tmp_path) == read_run(tmp_path / "results.json") == run
    names = [str(f.relative_to(tmp_path)) for f in files]
    assert {"results.json", "report.md", "report.html"} <= set(names)
    if can_draw():
        assert "plots/t-trees.svg" in names
        assert "](plots/t-trees.svg)" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")
@pytest.mark.parametrize("kind", ["line", "bar"])
def test_plots_are_the_same_each_time(kind: str) -> None:
    plot = Plot("t", "x", "y", [Series("a", [0, 1], [1, 2], [0.5, 1], [2, 3])], kind=kind, labels=["p", "q"])
    svg = draw_svg(plot)
    assert svg.startswith("<svg ") and svg == draw_svg(plot)


def test_comparison_finds_the_clear_change_alone() -> None:
    table = compare_runs(make_run(), make_run(1.5))
    assert [row[1] for row in table.rows] == ["fxbatch, seconds", "loop / fxbatch"]
    assert table.rows[0][4] == pytest.approx(1.5)
    assert compare_runs(make_run(), make_run(1.02)).rows == []  # too small
    assert compare_runs(make_run(spread=0.8), make_run(1.2, spread=0.8)).rows[0][1] == "loop / fxbatch"
    assert len(changes(make_run(), make_run())) == 3


def test_comparison_says_where_machines_differ() -> None:
    other = make_run()
    other.machine["threads"] = 64
    assert "differ in threads" in compare_runs(make_run(), other).note


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.234, "1.23 s"), (0.0456, "45.6 ms"), (7.89e-6, "7.89 µs"), (3e-9, "3 ns")]
)
def test_seconds_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_number_text() -> None:
    assert [number_text(x) for x in (None, 12345.6, 0.01234, 7, "a")] == ["–", "12,346", "0.0123", "7", "a"]


def test_resident_bytes_grows_with_what_is_held() -> None:
    before = resident_bytes()
    held = torch.ones(8_000_000)
    assert resident_bytes() - before > 20_000_000 or before == 0
    assert held.numel()


PAGE = "# Page\n\n<!-- figures: t -->\nold\n<!-- end -->\n\n<!-- figures: s -->\n<!-- end -->\n\nrest\n"


def test_docs_page_takes_the_tables_of_a_full_run() -> None:
    run = make_run()
    run.settings["quick"] = False
    page = update_page(PAGE, run)
    assert "old" not in page and page.endswith("rest\n") and page.startswith("# Page")
    for expected in (
        "Command: `test --quick`",
        "**Own <table>**",
        "left out: peer: not installed",
        "no data",
    ):
        assert expected in page
    assert update_page(page, run) == page


def test_docs_page_leaves_places_of_one_machine_out() -> None:
    command = "python -m benchmarks --task scale -o /somewhere/x --docs=docs/y.md --threads 2 --json out.json"
    assert measuring_command(command) == "python -m benchmarks --task scale --threads 2"


def test_docs_page_refuses_quick_runs_and_missing_sections() -> None:
    with pytest.raises(DocsError, match="quick run"):
        update_page(PAGE, make_run())
    run = make_run()
    run.settings["quick"] = False
    with pytest.raises(DocsError, match="no section <!-- figures: t -->"):
        update_page("# Page\n", run)


def test_the_docs_have_a_section_for_every_task() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    missing = [task.name for task in TASKS if f"<!-- figures: {task.name} -->" not in page]
    assert missing == list(NOT_ON_THE_PAGE)


# -- lines of code -----------------------------------------------------------------------------------------

SOURCE = '''"""Doc."""
import x

@decorated
class A:
    """Doc
    of two lines."""

    def f(self):  # comment
        # comment
        return """a
string"""

    def g(self): return 1

def h():
    """Doc."""
    return (
        1
    )
'''


def test_lines_are_counted_without_docs_comments_and_blanks() -> None:
    assert count_lines(SOURCE, ["A"]) == 6
    assert count_lines(SOURCE, ["A.f"]) == 3
    assert count_lines(SOURCE, ["h"]) == 4
    assert count_lines(SOURCE, ["A", "A.f", "h"]) == 10  # each once
    with pytest.raises(KeyError):
        count_lines(SOURCE, ["missing"])


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_models_have_lines(model) -> None:
    assert 5 < count_model(model.fxbatch) < 300
    assert 5 < count_model(model.by_hand) < 300


# -- the command -------------------------------------------------------------------------------------------


def test_unknown_task_and_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no task 'figurs'"):
        choose_tasks(["figurs"])
    assert main(["--task", "figurs"]) == 2
    assert "the tasks are figures, " in capsys.readouterr().err
    assert main(["--device", "toaster"]) == 2
    assert main(["--threads", "0"]) == 2
    assert main(["--dynet", str(tmp_path)]) == 2  # nothing built there
    assert main(["--compare", "/nowhere/results.json", "--task", "lines-of-code"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_list_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(task.name in out for task in TASKS)


def test_a_run_writes_its_report_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["--quick", "--task", "lines-of-code", "--threads", "1"]
    assert main([*command, "-o", str(first), "--json", str(tmp_path / "out.json")]) == 0
    assert read_run(tmp_path / "out.json") == read_run(first)
    assert "Lines of code" in capsys.readouterr().out
    assert main([*command, "-o", str(second), "--compare", str(first)]) == 0
    assert "Against the earlier run" in (second / "report.md").read_text()
    assert main(["--report", str(first / "results.json"), "-o", str(tmp_path / "third")]) == 0
    assert (tmp_path / "third" / "report.md").read_text() == (first / "report.md").read_text()


def test_json_on_standard_output_is_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--task", "lines-of-code", "--json", "-", "-o", str(tmp_path)]) == 0
    check_schema(json.loads(capsys.readouterr().out))


def test_settings_default_to_the_machine() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    full, quick = settings_of(parser.parse_args([])), settings_of(parser.parse_args(["--quick"]))
    assert (full.repeats, quick.repeats) == (7, 3)
    assert full.budget > quick.budget
    assert 1 <= full.threads <= 2
