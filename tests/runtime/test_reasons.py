"""Why batching gains little, in lines that name the user's code."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch import inspection, stopwatch
from fxbatch.runtime.reasons import recording_share
from fxbatch.runtime.strategy import AdaptiveSwitch
from fxbatch.trace.state import current_recorder


class Clock:
    """A global, so that the forward that it counts for may wait."""

    seconds = 0.0


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 4), nn.Linear(4, 3)

    @fxbatch.autobatch
    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        Clock.seconds += 1.0 if current_recorder() is None else 4.0
        h, total = torch.zeros(4), 0.0
        for word in words:
            h = self.cell(word, h)
            best = self.out(h).detach().max()
            total += float(best)
        return h * total


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    @fxbatch.autobatch
    def forward(self, n: int) -> torch.Tensor:
        h = torch.tanh(self.layer(torch.ones(16)))
        return h[:n].sum()


def words(n: int = 3, length: int = 10) -> list[list[torch.Tensor]]:
    return [[torch.randn(4) for _ in range(length)] for _ in range(n)]


def test_phases_name_the_code_that_waits() -> None:
    report = fxbatch.explain(Waits(), words())
    (line,) = [x for x in report.reasons if "phases" in x]
    assert line.startswith("11 phases because of `float(best)` (test_reasons.py:")
    assert str(report).startswith(line)


def test_signatures_name_the_line_and_say_what_to_write_and_their_rows_are_one() -> None:
    report = fxbatch.explain(Slices(), list(range(1, 16)))
    (line,) = report.reasons
    assert (
        line.startswith("15 of ")
        and "signatures are of getitem: `return h[:n].sum()` (test_reasons.py:" in line
    )
    assert "number each time: give it as a tensor" in line
    text = " ".join(str(report).split())
    assert "15 signatures, the first of them" in text and "slice(None, 9, None)" not in text
    assert len([row for row in report.operations if row.operation == "getitem"]) == 15, (
        "the data has all of them"
    )
    assert not [x for x in report.advice if x.startswith("getitem has")]


def test_what_batches_well_has_no_reasons_but_recording() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        @fxbatch.autobatch
        def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
            h = torch.zeros(4)
            for word in words:
                h = self.cell(word, h)
            return h

    report = fxbatch.explain(Chain(), words())
    assert [x for x in report.reasons if not x.startswith("recording takes")] == []


def test_the_share_of_recording() -> None:
    assert recording_share(recording=0.012, step=0.02) == "recording takes 60 % of a step"
    assert recording_share(recording=0.002, step=0.02) == recording_share(recording=0.0, step=0.0) == ""


def test_the_warning_has_figures_and_reasons(_always_batched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Waits()
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(stopwatch, "now", lambda: Clock.seconds)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", fxbatch.LoopWarning)
        for _ in range(30):
            model(words())
    (text,) = [str(w.message) for w in said if w.category is fxbatch.LoopWarning]
    assert "1.2e+04 ms batched, 3e+03 ms one by one (3 instances, with gradients)" in text
    assert "phases because of `float(best)` (test_reasons.py:" in text
    assert "recording takes 100 % of a step" in text


def test_packed_calls_are_no_part_of_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run before the rest of the program is planned."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.clock = nn.Linear(4, 4), Clock()

        @fxbatch.autobatch
        def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
            self.clock.seconds += 1.0
            return self.layer(torch.stack(words)).sum(0)

    model, batch = Encoder(), [[torch.randn(4)] * n for n in (9, 10, 11, 12)]
    monkeypatch.setattr(stopwatch, "now", lambda: model.clock.seconds)
    resolve = inspection.after_packed_calls

    def slowly(run: Any, program: Any) -> Any:
        model.clock.seconds += 96.0
        return resolve(run, program)

    for _ in range(3):
        model(batch)
    assert "recording takes 100 % of a step" in fxbatch.explain(model, batch).reasons
    monkeypatch.setattr(inspection, "after_packed_calls", slowly)
    assert [x for x in fxbatch.explain(model, batch).reasons if x.startswith("recording")] == []
