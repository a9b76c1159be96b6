"""The layout of a picture: colours, the figure's measures in inches, and its words (title, facts, legend).

title                                     all places are measured from the top in inches, so that texts do
facts, one line a trace                   not overlap and none is cut off, for any number of ranks
legend
rank 0 | timeline            | 27% idle
       | memory              | peaks
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.trace import Trace, labels

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Look(NamedTuple):
    """Colours of a kind of instruction: the bar, its edge, the number on it; and a hatch."""

    face: str
    edge: str
    ink: str = "#fefefe"
    hatch: str = ""


# These are colours of the paper, not of the data: a page with a dark mode replaces only these.
INK, MUTED, RULE, PAPER = "#1a1a1a", "#5c5c5c", "#dcdcdc", "#ffffff"
WIRE = "#8f3f6d"  # ticks where a message is received
DARK = "#201400"  # numbers on light bars, in both modes

LOOKS = {
    "forward": Look("#0072B2", "#004a75"),
    "backward": Look("#E69F00", "#7a5300", DARK),
    "input gradient": Look("#F6CF78", "#7a5300", DARK),
    "weight gradient": Look("#8F5F00", "#5c3d00"),
    "recompute": Look("#56B4E9", "#1f6d9c", DARK),
    "optimizer step": Look("#009E73", "#00664a"),
    "reduce": Look("#009E73", "#00664a"),
    "message": Look("#CC79A7", "#8f3f6c", hatch="//////"),
    "receive": Look(WIRE, WIRE),
    "collective": Look("#CC79A7", "#8f3f6c", hatch="xxxxxx"),
    "copy": Look("#9a9a9a", "#6a6a6a"),
}
BENEATH = ("message", "receive", "collective", "copy")  # kinds that are drawn under the compute bars
LINES = 8  # memory curves; beyond this one curve shows the highest rank

Bars = dict[str, "np.ndarray"]  # kind -> rows of (rank, start, end, micro-batch), on the time axis


class FigureLayout:
    """An empty picture of one trace or two, with its words; `axes` adds a panel.

    `bars[t]` has the bars of trace t, without the kinds for which there is no room.
    """

    def __init__(self, traces: Sequence[Trace], bars: list[Bars], width: float, title: str, memory: bool) -> None:
        self.traces, self.width = traces, width
        self.ranks, self.count = len(traces[0].program.ranks), len(traces)
        self.names = labels.names(traces)
        longest = max(len(labels.rank_name(traces[0].program, rank)) for rank in range(min(self.ranks, 64)))
        longest += 2 * (self.count == 2)  # two traces have a line each for a part of the name: `(tp 0) measured`
        self.left = max(1.15, 0.22 + 0.064 * longest)  # inches
        self.curves = _alike(traces)
        self.key = self._peaks()
        self.key_head = ["peak in MiB" if traces[0].unit == "bytes" else "peak", " / ".join(self.names)][: self.count]
        beside = [
            labels.share(trace, rank) for trace in traces[:1] for rank in range(min(len(trace.program.ranks), 64))
        ]
        keys = [*(f"{a}  {b}" for a, b in self.key), *self.key_head]
        self.right = 0.35 + 0.066 * max(map(len, [*keys, *beside]))
        self.pitch = self.count + (0.22 if self.count == 2 else 0.0)  # from rank to rank, in lanes
        lanes = self.ranks * self.pitch - (self.pitch - self.count)
        tall = 0.5 if any(kind in found for found in bars for kind in BENEATH) else 0.36
        self.lane = min(tall, max(8.0 / lanes, 0.02))  # inches
        self.beneath = tall == 0.5 and self.lane > 0.2
        self.bars = [{k: b for k, b in found.items() if self.beneath or k not in BENEATH} for found in bars]
        self.timeline = lanes * self.lane
        self.memory = max(1.3, 0.15 * (len(self.key) + len(self.key_head)))

        letters = int((width - 0.3) * 13.5)  # on one line of the facts
        self._title = textwrap.wrap(title, int(letters * 0.7))
        self._facts = [
            line
            for trace, name in zip(traces, self.names, strict=True)
            for sentence in (f"{name}: {labels.facts(trace)}", trace.note)
            for line in _lines(sentence, letters)
        ]
        kinds = [kind for kind in LOOKS if any(kind in found for found in self.bars)]
        self._legend = [*kinds, *(self.names if self.count == 2 else [])]
        self._columns = max(1, min(len(self._legend), int((width - 0.3) / 1.25)))
        rows = -(-len(self._legend) // self._columns)
        self.top = 0.12 + 0.22 * len(self._title) + 0.17 * len(self._facts) + 0.06 + 0.19 * rows + 0.1
        self.memory_top = self.top + self.timeline + 0.14
        self.height = (self.memory_top + self.memory if memory else self.top + self.timeline) + 0.46
        self.figure = picture()(figsize=(width, self.height), dpi=100, facecolor=PAPER)
        self.figure.alt = labels.description(traces)  # type: ignore[attr-defined]
        self._write()

    def axes(self, top: float, height: float) -> Axes:
        """A panel whose upper edge is `top` inches below the upper edge of the figure."""
        inside = (self.width - self.left - self.right) / self.width
        axes = self.figure.add_axes(
            (self.left / self.width, 1 - (top + height) / self.height, inside, height / self.height), facecolor=PAPER
        )
        axes.tick_params(colors=MUTED, labelcolor=INK, length=3, width=0.6, labelsize=8)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=MUTED, linewidth=0.6)
        return axes

    def points(self, span: tuple[float, float]) -> float:
        """Printer's points (1/72 inch) of one unit of the time axis."""
        return (self.width - self.left - self.right) * 72 / (span[1] - span[0])

    def zone(self, kind: str, trace: int) -> tuple[float, float]:
        """Top and bottom of the bars of a kind, in lanes from the upper edge of their rank's lanes."""
        if not self.beneath:
            low, high = 0.07, 0.93
        elif kind not in BENEATH:
            low, high = 0.05, 0.68
        elif not any("collective" in found or "copy" in found for found in self.bars):
            low, high = 0.74, 0.94
        else:
            low, high = (0.72, 0.83) if kind in ("message", "receive") else (0.86, 0.97)
        return trace + low, trace + high

    def _peaks(self) -> list[tuple[str, str]]:
        """The words beside the memory curves: for each curve, its ranks, and its peak in each trace."""
        peaks = [trace.peak_memory() for trace in self.traces]
        mib = self.traces[0].unit == "bytes"
        words = [[labels.mebibytes(p) if mib else f"{p:.4g}" for p in (*found, max(found))] for found in peaks]
        both = [" / ".join(pair) for pair in zip(*words, strict=True)]
        if not self.curves:
            return [("highest", both[-1])]
        return [(_ranks(ranks), both[ranks[0]]) for ranks in self.curves]

    def _write(self) -> None:
        top = 0.12
        for line in self._title:
            self._line(line, top, size=10.5, weight="bold", color=INK)
            top += 0.22
        for line in self._facts:
            self._line(line, top, size=8.5, color=MUTED)
            top += 0.17
        if self._legend:
            self.figure.legend(
                handles=[self._handle(kind) for kind in self._legend], ncols=self._columns, loc="upper left",
                bbox_to_anchor=(0.15 / self.width, 1 - (top + 0.06) / self.height), borderaxespad=0, borderpad=0,
                frameon=False, labelcolor=INK, fontsize=8, handlelength=1.6, handleheight=0.95, handletextpad=0.5,
                columnspacing=1.4, labelspacing=0.4,
            )  # fmt: skip

    def _line(self, text: str, top: float, **style: Any) -> None:
        self.figure.text(0.15 / self.width, 1 - top / self.height, text, va="top", **style)

    def _handle(self, kind: str) -> Any:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        if kind == "receive":
            return Line2D([], [], color=LOOKS[kind].edge, marker="|", linestyle="", markersize=8, mew=1.3, label=kind)
        if kind in LOOKS:
            look = LOOKS[kind]
            return Patch(facecolor=look.face, edgecolor=look.edge, linewidth=0.6, hatch=look.hatch, label=kind)
        if kind == self.names[0]:
            return Patch(facecolor="none", edgecolor=MUTED, linewidth=1.2, label=f"{kind} (outlined)")
        return Patch(facecolor=MUTED, edgecolor=MUTED, linewidth=1.2, label=f"{kind} (filled)")


def _alike(traces: Sequence[Trace]) -> list[list[int]]:
    """The ranks of each memory curve: in one trace, ranks with the same curve share it. Empty if there are too many."""
    groups: dict[object, list[int]] = {}
    for rank in range(len(traces[0].program.ranks)):
        curve = traces[0].memory(rank)
        groups.setdefault((*curve.times, *curve.total) if len(traces) == 1 else rank, []).append(rank)
    return list(groups.values()) if len(groups) * len(traces) <= LINES else []


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) < 4:
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return f"rank {ranks[0]} and {len(ranks) - 1} like it"


def _lines(sentence: str, letters: int) -> list[str]:
    """A sentence in lines of at most so many letters. It is broken between its facts if possible."""
    joined = " · ".join(fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in sentence.split(" · "))
    whole = joined if all(len(word) <= letters for word in joined.split(" ")) else sentence
    return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip(" ·") for line in textwrap.wrap(whole, letters)]


@cache
def picture() -> type[Figure]:
    """The class of figures that a notebook shows by itself. The first call loads matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    class Picture(Figure):
        """A figure that a notebook shows by itself. (Without this class IPython shows only figures of pyplot.) Names in
        it are drawn as they are: matplotlib would read what is between two dollars as a formula."""

        alt = ""

        def draw(self, renderer: Any) -> None:
            for text in self.findobj(Text):
                text.set_parse_math(False)
            for axis in [axis for axes in self.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"]:
                for tick in (*axis.majorTicks, *axis.minorTicks):
                    tick.label1.set_parse_math(True)  # (matplotlib's own powers of ten)
            super().draw(renderer)

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
            from PIL import Image

            whole, file = io.BytesIO(), io.BytesIO()
            self.savefig(whole, format="png", dpi=144, facecolor=PAPER)
            # A palette makes the file three times smaller. It is stored in the notebook.
            Image.open(whole).convert("RGB").quantize(255, dither=Image.Dither.NONE).save(file, "png")
            data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": self.alt}
            # Give no height: `%matplotlib inline` replaces this picture by its own one, which has other margins.
            return data, {"image/png": {"width": round(self.get_size_inches()[0] * 96), "alt": self.alt}}

    return Picture
