"""The form that is drawn: boxes, arrows, lanes and ticks with positions, in pixels.

Comes in: what the `draw_*` modules make of a form. Goes out: SVG (`svg.py`), PNG (`png.py`), a page.

    key = SignatureKey.of(program)
    key.number(program.signatures[2])      # the colour of the signature, the same in all pictures
    Picture("merged", boxes, arrows).size
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fxbatch.ir import Program, Signature

FONT = 11.0  # pixels; labels
BoxKind = Literal[
    "call", "constant", "known", "group", "batch", "pass", "gather", "cat", "result", "step", "block"
]
ArrowKind = Literal["data", "pass", "gather"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with text. `signature` is its number in the key, -1 for none.

    `step` is the step of the schedule that runs it, -1 for none; `info` is what hovering tells besides
    the signature.
    """

    id: str
    kind: BoxKind
    x: float
    y: float
    w: float
    h: float
    label: str = ""
    sub: str = ""
    signature: int = -1
    step: int = -1
    result: bool = False
    info: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line between two boxes (positions in `boxes`), with its end points and how many rows it carries."""

    source: int
    target: int
    x1: float
    y1: float
    x2: float
    y2: float
    kind: ArrowKind = "data"
    width: float = 1.2
    info: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """A labelled background: an instance, a row of the timeline, an arena."""

    x: float
    y: float
    w: float
    h: float
    label: str
    signature: int = -2  # -2: the neutral surface


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of the axis at the top, centred on x."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole drawing. `note` says what was left out or summarised, "" where nothing was."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...] = ()
    lanes: tuple[Lane, ...] = ()
    ticks: tuple[Tick, ...] = ()
    note: str = ""
    width: float = 0.0
    height: float = 0.0


class SignatureKey:
    """Numbers the signatures of all forms that are drawn together, so that colours stay the same.

    Constants and numbers have no colour: they run nothing.
    """

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self._number: dict[int, int] = {}
        self._colour: dict[int, int] = {}
        self._twins: dict[tuple[str, int], int] = {}

    @staticmethod
    def of(*programs: Program) -> SignatureKey:
        key = SignatureKey()
        for program in programs:
            key.extend(program.signatures)
        return key

    def extend(self, signatures: Iterable[Signature]) -> None:
        """Number those that are new, in order.

        The n-th signature of one text has one colour in all programs: those of two runs of a model agree.
        """
        met: dict[str, int] = {}
        for signature in signatures:
            text = str(signature)
            met[text] = met.get(text, 0) + 1
            if id(signature) not in self._number:  # the list holds them, so ids stay theirs
                number = self._number[id(signature)] = len(self.signatures)
                self.signatures.append(signature)
                if is_constant(signature):
                    self._colour[number] = -1
                else:
                    self._colour[number] = self._twins.setdefault((text, met[text]), len(self._twins))

    def number(self, signature: Signature) -> int:
        """Its number; KeyError for a signature that `extend` has not seen."""
        return self._number[id(signature)]

    def colour(self, number: int) -> int:
        """The number of the palette's colour of signature `number`; -1 is grey."""
        return self._colour.get(number, -1)


def is_constant(signature: Signature) -> bool:
    """Whether its calls are data that an instance brings along, and no launch."""
    return signature.operation.kind in ("constant", "number")


def shorten(text: str, limit: int = 22) -> str:
    """At most `limit` characters, the middle left out: `encoder.lay…attention`."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def text_width(text: str, size: float = FONT) -> float:
    """Pixels that `text` takes, estimated for a sans-serif font: wide enough for most."""
    narrow = sum(c in "iljtfr.,:;'|()[] 1" for c in text)
    wide = sum(c in "mwMWQO@×…" or ord(c) > 0x2E80 for c in text)
    return size * (0.59 * (len(text) - narrow - wide) + 0.36 * narrow + 0.92 * wide)
