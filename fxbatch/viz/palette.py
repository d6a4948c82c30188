"""Colours: one hue per signature, of equal lightness, for light and dark surfaces.

Comes in: a signature's number in the key. Goes out: hexadecimal colours for fill, stroke and text.

    colour(0).fill             # '#d5e8ff'
    colour(0, dark=True).fill  # '#193e61'
    colour(-1)                 # grey: constants, pass-throughs, gathers

The conversion from OKLCH is that of Ottosson 2020, "A perceptual color space for image processing".
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

# Neighbours in the list are far apart on the circle; after them, golden-angle steps.
HUES = (252, 38, 152, 318, 88, 205, 12, 128, 282, 62, 178, 345)
_GOLDEN_ANGLE = 137.508


@dataclass(frozen=True, slots=True)
class Colour:
    """Hexadecimal colours of one signature."""

    fill: str
    stroke: str
    text: str


@dataclass(frozen=True, slots=True)
class Surface:
    """Hexadecimal colours of everything that no signature colours."""

    background: str
    panel: str
    line: str
    text: str
    muted: str


LIGHT = Surface("#ffffff", "#f6f7f9", "#dfe2e8", "#1d2027", "#69707d")
DARK = Surface("#14161b", "#1b1e25", "#31363f", "#e8eaef", "#98a0ad")


@functools.lru_cache(maxsize=4096)
def colour(number: int, *, dark: bool = False) -> Colour:
    """The colours of signature `number`; grey for negative numbers."""
    if number < 0:
        hue, chroma = 262.0, 0.12
    else:
        hue = float(HUES[number]) if number < len(HUES) else (number * _GOLDEN_ANGLE) % 360
        chroma = 1.0
    shift = 0.02 * (number // len(HUES) % 3) if number > 0 else 0.0  # hues come near each other after a round
    if dark:
        return Colour(
            oklch(0.36 + shift, 0.075 * chroma, hue),
            oklch(0.72, 0.125 * chroma, hue),
            oklch(0.95, 0.035 * chroma, hue),
        )
    return Colour(
        oklch(0.925 - shift, 0.055 * chroma, hue),
        oklch(0.58, 0.145 * chroma, hue),
        oklch(0.33, 0.085 * chroma, hue),
    )


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """`#rrggbb` of an OKLCH colour: lightness 0-1, chroma 0-0.4, hue in degrees; clipped to sRGB."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(x, 0.0), 1.0))):02x}" for x in linear)


def _gamma(x: float) -> float:
    return 12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055
