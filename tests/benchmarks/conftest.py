"""A benchmark collects before each run, and looks at all objects anew before each case: those of a whole suite take
longer than the quick runs themselves. What the suite froze stays frozen here."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _what_is_frozen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
