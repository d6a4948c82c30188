"""Draws the forms: pictures of programs, batched graphs, schedules and plans. Decides nothing.

Comes in: any form of the pipeline. Goes out: a Picture, and from it SVG, PNG or a self-contained page;
DOT and JSON come straight from the form.

    picture = draw_program(program, SignatureKey.of(program))
    svg = picture_to_svg(picture)
    page = page_of(Report(...))            # one HTML file without network
"""

from fxbatch.viz.describe import SCHEMA_VERSION, describe_form
from fxbatch.viz.dot import form_to_dot
from fxbatch.viz.draw_form import draw_form
from fxbatch.viz.page import page_of
from fxbatch.viz.picture import Picture, SignatureKey
from fxbatch.viz.png import write_png
from fxbatch.viz.report import Report, make_report
from fxbatch.viz.svg import picture_to_svg

__all__ = [
    "Picture",
    "Report",
    "SCHEMA_VERSION",
    "SignatureKey",
    "describe_form",
    "draw_form",
    "form_to_dot",
    "make_report",
    "page_of",
    "picture_to_svg",
    "write_png",
]
