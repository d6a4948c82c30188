"""A picture as SVG: readable alone (colours as attributes), themable inside the page (classes).

Comes in: a Picture and the SignatureKey of its colours. Goes out: SVG text; all that users wrote is escaped.

    svg = picture_to_svg(picture, key)
    svg = picture_to_svg(picture, key, standalone=False)   # for the page: no background, no title
"""

from __future__ import annotations

import html
import re

from fxbatch.viz.palette import LIGHT, colour
from fxbatch.viz.picture import FONT, Arrow, Box, Lane, Picture, SignatureKey, Tick

FONTS = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
HEAD = 34.0


def picture_to_svg(picture: Picture, key: SignatureKey, *, standalone: bool = True) -> str:
    """SVG 1.1 of the picture; `standalone` adds namespace, background, title and note."""
    head = HEAD if standalone else 0.0
    width, height = max(picture.width, 240.0 if standalone else 1.0), picture.height + head
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'width="{_n(width)}" height="{_n(height)}" font-family="{FONTS}" font-size="{_n(FONT)}">'
    ]
    if standalone:
        lines += _head(picture, width, height)
    lines.append(f'<g transform="translate(0 {_n(head)})">' if head else "<g>")
    lines += [_lane(lane, key) for lane in picture.lanes]
    lines += [_tick(tick, picture) for tick in picture.ticks]
    lines.append(f'<g class="arrows" fill="none" stroke="{LIGHT.muted}" stroke-opacity="0.5">')
    lines += [_arrow(arrow, picture) for arrow in picture.arrows]
    lines.append("</g>")
    lines += [_box(box, key) for box in picture.boxes]
    lines.append("</g></svg>")
    return "\n".join(lines)


def _head(picture: Picture, width: float, height: float) -> list[str]:
    note = (
        f'<tspan dx="12" font-size="11" font-weight="400" fill="{LIGHT.muted}">{escape(picture.note)}</tspan>'
    )
    return [
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{_n(width)}" height="{_n(height)}" fill="{LIGHT.background}"/>',
        f'<text x="16" y="23" font-size="14" font-weight="600" fill="{LIGHT.text}">{escape(picture.title)}'
        f"{note if picture.note else ''}</text>",
    ]


def _lane(lane: Lane, key: SignatureKey) -> str:
    fill = LIGHT.panel
    return (
        f'<g class="lane"><rect x="{_n(lane.x)}" y="{_n(lane.y)}" width="{_n(lane.w)}" height="{_n(lane.h)}" '
        f'rx="7" fill="{fill}"/><text x="{_n(lane.x + 10)}" y="{_n(lane.y + 15)}" fill="{LIGHT.muted}" '
        f'font-size="{_n(FONT)}">{escape(lane.label)}</text></g>'
    )


def _tick(tick: Tick, picture: Picture) -> str:
    return (
        f'<g class="tick"><line x1="{_n(tick.x)}" y1="26" x2="{_n(tick.x)}" y2="{_n(picture.height)}" '
        f'stroke="{LIGHT.line}" stroke-opacity="0.6" stroke-dasharray="2 5"/>'
        f'<text x="{_n(tick.x)}" y="18" text-anchor="middle" fill="{LIGHT.muted}" font-size="10">'
        f"{escape(tick.label)}</text></g>"
    )


def _arrow(arrow: Arrow, picture: Picture) -> str:
    bend = max((arrow.x2 - arrow.x1) * 0.5, 12.0)
    path = (
        f"M{_n(arrow.x1)} {_n(arrow.y1)}C{_n(arrow.x1 + bend)} {_n(arrow.y1)} "
        f"{_n(arrow.x2 - bend)} {_n(arrow.y2)} {_n(arrow.x2)} {_n(arrow.y2)}"
    )
    dash = {"data": "", "pass": ' stroke-dasharray="5 4"', "gather": ' stroke-dasharray="1.5 3"'}[arrow.kind]
    a, b = picture.boxes[arrow.source].id, picture.boxes[arrow.target].id
    title = f"<title>{escape(arrow.info)}</title>" if arrow.info else ""
    return (
        f'<path class="arrow {arrow.kind}" data-a="{escape(a)}" data-b="{escape(b)}" d="{path}" '
        f'stroke-width="{_n(arrow.width)}"{dash}>{title}</path>'
    )


_ROUND = {"constant": 8.0, "known": 8.0, "pass": 9.0, "gather": 9.0, "cat": 2.0, "block": 1.5, "step": 3.0}


def _box(box: Box, key: SignatureKey) -> str:
    number = key.colour(box.signature)
    shade = colour(number)
    step = f' data-step="{box.step}"' if box.step >= 0 else ""
    classes = f"box {box.kind} s{number if number >= 0 else 'x'}{' result' if box.result else ''}"
    dash = ' stroke-dasharray="4 3"' if box.kind in ("pass", "known") else ""
    thick = "2.4" if box.result else "1.1" if box.kind not in ("block", "step") else "0.8"
    return (
        f'<g class="{classes}" data-id="{escape(box.id)}" data-sig="{box.signature}"{step}>'
        f'<rect x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.w)}" height="{_n(box.h)}" '
        f'rx="{_n(min(_ROUND.get(box.kind, 5.0), box.w / 2, box.h / 2))}" fill="{shade.fill}" '
        f'stroke="{shade.stroke}" stroke-width="{thick}"{dash}/>{_texts(box, shade.text)}</g>'
    )


def _texts(box: Box, fill: str) -> str:
    x, y = _n(box.x + box.w / 2), box.y + box.h / 2
    size = f' font-size="{_n(FONT - 1)}"' if box.kind in ("constant", "known", "step", "block") else ""
    if not box.label:
        return ""
    if not box.sub:
        place = f'x="{x}" y="{_n(y + 3.8)}" text-anchor="middle"'
        return f'<text {place} fill="{fill}"{size}>{escape(box.label)}</text>'
    return (
        f'<text x="{x}" y="{_n(y - 3)}" text-anchor="middle" fill="{fill}">{escape(box.label)}</text>'
        f'<text class="sub" x="{x}" y="{_n(y + 11)}" text-anchor="middle" fill="{fill}" '
        f'font-size="{_n(FONT - 1)}" opacity="0.75">{escape(box.sub)}</text>'
    )


def _n(x: float) -> str:
    """A number as short as a tenth of a pixel needs."""
    text = f"{x:.1f}"
    return text[:-2] if text.endswith(".0") else text


def escape(text: str) -> str:
    """Escaped for text and attributes."""
    return html.escape(legal(text), quote=True)


def legal(text: str) -> str:
    """The text with the replacement character for those that XML forbids."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
