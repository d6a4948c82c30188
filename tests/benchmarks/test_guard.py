"""The guard: what it refuses, and that it measures two checkouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.guard import COUNTS, Workload, interval, judge, main

WORKLOAD = Workload("Tree-LSTM", 1, True)
SAME = dict.fromkeys(COUNTS, 5.0)


def steps(*ratios: float, loss: float = 1.0) -> list[tuple[dict[str, float], dict[str, float]]]:
    return [({"seconds": 1.0, "loss": 1.0}, {"seconds": r, "loss": loss}) for r in ratios]


def test_what_is_slower_beyond_noise_is_refused() -> None:
    assert judge(WORKLOAD, steps(*[1.05] * 9), [SAME, SAME]).refused
    assert not judge(WORKLOAD, steps(*[1.02] * 9), [SAME, SAME]).refused
    assert not judge(WORKLOAD, steps(*[0.5, 1.5] * 4, 1.05), [SAME, SAME]).refused  # noise
    assert not judge(WORKLOAD, steps(*[1.05] * 3), [SAME, SAME]).refused  # too few to tell


def test_more_launches_and_other_losses_are_refused() -> None:
    more = {**SAME, "launches": 6.0, "copies": 4.0}
    found = judge(WORKLOAD, steps(*[1.0] * 9), [SAME, more])
    assert found.refused and found.changed == ("!launches 5 -> 6", "copies 5 -> 4")
    assert judge(WORKLOAD, steps(*[1.0] * 9, loss=1.01), [SAME, SAME]).refused
    assert judge(WORKLOAD, steps(*[1.0] * 9, loss=float("nan")), [SAME, SAME]).refused


def test_the_interval_of_a_median() -> None:
    assert interval([float(x) for x in range(10)]) == (1.0, 8.0)  # tables of the sign test: 2nd and 9th of 10
    assert interval([3.0]) == (3.0, 3.0)


@pytest.mark.slow
def test_a_checkout_against_itself(capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(__file__).parents[2])
    main([here, "--budget", "2", "--only", "Tree-LSTM, inference, batch 1"])
    assert "Tree-LSTM, inference, batch 1 " in capsys.readouterr().out
