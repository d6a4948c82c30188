"""Draw the user's source: what each line called, and in how many launches that ran.

Comes in: a Program, its Schedule, and the lines of the files that its locations name. Goes out: a Picture.

    draw_source(program, schedule, key, read_sources(program))
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fxbatch.ir import Program, Schedule
from fxbatch.viz.picture import Box, Lane, Picture, SignatureKey, is_constant, shorten, text_width

ROW = 22.0
COUNTS = 150.0  # pixels of the column of counts
CONTEXT = 2  # lines around those that called something
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
SHOWN = 400  # lines of all files


def read_sources(program: Program) -> dict[str, list[str]]:
    """The lines of each file that the program's locations name, of those that this process has imported."""
    names = {s.location.rpartition(":")[0] for s in program.signatures if s.location}
    paths = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    sources: dict[str, list[str]] = {}
    for path in dict.fromkeys([*paths, *linecache.cache]):
        name = Path(path).name
        if any(part in path for part in _LIBRARIES):
            continue  # a name says no folder, and the user's own file of that name is meant
        if name in names and name not in sources and (lines := linecache.getlines(path)):
            sources[name] = [line.rstrip() for line in lines]
    return sources


def draw_source(
    program: Program, schedule: Schedule, key: SignatureKey, sources: Mapping[str, Sequence[str]]
) -> Picture:
    """A row per line of source: calls -> launches in a box, and the line."""
    called = _counts(program, schedule)
    boxes: list[Box] = []
    rows: list[tuple[str, int]] = []  # a file and a line of it, -1 for its name, -2 for lines left out
    for file, lines in sources.items():
        numbers = {n for name, n in called if name == file}
        near = {m for n in numbers for m in range(n - CONTEXT, n + CONTEXT + 1) if 0 < m <= len(lines)}
        rows.append((file, -1))
        for m in sorted(near):
            if rows[-1][1] > 0 and rows[-1][1] != m - 1:
                rows.append((file, -2))
            rows.append((file, m))
    left_out = len(rows) - SHOWN
    lanes = []
    widest = 200.0
    for k, (file, n) in enumerate(rows[:SHOWN]):
        y = 8 + k * ROW
        text = file if n == -1 else "…" if n == -2 else f"{n}\u2003{sources[file][n - 1]}"
        text = text.replace(" ", "\u00a0")  # SVG makes one space of many
        widest = max(widest, text_width(text) + 30)
        lanes.append(Lane(COUNTS if n > 0 else 4, y, 0, ROW - 2, text))
        if (file, n) in called:
            calls, launches, by_signature = called[file, n]
            info = [("line", f"{file}:{n}"), ("calls", f"{calls:,}"), ("launches", f"{launches:,}")]
            info += [
                (shorten(program.signatures[s].name), f"{c:,} → {m:,}") for s, (c, m) in by_signature.items()
            ]
            only = key.number(program.signatures[next(iter(by_signature))]) if len(by_signature) == 1 else -1
            boxes.append(
                Box(f"line-{file}-{n}", "call", 4, y, COUNTS - 10, ROW - 3, f"{calls:,} → {launches:,}",
                    "", only, -1, False, tuple(info))
            )  # fmt: skip
    width = COUNTS + widest + 16
    lanes = [Lane(x.x, x.y, width - x.x - 8, x.h, x.label, x.signature) for x in lanes]
    note = f"{left_out} more lines" if left_out > 0 else ""
    return Picture(
        "source", tuple(boxes), (), tuple(lanes), (), note, width, 16 + ROW * min(len(rows), SHOWN)
    )


def _counts(
    program: Program, schedule: Schedule
) -> dict[tuple[str, int], tuple[int, int, dict[int, tuple[int, int]]]]:
    """By file and line: calls, launches, and both by signature."""
    rows = np.diff(schedule.offsets)
    sig = program.sig[schedule.order[schedule.offsets[:-1]]] if len(schedule) else np.zeros(0, np.int64)
    found: dict[tuple[str, int], tuple[int, int, dict[int, tuple[int, int]]]] = {}
    for s, signature in enumerate(program.signatures):
        file, _, line = signature.location.rpartition(":")
        mine = rows[sig == s]
        if is_constant(signature) or not line.isdecimal() or not len(mine):
            continue
        calls, launches, by_signature = found.get((file, int(line)), (0, 0, {}))
        by_signature[s] = int(mine.sum()), len(mine)
        found[file, int(line)] = calls + int(mine.sum()), launches + len(mine), by_signature
    return found
