"""Static pictures of traces: a timeline with a lane per rank, and the memory curves under it.

    rank 0  |F0|F1|  |B0  |B1  |S|      one trace: filled bars, the number is the micro-batch
            /// '        '  \\\\\\         under them messages and collectives (hatched), arrivals (ticks)
    rank 0  predicted, outlined         two traces: one over the other, on one time axis
            measured, filled
    memory  _/--\\__                     a step curve per rank, its peak marked

`draw` gives a matplotlib figure that shows itself in a notebook, `svg` an image as text, `page` (minipar/webpage.py) a
self-contained HTML page, `text` (minipar/terminal.py) letters and digits. matplotlib loads on first use.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from minipar import captions
from minipar.critical_path import messages
from minipar.errors import MiniparError
from minipar.program import Op
from minipar.terminal import text
from minipar.trace import Trace
from minipar.webpage import page, table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "page", "svg", "table", "text"]


class Look(NamedTuple):
    """Colours of a kind of instruction: the bar, its edge, the number on it; and a hatch."""

    face: str
    edge: str
    ink: str = "#fefefe"
    hatch: str = ""


# Four colours belong to the paper, not to the data; a page with a dark mode replaces them, and nothing else.
INK, MUTED, RULE, PAPER = "#1a1a1a", "#5c5c5c", "#dcdcdc", "#ffffff"
DARK = "#201400"  # numbers on light bars, in both modes

LOOKS = {
    "forward": Look("#0072B2", "#004a75"),
    "backward": Look("#E69F00", "#7a5300", DARK),
    "input gradient": Look("#F6CF78", "#7a5300", DARK),
    "weight gradient": Look("#8F5F00", "#5c3d00"),
    "recompute": Look("#56B4E9", "#1f6d9c", DARK),
    "optimizer step": Look("#009E73", "#00664a"),
    "message": Look("#CC79A7", "#8f3f6c", hatch="/////"),
    "collective": Look("#CC79A7", "#8f3f6c", hatch="xxxxx"),
    "arrival": Look("#8f3f6c", "#8f3f6c"),
    "copy": Look("#9a9a9a", "#6a6a6a"),
}
BENEATH = ("message", "collective", "arrival", "copy")  # kinds that are drawn under the compute bars
RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#999933", "#7A7A7A", "#CC79A7", "#8C6D31")
MANY = 20_000  # bars; beyond this they are stored as pixels in an SVG
LINES = 8  # memory curves; beyond this one curve shows the highest rank


def draw(
    traces: Sequence[Trace],
    *,
    memory: bool = True,
    numbers: bool = True,
    width: float = 11,
    window: tuple[float, float] | None = None,
    title: str = "",
    arrows: bool = False,
) -> Figure:
    """One trace, or two (predicted, measured) on one time axis, as a matplotlib figure. Both begin at 0.

    memory    the memory curves under the timeline
    numbers   micro-batch numbers on the bars that are wide enough
    width     inches
    window    only this part of the time axis, in the axis's own unit
    title     default: the program's name
    arrows    arrows from SEND to RECV, if there are at most 200 messages

    Communication has its own thin lane under the bars; it is left out if it takes no time at all (as in the papers'
    figures). The figure shows itself in a notebook and belongs to no window (it is no pyplot figure).
    Errors: MiniparError for no traces, more than two, different numbers of ranks, an empty trace, a bad window.
    """
    import matplotlib
    import matplotlib.style

    captions.check(traces)
    clock = captions.clock(traces)
    span = window or (0.0, max(trace.time for trace in traces) * clock.scale or 1.0)
    if not span[0] < span[1]:
        raise MiniparError(f"window={window}: must be (from, to) on the time axis, with from below to")
    if not 4 <= width <= 100:
        raise MiniparError(f"width={width}: must be from 4 to 100 inches")
    with matplotlib.style.context("default"), matplotlib.rc_context({"hatch.linewidth": 0.6, "font.size": 8.5}):
        bars = [_bars(trace, clock.scale, span) for trace in traces]
        sheet = _Sheet(traces, bars, width, title or traces[0].program.name or "a program made by hand", memory)
        timeline = sheet.axes(sheet.timeline_top, sheet.timeline)
        _timeline(timeline, sheet, span, numbers)
        if arrows:
            _arrows(timeline, sheet, clock.scale)
        lowest = timeline
        if memory:
            lowest = sheet.axes(sheet.memory_top, sheet.memory)
            _memory(lowest, sheet, clock.scale)
            timeline.tick_params(labelbottom=False)
        for axes in sheet.figure.axes:
            axes.set_xlim(*span)
        lowest.set_xlabel(clock.label, color=INK)
        sheet.figure.alt = captions.description(traces)  # type: ignore[attr-defined]
    return sheet.figure


def svg(traces: Sequence[Trace], **options: Any) -> str:
    """The picture of `draw` (with its options) as one `<svg>` element, described in words for screen readers."""
    import matplotlib

    figure = draw(traces, **options)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "minipar", "svg.fonttype": "path"}):  # the same text every time
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing, dpi=200, facecolor=PAPER)
    text = file.getvalue()
    opening, rest = text[text.index("<svg") :].split(">", 1)
    name = escape(f"Timeline: {options.get('title') or traces[0].program.name}")
    words = escape(captions.description(traces))
    return f'{opening} role="img" aria-label="{name}">\n <title>{name}</title>\n <desc>{words}</desc>{rest}'


# the sheet ------------------------------------------------------------------------------------------------------------


class _Sheet:
    """The figure, measured in inches from the top, so that no text meets another, however many ranks there are."""

    left, right = 1.0, 1.25

    def __init__(self, traces: Sequence[Trace], bars: list[_Bars], width: float, title: str, memory: bool) -> None:
        self.traces, self.bars, self.width = traces, bars, width
        self.ranks = len(traces[0].program.ranks)
        lanes = self.ranks * len(traces)
        self.beneath = any(_visible(found, kind) for found in bars for kind in BENEATH)
        self.lane = min(0.52 if self.beneath else 0.4, max(8 / lanes, 0.02))  # inches
        self.timeline = lanes * self.lane
        letters = int((width - 0.3) * 13.5)  # of the subtitle, on one line
        self.title = textwrap.wrap(title, int(letters * 0.75))
        self.subtitle = [
            line
            for trace, name in zip(traces, captions.names(traces), strict=True)
            for sentence in (f"{name}: {captions.facts(trace)}", trace.note)
            for line in textwrap.wrap(sentence, letters)
        ]
        shown = [kind for kind in LOOKS if any(_visible(found, kind) for found in bars)]
        self.legend = shown + (captions.names(traces) if len(traces) == 2 else [])
        columns = max(1, min(len(self.legend), int((width - 0.3) / 1.18)))
        self.timeline_top = 0.15 + 0.22 * len(self.title) + 0.165 * len(self.subtitle)
        self.timeline_top += 0.2 * -(-len(self.legend) // columns) + 0.16
        lines = self.ranks if self.ranks * len(traces) <= LINES else len(traces)
        self.memory = max(1.2, 0.14 * (lines + 1))
        self.memory_top = self.timeline_top + self.timeline + 0.14
        bottom = self.memory_top + self.memory if memory else self.timeline_top + self.timeline
        self.height = bottom + 0.5
        self.figure = _picture()(figsize=(width, self.height), dpi=100, facecolor=PAPER)
        self._words(columns)

    def axes(self, top: float, height: float) -> Axes:
        inside = (self.width - self.left - self.right) / self.width
        axes = self.figure.add_axes(
            (self.left / self.width, 1 - (top + height) / self.height, inside, height / self.height), facecolor=PAPER
        )
        axes.tick_params(colors=MUTED, labelcolor=INK, length=3, width=0.6)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=MUTED, linewidth=0.6)
        return axes

    def points(self, span: tuple[float, float]) -> float:
        """Printer's points (1/72 inch) for one unit of the time axis."""
        return (self.width - self.left - self.right) * 72 / (span[1] - span[0])

    def _words(self, columns: int) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        top = 0.12
        for line, size, step, weight in (
            *((line, 10.5, 0.22, "bold") for line in self.title),
            *((line, 8.5, 0.165, "normal") for line in self.subtitle),
        ):
            ink = INK if weight == "bold" else MUTED
            self.figure.text(0.15 / self.width, 1 - top / self.height, line, size=size, weight=weight, color=ink, va="top")
            top += step
        handles: list[Any] = []
        for kind in self.legend:
            if kind not in LOOKS:
                outlined = kind == self.legend[-2]
                label = f"{kind} ({'outlined' if outlined else 'filled'})"
                handles.append(Patch(facecolor="none" if outlined else MUTED, edgecolor=MUTED, label=label))
            elif kind == "arrival":
                colour = LOOKS[kind].edge
                handles.append(Line2D([], [], color=colour, marker="|", linestyle="", markersize=8, label=kind))
            else:
                look = LOOKS[kind]
                handles.append(
                    Patch(facecolor=look.face, edgecolor=look.edge, linewidth=0.6, hatch=look.hatch, label=kind)
                )
        if handles:
            self.figure.legend(
                handles=handles, ncols=columns, loc="upper left", frameon=False, labelcolor=INK, borderpad=0,
                bbox_to_anchor=(0.15 / self.width, 1 - (top + 0.04) / self.height), borderaxespad=0, fontsize=8,
                handlelength=1.4, handleheight=0.9, handletextpad=0.5, columnspacing=1.4, labelspacing=0.4,
            )  # fmt: skip


@cache
def _picture() -> type[Figure]:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that shows itself in a notebook: IPython knows only those that pyplot made."""

        alt = ""

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=160, facecolor=PAPER)
            size = {key: round(inches * 96) for key, inches in zip(("width", "height"), self.get_size_inches(), strict=True)}
            picture = base64.b64encode(file.getvalue()).decode()
            return {"image/png": picture, "text/plain": self.alt}, {"image/png": {**size, "alt": self.alt}}

    return Picture


# the timeline ---------------------------------------------------------------------------------------------------------

_Bars = dict[str, "np.ndarray"]  # kind -> rows of (rank, start, end, micro-batch)


def _bars(trace: Trace, scale: float, span: tuple[float, float]) -> _Bars:
    """The bars of a trace on the time axis, cut to what is in sight."""
    import numpy as np

    rows: dict[str, list[tuple[int, float, float, int]]] = {}
    for rank, row in enumerate(trace.program.ranks):
        for ins, start, end in zip(row, trace.starts[rank], trace.ends[rank], strict=True):
            rows.setdefault(captions.kind_of(ins), []).append((rank, start, end, ins.microbatch))
    result = {}
    for kind, found in rows.items():
        bars = np.array(found, dtype=float)
        bars[:, 1:3] = (bars[:, 1:3] - trace.span[0]) * scale
        if kind == "arrival":
            bars[:, 1] = bars[:, 2]  # posted long before; what counts is when the message was there
        bars = bars[(bars[:, 2] >= span[0]) & (bars[:, 1] <= span[1])]
        bars[:, 1:3] = bars[:, 1:3].clip(*span)
        result[kind] = bars
    return result


def _visible(bars: _Bars, kind: str) -> bool:
    if kind not in bars or not len(bars[kind]):
        return False
    if kind not in ("message", "arrival"):
        return kind != "collective" or bool((bars[kind][:, 2] > bars[kind][:, 1]).any())
    return _messages_take_time(bars)


def _messages_take_time(bars: _Bars) -> bool:
    sends, arrivals = bars.get("message"), bars.get("arrival")
    if sends is None or arrivals is None or not len(sends):
        return False
    return bool((sends[:, 2] > sends[:, 1]).any()) or sorted(sends[:, 2]) != sorted(arrivals[:, 2])
