"""Interleaving, spreads, ratios pair by pair, the check before the timing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.correctness import CorrectnessError, check_outcome
from benchmarks.driver import OUTSIDE, Nobody, check_case, run_case, run_tasks
from benchmarks.measure import Clock, Contender, in_turn, measure, pair_ratios, seconds_of
from benchmarks.results import CaseResult, Entry, ResultsError, RunResult, Spread
from benchmarks.task import Case, Settings, Skip, Task


class Time:
    """What measure.py takes for the module `time`: a clock that goes when somebody works."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def process_time(self) -> float:
        return self.now / 2  # half of the time asleep

    def work(self, seconds: float) -> None:
        self.now += seconds


time = Time()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure.time", time)


CPU = torch.device("cpu")
SETTINGS = Settings(quick=True, repeats=3, warmup=1)


def named(name: str, log: list[tuple[str, int]], seconds: float = 0.0, **more) -> Contender:
    def run(clock: Clock) -> None:
        log.append((name, clock.round))
        time.work(seconds)

    return Contender(name, run, **more)


def test_contenders_take_turns_and_get_the_round() -> None:
    log: list[tuple[str, int]] = []
    measure([named("a", log), named("b", log)], repeats=4, warmup=1, device=CPU)
    assert [name for name, _ in log] == ["a", "b", "a", "b", "b", "a", "b", "a", "a", "b"]
    assert [number for _, number in log] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_everybody_is_first_and_last_as_often_as_the_others() -> None:
    contenders = [named(name, []) for name in "abc"]
    orders = ["".join(c.name for c in in_turn(contenders, number)) for number in range(6)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac"]


def test_prepare_is_outside_the_timing_and_gets_the_round() -> None:
    log: list[tuple[str, int]] = []
    rounds: list[int] = []

    def prepare(number: int) -> None:
        rounds.append(number)
        time.work(0.05)

    entries, _ = measure([named("a", log, prepare=prepare)], repeats=2, warmup=0, device=CPU)
    assert rounds == [1, 2]
    assert entries["a"].wall.median < 0.04


def test_the_slower_one_is_slower_by_its_ratio() -> None:
    log: list[tuple[str, int]] = []
    entries, ratios = measure(
        [named("slow", log, 0.06), named("fast", log, 0.01)], repeats=3, warmup=0, device=CPU, slow=("slow",)
    )
    (ratio,) = ratios
    assert (ratio.slow, ratio.fast) == ("slow", "fast")
    assert ratio.value.median == pytest.approx(6, rel=1e-3)
    assert entries["fast"].cpu.median < entries["fast"].wall.median  # asleep, not computing


def test_ratios_are_taken_pair_by_pair() -> None:
    def entry(*seconds: float) -> Entry:
        return Entry(Spread.of(seconds), Spread.of(seconds))

    # Every pair is 2: the medians of unpaired times would be 2 as well, but with a spread.
    (ratio,) = pair_ratios({"a": entry(2, 20, 200), "b": entry(1, 10, 100)}, ["a"])
    assert (ratio.value.low, ratio.value.median, ratio.value.high) == (2, 2, 2)


def test_limit_and_budget_end_the_rounds() -> None:
    log: list[tuple[str, int]] = []
    entries, _ = measure([named("a", log), named("b", log, limit=2)], repeats=5, warmup=0, device=CPU)
    assert (len(entries["a"].wall.samples), len(entries["b"].wall.samples)) == (5, 2)
    entries, _ = measure([named("a", log, 0.05)], repeats=100, warmup=0, device=CPU, budget=2.5)
    assert 1 < len(entries["a"].wall.samples) <= 50


def test_a_budget_that_is_spent_leaves_one_round_to_warm_up_and_a_few() -> None:
    log: list[tuple[str, int]] = []
    entries, _ = measure([named("a", log)], repeats=5, warmup=3, device=CPU, budget=30.0, spent=60.0)
    assert (log, len(entries["a"].wall.samples)) == ([("a", 1), ("a", 4), ("a", 5), ("a", 6)], 3)


def test_long_rounds_are_timed_once_where_the_budget_is_spent() -> None:
    log: list[tuple[str, int]] = []
    entries, _ = measure([named("a", log, 0.05)], repeats=5, warmup=0, device=CPU, budget=0.1, spent=2.0)
    assert (log, len(entries["a"].wall.samples)) == ([("a", 1)], 1)


def test_who_raises_while_timed_is_told_and_left_out() -> None:
    log: list[tuple[str, int]] = []
    told: list[tuple[str, str]] = []

    def breaks(clock: Clock) -> None:
        if clock.round == 2:
            raise RuntimeError("no more")

    entries, ratios = measure(
        [named("a", log), Contender("b", breaks)], repeats=3, warmup=0, device=CPU, slow=("b",),
        on_error=lambda name, error: told.append((name, str(error))),
    )  # fmt: skip
    assert told == [("b", "no more")]
    assert (list(entries), ratios, len(entries["a"].wall.samples)) == (["a"], [], 3)
    with pytest.raises(RuntimeError, match="no more"):
        measure([Contender("b", breaks)], repeats=3, warmup=0, device=CPU)


def test_a_part_of_the_work_is_scaled_and_checked_alone_is_not_timed() -> None:
    log: list[tuple[str, int]] = []
    part = named("part", log, 0.01, factor=lambda number: 10.0)
    entries, _ = measure([part, named("checked", log, limit=0)], repeats=2, warmup=0, device=CPU)
    assert list(entries) == ["part"]
    assert entries["part"].wall.median == pytest.approx(0.1, rel=1e-3)  # ten times 0.01 s


def test_phases_are_timed() -> None:
    def run(clock: Clock) -> None:
        with clock("first"):
            time.work(0.02)
        with clock("second"):
            pass

    entries, _ = measure([Contender("a", run)], repeats=1, warmup=0, device=CPU)
    assert list(entries["a"].phases) == ["first", "second"]
    assert entries["a"].phases["first"].median >= 0.02 > entries["a"].phases["second"].median


def test_seconds_of_leaves_the_first_run_out() -> None:
    calls: list[int] = []
    spread = seconds_of(lambda: calls.append(0), repeats=4)
    assert (len(calls), len(spread.samples)) == (5, 4)


def test_spread() -> None:
    spread = Spread.of([4, 1, 3, 2, 5])
    assert (spread.low, spread.median, spread.high) == (2, 3, 4)
    assert Spread.of([7.0]).high == 7
    assert spread.scaled(10).high == 40
    with pytest.raises(ResultsError, match="at least one"):
        Spread.of([])


# -- correctness -------------------------------------------------------------------------------------------


def test_equal_outcomes_use_up_no_tolerance() -> None:
    x = torch.randn(5)
    assert check_outcome("a", {"x": x}, {"x": x.clone()}) == 0
    assert 0 < check_outcome("a", {"x": x + 1e-5}, {"x": x}) <= 1


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"x": torch.tensor([1.0, 2.5])}, r"a: x differs .* most at \(1,\): got 2.5, expected 2"),
        ({"x": torch.tensor([1.0, torch.nan])}, "a: x differs"),
        ({"x": torch.ones(3)}, r"a: x has shape \[3\], expected \[2\]"),
        ({"y": torch.ones(2)}, "a: gives"),
        ({}, "a: gives nothing"),
    ],
)
def test_wrong_outcomes_are_refused(got: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CorrectnessError, match=message):
        check_outcome("a", got, {"x": torch.tensor([1.0, 2.0])})


def test_integers_are_compared_exactly() -> None:
    with pytest.raises(CorrectnessError):
        check_outcome("a", {"x": torch.tensor([1000000])}, {"x": torch.tensor([1000001])})


def contender(name: str, value: float, **more) -> Contender:
    return Contender(name, lambda clock: None, lambda: {"x": torch.tensor([value])}, **more)


def test_who_differs_or_fails_is_named_and_not_timed() -> None:
    def broken() -> dict[str, torch.Tensor]:
        raise ValueError("no such thing")

    case = Case("c", {}, "tree", 1, [
        contender("right", 1.0), contender("also right", 1.0), contender("wrong", 2.0),
        Contender("broken", lambda clock: None, broken), contender("other work", 5.0, group="other"),
    ], slow=("right",))  # fmt: skip
    result = run_case(case, SETTINGS, Nobody())
    assert list(result.entries) == ["right", "also right", "other work"]
    assert result.checked == {"also right": 0.0}
    assert "wrong: x differs" in result.failed["wrong"]
    assert result.failed["broken"].startswith("ValueError: no such thing (test_measure.py:")


def test_the_reference_can_be_chosen() -> None:
    case = Case("c", {}, "tree", 1, [contender("a", 1.0), contender("b", 2.0)], reference="b")
    checked, failed = check_case(case, SETTINGS, Nobody())
    assert (checked, list(failed)) == ({}, ["a"])


def test_a_skipped_task_says_why_and_the_others_run() -> None:
    def no_data(settings: Settings):
        yield Case("first", {}, "tree", 1, [contender("a", 1.0)])
        raise Skip("no data here")

    def one(settings: Settings):
        yield Case("only", {}, "tree", 1, [contender("a", 1.0)])

    result = run_tasks([Task("x", "X", "", no_data), Task("y", "Y", "", one)], SETTINGS, command="test")
    assert [task.skipped for task in result.tasks] == ["no data here", ""]
    assert [len(task.cases) for task in result.tasks] == [1, 1]


def test_an_error_outside_the_cases_does_not_lose_them_nor_the_other_tasks() -> None:
    def half(settings: Settings):
        yield Case("first", {}, "tree", 1, [contender("a", 1.0)])
        raise ValueError("no second")

    def no_table(found, settings):
        raise KeyError("a column")

    kept: list[list[str]] = []
    tasks = [Task("x", "X", "", half), Task("y", "Y", "", half, tables=no_table)]
    run = run_tasks(
        tasks, SETTINGS, command="test", keep=lambda run: kept.append([t.name for t in run.tasks])
    )
    assert kept == [["x"], ["x", "y"]]
    assert [[case.name for case in task.cases] for task in run.tasks] == [["first", OUTSIDE]] * 2
    assert [failure.partition(" (")[0] for failure in run.failures] == [
        "x, outside its cases: cases: ValueError: no second",
        "y, outside its cases: cases: ValueError: no second",
        "y, outside its cases: tables and plots: KeyError: 'a column'",
    ]
    assert RunResult.from_json(run.to_json()).failures == run.failures


def test_a_run_is_gone_on_with_after_its_last_good_task() -> None:
    ran: list[str] = []

    def task(name: str, *, broken: bool = False) -> Task:
        def cases(settings: Settings):
            ran.append(name)
            yield Case("c", {}, "tree", 1, [contender("a", 1.0)])
            if broken:
                raise ValueError("broken")

        return Task(name, name, "", cases)

    before = run_tasks([task("x"), task("y", broken=True)], SETTINGS, command="test")
    run = run_tasks([task("x"), task("y"), task("z")], SETTINGS, command="test", before=before)
    assert ran == ["x", "y", "y", "z"]
    assert ([t.name for t in run.tasks], run.failures) == (["x", "y", "z"], [])
    assert run.seconds > before.seconds
    with pytest.raises(ValueError, match="settings differ: seed was 0, is 1"):
        run_tasks([task("x")], replace(SETTINGS, seed=1), command="test", before=before)


def test_threads_are_pinned_and_put_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def cases(settings: Settings):
        seen.append(torch.get_num_threads())
        yield Case("c", {}, "tree", 1, [])

    result = run_tasks([Task("x", "X", "", cases)], Settings(quick=True, threads=1), command="test")
    assert seen == [1] == [result.machine["threads"]]
    assert torch.get_num_threads() == before


def test_an_error_in_counting_does_not_lose_the_times() -> None:
    def numbers() -> dict[str, float]:
        raise RuntimeError("can't count")

    case = Case("c", {}, "tree", 1, [contender("a", 1.0)], numbers=numbers)
    result: CaseResult = run_case(case, SETTINGS, Nobody())
    assert list(result.entries) == ["a"]
    assert "can't count" in result.failed["counting"]
