"""Draw milliseconds: the loop above the batch, on one axis.

Comes in: for each way its parts with their milliseconds, in order. Goes out: a Picture.

    draw_times({"one by one": {"64 instances": 43.0}, "batched": {"trace": 2.1, "forward": 4.0, "backward": 3.3}})
"""

from __future__ import annotations

from collections.abc import Mapping

from fxbatch.viz.picture import Box, Lane, Picture, Tick, text_width

WIDTH = 900.0
LEFT, TOP, ROW = 130.0, 34.0, 54.0


def draw_times(ways: Mapping[str, Mapping[str, float]]) -> Picture:
    """A lane per way, a box per part, as wide as it takes; ticks are milliseconds."""
    totals = {name: sum(parts.values()) for name, parts in ways.items()}
    longest = max(totals.values(), default=0.0) or 1.0
    scale = WIDTH / longest
    boxes: list[Box] = []
    lanes: list[Lane] = []
    for k, (name, parts) in enumerate(ways.items()):
        y, x = TOP + k * ROW, LEFT
        lanes.append(Lane(4, y, LEFT + WIDTH + 12, ROW - 8, f"{name}  {totals[name]:.1f} ms"))
        for part, milliseconds in parts.items():
            wide = milliseconds * scale
            label = part if text_width(part, 10) + 6 <= wide else ""
            info = (("part", part), ("milliseconds", f"{milliseconds:.2f}"),
                    ("share", f"{milliseconds / (totals[name] or 1):.0%}"))  # fmt: skip
            place = (x, y + 20, max(wide - 1, 0.5), ROW - 32)
            boxes.append(Box(f"time-{k}-{part}", "step", *place, label, "", -1, -1, False, info))
            x += wide
    ticks = [Tick(LEFT + i * WIDTH / 5, f"{longest * i / 5:.1f} ms") for i in range(6)]
    size = (LEFT + WIDTH + 40, TOP + ROW * len(ways) + 8)
    return Picture("time", tuple(boxes), (), tuple(lanes), tuple(ticks), "", *size)
