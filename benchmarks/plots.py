"""Plots of a report: a Plot, which is data, to an SVG text by matplotlib (an optional dependency).

svg = draw_svg(plot)                # "<svg ...>", or "" where matplotlib is not installed
"""

from __future__ import annotations

import importlib.util
import io
import re

from benchmarks.results import Plot

# Okabe and Ito's colours: distinct to colour-blind readers, and in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
MARKERS = "osD^vPX*"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_svg(plot: Plot) -> str:
    """The plot as SVG text, the same for the same plot; "" where matplotlib is not installed."""
    if not can_draw():
        return ""
    import matplotlib  # here: optional, and half a second that a run without plots need not wait for
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.hashsalt": "fxbatch", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    ):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        (_bars if plot.kind == "bar" else _lines)(axes, plot)
        axes.set_title(plot.title, fontsize=10)
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        if len(plot.series) > 1:
            axes.legend(fontsize=8, framealpha=0.8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r"^.*?(?=<svg )", "", text, flags=re.DOTALL)


def _lines(axes, plot: Plot) -> None:  # type: ignore[no-untyped-def]  # matplotlib is optional
    for i, series in enumerate(plot.series):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axes.plot(series.x, series.y, color=colour, marker=marker, markersize=4, label=series.name)
        if series.low and series.high:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    if plot.log_x:
        axes.set_xscale("log", base=2 if max(max(s.x, default=1) for s in plot.series) <= 8192 else 10)
    if plot.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _bars(axes, plot: Plot) -> None:  # type: ignore[no-untyped-def]
    width = 0.8 / max(1, len(plot.series))
    for i, series in enumerate(plot.series):
        where = [x + (i - (len(plot.series) - 1) / 2) * width for x in series.x]
        bars = axes.bar(where, series.y, width=width, color=COLOURS[i % len(COLOURS)], label=series.name)
        if series.low and series.high:
            below = [max(0.0, y - low) for y, low in zip(series.y, series.low)]
            above = [max(0.0, high - y) for y, high in zip(series.y, series.high)]
            axes.errorbar(where, series.y, yerr=[below, above], fmt="none", ecolor="#333333", linewidth=0.8)
        axes.bar_label(bars, fmt=lambda v: f"{v:.3g}", fontsize=6, padding=2)
    axes.set_xticks(range(len(plot.labels)), plot.labels, fontsize=7)
    axes.grid(visible=False, axis="x")
    if plot.log_y:
        axes.set_yscale("log")
