"""The timeline as a PNG, without a browser: the rule of js/lod.js in NumPy, words by Pillow.

    facts          one line a trace
    legend
    rank 0         lanes as in the widget: compute, a strip that shows why it is idle, thin lanes for other streams
    memory         of the rank with the highest peak, stacked by kind

The top of js/lod.js says what a pixel shows, and how strongly; `cells` applies that rule here. It takes tens of
milliseconds for a million events, so that every output of a notebook can contain its picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from minipar.trace import labels
from minipar.trace.figure import LOOKS
from minipar.trace.idleness import REASONS
from minipar.trace.memory_series import ALL_KINDS
from minipar_widgets.columns import KINDS
from minipar_widgets.details import IDLE
from minipar_widgets.words import Paper, font, paper, png

if TYPE_CHECKING:
    from minipar_widgets.timeline import Timeline

STRONG, FAINT = 15, 4
WIDTH, LEFT, RIGHT = 1000, 74, 66
CURVE = 84
MEMORY = dict(
    zip(ALL_KINDS, ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#999933", "#9a9a9a"), strict=True)
)


def cells(start: np.ndarray, length: np.ndarray, kind: np.ndarray, begin: float, end: float, width: int) -> np.ndarray:
    """One byte for each pixel of [begin, end): 0 if it has no event, otherwise 16 * (kind + 1) + strength. The events
    must be sorted by start."""
    scale = width / (end - begin)
    first = int(np.searchsorted(start, begin))
    if first and (start[first - 1] + length[first - 1] - begin) * scale > 0:
        first -= 1
    here = slice(first, int(np.searchsorted(start, end)))
    a = (start[here] - begin) * scale
    a = a[: np.searchsorted(a, width)]
    if not len(a):
        return np.zeros(width, np.uint8)
    b = np.minimum(a + np.multiply(length[here][: len(a)], scale, dtype=float), width)
    a[0] = max(a[0], 0.0)
    kind = kind[here][: len(a)]
    codes = np.flatnonzero(np.bincount(kind))
    place = np.zeros(256, np.int64)  # where the row of each code begins; one call counts all rows
    place[codes] = np.arange(len(codes)) * (width + 1)
    x, y, row = a.astype(np.int64), b.astype(np.int64), place[kind]
    size = len(codes) * (width + 1)
    filled = np.bincount(row + x, np.minimum(b, x + 1) - a, size)
    there = np.bincount(row + x, minlength=size) > 0
    far = np.flatnonzero(y > x)  # events that end in another pixel: they fill whole pixels, and a part of the last
    first_whole, end = (row + x)[far] + 1, (row + y)[far]
    filled += np.bincount(end, (b - y)[far], size)
    filled += np.cumsum(np.bincount(first_whole, minlength=size) - np.bincount(end, minlength=size))
    there |= filled > 0
    shape = len(codes), width + 1
    filled, there = filled.reshape(shape)[:, :width], there.reshape(shape)[:, :width]
    best = np.where(there, filled, -1).argmax(0)  # argmax takes the first of equal values: the lower code
    strength = np.clip(np.ceil(filled.sum(0) * STRONG - 1e-6), FAINT, STRONG)
    return np.where(there.any(0), 16 * (codes[best] + 1) + strength, 0).astype(np.uint8)


class Row(NamedTuple):
    """Where a lane is drawn: its top and its height in pixels; `strip` is the place of its idle times."""

    lane: int
    y: int
    height: int
    strip: int


def rows(lanes: Sequence[Any], ranks: int) -> tuple[list[Row], int]:
    """Rows for the lanes, rank by rank from the top, and where they end. If there are very many ranks, only every k-th
    rank has rows."""
    stride = -(-ranks // 640)
    order = sorted(
        (k for k, lane in enumerate(lanes) if lane.rank % stride == 0), key=lambda k: (lanes[k].rank, lanes[k].trace, k)
    )
    main = sum(lanes[k].stream == "compute" for k in order)
    thin = len(order) - main
    tall = min(20, max(1, (560 - 7 * thin) // max(1, main) - 4))
    shown = tall >= 9
    tall = tall if shown else min(20, max(1, 560 // max(1, main) - 4))
    strip = 3 if tall >= 9 else 0
    found: list[Row] = []
    y, before = 0, -1
    for k in order:
        compute = lanes[k].stream == "compute"
        if not compute and not shown:
            continue
        y += strip if before >= 0 and lanes[k].rank != before else 0
        before = lanes[k].rank
        found.append(Row(k, y, tall if compute else 6, strip if compute else 0))
        y += (tall if compute else 6) + (strip + 1 if strip and compute else 1 if strip else 0)
    return found, y


def raster(timeline: Timeline, dark: bool = False) -> bytes:
    """The whole of a timeline as a PNG."""
    look = paper(dark)
    found, about, more = timeline.columns, timeline.about, None if timeline.about["large"] else timeline.found
    wide = WIDTH - LEFT - RIGHT
    span = about["span"] or 1.0
    lines = [part for line in timeline.caption().splitlines() for part in textwrap.wrap(line, 135)]
    words = [*about["shown"], *([f"idle: {reason}" for reason in REASONS] if more else []), *_two(about["traces"])]
    legend, bottom = _legend(words, 8 + 16 * len(lines))
    placed, tall = rows(found.lanes, about["ranks"])
    top = bottom + 8
    curve = top + tall + 12 if more and "memory" in more[1] else 0
    height = (curve + CURVE if curve else top + tall) + (40 if curve else 24)
    pixels = np.empty((height, WIDTH, 3), np.uint8)
    pixels[:] = _rgb(look.paper)
    for row in placed:
        _paint(pixels, timeline, row, top, span, look)
    if curve and more:
        stack = _memory(pixels, more, about, curve, span)
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    for k, line in enumerate(lines):
        draw.text((4, 6 + 16 * k), line, fill=look.ink, font=font(12))
    for word, x, y in legend:
        _sample(draw, word, x, y, about["traces"], look)
    _label(draw, timeline, placed, top, span, look)
    end = curve + CURVE if curve else top + tall
    for t in _ticks(span):
        at = LEFT + t / span * wide
        draw.line((at, end, at, end + 4), fill=look.muted)
        draw.text((at, end + 6), f"{t:g}", fill=look.muted, font=font(11), anchor="ma")
    draw.text((WIDTH - 2, end + 6), about["unit"], fill=look.muted, font=font(11), anchor="ra") if len(
        about["unit"]
    ) < 9 else None
    if curve and more:
        _memory_words(draw, more, about, curve, stack, look)
    return png(image)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@cache
def _inks(faces: tuple[str, ...], under: str, most: float = 1.0) -> np.ndarray:
    """Colours of all cells: a face mixed with the paper by strength. Cell 0 is the paper."""
    table = np.empty((256, 3))
    table[:] = base = np.array(_rgb(under), float)
    for code, face in enumerate(faces):
        for strength in range(STRONG + 1):
            part = most * strength / STRONG
            table[16 * (code + 1) + strength] = base + (np.array(_rgb(face)) - base) * part
    return table.round().astype(np.uint8)


def _paint(pixels: np.ndarray, timeline: Timeline, row: Row, top: int, span: float, look: Paper) -> None:
    found, lane = timeline.columns, timeline.columns.lanes[row.lane]
    here, wide = slice(lane.first, lane.last), pixels.shape[1] - LEFT - RIGHT
    outlined = len(timeline.traces) > 1 and not lane.trace
    faces = (*(LOOKS[kind].face for kind in KINDS), look.rule, look.muted, look.warn)
    rims = [LOOKS[kind].face if outlined else LOOKS[kind].edge for kind in KINDS]
    start, length, kind = found.start[here], found.length[here], found.kind[here]
    line = cells(start, length, kind, 0.0, span, wide)
    inks = _inks(faces, look.paper, 0.4 if outlined else 1.0)
    area = pixels[top + row.y : top + row.y + row.height, LEFT : LEFT + wide]
    area[:] = inks[line]
    hatched = np.array([0, *(LOOKS[kind].hatch != "" for kind in KINDS), *[False] * 4])[line >> 4].astype(bool)
    if hatched.any():
        y, x = np.mgrid[0 : row.height, 0:wide]
        area[hatched[None] & ((x + y) % 6 == 0)] = _rgb(LOOKS["message"].edge)
    if row.height >= 9 and len(start) <= wide / 3:
        edges = np.array([_rgb(rim) for rim in rims])
        a, b = (np.round(t * wide / span).astype(int) for t in (start, start + length))
        for p, q, code in zip(a, np.minimum(b, wide), kind, strict=True):
            if q - p >= 4:
                area[[0, -1], p:q] = area[:, [p, q - 1]] = edges[code]
    if row.strip and timeline.found and not timeline.about["large"]:
        arrays, facts = timeline.found
        first, last = next(one[2:] for one in facts["idle"] if one[:2] == [lane.trace, lane.rank])
        starts, lengths, kinds = (arrays[f"idle_{key}"][first:last] for key in ("start", "length", "kind"))
        area = pixels[top + row.y + row.height : top + row.y + row.height + 3, LEFT : LEFT + wide]
        area[:] = _inks(faces, look.paper)[cells(starts, lengths, kinds, 0.0, span, wide)]


def _label(draw: Any, timeline: Timeline, placed: Sequence[Row], top: int, span: float, look: Paper) -> None:
    """Draw the names of ranks, the idle shares, and the micro-batches that have room."""
    found, names = timeline.columns, timeline.about["traces"]
    scale = (WIDTH - LEFT - RIGHT) / span
    until = -1
    for row in placed:
        lane = found.lanes[row.lane]
        y = top + row.y + max(6, row.height / 2)
        if lane.stream == "compute" and top + row.y >= until:
            name = f"  {names[1]}" if lane.trace and row.height >= 10 else f"rank {lane.rank}"
            where = timeline.about["places"][lane.rank] if timeline.about["places"] and not lane.trace else ""
            if where and row.height >= 20:
                draw.text((4, y - 5), name, fill=look.ink, font=font(11), anchor="lm")
                draw.text((4, y + 7), labels.narrow(where), fill=look.muted, font=font(9), anchor="lm")
            else:
                draw.text((4, y), name, fill=look.ink, font=font(11), anchor="lm")
            words = f"{labels.idle(timeline.traces[lane.trace], lane.rank):.0%} idle"
            draw.text((WIDTH - 2, y), words, fill=look.muted, font=font(11), anchor="rm")
            until = top + row.y + max(13, row.height)
        here = range(lane.first, lane.last)
        if row.height < 11 or len(here) > 300:
            continue
        fits = [k for k in here if found.number[k] >= 0]
        text = {k: LOOKS[KINDS[found.kind[k]]] and f"{found.number[k]}" for k in fits}
        room = [k for k in fits if found.length[k] * scale >= 7 * len(text[k]) + 2]
        if len(room) < 0.4 * len(fits):
            continue
        for k in room:
            ink = look.ink if len(names) > 1 and not lane.trace else LOOKS[KINDS[found.kind[k]]].ink
            x = LEFT + (found.start[k] + found.length[k] / 2) * scale
            draw.text((x, y), text[k], fill=ink, font=font(11), anchor="mm")


def _two(names: Sequence[str]) -> list[str]:
    return [f"{names[0]} (outlined)", f"{names[1]} (filled)"] if len(names) > 1 else []


def _legend(words: Sequence[str], top: int) -> tuple[list[tuple[str, int, int]], int]:
    found, x, y = [], 4, top
    for word in words:
        size = 28 + round(font(11).getlength(word))
        if x + size > WIDTH and x > 4:
            x, y = 4, y + 17
        found.append((word, x, y))
        x += size
    return found, y + 17


def _sample(draw: Any, word: str, x: int, y: int, names: Sequence[str], look: Paper) -> None:
    reason = word.removeprefix("idle: ")
    if reason in IDLE and word != reason:
        colour = (look.rule, look.muted, look.warn)[REASONS.index(reason)]
        draw.rectangle((x, y + 5, x + 13, y + 8), fill=colour)
    else:
        known = LOOKS.get(word)
        face, edge = (known.face, known.edge) if known else (look.muted, look.muted)
        draw.rectangle((x, y + 1, x + 13, y + 11), fill=None if word.endswith("(outlined)") else face, outline=edge)
        if known and known.hatch:
            for k in (3, 9):
                draw.line((x + k - 2, y + 10, x + k + 4, y + 3), fill=edge)
    draw.text((x + 18, y + 6), word, fill=look.ink, font=font(11), anchor="lm")


def _ticks(span: float) -> list[float]:
    """Round times of the axis, at most nine."""
    power = 10.0 ** np.floor(np.log10(span / 8))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= span / 8 * 0.999999)
    return [float(f"{k * step:.12g}") for k in range(int(span / step + 1e-9) + 1)]


def _memory(pixels: np.ndarray, more: Any, about: dict[str, Any], top: int, span: float) -> float:
    """Draw the stack of the rank with the highest peak. Returns the memory at the upper edge."""
    arrays, facts = more
    trace, rank = len(about["traces"]) - 1, about["highest"]
    first, last = next(one[2:] for one in facts["memory"] if one[:2] == [trace, rank])
    time, total = arrays["memory_time"][first:last], arrays["memory_total"][first:last]
    wide = pixels.shape[1] - LEFT - RIGHT
    highest = float(total.max(initial=0)) or 1.0
    if about["capacity"] and about["capacity"] < 4 * highest:
        highest = max(highest, about["capacity"])
    edges = np.searchsorted(time, np.arange(wide + 1) * span / wide)
    column = np.zeros((CURVE, wide, 3), np.uint8)
    column[:] = pixels[top, LEFT]
    for x in range(wide):
        a, b = max(0, edges[x] - 1), max(edges[x], edges[x + 1])
        if b <= a:
            continue
        k = first + a + int(total[a:b].argmax())
        low = 0.0
        for kind in facts["memory_kinds"]:
            size = float(arrays[f"memory_{kind}"][k])
            y, end = (CURVE - round(v / (1.06 * highest) * CURVE) for v in (low + size, low))
            column[max(0, y) : end, x] = _rgb(MEMORY[kind])
            low += size
    pixels[top : top + CURVE, LEFT : LEFT + wide] = column
    return 1.06 * highest


def _memory_words(draw: Any, more: Any, about: dict[str, Any], top: int, highest: float, look: Paper) -> None:
    _, facts = more
    for value in _ticks(highest)[::2]:
        y = top + CURVE - value / highest * CURVE
        draw.text((LEFT - 4, y), f"{value:g}", fill=look.muted, font=font(10), anchor="rm")
    if 0 < about["capacity"] <= highest:
        y = top + CURVE - about["capacity"] / highest * CURVE
        draw.line((LEFT, y, WIDTH - RIGHT, y), fill=look.warn, width=2)
        draw.text((WIDTH - RIGHT, y - 3), "capacity", fill=look.warn, font=font(11), anchor="rs")
    x, y = 4.0, float(top + CURVE + 22)
    words = f"memory of rank {about['highest']} ({facts['memory_unit']}):"
    draw.text((x, y), words, fill=look.ink, font=font(11))
    x += font(11).getlength(words) + 10
    for kind in facts["memory_kinds"]:
        draw.rectangle((x, y + 2, x + 10, y + 10), fill=MEMORY[kind])
        draw.text((x + 14, y), kind, fill=look.ink, font=font(11))
        x += 26 + font(11).getlength(kind)
