"""CheckpointExplorer: what recomputation does, layer by layer, and what it costs in memory and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from minipar.costs.quantities import size
from minipar.costs.recomputation import keep_everything, memory, time
from minipar.errors import MiniparError, PlanError
from minipar.program import Op
from minipar.strategies import segments
from minipar.trace.figure import LOOKS
from minipar.wording import several
from minipar_widgets import chart
from minipar_widgets.arguments import whole
from minipar_widgets.base import Explorer, View, beside, real
from minipar_widgets.checkpoint_model import (
    MOST_LAYERS,
    Layers,
    MeasuredStep,
    Tape,
    best_length,
    curve,
    lengths_to_measure,
    measure,
    tape,
)
from minipar_widgets.host import traitlets, ui
from minipar_widgets.sketch import Sketch, ticks

_KINDS = {Op.FORWARD: "forward", Op.RECOMPUTE: "recompute", Op.BACKWARD: "backward"}


class CheckpointView(View):
    """The tape of one schedule; `update(layers, word)` shows another one, `word` as in `checkpoint=`."""

    name = "checkpoint"
    tape = traitlets.Dict().tag(sync=True)

    def __init__(self, layers: Layers | None = None, word: str = "sqrt") -> None:
        super().__init__()
        self.found: Tape | None = None
        self.update(layers or Layers(), word)

    def update(self, layers: Layers, word: str) -> None:
        """Show another schedule. If it is impossible, the widget shows the reason instead."""
        with self.hold_sync():
            try:
                self.found = tape(layers, word)
                self.tape = _data(self.found)
                self.problem = ""
            except MiniparError as error:
                self.found, self.problem = None, str(error)
            self.refresh()

    def summary(self) -> str:
        assert self.found is not None
        one, plain = self.found, _plain(self.found.layers)
        peak, least = amount(one.layers, one.peak), amount(one.layers, plain[0])
        budget = segments.budget_of(one.word)
        word = one.word if budget is None else f"a budget of {amount(one.layers, budget)}"
        return (
            f"checkpoint={word}, {several(one.layers.count, 'layer')}: peak {peak} (without recomputation {least}); "
            f"{several(one.again, 'layer')} {'runs' if one.again == 1 else 'run'} again, time "
            f"x{one.ends[-1] / plain[1]:.2f}"
        )

    def caption(self) -> str:
        return (
            "F forward, R forward again, B backward; a line under a block says that the layer keeps what it saves. "
            "Between blocks: a thin line is an output that is kept, a hatched band what autograd saved, a cross an "
            "output that is dropped. Counted are outputs, their gradients, and what is saved."
        )

    def rows(self) -> list[list[str]]:
        assert self.found is not None
        one, before = self.found, 0.0
        rows = [["move", "what", "layer", "keeps what it saves", "drops", "start", "end", "memory", "memory after"]]
        names = {Op.FORWARD: "forward", Op.RECOMPUTE: "forward again", Op.BACKWARD: "backward"}
        for k, (move, end, level) in enumerate(zip(one.moves, one.ends, one.levels, strict=True)):
            drops = f"output of layer {move.layer - 1}" if move.drops and move.op is not Op.BACKWARD else ""
            during, after = amount(one.layers, level.during), amount(one.layers, level.after)
            saves = "yes" if move.saves else ""
            line = [str(k), names[move.op], str(move.layer), saves, drops, f"{before:g}", f"{end:g}", during, after]
            rows.append(line)
            before = end
        return rows

    def picture(self, dark: bool | None = False) -> bytes:
        assert self.found is not None
        return _picture(self.found, dark)


def amount(layers: Layers, number: float) -> str:
    """Memory as text, in the unit of the layers."""
    return size(number) if layers.rows else f"{number:g} units"


def _plain(layers: Layers) -> tuple[int, float]:
    """Peak and time without recomputation."""
    moves = keep_everything(layers.count)
    return memory(layers.chain, moves)[1], time(layers.chain, moves)


def _data(one: Tape) -> dict[str, Any]:
    scale = 1.0 if not one.layers.rows else 1 / one.chain.forward[0]
    return {
        "layers": one.layers.count,
        "unit": "MiB" if one.layers.rows else "units",
        "clock": "time (forwards of a layer)",
        "peak": one.peak,
        "moves": [
            [m.op.value, m.layer, m.saves, m.hands, m.drops, end * scale, level.during, level.after]
            for m, end, level in zip(one.moves, one.ends, one.levels, strict=True)
        ],
        "lifetimes": [list(life) for life in one.lifetimes],
    }


def _picture(one: Tape, dark: bool | None) -> bytes:
    """The tape and the memory under it."""
    n, left, width = one.layers.count, 70, 900
    h = max(6.0, min(16.0, 260 / n))
    sketch = Sketch(width, 12 + n * h + 118, dark)
    scale = (width - left - 14) / one.ends[-1]
    starts = [0.0, *one.ends[:-1]]
    for layer in range(0, n, math.ceil(13 / h)):
        sketch.text(left - 6, 8 + (layer + 0.5) * h, f"layer {layer}", sketch.look.muted, 10, "rm")
    saved, kept = ("#4d3a12", "#7cc7f0") if dark else ("#fbe6b5", "#0072B2")
    for kind, layer, first, last in one.lifetimes:
        x, end, y = left + one.ends[first] * scale, left + one.ends[last] * scale, 8 + layer * h
        if kind == "saved":
            sketch.rect(x, y + 1, end - x, h - 2, saved)
    for kind, layer, first, last in one.lifetimes:
        x, end, y = left + one.ends[first] * scale, left + one.ends[last] * scale, 8 + (layer + 0.5) * h
        if kind == "output":
            sketch.line([(x, y), (end, y)], kept, 2)
            if one.moves[last].op is not Op.BACKWARD:
                s = min(3.5, h / 3)
                sketch.line([(end - s, y - s), (end + s, y + s)], sketch.look.warn, 1.5)
                sketch.line([(end - s, y + s), (end + s, y - s)], sketch.look.warn, 1.5)
    for move, start, end in zip(one.moves, starts, one.ends, strict=True):
        look, letter = LOOKS[_KINDS[move.op]], move.op.value
        x, y = left + start * scale, 8 + move.layer * h
        sketch.rect(x, y + 1, (end - start) * scale, h - 2, look.face, look.edge)
        if (end - start) * scale >= 12 and h >= 11:
            sketch.text(x + (end - start) * scale / 2, y + h / 2, letter, look.ink, 10, "mm")
    top, tall = 20 + n * h, 76.0
    points = [(float(left), top + tall)]
    for start, end, level in zip(starts, one.ends, one.levels, strict=True):
        y, after = top + tall * (1 - 0.86 * level.during / one.peak), top + tall * (1 - 0.86 * level.after / one.peak)
        points += [(left + start * scale, y), (left + end * scale, y), (left + end * scale, after)]
    sketch.line(points, kept, 1.5)
    peak = top + tall * 0.14
    sketch.line([(left, peak), (width - 14, peak)], sketch.look.warn, 1, dashed=True)
    sketch.text(width - 14, peak - 8, f"peak {amount(one.layers, one.peak)}", sketch.look.warn, 11, "rm")
    sketch.text(left - 6, top + tall / 2, "memory", size=11, anchor="rm")
    sketch.text(width - 14, top + tall + 12, "time", sketch.look.muted, 11, "rm")
    return sketch.png()


class CheckpointExplorer(Explorer):
    """Choose layers and what to keep; step through the tape; see memory and time for every segment length.

    `measure()`, or its button, runs some lengths on a real rank, and draws the results over the curves; the controls
    are locked meanwhile. Errors: PlanError for what no control has.
    """

    def __init__(self, layers: int = 16, checkpoint: str = "sqrt") -> None:
        whole("layers", layers, 2, MOST_LAYERS)
        style, size_ = {"description_width": "8.5em"}, {"width": "21em"}
        both = {"style": style, "layout": size_}
        way, length, budget, starts = _read(str(checkpoint), layers)
        self.controls: dict[str, Any] = {
            "layers": ui.IntSlider(layers, 2, MOST_LAYERS, description="layers", **both),
            "kind": ui.Dropdown(
                options=[("in units", 0), ("Linear, GELU: 256 rows", 256), ("Linear, GELU: 1024 rows", 1024)],
                value=0, description="a layer", style=style, layout={"width": "25em", "max_width": "calc(100% - 4px)"},
            ),
            "saved": ui.IntSlider(1, 0, 16, description="saves (units)", **both),
            "backward": ui.FloatSlider(2, min=0.5, max=4, step=0.1, description="backward takes", **both),
            "way": ui.Dropdown(
                options=["none", "sqrt", "every K layers", "a budget", "layers"], value=way,
                description="checkpoint", **both,
            ),
            "length": ui.IntSlider(length, 1, layers, description="K", **both),
            "budget": ui.IntSlider(budget, 5, 100, description="budget (%)", **both),
            "starts": ui.Text(starts, description="begin at", continuous_update=False, **both),
        }  # fmt: skip
        self.view = CheckpointView()
        self.chart = chart.Chart(300)
        self.run_button = ui.Button(description="measure", icon="play", layout={"width": "9em", "flex": "none"})
        self.note = ui.HTML()
        self.runs: list[MeasuredStep] = []
        panel = ui.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        foot = beside(self.run_button, self.note)
        super().__init__([panel, self.view, *real("CheckpointExplorer()", foot), self.chart])
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self.run_button.on_click(self.measure)
        self._changed()

    @property
    def layers(self) -> Layers:
        now = self.controls
        return Layers(now["layers"].value, now["saved"].value, now["backward"].value, now["kind"].value)

    @property
    def word(self) -> str:
        """The value of `checkpoint=` that the controls mean."""
        now = {name: control.value for name, control in self.controls.items()}
        if now["way"] == "every K layers":
            return str(min(now["length"], now["layers"]))
        if now["way"] == "a budget":
            return f"{max(1, _plain(self.layers)[0] * now['budget'] // 100)}B"
        if now["way"] == "layers":
            return now["starts"] if "," in now["starts"] else f"{now['starts']},"
        return str(now["way"])

    def _changed(self, change: Any = None) -> None:
        now = self.controls
        now["length"].max = now["layers"].value
        for name, way in {"length": "every K layers", "budget": "a budget", "starts": "layers"}.items():
            now[name].layout.display = "" if now["way"].value == way else "none"
        for name in ("saved", "backward"):
            now[name].layout.display = "none" if now["kind"].value else ""
        if change is not None and change["owner"] in (now["layers"], now["kind"]):
            self.runs = []
        self.run_button.disabled = not now["kind"].value
        self.note.value = escape(self._said())
        self.view.update(self.layers, self.word)
        self.problem = self.view.problem
        self.chart.show(self.figure(), self.view._line())

    def _said(self) -> str:
        if not self.controls["kind"].value:
            return "layers in units are on paper only; choose Linear, GELU to measure a real run"
        if not self.runs:
            return "trains with segments of some lengths, on one real rank that emulates a slower device"
        least = min(self.runs, key=lambda run: run.peak)
        which = f"segments of {several(least.length, 'layer')}" if least.length else "no recomputation"
        title = f"measured with {several(self.layers.count, 'layer')} and {self.layers.rows} rows"
        emulated = f"on a device that takes {self.layers.forward * 1e3:.3g} ms for a layer's forward"
        return f"{title}, {emulated}: least memory {size(least.peak)}, with {which}"

    def measure(self, _: Any = None) -> None:
        """Run some segment lengths, and the best one, on a real rank."""
        lengths = sorted({*lengths_to_measure(self.layers.count), best_length(self.layers)})
        words = ", ".join("none" if not n else str(n) for n in lengths)
        self._lock(True)
        self.note.value = f"runs of {several(self.layers.count, 'layer')}, in segments of {words} ..."
        wrong = ""
        try:
            self.runs = measure(self.layers, lengths)
        except MiniparError as error:
            wrong = str(error)
        finally:
            self._lock(False)
        self._changed()
        if wrong:
            self.note.value = escape(wrong)

    def _lock(self, locked: bool) -> None:
        for control in (*self.controls.values(), self.run_button):
            control.disabled = locked

    def figure(self) -> Any:
        """Memory and time over the segment length, with the sqrt(N) point, as data for plotly."""
        layers, points = self.layers, curve(self.layers)
        unit, word = (2**20, "MiB") if layers.rows else (1, "units")
        none, rest, best = points[0], points[1:], best_length(layers)
        found: list[dict[str, Any]] = []
        x = [point.length for point in rest]

        def points_of(name: str, x: Sequence[int], y: Sequence[float], colour: str, mark: str, **more: Any) -> None:
            marker = {"symbol": mark, "size": 11, "color": colour, "line": {"color": "#fff", "width": 1}}
            found.append({"type": "scatter", "x": x, "y": y, "name": name, "mode": "markers", "marker": marker, **more})

        line = {"mode": "lines+markers", "line": {"color": "#0072B2"}, "marker": {"size": 5}}
        points_of(f"peak memory ({word})", x, [p.peak / unit for p in rest], "#0072B2", "circle", **line)
        line = {"mode": "lines+markers", "line": {"color": "#E69F00", "dash": "dot"}, "marker": {"size": 5}}
        points_of(
            "time, of that without", x, [p.time / none.time for p in rest], "#E69F00", "square", yaxis="y2", **line
        )
        text = f"√N a/s = {best}" if best != round(math.sqrt(layers.count)) else f"√N = {best}"
        points_of(text, [best], [points[best].peak / unit], "#D55E00", "star")
        runs = [run for run in self.runs if run.length]
        base = next((run.seconds for run in self.runs if not run.length), 0.0)
        if runs and base:
            x = [run.length for run in runs]
            points_of("measured memory", x, [run.peak / unit for run in runs], "#0072B2", "diamond")
            points_of("measured time", x, [run.seconds / base for run in runs], "#E69F00", "diamond", yaxis="y2")
        layout = chart.layout(300, "layers in a segment (K)", f"peak memory ({word})")
        second = {
            "overlaying": "y",
            "side": "right",
            "title": {"text": "time"},
            "showgrid": False,
            "dtick": 0.25,
            "tickformat": ".2~f",
            "automargin": True,
            "range": [0, 1.75],
        }
        layout["yaxis"]["rangemode"] = "tozero"
        level = {"y0": none.peak / unit, "y1": none.peak / unit, "line": {"dash": "dash", "color": "#888"}}
        above = {"xref": "paper", "x": 0.01, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        layout |= {
            "yaxis2": second,
            "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, **level}],
            "annotations": [{"y": none.peak / unit, "text": "no recomputation", **above}],
        }
        return {"data": found, "layout": layout}

    def settings(self) -> dict[str, str]:
        kind = next(name for name, rows in self.controls["kind"].options if rows == self.controls["kind"].value)
        shown = {"layers": str(self.layers.count), "a layer": kind, "checkpoint": self.word}
        if not self.layers.rows:
            shown |= {"saves": several(self.layers.saved, "unit"), "backward": f"{self.layers.backward:g} forwards"}
        return shown

    def section(self, place: str = "widget") -> str:
        """The tape, and the curves as pictures for light and dark."""
        page = super().section(place)
        if self.problem:
            return page
        line = f"peak memory over the length of segments, least at {best_length(self.layers)}"
        return page + chart.picture(line, lambda dark, width: _curves(self.layers, self.runs, dark, width))

    def rows(self) -> list[list[str]]:
        rows = [["segments of", "peak memory", "time, of that without", "measured memory", "measured time (ms)"]]
        points, none = curve(self.layers), _plain(self.layers)[1]
        measured = {run.length: run for run in self.runs}
        for point in points:
            run = measured.get(point.length)
            real = [size(run.peak), f"{run.seconds * 1e3:.2f}"] if run else ["", ""]
            name = several(point.length, "layer") if point.length else "no recomputation"
            rows.append([name, amount(self.layers, point.peak), f"{point.time / none:.3f}", *real])
        return rows


def _read(checkpoint: str, layers: int) -> tuple[str, int, int, str]:
    """The controls' values for a value of `checkpoint=`: method, K, percent of a budget, first layers of segments."""
    k, starts = min(4, layers), "4,8,12"
    if checkpoint in ("none", "sqrt"):
        return checkpoint, k, 50, starts
    if checkpoint.isdecimal():
        return "every K layers", whole("checkpoint", int(checkpoint), 1, layers), 50, starts
    if checkpoint.removesuffix("%").isdecimal():
        return "a budget", k, whole("checkpoint, in percent", int(checkpoint[:-1]), 5, 100), starts
    if not checkpoint.replace(",", "").isdecimal():
        raise PlanError(
            f"checkpoint={checkpoint}: possible are none, sqrt, K, a budget such as 50%, or layers such as {starts}"
        )
    return "layers", k, 50, checkpoint


def _curves(layers: Layers, runs: Sequence[MeasuredStep], dark: bool | None, width: int) -> bytes:
    """Peak memory over the segment length."""
    points, best = curve(layers), best_length(layers)
    height, left, top = 240, 70, 20
    sketch = Sketch(width, height, dark)
    most = max(max(p.peak for p in points), *(r.peak for r in runs), 1)
    unit, word = (2**20, "MiB") if layers.rows else (1, "units")

    def at(length: float, peak: float) -> tuple[float, float]:
        x = left + (width - left - 24) * (length - 1) / max(1, layers.count - 1)
        return x, top + (height - top - 44) * (1 - peak / most)

    for tick in ticks(most / unit, 5):
        y = at(1, tick * unit)[1]
        sketch.line([(left, y), (width - 24, y)], sketch.look.rule)
        sketch.text(left - 6, y, f"{tick:g} {word}", sketch.look.muted, 11, "rm")
    for length in range(1, layers.count + 1, max(1, -(-layers.count * 22 // (width - left)))):
        sketch.text(at(length, 0)[0], height - 34, str(length), sketch.look.muted, 11, "mm")
    sketch.text(width / 2, height - 14, "layers in a segment; the diamond: sqrt(N)", sketch.look.muted, 11, "mm")
    sketch.line([at(p.length, p.peak) for p in points[1:]], "#0072B2", 2)
    for p in points[1:]:
        sketch.dot(*at(p.length, p.peak), 2.5, "#0072B2")
    y = at(1, points[0].peak)[1]
    sketch.line([(left, y), (width - 24, y)], sketch.look.muted, 1, dashed=True)
    sketch.text(left + 4, y + 9, "no recomputation", sketch.look.muted, 11)
    for run in runs:
        if run.length:
            sketch.diamond(*at(run.length, run.peak), 6, "#0072B2", sketch.look.paper)
    sketch.diamond(*at(best, points[best].peak), 7, "#D55E00", sketch.look.paper)
    return sketch.png()
