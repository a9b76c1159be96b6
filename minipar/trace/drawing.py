"""Static pictures of traces: a timeline with a lane per rank, and the memory curves under it.

    rank 0  |F0|F1|  |B0  |B1  |S|      one trace: filled bars, the number is the micro-batch;
            /// '        '  xxxx        below them messages and collectives (hatched), receives (ticks)
    rank 0  predicted, outlined         two traces: one over the other, on one time axis
            measured, filled
    memory  _/--\\__                     a step curve per rank, its peak marked

`draw` gives a matplotlib figure that shows itself in a notebook, `text` (terminal.py) letters and digits. matplotlib
loads on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minipar.errors import MiniparError
from minipar.trace import Trace, labels
from minipar.trace.comparison import comparable, levels
from minipar.trace.figure import (
    BENEATH,
    COLLECTIVE,
    DIFFERENCES,
    INK,
    LOOKS,
    MUTED,
    PAPER,
    RANK_COLOURS,
    RULE,
    Bars,
    FigureLayout,
)
from minipar.trace.shades import Shades
from minipar.trace.terminal import text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "text"]

Span = tuple[float, float]
RANK_MARKERS = "osDv^PX*"
MANY_NUMBERS = 5_000
SIZES = (9.0, 8.0, 7.0, 6.0, 5.2)  # of the words on bars, in points
FEW_RANKS = 6  # up to so many, both traces of a comparison have lanes
NARROW = 3.0  # points; the edge of a narrower bar would hide its face


def draw(
    traces: Sequence[Trace],
    *,
    memory: bool = True,
    numbers: bool = True,
    width: float = 11,
    window: Span | None = None,
    title: str = "",
    unfold: bool = False,
) -> Figure:
    """One trace, or two (predicted, measured) on one time axis, as a matplotlib figure. Both begin at 0.

    memory    the memory curves under the timeline
    numbers   on the bars that are wide enough: micro-batches, with the layers where ranks hold whole models or run
              layers one by one; on collectives, or beside them, their letters (AG, RS, AR, AA) and what they carry
    width     inches
    window    only this part of the time axis, in the axis's own unit
    title     default: the program's name
    unfold    two traces of one program with more than 6 ranks have one lane a rank, with the second trace and the
              difference of each instruction under it; True: both traces have lanes

    Communication has its own thin lane under the bars. It is not drawn if it takes no time at all (as in the papers'
    figures). A notebook shows the figure by itself. It belongs to no window, because it is no pyplot figure.
    Errors: MiniparError for no traces, more than two, different numbers of ranks, an empty trace, a bad window.
    """
    import matplotlib
    import matplotlib.style

    labels.check(traces)
    clock = labels.clock(traces)
    span = window or (0.0, max(trace.time for trace in traces) * clock.scale or 1.0)
    if not span[0] < span[1]:
        raise MiniparError(f"window={window}: must be (from, to) on the time axis, with from below to")
    if not 4 <= width <= 100:
        raise MiniparError(f"width={width}: must be from 4 to 100 inches")
    with matplotlib.style.context("default"), matplotlib.rc_context({"hatch.linewidth": 0.7}):
        texts: dict[tuple[str, ...], int] = {}
        bars = [_bars(trace, clock.scale, span, texts) for trace in traces]
        name = title or traces[0].program.name or "a program made by hand"
        layout = FigureLayout(traces, bars, list(texts), width, name, memory, _folds(traces, unfold))
        lowest = timeline = layout.axes(layout.top, layout.timeline)
        _draw_timeline(timeline, layout, span, numbers)
        if memory:
            lowest = layout.axes(layout.memory_top, layout.memory)
            _draw_memory(lowest, layout, clock.scale)
            timeline.tick_params(labelbottom=False)
        for axes in layout.figure.axes:
            axes.set_xlim(span[0], span[1] + (0 if window else 2 / layout.points(span)))  # room for the last edge
        lowest.set_xlabel(clock.label, color=INK, fontsize=8.5)
    return layout.figure


def _folds(traces: Sequence[Trace], unfold: bool) -> bool:
    """Whether two traces share one lane a rank: if there are many ranks, and their instructions can be compared."""
    return not unfold and len(traces) == 2 and len(traces[0].program.ranks) > FEW_RANKS and comparable(*traces)


# the timeline ---------------------------------------------------------------------------------------------------------


def _bars(trace: Trace, scale: float, span: Span, texts: dict[tuple[str, ...], int]) -> Bars:
    """The bars of a trace that are inside `span`, without communication that takes no time. Kinds carry their shade;
    `texts` collects the words on bars, and a bar has the number of its words."""
    import numpy as np

    program, shades, layers = trace.program, Shades(trace.program), labels.by_layers(trace.program)
    rows: dict[str, list[tuple[int, float, float, int]]] = {}
    for rank, row in enumerate(program.ranks):
        for ins, start, end in zip(row, trace.starts[rank], trace.ends[rank], strict=True):
            kind = labels.kind_of(ins)
            if shades.names and (shade := shades.of(rank, ins)):
                kind = f"{kind} {shade}"
            words = labels.words_of(program, ins, layers)
            rows.setdefault(kind, []).append((rank, start, end, texts.setdefault(words, len(texts)) if words else -1))
    bars = {kind: np.array(found, dtype=float) for kind, found in rows.items()}
    if "receive" in bars:
        bars["receive"][:, 1] = bars["receive"][:, 2]  # it was posted long before; show only when the message arrived
        sends = bars.get("message", np.zeros((0, 4)))
        if not (sends[:, 2] > sends[:, 1]).any() and sorted(sends[:, 2]) == sorted(bars["receive"][:, 2]):
            del bars["receive"], bars["message"]
    joined = [bars[kind] for kind in COLLECTIVE if kind in bars]
    if not any((found[:, 2] > found[:, 1]).any() for found in joined):
        bars = {kind: found for kind, found in bars.items() if kind not in COLLECTIVE}
    for found in bars.values():
        found[:, 1:3] = (found[:, 1:3] - trace.span[0]) * scale
    seen = {kind: found[(found[:, 2] >= span[0]) & (found[:, 1] <= span[1])] for kind, found in bars.items()}
    for found in seen.values():
        found[:, 1:3] = found[:, 1:3].clip(*span)
    seen = {kind: found for kind, found in seen.items() if len(found)}
    # Collectives that overlap share a lane. One that ends earlier is drawn over one that ends later and has waited for
    # it, and a kind that takes little time over one that takes more: so each is seen.
    seen |= {kind: found[np.argsort(-found[:, 2], kind="stable")] for kind, found in seen.items() if kind in COLLECTIVE}
    lengths = {kind: float((found[:, 2] - found[:, 1]).mean()) for kind, found in seen.items() if kind in COLLECTIVE}
    return {kind: seen[kind] for kind in sorted(seen, key=lambda kind: -lengths.get(kind, 1e300))}


def _draw_timeline(axes: Axes, layout: FigureLayout, span: Span, numbers: bool) -> None:
    import numpy as np

    points = layout.points(span)
    for t, bars in enumerate(layout.bars):
        outlined = layout.count == 2 and t == 0
        seen = _uncovered(bars) if numbers else {}
        for kind, found in bars.items():
            top, bottom = layout.zone(kind, t)
            y = found[:, 0] * layout.pitch
            _draw_bars(axes, kind, found, y, (top, bottom), points, outlined, layout.names[t])
            if LOOKS[kind].bands:
                bottom = _draw_bands(axes, kind, found, y, (top, bottom), points, outlined)
            if numbers and (kind not in BENEATH or kind in COLLECTIVE):
                ink = INK if outlined or kind in COLLECTIVE else LOOKS[kind].ink
                height, middle = (bottom - top) * layout.lane * 72, y + (top + bottom) / 2
                own, free = seen.get(kind, found), None
                if kind in COLLECTIVE:  # (no word stands beside a bar whose end is covered)
                    free = np.where(own[:, 2] < found[:, 2], 0.0, _free(found, bars, span) * points)
                _draw_numbers(axes, own, middle, points, height, ink, layout.texts, free)
    if layout.folded:
        _draw_differences(axes, layout, span)
    lanes = layout.ranks * layout.pitch
    axes.set_ylim(lanes - (layout.pitch - layout.rows), 0)
    axes.spines["left"].set_visible(False)
    _label_lanes(axes, layout)


def _boxes(start: np.ndarray, end: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> list[np.ndarray]:
    import numpy as np

    corners = [np.stack([x, y], 1) for x, y in ((start, top), (end, top), (end, bottom), (start, bottom))]
    return list(np.stack(corners, 1))


def _draw_bars(
    axes: Axes, kind: str, bars: np.ndarray, y: np.ndarray, zone: Span, points: float, outlined: bool, name: str
) -> None:
    """All bars of a kind as one collection, so that 200 000 of them take a second."""
    import numpy as np
    from matplotlib.collections import LineCollection, PolyCollection

    look = LOOKS[kind]
    start, end, top, bottom = bars[:, 1], bars[:, 2], y + zone[0], y + zone[1]
    gid = f"{name} {kind}".replace(" ", "-")
    if kind == "receive":
        ticks = np.stack([np.stack([end, top], 1), np.stack([end, bottom], 1)], 1)
        axes.add_collection(
            LineCollection(list(ticks), colors=look.edge, linewidths=1.3, label=kind, gid=gid, zorder=3), autolim=False
        )
        return
    narrow = bool((end > start).any()) and float(np.median((end - start)[end > start])) * points < NARROW
    least = 1.2 / points  # a bar that takes no time can be seen, too
    end = np.maximum(end, start + least) if kind in BENEATH else np.where(end > start, end, start + least)
    if outlined:
        tint: Any = (look.face, 0.5) if narrow else "none" if look.hatch else (look.face, 0.16)
        style: dict[str, Any] = {"facecolors": tint, "edgecolors": look.edge if look.bands else look.face}
    else:
        style = {"facecolors": look.face, "edgecolors": look.edge}
    axes.add_collection(
        PolyCollection(
            _boxes(start, end, top, bottom), linewidths=0.0 if narrow else 1.2 if outlined else 0.6,
            hatch=look.hatch or None, label=kind, gid=gid, zorder=2, **style,
        ),
        autolim=False,
    )  # fmt: skip


def _draw_bands(
    axes: Axes, kind: str, bars: np.ndarray, y: np.ndarray, zone: Span, points: float, outlined: bool
) -> float:
    """The bands at the lower edge of the bars of a later chunk. Returns where the part above them ends."""
    from matplotlib.collections import PolyCollection

    look, tall = LOOKS[kind], zone[1] - zone[0]
    inset = 0.5 / points
    for k in range(look.bands):
        low = zone[1] - (0.04 + 0.19 * k) * tall
        boxes = _boxes(bars[:, 1] + inset, bars[:, 2] - inset, y + low - 0.13 * tall, y + low)
        face: Any = (look.tone, 0.55) if outlined else look.tone
        axes.add_collection(
            PolyCollection(boxes, linewidths=0, facecolors=face, zorder=2.5),
            autolim=False,
        )
    return zone[1] - (0.04 + 0.19 * look.bands) * tall


def _draw_numbers(
    axes: Axes, bars: np.ndarray, y: np.ndarray, points: float, height: float, ink: str,
    texts: Sequence[tuple[str, ...]], free: np.ndarray | None = None,
) -> None:  # fmt: skip
    """The words on bars that have room (`labels.fitted`). `free`: of collectives, the points to the right of each bar;
    of these a bar is the part that is seen.
    Where bars overlap, a word that would stand on the one before it is left out."""
    import numpy as np
    from matplotlib.patheffects import withStroke

    sizes = [size for size in SIZES if size * 1.2 <= height]
    there = np.argsort(bars[:, 1], kind="stable")
    there = there[bars[there, 3] >= 0]
    if not sizes or not len(there):
        return
    bars, y = bars[there], y[there]
    gap = 1.0 if free is None else 3.0  # points between two words: on hatched bars they have a halo of 1.1
    rooms, beside = (bars[:, 2] - bars[:, 1]) * points - gap, () if free is None else (free[there] - 4.0).tolist()
    found = labels.fitted([texts[int(k)] for k in bars[:, 3]], rooms.tolist(), sizes, 0.62, beside)
    shown, around = 0, None if free is None else [withStroke(linewidth=2.2, foreground=PAPER)]
    ends: dict[float, float] = {}  # of the last word in each lane
    for one, start, end, middle in zip(found, bars[:, 1], bars[:, 2], y, strict=True):
        half = (0.31 * one.size * len(one.text) + gap / 2) / points
        x = end + 1.0 / points + half if one.beside else (start + end) / 2
        if one.text and shown < MANY_NUMBERS and x - half >= ends.get(middle, x - half):
            shown, ends[middle] = shown + 1, x + half
            axes.text(
                x, middle, one.text, size=one.size, color=ink, ha="center", va="center_baseline", clip_on=True,
                zorder=4, path_effects=None if one.beside else around,
            )  # fmt: skip


def _uncovered(bars: Bars) -> Bars:
    """The bars of the thin lane, each with the part of it that is not covered by those drawn after it: collectives may
    overlap in time, and a word stands where its bar is seen."""
    import numpy as np

    thin = {kind: found for kind, found in bars.items() if kind in BENEATH and kind != "receive"}
    every = np.concatenate([*thin.values(), np.zeros((0, 4))])
    if len(every) > MANY_NUMBERS:  # (they have no words, or few of them)
        return thin
    part = every.copy()
    for rank in np.unique(every[:, 0]):
        mine = np.flatnonzero(every[:, 0] == rank)
        start, end = every[mine, 1], every[mine, 2]
        for n, k in enumerate(mine.tolist()):
            low, high = every[k, 1:3].tolist()
            later = np.flatnonzero((start[n + 1 :] < high) & (end[n + 1 :] > low)) + n + 1
            for from_, to in sorted(zip(start[later].tolist(), end[later].tolist(), strict=True)):
                if from_ < high and to > low:  # the longer one of the parts before and after it
                    low, high = (low, max(low, from_)) if from_ - low >= high - to else (to, max(high, to))
            part[k, 1:3] = low, high
    ends = np.cumsum([len(found) for found in thin.values()])
    return dict(zip(thin, np.split(part, ends[:-1]), strict=True)) if thin else {}


def _free(found: np.ndarray, bars: Bars, span: Span) -> np.ndarray:
    """For each collective, how long its rank's thin lane is empty after it; 0 where another bar is there at its end."""
    import numpy as np

    every = np.concatenate([bars[kind] for kind in (*COLLECTIVE, "copy") if kind in bars])
    result = np.zeros(len(found))
    for rank in np.unique(found[:, 0]).tolist():
        lane = every[every[:, 0] == rank]
        lane = lane[np.argsort(lane[:, 1], kind="stable")]
        mine = np.flatnonzero(found[:, 0] == rank)
        end = found[mine, 2]
        places = np.searchsorted(lane[:, 1], end, "right")  # of the first bar that begins later
        empty = np.append(lane[:, 1], span[1])[places] - end
        result[mine] = np.where(np.maximum.accumulate(lane[:, 2])[places - 1] > end, 0.0, empty)
    return result


def _draw_differences(axes: Axes, layout: FigureLayout, span: Span) -> None:
    """Under each bar of the second trace, how long it took against the first one."""
    import numpy as np
    from matplotlib.collections import PolyCollection

    first, second = layout.traces
    clock = labels.clock(layout.traces)
    found = [
        ((start - second.span[0]) * clock.scale, (end - second.span[0]) * clock.scale, rank * layout.pitch, level)
        for rank in range(layout.ranks)
        for start, end, level in levels(second, first, rank)
    ]
    low, high = layout.strip
    for level, (word, colour) in enumerate(DIFFERENCES):
        rows = np.array([row[:3] for row in found if row[3] == level], float).reshape(-1, 3)
        rows[:, :2] = rows[:, :2].clip(*span)
        axes.add_collection(
            PolyCollection(
                _boxes(rows[:, 0], rows[:, 1], rows[:, 2] + low, rows[:, 2] + high), linewidths=0, facecolors=colour,
                gid=f"difference-{word}".replace(" ", "-"), zorder=2,
            ),
            autolim=False,
        )  # fmt: skip


def _label_lanes(axes: Axes, layout: FigureLayout) -> None:
    """Rank names at the left and idle time at the right, on every lane or on as many ranks as there is room for."""
    places, lanes = [], []
    roomy = layout.lane >= 0.15
    every = 1
    while every * layout.pitch * layout.lane < 0.15:
        every *= 2
    for rank in range(0, layout.ranks, every):
        if layout.rows == 1 or not roomy:
            low, high = layout.zone("forward", 0)[0], layout.zone("forward", layout.rows - 1)[1]
            places.append(rank * layout.pitch + (low + high) / 2)
            lanes.append(labels.rank_name(layout.traces[0].program, rank))
            continue
        for t, name in enumerate(layout.names):
            places.append(rank * layout.pitch + sum(layout.zone("forward", t)) / 2)
            where, own = labels.place(layout.traces[0].program, rank), labels.rank_name(layout.traces[0].program, rank)
            where = (f"({where})" if where else "") if t else own.partition(" (")[0]
            lanes.append(f"{where} {name}".lstrip())
    axes.set_yticks(places, lanes)
    axes.tick_params(axis="y", length=0)
    if roomy and layout.ranks > 1:
        lines = [rank * layout.pitch - (layout.pitch - layout.rows) / 2 for rank in range(1, layout.ranks)]
        axes.hlines(lines, 0, 1, transform=axes.get_yaxis_transform(), color=RULE, linewidth=0.6, zorder=0)
    if not roomy:
        return
    inch = 1 / (layout.width - layout.left - layout.right)
    for t, trace in enumerate(layout.traces[-layout.rows :]):
        for rank in range(layout.ranks):
            y = rank * layout.pitch + sum(layout.zone("forward", t)) / 2
            words, across = layout.share(trace, rank), axes.get_yaxis_transform()
            axes.text(1 + 0.1 * inch, y, words, transform=across, size=8, color=MUTED, va="center_baseline")


# memory ---------------------------------------------------------------------------------------------------------------


def _draw_memory(axes: Axes, layout: FigureLayout, scale: float) -> None:
    """A step curve for each rank, or only for the highest rank if there are many. Peaks are marked and listed
    beside."""
    mib = layout.traces[0].unit == "bytes"
    highest = 0.0
    for line in range(len(layout.key)):
        colour = RANK_COLOURS[line] if layout.curves else INK
        for t, trace in enumerate(layout.traces):
            times, values = _curve(trace, layout.curves[line][0] if layout.curves else -1, scale)
            values = values / 2**20 if mib else values
            dashed = layout.count == 2 and t == 0
            axes.step(
                times, values, where="post", color=colour, linewidth=1.2, zorder=3 if dashed else 2.5,
                linestyle=(4 * line, (4, 2)) if dashed else "solid", label=f"{layout.names[t]} {layout.key[line][0]}",
            )  # fmt: skip
            peak = int(values.argmax())
            axes.plot(times[peak], values[peak], RANK_MARKERS[line], color=colour, markersize=4.5, zorder=5)
            highest = max(highest, float(values[peak]))
    axes.set_ylim(0, highest * 1.12 or 1.0)
    axes.set_ylabel("memory (MiB)" if mib else "activations", color=INK, fontsize=8.5)
    axes.locator_params(axis="y", nbins=4 if mib else 5, integer=not mib)  # there is no half activation
    axes.grid(axis="y", color=RULE, linewidth=0.6)

    line_height, inch = 0.15 / layout.memory, 1 / (layout.width - layout.left - layout.right)  # in parts of the panel
    for k, words in enumerate(layout.key_head):
        axes.text(1 + 0.1 * inch, 1 - k * line_height, words, transform=axes.transAxes, size=7.5, color=MUTED, va="top")
    for k, (label, words) in enumerate(layout.key):
        y = 1 - (k + len(layout.key_head) + 0.5) * line_height
        colour = RANK_COLOURS[k] if layout.curves else INK
        axes.plot(
            1 + 0.15 * inch, y, RANK_MARKERS[k], color=colour, markersize=4.5, transform=axes.transAxes, clip_on=False
        )
        axes.text(
            1 + 0.25 * inch, y, f"{label}  {words}", transform=axes.transAxes, size=8, color=INK, va="center_baseline"
        )


def _curve(trace: Trace, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Times and values of a rank's memory until the end of the trace; the maximum over all ranks if `rank` is -1."""
    import numpy as np

    def steps(r: int) -> tuple[np.ndarray, np.ndarray]:
        curve = trace.memory(r)
        if not curve.times:
            return np.array(trace.span), np.zeros(2)
        return np.array([*curve.times, trace.span[1]]), np.array([*curve.total, curve.total[-1]])

    if rank >= 0:
        times, values = steps(rank)
    else:
        curves = [steps(r) for r in range(len(trace.program.ranks))]
        times = np.unique(np.concatenate([t for t, _ in curves]))
        values = np.zeros(len(times))
        for t, v in curves:
            at = np.searchsorted(t, times, "right") - 1
            values = np.maximum(values, np.where(at >= 0, v[at], 0.0))
    last = np.append(times[1:] > times[:-1], True)  # frees come first: a moment's last value is its highest
    times, values = (times[last] - trace.span[0]) * scale, values[last]
    if len(times) > 6000:  # more steps than pixels: keep the highest step of each run
        first = np.arange(0, len(times), len(times) // 3000)
        times, values = times[first], np.maximum.reduceat(values, first)
    return times, values
