"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """Stands still but where it is moved."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time
