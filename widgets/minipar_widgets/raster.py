"""The timeline as a PNG, without a browser: the rule of js/lod.js in NumPy, words by Pillow.

    facts          two lines at most
    legend
    rank 0         lanes as in the widget: compute, a strip that shows why it is idle, thin lanes for other streams
    memory         of the rank with the highest peak, stacked by kind
    notes          and facts that had no room above

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
from minipar.trace.figure import BENEATH, COLLECTIVE, DIFFERENCES, GREY, LOOKS, MEMORY, shaded
from minipar.trace.idleness import REASONS
from minipar.trace.shades import repeated
from minipar_widgets.columns import KINDS, labelled
from minipar_widgets.details import IDLE
from minipar_widgets.words import ANY, FINE, Paper, font, paper, png

if TYPE_CHECKING:
    from minipar_widgets.timeline import Timeline

STRONG, FAINT = 15, 4
WIDTH, LEFT, RIGHT = 1000, 74, 66
CURVE = 84


def cells(start: np.ndarray, length: np.ndarray, kind: np.ndarray, begin: float, end: float, width: int) -> np.ndarray:
    """A number for each pixel of [begin, end): 0 if it has no event, otherwise 16 * (kind + 1) + strength. The events
    must be sorted by start."""
    scale = width / (end - begin)
    first = int(np.searchsorted(start, begin))
    if first and (start[first - 1] + length[first - 1] - begin) * scale > 0:
        first -= 1
    here = slice(first, int(np.searchsorted(start, end)))
    a = (start[here] - begin) * scale
    a = a[: np.searchsorted(a, width)]
    if not len(a):
        return np.zeros(width, np.uint16)
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
    return np.where(there.any(0), 16 * (codes[best] + 1) + strength, 0).astype(np.uint16)


class Row(NamedTuple):
    """Where a lane is drawn: its top and its height in pixels; `strip` is the place of its idle times."""

    lane: int
    y: int
    height: int
    strip: int


def rows(timeline: Timeline) -> tuple[list[Row], int]:
    """Rows for the lanes, rank by rank from the top, and where they end. If there are very many ranks, only every k-th
    rank has rows. In a folded comparison a rank has the lane of the second trace, without other streams."""
    lanes, ranks, folded = timeline.columns.lanes, timeline.about["ranks"], timeline.about["folded"]
    stride = -(-ranks // 640)
    order = sorted(
        (k for k, lane in enumerate(lanes) if lane.rank % stride == 0 and (lane.trace or not folded)),
        key=lambda k: (lanes[k].rank, lanes[k].trace, k),
    )
    grouped = {k for k in order if labelled(timeline.columns, lanes[k])}
    main = sum(lanes[k].stream == "compute" for k in order)
    thin = 0 if folded else len(order) - main + len(grouped)
    tall = min(20, max(1, (560 - 7 * thin) // max(1, main) - 4))
    shown = tall >= 9 and not folded
    tall = tall if shown else min(20, max(1, 560 // max(1, main) - 4))
    strip = (5 if folded else 3) if tall >= 9 else 0
    found: list[Row] = []
    y, before = 0, -1
    for k in order:
        compute = lanes[k].stream == "compute"
        if not compute and not shown:
            continue
        y += strip if before >= 0 and lanes[k].rank != before else 0
        before = lanes[k].rank
        high = tall if compute else 13 if k in grouped else 6
        found.append(Row(k, y, high, strip if compute else 0))
        y += high + (strip + 1 if strip and compute else 1 if strip else 0)
    return found, y


def raster(timeline: Timeline, dark: bool | None = False) -> bytes:
    """The whole of a timeline as a PNG."""
    look = paper(dark)
    about, more = timeline.about, None if timeline.about["large"] else timeline.found
    wide = WIDTH - LEFT - RIGHT
    span = about["span"] or 1.0
    count, caption = len(timeline.traces), [textwrap.wrap(line, 135) for line in timeline.caption().splitlines()]
    lines = [line[0] for line in caption[:count]]
    below = [part for k, line in enumerate(caption) for part in line[k < count :]]
    idle = [] if about["folded"] else [f"idle: {reason}" for reason in REASONS]
    drawn = [word for word in about["shown"] if word not in BENEATH or not about["folded"]]
    words = [*drawn, *about["shades"], *(idle if more else []), *_two(about)]
    legend, bottom = _legend(words, 8 + 16 * len(lines), about["traces"])
    placed, tall = rows(timeline)
    top = bottom + 8
    curve = top + tall + 12 if more and "memory" in more[1] else 0
    height = (curve + CURVE if curve else top + tall) + (40 if curve else 24)
    pixels = np.empty((FINE * (height + 16 * len(below)), FINE * WIDTH, 4), np.uint8)
    pixels[:] = _rgb(look.paper)
    for row in placed:
        _paint(pixels, timeline, row, top, span, look)
    if curve and more:
        stack = _memory(pixels, more, about, curve, span)
    image = Image.fromarray(pixels)
    draw = _Pen(ImageDraw.Draw(image))
    for k, line in enumerate(lines):
        draw.text((4, 6 + 16 * k), line, look.ink, 12)
    for k, line in enumerate(below):
        draw.text((4, height + 16 * k), line, look.muted, 11)
    for word, x, y in legend:
        _sample(draw, word, x, y, about, look)
    _label(draw, timeline, placed, top, span, look)
    end = curve + CURVE if curve else top + tall
    for t in _ticks(span):
        at = LEFT + t / span * wide
        draw.line((at, end, at, end + 4), look.muted)
        draw.text((at, end + 6), f"{t:g}", look.muted, 11, "ma")
    if len(about["unit"]) < 9:
        draw.text((WIDTH - 2, end + 6), about["unit"], look.muted, 11, "ra")
    if curve and more:
        _memory_words(draw, more, about, curve, stack, look)
    return png(image)


class _Pen:
    """Draws in pixels of the page on an image that is `FINE` times as fine."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def text(
        self, at: tuple[float, float], text: str, ink: str, size: float, anchor: str = "la", halo: str = ""
    ) -> None:
        place = (FINE * at[0], FINE * at[1])
        about = {"stroke_width": FINE, "stroke_fill": halo} if halo else {}
        self.draw.text(place, text, fill=ink, font=font(FINE * size), anchor=anchor, **about)

    def line(self, box: tuple[float, ...], ink: str, width: int = 1) -> None:
        self.draw.line(tuple(FINE * x for x in box), fill=ink, width=FINE * width)

    def rectangle(self, box: tuple[float, float, float, float], fill: str | None = None, outline: str = "") -> None:
        left, top, right, bottom = (FINE * x for x in box)
        self.draw.rectangle((left, top, right + FINE - 1, bottom + FINE - 1), fill=fill)
        if outline:
            self.draw.rectangle((left, top, right + FINE - 1, bottom + FINE - 1), outline=outline, width=FINE)


def _rgb(colour: str) -> tuple[int, int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16), int(colour[7:9] or "ff", 16)


@cache
def _inks(faces: tuple[str, ...], under: str, most: float = 1.0) -> np.ndarray:
    """Colours of all cells: a face mixed with the paper by strength, or what lets so much of the page through. Cell 0
    is the paper."""
    table = np.empty((16 * (len(faces) + 1), 4))
    table[:] = base = np.array(_rgb(under), float)
    for code, face in enumerate(faces):
        ink = np.array(_rgb(face), float)
        for strength in range(STRONG + 1):
            part = most * strength / STRONG
            mixed = base + (ink - base) * part
            table[16 * (code + 1) + strength] = mixed if base[3] == 255 else [*ink[:3], ink[3] * part]
    return table.round().astype(np.uint8)


def _marks(kinds: Sequence[str], height: int, wide: int) -> np.ndarray:
    """For each kind its marks, as a mask of a whole lane: the hatch of a collective, the bands of a later chunk."""
    y, x = np.mgrid[0:height, 0:wide]
    step, thick = 6 * FINE, FINE
    up, down = (x + y) % step < thick, (x - y) % step < thick
    hatches = {"": up & False, "/": up, "\\": down, "x": up | down, "|": x % step < thick, "-": y % (step // 2) < thick}
    hatches["+"] = hatches["|"] | (y % step < thick)
    found = np.zeros((len(kinds) + 1, height, wide), bool)
    for code, kind in enumerate(kinds, 1):
        found[code] = hatches[LOOKS[kind].hatch[:1]]
        for k in range(LOOKS[kind].bands if height >= 9 * FINE else 0):
            low = height - (2 + 4 * k) * FINE
            found[code, low - 2 * FINE : low] = True
    return found


def _paint(pixels: np.ndarray, timeline: Timeline, row: Row, top: int, span: float, look: Paper) -> None:
    found, lane = timeline.columns, timeline.columns.lanes[row.lane]
    here, wide = slice(lane.first, lane.last), pixels.shape[1] - FINE * (LEFT + RIGHT)
    outlined = len(timeline.traces) > 1 and not lane.trace
    faces = tuple(LOOKS[kind].face for kind in KINDS)
    rims = [LOOKS[kind].face if outlined and not LOOKS[kind].bands else LOOKS[kind].edge for kind in KINDS]
    tones = tuple(LOOKS[kind].tone or LOOKS[kind].edge for kind in KINDS)
    start, length, kind = (np.asarray(column)[here] for column in (found.start, found.length, found.kind))
    line = cells(start, length, kind, 0.0, span, wide)
    part = 1.0 if not outlined else 0.4 if look.paper != ANY.paper else 0.22  # (numbers on it are grey)
    first, high = FINE * (top + row.y), FINE * row.height
    area = pixels[first : first + high, FINE * LEFT : FINE * LEFT + wide]
    area[:] = _inks(faces, look.paper, part)[line]
    there = sorted({*np.unique(line >> 4).tolist()} - {0})
    if any(LOOKS[KINDS[code - 1]].hatch or LOOKS[KINDS[code - 1]].bands for code in there):
        masks, inks = _marks([KINDS[code - 1] for code in there], high, wide), _inks(tones, look.paper, part)[line]
        for k, code in enumerate(there, 1):
            mask = masks[k] & (line >> 4 == code)[None]
            area[mask] = np.broadcast_to(inks, area.shape)[mask]
    if row.height > 5 and len(start) <= wide / (3 * FINE):
        edges = np.array([_rgb(rim) for rim in rims])
        a, b = (np.round(t * wide / span).astype(int) for t in (start, start + length))
        for p, q, code in zip(a, np.minimum(b, wide), kind, strict=True):
            if q - p < 1.5 * FINE:  # what takes no time is a full line, as in js/lanes.js
                area[:, p : p + 3 * FINE // 2] = edges[code]
            elif q - p >= 4 * FINE and row.height >= 9:
                area[:FINE, p:q] = area[-FINE:, p:q] = edges[code]
                area[:, p : p + FINE] = area[:, q - FINE : q] = edges[code]
    if not row.strip:
        return
    area = pixels[first + high : first + high + FINE * row.strip, FINE * LEFT : FINE * LEFT + wide]
    if timeline.about["folded"]:
        colours = tuple(colour for _, colour in DIFFERENCES)
        area[:] = _inks(colours, look.paper)[cells(start, length, np.asarray(timeline.levels)[here], 0.0, span, wide)]
    elif timeline.found and not timeline.about["large"]:
        arrays, facts = timeline.found
        first, last = next(one[2:] for one in facts["idle"] if one[:2] == [lane.trace, lane.rank])
        starts, lengths, kinds = (np.asarray(arrays[f"idle_{key}"])[first:last] for key in ("start", "length", "kind"))
        reasons = (look.rule, look.muted, look.warn)
        area[:] = _inks(reasons, look.paper)[cells(starts, lengths, kinds, 0.0, span, wide)]


def _label(draw: _Pen, timeline: Timeline, placed: Sequence[Row], top: int, span: float, look: Paper) -> None:
    """Draw the names of ranks, the idle shares, and the words of the bars that have room."""
    found, about = timeline.columns, timeline.about
    names = about["traces"]
    scale = (WIDTH - LEFT - RIGHT) / span
    until = -1
    for row in placed:
        lane = found.lanes[row.lane]
        y = top + row.y + max(6, row.height / 2)
        if lane.stream == "compute" and top + row.y >= until:
            second = lane.trace and row.height >= 10 and not about["folded"]
            own = about["names"][lane.rank].partition(" (")[0] if about["names"] else f"rank {lane.rank}"
            name = f"  {names[1]}" if second else own
            where = about["places"][lane.rank] if about["places"] and not lane.trace else ""
            if where and row.height >= 20:
                draw.text((4, y - 5), name, look.ink, 11, "lm")
                draw.text((4, y + 7), labels.narrow(where), look.muted, 9, "lm")
            else:
                draw.text((4, y), name, look.ink, 11, "lm")
            words = f"{labels.idle(timeline.traces[lane.trace], lane.rank):.0%} idle"
            if about["folded"]:
                words = f"busy {timeline.busier(lane.rank):+.0%}"
            draw.text((WIDTH - 2, y), words, look.muted, 11, "rm")
            until = top + row.y + max(13, row.height)
        here = range(lane.first, lane.last)
        if row.height < 11 or len(here) > 300:
            continue
        outlined = len(names) > 1 and not lane.trace
        for k, one in _fitting(timeline, here, scale, min(11, row.height - 2)):
            kind = KINDS[found.kind[k]]
            group = kind in COLLECTIVE
            ink = "#1a1a1a" if group else look.ink if outlined else LOOKS[kind].ink
            x = LEFT + (found.start[k] + found.length[k] / 2) * scale
            middle = top + row.y + row.height / 2 - (2 * LOOKS[kind].bands if row.height >= 9 else 0)
            if one.beside:
                end = LEFT + (found.start[k] + found.length[k]) * scale
                draw.text((end + 3, middle), one.text, look.ink, one.size, "lm")
            else:
                draw.text((x, middle), one.text, ink, one.size, "mm", "#ffffff" if group else "")


def _fitting(timeline: Timeline, here: range, scale: float, most: float) -> list[tuple[int, labels.Fitted]]:
    """The words of a lane's bars that have room."""
    found = timeline.columns
    places, _, labelled = found.named if timeline.found else (None, [], [])
    words = {}
    for k in here:
        own = labelled[places[k]] if places is not None else ("#",) if found.number[k] >= 0 else ()
        if own:
            words[k] = [text.replace("#", str(found.number[k])) for text in own]
    shown = []
    sizes = [size for size in (11, 9.5, 8, 7) if size <= most]
    for code in {int(found.kind[k]) for k in words}:
        mine = [k for k in words if found.kind[k] == code]
        rooms = [found.length[k] * scale - 2 for k in mine]
        nexts = [found.start[k + 1] if k + 1 in here else timeline.about["span"] for k in mine]
        free = [(then - found.start[k] - found.length[k]) * scale - 6 for k, then in zip(mine, nexts, strict=True)]
        group = KINDS[code] in COLLECTIVE
        both = zip(
            mine, labels.fitted([words[k] for k in mine], rooms, sizes, 0.64, free if group else ()), strict=True
        )
        shown += [(k, one) for k, one in both if one.text]
    return shown


def _two(about: dict[str, Any]) -> list[str]:
    names = about["traces"]
    if about["folded"]:
        return [word for word, _ in DIFFERENCES]
    return [f"{names[0]} (outlined)", f"{names[1]} (filled)"] if len(names) > 1 else []


def _legend(words: Sequence[str], top: int, names: Sequence[str]) -> tuple[list[tuple[str, int, int]], int]:
    found, x, y = [], 4, top
    for word in words:
        size = 28 + round(font(11).getlength(_said(word, names)))
        if x + size > WIDTH and x > 4:
            x, y = 4, y + 17
        found.append((word, x, y))
        x += size
    return found, y + 17


def _said(word: str, names: Sequence[str]) -> str:
    return labels.legend([word], names).get(word, word)


def _sample(draw: _Pen, word: str, x: int, y: int, about: dict[str, Any], look: Paper) -> None:
    reason, differences = word.removeprefix("idle: "), dict(DIFFERENCES)
    if reason in IDLE and word != reason:
        colour = (look.rule, look.muted, look.warn)[REASONS.index(reason)]
        draw.rectangle((x, y + 5, x + 13, y + 8), colour)
    elif word in differences:
        draw.rectangle((x, y + 4, x + 13, y + 9), differences[word])
    else:
        known = LOOKS.get(word)
        if word in about["shades"]:
            known = shaded(GREY, repeated(about["shades"].index(word)))
        face, edge = (known.face, known.edge) if known else (look.muted, look.muted)
        if not word.endswith("(outlined)"):
            draw.rectangle((x, y + 1, x + 13, y + 11), face)
        mark = known.hatch[:1] if known else ""
        for k in (2, 6, 10) if mark in ("/", "\\", "x", "|", "+") and mark else ():
            if mark in "/x":
                draw.line((x + k - 2, y + 10, x + k + 3, y + 3), edge)
            if mark in "\\x":
                draw.line((x + k - 2, y + 3, x + k + 3, y + 10), edge)
            if mark in "|+":
                draw.line((x + k, y + 2, x + k, y + 10), edge)
        for k in (4, 7) if mark and mark in "-+" else ():
            draw.line((x + 1, y + k, x + 12, y + k), edge)
        for k in range(known.bands if known else 0):
            draw.rectangle((x + 1, y + 8 - 4 * k, x + 12, y + 9 - 4 * k), known.tone if known else "")
        draw.rectangle((x, y + 1, x + 13, y + 11), None, edge)
    draw.text((x + 18, y + 6), _said(word, about["traces"]), look.ink, 11, "lm")


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
    time, total = (np.asarray(arrays[f"memory_{key}"])[first:last] for key in ("time", "total"))
    wide, high = pixels.shape[1] - FINE * (LEFT + RIGHT), FINE * CURVE
    highest = float(total.max(initial=0)) or 1.0
    if about["capacity"] and about["capacity"] < 4 * highest:
        highest = max(highest, about["capacity"])
    edges = np.searchsorted(time, np.arange(wide + 1) * span / wide)
    column = pixels[FINE * top : FINE * top + high, FINE * LEFT : FINE * LEFT + wide]
    for x in range(wide):
        a, b = max(0, edges[x] - 1), max(edges[x], edges[x + 1])
        if b <= a:
            continue
        k = first + a + int(total[a:b].argmax())
        low = 0.0
        for kind in facts["memory_kinds"]:
            size = float(arrays[f"memory_{kind}"][k])
            y, end = (high - round(v / (1.06 * highest) * high) for v in (low + size, low))
            column[max(0, y) : end, x] = _rgb(MEMORY[kind])
            low += size
    return 1.06 * highest


def _memory_words(draw: _Pen, more: Any, about: dict[str, Any], top: int, highest: float, look: Paper) -> None:
    _, facts = more
    for value in _ticks(highest)[::2]:
        y = top + CURVE - value / highest * CURVE
        draw.text((LEFT - 4, y), f"{value:g}", look.muted, 10, "rm")
    if 0 < about["capacity"] <= highest:
        y = top + CURVE - about["capacity"] / highest * CURVE
        draw.line((LEFT, y, WIDTH - RIGHT, y), look.warn, 2)
        draw.text((WIDTH - RIGHT, y - 3), "capacity", look.warn, 11, "rs")
    x, y = 4.0, float(top + CURVE + 22)
    name = about["names"][about["highest"]] if about["names"] else f"rank {about['highest']}"
    words = f"memory of {name} ({facts['memory_unit']}):"
    draw.text((x, y), words, look.ink, 11)
    x += font(11).getlength(words) + 10
    for kind in facts["memory_kinds"]:
        draw.rectangle((x, y + 2, x + 10, y + 10), MEMORY[kind])
        draw.text((x + 14, y), kind, look.ink, 11)
        x += 26 + font(11).getlength(kind)
