"""Make the pictures of README and docs again: `make pictures`.

    python -m tools.pictures                  # into docs/pictures
    python -m tools.pictures --to elsewhere

Every picture is what a command of fxbatch writes, for a small minibatch of the Tree-LSTM example with its
own generated treebank, so that it needs no data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .main import main as fxbatch_main

ROOT = Path(__file__).resolve().parent.parent
TARGET = f"{ROOT / 'docs' / 'picture_model.py'}:minibatch"
AGENDA, DEPTH = ("--option", "schedule=agenda"), ("--option", "schedule=depth")
PICTURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("instances.svg", ("draw", TARGET, "--format", "svg", "--stage", "trace", *AGENDA)),
    ("merged.svg", ("draw", TARGET, "--format", "svg", "--stage", "merged", *AGENDA)),
    ("batched.svg", ("draw", TARGET, "--format", "svg", "--stage", "batched", *AGENDA)),
    ("gathered.svg", ("draw", TARGET, "--format", "svg", "--stage", "gathered", *DEPTH)),
    ("schedule.svg", ("draw", TARGET, "--format", "svg", "--stage", "schedule", *AGENDA)),
    ("plan.svg", ("draw", TARGET, "--format", "svg", "--stage", "plan", *AGENDA)),
    ("diff.svg", ("diff", TARGET, "--a", "schedule=depth", "--b", "schedule=agenda", "--format", "svg")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all pictures; the exit status of the first command that fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description="Make the pictures again.")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures", metavar="DIR")
    folder = parser.parse_args(arguments).to
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in PICTURES:
        status = fxbatch_main([*command, "-o", str(folder / name)])
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
