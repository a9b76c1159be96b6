"""Text in a picture: fonts, colours of the paper, and a PNG that says why there is nothing to see."""

from __future__ import annotations

import io
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont


class Paper(NamedTuple):
    """Colours of the parts that are not data: paper, ink and rules. They are the same in js/shared.js."""

    ink: str
    muted: str
    rule: str
    paper: str
    wire: str
    warn: str


LIGHT = Paper("#1a1a1a", "#5c5c5c", "#dcdcdc", "#ffffff", "#8f3f6d", "#b04a00")
DARK = Paper("#ececec", "#aaaaaa", "#3a3a3a", "#161616", "#e3b1cd", "#ff9d5c")


def paper(dark: bool) -> Paper:
    return DARK if dark else LIGHT


@cache
def font(size: float) -> Any:
    """The font that Matplotlib installs: it has ×, √ and Σ, and gives the same picture on every machine. Matplotlib
    itself is not imported."""
    found = find_spec("matplotlib")
    assert found is not None
    assert found.origin is not None
    return ImageFont.truetype(Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def png(image: Image.Image) -> bytes:
    """A picture with few colours, as a small PNG."""
    file = io.BytesIO()
    image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(file, "png", optimize=False)
    return file.getvalue()


def picture(text: str, dark: bool = False, width: int = 900) -> bytes:
    """A PNG of a sentence or two: the reason why there is nothing to see."""
    look = paper(dark)
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, (width - 40) // 9) or [""]]
    image = Image.new("RGB", (width, 24 + 20 * len(lines)), look.paper)
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 8, 11, 16 + 20 * len(lines)), fill=look.warn)
    for k, line in enumerate(lines):
        draw.text((20, 12 + 20 * k), line, fill=look.ink, font=font(14))
    return png(image)
