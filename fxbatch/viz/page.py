"""A report as one self-contained HTML file: no network, everything that users wrote escaped.

Comes in: a Report. Goes out: HTML, with page.css and page.js inside and a policy that forbids all else.

    Path("page.html").write_text(page_of(report), encoding="utf-8")
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from fxbatch.viz.describe import SCHEMA_VERSION, describe_signature
from fxbatch.viz.palette import DARK, LIGHT, Surface, colour
from fxbatch.viz.picture import Picture
from fxbatch.viz.report import EXPLAINED, Report, Row, Stage
from fxbatch.viz.svg import picture_to_svg


class Page(str):
    """The text of a page. A notebook shows it in a frame."""

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self)}" width="100%" height="640" style="border:0"></iframe>'


def page_of(report: Report) -> Page:
    """The HTML text; open it in any browser of the last years, from disk, or end a notebook's cell with it."""
    files = resources.files("fxbatch.viz")
    template = files.joinpath("page.html").read_text(encoding="utf-8")
    script = files.joinpath("page.js").read_text(encoding="utf-8")
    style = files.joinpath("page.css").read_text(encoding="utf-8") + _colours(report)
    parts = {
        "POLICY": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        "TITLE": html.escape(report.title),
        "STYLE": style,
        "COUNTS": "".join(_count(name, value) for name, value in report.counts),
        "TABS": "".join(_tab(i, stage) for i, stage in enumerate(report.stages)),
        "LEGEND": "".join(_legend_row(report, row) for row in _legend(report)),
        "PICTURES": "\n".join(_template(report, name, picture) for name, picture in _pictures(report)),
        "DATA": _json(_data(report)),
        "SCRIPT": script,
    }
    # One pass, so that what is put in is never searched for markers.
    return Page(re.sub(r"<!--([A-Z]+)-->|@([A-Z]+)@", lambda m: parts[m[1] or m[2]], template))


def _legend(report: Report) -> list[Row]:
    """A row a signature of any stage; which of them are shown, and what they count, goes by the stage."""
    rows = [row for stage in report.stages for row in stage.rows] + list(report.rows)
    return list({row.signature: row for row in rows}.values())


def _template(report: Report, name: str, picture: Picture) -> str:
    svg = picture_to_svg(picture, report.key, standalone=False)
    return f'<template id="picture-{html.escape(name)}">{svg}</template>'


def _pictures(report: Report) -> list[tuple[str, Picture]]:
    return [(s.name, s.picture) for s in report.stages] + [("timeline", report.timeline)]


def _data(report: Report) -> dict[str, Any]:
    """The data that hovering shows: the signatures, and of each picture its boxes."""
    signatures = [describe_signature(s) for s in report.key.signatures]
    pictures = {
        name: {
            "note": picture.note,
            "boxes": {
                b.id: {
                    "label": b.label,
                    "kind": b.kind,
                    "signature": b.signature,
                    "step": b.step,
                    "info": b.info,
                }
                for b in picture.boxes
            },
        }
        for name, picture in _pictures(report)
    }
    return {
        "schema": "fxbatch",
        "version": SCHEMA_VERSION,
        "form": "page",
        "title": report.title,
        "signatures": signatures,
        "stages": [
            {"name": s.name, "caption": s.caption, "runs": {r.signature: _runs(report, r) for r in s.rows}}
            for s in report.stages
        ],
        "pictures": pictures,
    }


def _json(data: Any) -> str:
    """JSON that can't end the script element that it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _count(name: str, value: str) -> str:
    title = html.escape(EXPLAINED.get(name, ""))
    return f'<div class="count" title="{title}"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _tab(i: int, stage: Stage) -> str:
    text = html.escape(stage.name)
    idle = "" if stage.ran else ' class="idle" title="not what ran: to be compared with"'
    return (
        f'<button role="tab" id="tab-{text}" data-stage="{text}" aria-selected="false" tabindex="-1"{idle}>'
        f"<i>{i + 1}</i>{text}</button>"
    )


def _runs(report: Report, row: Row) -> str:
    """How often a signature is called, and in how many steps."""
    if report.key.colour(row.signature) < 0:
        return "data"
    return f"{row.calls:,} → {row.steps:,}" if row.steps else f"{row.calls:,}"


def _legend_row(report: Report, row: Row) -> str:
    signature = report.key.signatures[row.signature]
    number = report.key.colour(row.signature)
    runs, title = html.escape(_runs(report, row)), html.escape(str(signature))
    return (
        f'<button class="row" data-sig="{row.signature}" title="{title}">'
        f'<span class="swatch s{number if number >= 0 else "x"}"></span>'
        f'<span class="name">{html.escape(signature.name)}</span><span class="runs">{runs}</span></button>'
    )


def _colours(report: Report) -> str:
    """The rules of both themes: surfaces, and one class per signature."""
    used = sorted({report.key.colour(n) for n in range(len(report.key.signatures))} | {-1})
    rules = [_surface(":root", LIGHT), _surface(":root[data-theme=dark]", DARK)]
    for dark, where in ((False, ""), (True, ":root[data-theme=dark] ")):
        for number in used:
            shade, name = colour(number, dark=dark), f"s{number}" if number >= 0 else "sx"
            rules.append(f"{where}.{name} rect{{fill:{shade.fill};stroke:{shade.stroke}}}")
            rules.append(f"{where}.{name} text{{fill:{shade.text}}}")
            rules.append(f"{where}.swatch.{name}{{background:{shade.fill};border-color:{shade.stroke}}}")
    return "\n" + "\n".join(rules) + "\n"


def _surface(where: str, s: Surface) -> str:
    return (
        f"{where}{{--background:{s.background};--panel:{s.panel};--line:{s.line};--text:{s.text};"
        f"--muted:{s.muted}}}"
    )
