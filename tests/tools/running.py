"""Run the command in this process.

status, out, err = run(capsys, "dump", TARGET, "--stage", "batched")
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.main import main

FILE = Path(__file__).with_name("target_model.py")
TARGET = f"{FILE}:minibatch"
BROKEN = f"{FILE}:broken"
BAGS, ITEMS = f"{FILE}:bags", f"{FILE}:items"
EMPTY = f"{FILE}:empty"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    capsys.readouterr()
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as error:  # --help
        status = int(error.code or 0)
    sys.stdout.flush()
    out, err = capsys.readouterr()
    return status, out, err
