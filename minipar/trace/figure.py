"""The layout of a picture: colours, the figure's measures in inches, and its words (title, facts, legend).

title, one line                           all places are measured from the top in inches, so that texts do
facts, one line                           not overlap and none is cut off, for any number of ranks
legend
rank 0 | timeline            | 27% idle
       | memory              | peaks
notes, and facts that had no room above
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.program import Program
from minipar.trace import Trace, labels
from minipar.trace.comparison import LEVELS
from minipar.trace.memory_series import ALL_KINDS
from minipar.trace.shades import MOST, Shades, repeated

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Look(NamedTuple):
    """Colours of a kind of instruction: the bar, its edge, the number on it; a hatch; and for chunks after the first
    one (see `shades`) how many bands are at the lower edge, and their colour."""

    face: str
    edge: str
    ink: str = "#fefefe"
    hatch: str = ""
    bands: int = 0
    tone: str = ""


# These are colours of the paper, not of the data: a page with a dark mode replaces only these.
INK, MUTED, RULE, PAPER = "#1a1a1a", "#5c5c5c", "#dcdcdc", "#ffffff"
WIRE = "#8f3f6d"  # ticks where a message is received
DARK = "#201400"  # numbers on light bars, in both modes

_PLAIN = {
    "forward": Look("#0072B2", "#004a75"),
    "backward": Look("#E69F00", "#7a5300", DARK),
    "input gradient": Look("#F6CF78", "#7a5300", DARK),
    "weight gradient": Look("#8F5F00", "#5c3d00"),
    "recompute": Look("#56B4E9", "#1f6d9c", DARK),
    "optimizer step": Look("#009E73", "#00664a"),
    "reduce": Look("#009E73", "#00664a"),
    "message": Look("#CC79A7", "#8f3f6c", hatch="//////"),
    "receive": Look(WIRE, WIRE),
    "collective": Look("#CC79A7", "#8f3f6c", hatch="++++++"),
    "all-reduce": Look("#CC79A7", "#8f3f6c", hatch="xxxxxx"),
    "reduce-scatter": Look("#CC79A7", "#8f3f6c", hatch="\\\\\\\\\\\\"),
    "all-gather": Look("#CC79A7", "#8f3f6c", hatch="||||||"),
    "all-to-all": Look("#CC79A7", "#8f3f6c", hatch="------"),
    "copy": Look("#9a9a9a", "#6a6a6a"),
}
SHADED = ("forward", "backward", "input gradient", "weight gradient", "recompute")


def mixed(colour: str, other: str, part: float) -> str:
    """A colour, mixed with another one."""
    pairs = [(int(colour[k : k + 2], 16), int(other[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{int(a + (b - a) * part + 0.5):02X}" for a, b in pairs)


def shaded(look: Look, shade: int) -> Look:
    """The look of a chunk: dark for even chunks, light for odd ones; from chunk 1 on with bands of the other tone."""
    light = mixed(look.face, "#ffffff", 0.55)
    bands = (shade + 1) // 2
    return (
        look._replace(face=light, ink=DARK, bands=bands, tone=look.face)
        if shade % 2
        else look._replace(bands=bands, tone=light)
    )


#: The look of each kind; `forward 2` is a forward of chunk 2.
LOOKS = _PLAIN | {f"{kind} {shade}": shaded(_PLAIN[kind], shade) for shade in range(1, MOST) for kind in SHADED}
GREY = Look("#7a7a7a", "#4d4d4d")  # samples of chunks in a legend


def plain(kind: str) -> str:
    """A kind without its shade."""
    return kind[:-2] if kind[-1].isdigit() else kind


#: How long an instruction took against the other trace (see `comparison.LEVELS`), and the colour of that.
DIFFERENCES = tuple(
    zip((word for word, _ in LEVELS), ("#332288", "#9F98CF", "#C8C8C8", "#F0B58A", "#D55E00"), strict=True)
)
RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#999933", "#7A7A7A", "#CC79A7", "#8C6D31")
#: Kinds of memory: parameters first, as in all views.
MEMORY = dict(
    zip(ALL_KINDS, ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#999933", "#9a9a9a"), strict=True)
)
COLLECTIVE = ("collective", "all-reduce", "reduce-scatter", "all-gather", "all-to-all")
BENEATH = ("message", "receive", *COLLECTIVE, "copy")  # kinds that are drawn under the compute bars
LINES = 8  # memory curves; beyond this one curve shows the highest rank

Bars = dict[str, "np.ndarray"]  # kind -> rows of (rank, start, end, micro-batch), on the time axis


class FigureLayout:
    """An empty picture of one trace or two, with its words; `axes` adds a panel.

    `bars[t]` has the bars of trace t, without the kinds for which there is no room.
    """

    def __init__(
        self, traces: Sequence[Trace], bars: list[Bars], texts: Sequence[tuple[str, ...]], width: float, title: str,
        memory: bool, folded: bool = False,
    ) -> None:  # fmt: skip
        self.traces, self.width, self.texts, self.folded = traces, width, texts, folded
        self.ranks, self.count = len(traces[0].program.ranks), len(traces)
        self.names = labels.names(traces)
        longest = max(len(labels.rank_name(traces[0].program, rank)) for rank in range(min(self.ranks, 64)))
        longest += 2 * (self.count == 2)  # two traces have a line each for a part of the name: `(tp 0) measured`
        self.left = max(1.15, 0.22 + 0.064 * longest)  # inches
        self.curves = _alike(traces)
        self.key = self._peaks()
        self.key_head = ["peak in MiB" if traces[0].unit == "bytes" else "peak", " / ".join(self.names)][: self.count]
        beside = [self.share(trace, rank) for trace in traces[-1:] for rank in range(min(len(trace.program.ranks), 64))]
        keys = [*(f"{a}  {b}" for a, b in self.key), *self.key_head]
        self.right = 0.35 + 0.066 * max(map(len, [*keys, *beside]))
        self.rows = 1 if folded else self.count  # lanes of a rank
        self.pitch = self.rows + (0.22 if self.rows == 2 else 0.0)  # from rank to rank, in lanes
        lanes = self.ranks * self.pitch - (self.pitch - self.rows)
        kinds = {kind for found in bars for kind in found}
        tall = 0.36 if folded or not kinds & {*BENEATH} else 0.66 if kinds & {*COLLECTIVE} else 0.5
        self.lane = min(tall, max(8.0 / lanes, 0.02))  # inches
        self.beneath = tall > 0.36 and self.lane > 0.2
        self.strip = (0.72, 0.92) if self.lane > 0.1 else (0.55, 0.95)  # where the differences are, in lanes
        self.bars = [{k: b for k, b in found.items() if self.beneath or k not in BENEATH} for found in bars]
        if folded:
            self.bars[0] = {}
        self.timeline = lanes * self.lane
        self.memory = max(1.3, 0.15 * (len(self.key) + len(self.key_head)))

        letters = int((width - 0.3) * 13.5)  # on one line of the facts
        most = int(letters * 0.7)
        self._title = title if len(title) <= most else title[: most - 1] + "…"
        own = (labels.facts(traces[0]), labels.both(traces))[self.count - 1].split(" · ")
        names = f"{' → '.join(self.names)}: "
        self._facts = next(
            (line for k in range(len(own), 0, -1) if len(line := names + " · ".join(own[:k])) <= 1.05 * letters),
            names + own[0],
        )
        rest = own[self._facts.count(" · ") + 1 :]
        self._foot = [  # what has no room above, and the notes
            line
            for words in (title * (self._title != title), " · ".join(rest), *(trace.note for trace in traces))
            for line in _lines(words, letters)
        ]
        shades = next((names for names in (Shades(trace.program).names for trace in traces) if names), ())
        kinds = {plain(kind) for found in self.bars for kind in found}
        self._legend = [kind for kind in _PLAIN if kind in kinds]
        self._legend += shades
        self._shades = {name: shaded(GREY, repeated(k)) for k, name in enumerate(shades)}
        self._legend += [] if folded or self.count < 2 else self.names
        self._legend += [word for word, _ in DIFFERENCES] if folded else []
        self._columns = max(1, min(len(self._legend), int((width - 0.3) / 1.25)))
        rows = -(-len(self._legend) // self._columns)
        self.top = 0.12 + 0.22 + 0.17 + 0.06 + 0.19 * rows + 0.1
        self.memory_top = self.top + self.timeline + 0.14
        panels = self.memory_top + self.memory if memory else self.top + self.timeline
        self.height = panels + 0.46 + (0.06 + 0.16 * len(self._foot) if self._foot else 0.0)
        self.figure = picture()(figsize=(width, self.height), dpi=100, facecolor=PAPER)
        self.figure.alt = labels.description(traces)  # type: ignore[attr-defined]
        self._write()

    def axes(self, top: float, height: float) -> Axes:
        """A panel whose upper edge is `top` inches below the upper edge of the figure."""
        inside = (self.width - self.left - self.right) / self.width
        axes = self.figure.add_axes(
            (self.left / self.width, 1 - (top + height) / self.height, inside, height / self.height), facecolor=PAPER
        )
        ruled(axes)
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        return axes

    def points(self, span: tuple[float, float]) -> float:
        """Printer's points (1/72 inch) of one unit of the time axis."""
        return (self.width - self.left - self.right) * 72 / (span[1] - span[0])

    def zone(self, kind: str, trace: int) -> tuple[float, float]:
        """Top and bottom of the bars of a kind, in lanes from the upper edge of their rank's lanes."""
        if self.folded:
            return 0.07, 0.70
        if not self.beneath:
            low, high = 0.07, 0.93
        elif kind not in BENEATH:
            low, high = 0.05, 0.56 if any(one in found for one in COLLECTIVE for found in self.bars) else 0.68
        elif any(one in found for one in COLLECTIVE for found in self.bars):
            low, high = (0.71, 0.97) if kind in (*COLLECTIVE, "copy") else (0.60, 0.68)
        elif not any("copy" in found for found in self.bars):
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
        return [(_ranks(self.traces[0].program, ranks), both[ranks[0]]) for ranks in self.curves]

    def share(self, trace: Trace, rank: int) -> str:
        """The words beside a lane; of a folded comparison also how much more the rank computes."""
        words = labels.share(trace, rank)
        if self.folded and (other := self.traces[0].busy[rank]):
            return f"{words}, busy {trace.busy[rank] / other - 1:+.0%}"
        return words

    def _write(self) -> None:
        self._line(self._title, 0.12, size=10.5, weight="bold", color=INK)
        self._line(self._facts, 0.34, size=8.5, color=MUTED)
        if self._legend:
            handles = [self._handle(kind) for kind in self._legend]
            banded = {h: _banded(self._shades[h.get_label()]) for h in handles if h.get_label() in self._shades}
            self.figure.legend(
                handles=handles, handler_map=banded, ncols=self._columns, loc="upper left",
                bbox_to_anchor=(0.15 / self.width, 1 - 0.57 / self.height), borderaxespad=0, borderpad=0,
                frameon=False, labelcolor=INK, fontsize=8, handlelength=1.6, handleheight=0.95, handletextpad=0.5,
                columnspacing=1.4, labelspacing=0.4,
            )  # fmt: skip
        for k, line in enumerate(self._foot):
            self._line(line, self.height - 0.16 * (len(self._foot) - k) - 0.04, size=8, color=MUTED)

    def _line(self, text: str, top: float, **style: Any) -> None:
        self.figure.text(0.15 / self.width, 1 - top / self.height, text, va="top", **style)

    def _handle(self, kind: str) -> Any:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        if kind == "receive":
            return Line2D([], [], color=LOOKS[kind].edge, marker="|", linestyle="", markersize=8, mew=1.3, label=kind)
        if kind in self._shades:
            look = self._shades[kind]
            return Patch(facecolor=look.face, edgecolor=look.edge, linewidth=0.6, label=kind)
        if kind in dict(DIFFERENCES):
            words = labels.legend([], self.names).get(kind, kind)
            return Patch(facecolor=dict(DIFFERENCES)[kind], label=words)
        if kind in LOOKS:
            look = LOOKS[kind]
            words = labels.legend([kind], self.names).get(kind, kind)
            return Patch(facecolor=look.face, edgecolor=look.edge, linewidth=0.6, hatch=look.hatch, label=words)
        if kind == self.names[0]:
            return Patch(facecolor="none", edgecolor=MUTED, linewidth=1.2, label=f"{kind} (outlined)")
        return Patch(facecolor=MUTED, edgecolor=MUTED, linewidth=1.2, label=f"{kind} (filled)")


def ruled(axes: Axes, title: str = "") -> None:
    """The style of all charts: thin lines at the left and below, small words, a bold title at the left."""
    axes.tick_params(colors=MUTED, labelcolor=INK, length=3, width=0.6, labelsize=8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=MUTED, linewidth=0.6)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=8.5)
    if title:
        axes.set_title(title, loc="left", size=10.5, weight="bold", color=INK)


def _banded(look: Look) -> Any:
    """What draws the sample of a chunk in a legend: a bar with its bands."""
    from matplotlib.legend_handler import HandlerBase
    from matplotlib.patches import Rectangle

    class Banded(HandlerBase):
        def create_artists(
            self, _: Any, __: Any, x: float, y: float, wide: float, tall: float, *more: Any
        ) -> list[Any]:
            style: dict[str, Any] = {"transform": more[-1], "linewidth": 0.6}
            bands = [
                Rectangle((x + 0.5, y + 0.7 + 2.6 * k), wide - 1, 1.7, facecolor=look.tone, **{**style, "linewidth": 0})
                for k in range(look.bands)
            ]
            return [Rectangle((x, y), wide, tall, facecolor=look.face, edgecolor=look.edge, **style), *bands]

    return Banded()


def _alike(traces: Sequence[Trace]) -> list[list[int]]:
    """The ranks of each memory curve: in one trace, ranks with the same curve share it. Empty if there are too many."""
    groups: dict[object, list[int]] = {}
    for rank in range(len(traces[0].program.ranks)):
        curve = traces[0].memory(rank)
        groups.setdefault((*curve.times, *curve.total) if len(traces) == 1 else rank, []).append(rank)
    return list(groups.values()) if len(groups) * len(traces) <= LINES else []


def _ranks(program: Program, ranks: Sequence[int]) -> str:
    if program.serving is not None and len(ranks) < 4:
        return ", ".join(labels.rank_name(program, rank) for rank in ranks)
    if len(ranks) < 4:
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return f"rank {ranks[0]} and {len(ranks) - 1} like it"


def _lines(sentence: str, letters: int) -> list[str]:
    """A sentence in lines of at most so many letters. It is broken between its facts if possible."""
    joined = " · ".join(fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in sentence.split(" · "))
    whole = joined if all(len(word) <= letters for word in joined.split(" ")) else sentence
    return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip(" ·") for line in textwrap.wrap(whole, letters)]


ON_ANY = "#757575"  # ink that can be read on white and on black


@contextmanager
def _on_any_page(figure: Figure) -> Iterator[None]:
    """The colours of the paper as a notebook's output needs them, since it is shown in light and in dark pages: the ink
    is grey, and nothing is behind it. A figure that is saved to a file keeps its white paper."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    grey = {INK: ON_ANY, MUTED: ON_ANY, RULE: "#80808060", "#dddddd": "#80808060", "#000000": ON_ANY, WIRE: "#b0608f"}
    figure.draw_without_rendering()  # (ticks are made when a figure is drawn)
    before: list[tuple[Any, Any]] = []
    for kind, properties in (
        (Text, ("color",)),
        (Line2D, ("color", "markeredgecolor", "markerfacecolor")),
        (Patch, ("edgecolor",)),
        (Collection, ("edgecolor",)),
    ):
        for artist in figure.findobj(kind):
            if isinstance(artist, Text) and artist.get_path_effects():
                continue  # (words on a bar, with paper of their own around them)
            if artist.get_alpha() == 1:  # (of lines of a grid; it would win over that of a colour)
                before.append((artist.set_alpha, 1))
                artist.set_alpha(None)
            for name in properties:
                old = getattr(artist, f"get_{name}")()
                one = old[0] if isinstance(artist, Collection) and len(old) else old
                if (isinstance(one, str) and one.lower() == "none") or len(one) == 0:
                    continue
                if (found := grey.get(to_hex(one))) is not None and artist.get_alpha() is None:
                    setter = getattr(artist, f"set_{name}")
                    before.append((setter, old))
                    setter(found)
    try:
        yield
    finally:
        for setter, old in before:
            setter(old)


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
            with _on_any_page(self):
                self.savefig(whole, format="png", dpi=192, transparent=True)  # twice as fine as a page
            # A palette makes the file three times smaller. It is stored in the notebook.
            Image.open(whole).quantize(255, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(file, "png")
            data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": self.alt}
            # Give no height: `%matplotlib inline` replaces this picture by its own one, which has other margins.
            return data, {"image/png": {"width": round(self.get_size_inches()[0] * 96), "alt": self.alt}}

    return Picture
