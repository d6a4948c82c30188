"""A picture as PNG, through matplotlib (the extra `fxbatch[bench]`).

Comes in: a Picture and the SignatureKey of its colours. Goes out: a PNG file.

    write_png(picture, key, "merged.png")
    write_png(picture, key, "merged.png", scale=3)    # pixels a picture's pixel
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import IO, Any

from fxbatch.errors import FxbatchError
from fxbatch.viz.palette import LIGHT, colour
from fxbatch.viz.picture import FONT, Box, Picture, SignatureKey
from fxbatch.viz.svg import legal

HEAD = 34.0
DOTS = 100  # an inch
LARGEST = 12_000  # pixels a side; a larger picture gets a smaller scale
_DASH = {"data": "solid", "pass": (0, (5, 4)), "gather": (0, (1, 2))}


def write_png(
    picture: Picture, key: SignatureKey, file: str | Path | IO[bytes], *, scale: float = 2.0
) -> None:
    """Write the picture; FxbatchError without matplotlib."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
        paths = importlib.import_module("matplotlib.path")
    except ImportError as error:
        raise FxbatchError(
            "PNG needs matplotlib: pip install 'fxbatch[bench]', or use --format svg"
        ) from error
    width, height = max(picture.width, 240.0), picture.height + HEAD
    scale = min(scale, LARGEST / max(width, height))
    figure = figures.Figure(
        figsize=(width / DOTS, height / DOTS), dpi=DOTS * scale, facecolor=LIGHT.background
    )
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    _write(axes, 16, 19, picture.title, 14, LIGHT.text, ha="left", weight="bold")
    if picture.note:
        _write(axes, width - 16, 19, picture.note, 10, LIGHT.muted, ha="right")
    for lane in picture.lanes:
        axes.add_patch(_rounded(patches, lane.x, lane.y + HEAD, lane.w, lane.h, 7, LIGHT.panel, "none", 0))
        _write(axes, lane.x + 10, lane.y + HEAD + 12, lane.label, 10, LIGHT.muted, ha="left")
    for tick in picture.ticks:
        axes.plot([tick.x] * 2, [HEAD + 26, height], color=LIGHT.line, linewidth=0.7, linestyle=(0, (2, 5)))
        _write(axes, tick.x, HEAD + 15, tick.label, 9, LIGHT.muted)
    curve = [paths.Path.MOVETO, *[paths.Path.CURVE4] * 3]
    for a in picture.arrows:
        bend = max((a.x2 - a.x1) * 0.5, 12.0)
        points = [(a.x1, a.y1), (a.x1 + bend, a.y1), (a.x2 - bend, a.y2), (a.x2, a.y2)]
        path = paths.Path([(x, y + HEAD) for x, y in points], curve)
        line = patches.PathPatch(
            path,
            fill=False,
            edgecolor=LIGHT.muted,
            alpha=0.5,
            linewidth=a.width * 0.72,
            linestyle=_DASH[a.kind],
        )
        axes.add_patch(line)
    for box in picture.boxes:
        _draw_box(axes, patches, box, key)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        figure.savefig(file, format="png", dpi=DOTS * scale, facecolor=LIGHT.background)


def _draw_box(axes: Any, patches: Any, box: Box, key: SignatureKey) -> None:
    shade = colour(key.colour(box.signature))
    radius = min(9.0 if box.kind in ("constant", "known", "pass", "gather") else 4.0, box.w / 2, box.h / 2)
    thick = 1.8 if box.result else 0.9
    y = box.y + HEAD
    axes.add_patch(_rounded(patches, box.x, y, box.w, box.h, radius, shade.fill, shade.stroke, thick))
    middle = y + box.h / 2
    small = box.kind in ("constant", "known", "step", "block")
    if box.label:
        lift = 7 if box.sub else 0
        _write(axes, box.x + box.w / 2, middle - lift, box.label, FONT - small, shade.text)
    if box.sub:
        _write(axes, box.x + box.w / 2, middle + 7, box.sub, FONT - 1, shade.text)


def _rounded(
    patches: Any, x: float, y: float, w: float, h: float, radius: float, fill: str, stroke: str, line: float
) -> Any:
    style = patches.BoxStyle("Round", pad=0, rounding_size=radius)
    return patches.FancyBboxPatch(
        (x, y), w, h, boxstyle=style, facecolor=fill, edgecolor=stroke, linewidth=line
    )


def _write(
    axes: Any,
    x: float,
    y: float,
    text: str,
    size: float,
    fill: str,
    ha: str = "center",
    weight: str = "normal",
) -> None:
    """Text centred vertically on y; `$` is no formula."""
    shown = legal(text).replace("\n", " ")
    font = {"fontsize": size * 0.72, "color": fill, "weight": weight, "family": "sans-serif"}
    axes.text(x, y, shown, ha=ha, va="center_baseline", parse_math=False, **font)
