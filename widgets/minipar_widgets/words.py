"""Text in a picture: fonts, colours of the paper, and a PNG that says why there is nothing to see."""

from __future__ import annotations

import io
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

FINE = 2  # pixels of a picture for each pixel of the page, so that it is crisp on fine screens


class Paper(NamedTuple):
    """Colours of the parts that are not data: paper, ink and rules. Light and dark are the same in js/shared.js."""

    ink: str
    muted: str
    rule: str
    paper: str
    wire: str
    warn: str


LIGHT = Paper("#1a1a1a", "#5c5c5c", "#dcdcdc", "#ffffff", "#8f3f6d", "#b04a00")
DARK = Paper("#ececec", "#aaaaaa", "#3a3a3a", "#161616", "#e3b1cd", "#ff9d5c")
#: On paper of any colour: nothing of the picture is filled, and the ink can be read on white and on black. A saved
#: output has one picture, and is shown in light and in dark notebooks.
ANY = Paper("#757575", "#7b7b7b", "#80808060", "#75757500", "#b0608f", "#d0621a")


def paper(dark: bool | None) -> Paper:
    """Light (False), dark (True), or for any page (None)."""
    return ANY if dark is None else DARK if dark else LIGHT


@cache
def font(size: float) -> Any:
    """The font that Matplotlib installs: it has ×, √ and Σ, and gives the same picture on every machine. Matplotlib
    itself is not imported."""
    from PIL import ImageFont

    found = find_spec("matplotlib")
    assert found is not None
    assert found.origin is not None
    return ImageFont.truetype(Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def png(image: Image.Image, colours: int = 128) -> bytes:
    """A picture with few colours, as a small PNG. Parts that let the page through stay so."""
    from PIL import Image

    file = io.BytesIO()
    few = image.quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(file, "png", optimize=True)
    return file.getvalue()


def picture(text: str, dark: bool | None = False, width: int = 900) -> bytes:
    """A PNG of a sentence or two: the reason why there is nothing to see."""
    from PIL import Image, ImageDraw

    look = paper(dark)
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, (width - 40) // 9) or [""]]
    image = Image.new("RGBA", (FINE * width, FINE * (24 + 20 * len(lines))), look.paper)
    draw = ImageDraw.Draw(image)
    draw.rectangle((FINE * 8, FINE * 8, FINE * 11, FINE * (16 + 20 * len(lines))), fill=look.warn)
    for k, line in enumerate(lines):
        draw.text((FINE * 20, FINE * (12 + 20 * k)), line, fill=look.ink, font=font(FINE * 14))
    return png(image)
