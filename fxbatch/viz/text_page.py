"""Text (code, operation graphs) as SVG or HTML, so that every stage has every format.

Comes in: a title and text. Goes out: one self-contained file's text; everything is escaped.

    text_to_svg("code", minibatch.code)
"""

from __future__ import annotations

import html

from fxbatch.viz.palette import DARK, LIGHT
from fxbatch.viz.svg import escape

LINE = 16
MONOSPACE = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def text_to_svg(title: str, text: str) -> str:
    """One text element a line, 12 pixels high."""
    lines = text.expandtabs(4).splitlines() or [""]
    width = 40 + 7.3 * max(map(len, [*lines, title]))
    height = 56 + LINE * len(lines)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="{MONOSPACE}" font-size="12">',
        f'<rect width="{width:.0f}" height="{height}" fill="{LIGHT.background}"/>',
        f'<text x="16" y="24" font-weight="600" fill="{LIGHT.text}">{escape(title)}</text>',
    ]
    for i, line in enumerate(lines):
        y = 52 + LINE * i
        out.append(f'<text x="16" y="{y}" xml:space="preserve" fill="{LIGHT.text}">{escape(line)}</text>')
    return "\n".join([*out, "</svg>"])


def text_to_html(title: str, text: str) -> str:
    """A page with the text as it is, light or dark as the reader's system."""
    name = html.escape(title)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}</title>
<style>
body {{ background: {LIGHT.background}; color: {LIGHT.text}; font-family: sans-serif; margin: 24px; }}
pre {{ font: 12px/1.5 {MONOSPACE}; }}
@media (prefers-color-scheme: dark) {{ body {{ background: {DARK.background}; color: {DARK.text}; }} }}
</style></head><body><h1>{name}</h1>
<pre>{escape(text)}</pre>
</body></html>
"""
