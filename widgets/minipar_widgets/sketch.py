"""A picture of rectangles, lines and words, drawn by Pillow without a browser, in the colours of js/shared.js."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minipar_widgets import words

FINE = words.FINE
Point = tuple[float, float]


class Sketch:
    """A drawing surface; its size is in pixels of a page; colours are names or `#rrggbb`."""

    def __init__(self, width: float, height: float, dark: bool | None = False) -> None:
        from PIL import Image, ImageDraw

        self.width, self.height, self.dark = round(width), round(height), dark
        self.look = words.paper(dark)
        self._image = Image.new("RGBA", (FINE * self.width, FINE * self.height), self.look.paper)
        self._draw = ImageDraw.Draw(self._image)

    def rect(
        self, x: float, y: float, width: float, height: float, face: str = "", edge: str = "", mark: str = ""
    ) -> None:
        r"""A rectangle, hatched with "/", "\" or "x" in the colour of its edge if a mark is given."""
        if width <= 0 or height <= 0:
            return
        box = (FINE * x, FINE * y, max(FINE * x, FINE * (x + width) - 1), max(FINE * y, FINE * (y + height) - 1))
        if face:
            self._draw.rectangle(box, fill=face)
        if mark and face:
            self._hatch(box, shade(face, -0.45), mark)
        if edge:
            self._draw.rectangle(box, outline=edge, width=FINE)

    def _hatch(self, box: tuple[float, float, float, float], ink: str, mark: str) -> None:
        from PIL import Image, ImageDraw

        left, top, right, bottom = (round(x) for x in box)
        tile = Image.new("L", (max(1, right - left + 1), max(1, bottom - top + 1)), 0)
        pen, tall = ImageDraw.Draw(tile), tile.height
        for x in range(-tall, tile.width + tall, 6 * FINE):
            if mark in "/x":
                pen.line((x, tall, x + tall, 0), fill=255, width=FINE)
            if mark in "\\x":
                pen.line((x, 0, x + tall, tall), fill=255, width=FINE)
        self._image.paste(Image.new("RGBA", tile.size, ink), (left, top), tile)

    def line(self, points: Sequence[Point], ink: str, width: float = 1.0, dashed: bool = False) -> None:
        """A line through the points."""
        fine = [(FINE * x, FINE * y) for x, y in points]
        if not dashed:
            self._draw.line(fine, fill=ink, width=round(FINE * width))
            return
        for (a, b), (c, d) in pairwise(fine):
            length = max(1e-9, ((c - a) ** 2 + (d - b) ** 2) ** 0.5)
            for k in range(0, int(length), 5 * FINE):
                start, end = k / length, min(1.0, (k + 3 * FINE) / length)
                dash = (a + (c - a) * start, b + (d - b) * start, a + (c - a) * end, b + (d - b) * end)
                self._draw.line(dash, fill=ink, width=round(FINE * width))

    def dot(self, x: float, y: float, radius: float, face: str, edge: str = "") -> None:
        box = (FINE * (x - radius), FINE * (y - radius), FINE * (x + radius), FINE * (y + radius))
        self._draw.ellipse(box, fill=face, outline=edge or face, width=FINE)

    def diamond(self, x: float, y: float, radius: float, face: str, edge: str) -> None:
        corners = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
        self._draw.polygon([(FINE * a, FINE * b) for a, b in corners], fill=face, outline=edge, width=FINE)

    def text(self, x: float, y: float, text: str, ink: str = "", size: float = 12, anchor: str = "lm") -> None:
        """Draw words so that their left edge (l), middle (m) or right edge (r), and their middle (m) or top (t), is at
        the point."""
        font, at = words.font(FINE * size), (FINE * x, FINE * y)
        self._draw.text(at, text, fill=ink or self.look.ink, font=font, anchor=anchor.replace("t", "a"))

    def measure(self, text: str, size: float = 12) -> float:
        """The width of words."""
        return float(words.font(FINE * size).getlength(text)) / FINE

    def cut(self, text: str, width: float, size: float = 12) -> str:
        """As much of a text as fits into `width`."""
        while self.measure(text, size) > width:
            text = text.rstrip(".").rpartition(" ")[0] + "..."
        return text

    def png(self) -> bytes:
        return words.png(self._image, 96)


def shade(colour: str, by: float) -> str:
    """A colour made lighter (by > 0) or darker."""
    from PIL import ImageColor

    parts: Any = ImageColor.getrgb(colour)[:3]
    goal = 255 if by > 0 else 0
    return "#" + "".join(f"{round(part + (goal - part) * abs(by)):02x}" for part in parts)


def wrapped(text: str, most: int) -> list[str]:
    """Words in lines of at most so many letters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def ticks(top: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to `top` for an axis."""
    if not top > 0:
        return [0.0]
    power = 10.0 ** (len(str(int(top / most))) - 1) if top >= most else 1e-9
    while not any(top / (step * power) <= most for step in (1, 2, 5)):
        power *= 10
    step = next(step for step in (1, 2, 5) if top / (step * power) <= most) * power
    return [k * step for k in range(int(top / step) + 1)]
