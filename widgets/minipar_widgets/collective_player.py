"""CollectivePlayer: how a collective gets its chunks from rank to rank, step by step, with real numbers."""

from __future__ import annotations

from typing import Any

from minipar.costs.quantities import size
from minipar.errors import MiniparError
from minipar.program import Op, collectives
from minipar.wording import several
from minipar_widgets.arguments import one_of, whole
from minipar_widgets.base import Explorer, View
from minipar_widgets.collective_model import MOST_RANKS, Cell, Links, Play, play
from minipar_widgets.host import traitlets, ui
from minipar_widgets.sketch import Sketch

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class CollectiveView(View):
    """One collective from beginning to end; `update(...)` takes what `collective_model.play` takes."""

    name = "collective"
    play = traitlets.Dict().tag(sync=True)

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()
        self.found: Play | None = None
        self.update(*given, **options)

    def update(self, *given: Any, **options: Any) -> None:
        """Execute and show another collective. If it is impossible, the widget shows the reason instead."""
        with self.hold_sync():
            try:
                self.found = play(*given, **options)
                if not self.found.time:
                    raise MiniparError(_EMPTY)
                self.play = _data(self.found)
                self.problem = ""
            except MiniparError as error:
                self.problem = str(error)
            self.refresh()

    def summary(self) -> str:
        assert self.found is not None
        one = self.found
        scale, unit = _scale(one.time)
        return (
            f"{one.program.name}, {size(one.nbytes)}: {several(len(one.messages), 'message')}, "
            f"{one.time / scale:.4g} {unit}; the "
            f"busiest rank sends {size(max(map(one.sent, range(one.ranks))))}, the least is {size(one.least_bytes)}"
        )

    def caption(self) -> str:
        assert self.found is not None
        one = self.found
        scale, unit = _scale(one.time)
        nodes = " (which takes all links to be alike)" if one.links.far else ""
        formula = one.closed_form
        known = "" if formula is None else f", {formula / scale:.4g} {unit} by the closed form{nodes}"
        return (
            f"Time {one.time / scale:.4g} {unit} as simulated{known}; no algorithm can do it in less than "
            f"{one.least_time / scale:.4g} {unit}. Chunk c of rank r "
            "begins as 10 (r + 1) + c: a cell shows the sum so far, the marks under it whose parts are in it. "
            "Green: as it has to be at the end."
        )

    def rows(self) -> list[list[str]]:
        assert self.found is not None
        one = self.found
        rows = [["link", "bytes", "messages", "of the least that the busiest rank sends"]]
        for (source, target), sent in sorted(one.by_link.items()):
            messages = sum(m.source == source and m.target == target for m in one.messages)
            share = f"{sent / one.least_bytes:.1%}" if one.least_bytes else ""
            rows.append([f"{source} to {target}", f"{sent:,}", str(messages), share])
        for rank in range(one.ranks):
            share = f"{one.sent(rank) / one.least_bytes:.1%}" if one.least_bytes else ""
            rows.append(
                [f"all of rank {rank}", f"{one.sent(rank):,}", str(sum(m.source == rank for m in one.messages)), share]
            )
        return rows

    def picture(self, dark: bool | None = False) -> bytes:
        assert self.found is not None
        return _picture(self.found, dark)


_EMPTY = "nothing takes any time here: choose 2 or more ranks, and a latency or a size above 0"


def _scale(time: float) -> tuple[float, str]:
    return next(((one, unit) for one, unit in _SCALES if time >= one), _SCALES[-1])


def _data(one: Play) -> dict[str, Any]:
    """The data for the browser. Times are in `unit`, with enough digits to keep their order."""
    scale, unit = _scale(one.time)
    moments = sorted({round(x / scale, 9) for m in one.messages for x in (m.start, m.end)} | {0.0})
    changes = [[round(c.time / scale, 9), c.rank, c.chunk, c.cell] for c in one.changes]
    ranks = range(one.ranks)
    adds = [
        [round(one.trace.starts[rank][k] / scale, 9), round(one.trace.ends[rank][k] / scale, 9), rank, c]
        for rank, row in enumerate(one.program.ranks)
        for k, ins in enumerate(row)
        if ins.op is Op.REDUCE
        for c in ins.layers
    ]
    return {
        "adds": adds,
        "unit": unit,
        "time": round(one.time / scale, 9),
        "nodes": one.setting.nodes,
        "sizes": list(one.program.chunks),
        "moments": sorted({*moments, *(change[0] for change in changes)}),
        "first": [list(row) for row in one.first],
        "last": [list(row) for row in one.last],
        "messages": [
            [m.source, m.target, round(m.start / scale, 9), round(m.end / scale, 9), m.bytes, m.chunks, m.values]
            for m in one.messages
        ],
        "changes": changes,
        "links": [[source, target, sent, size(sent)] for (source, target), sent in one.by_link.items()],
        "sent": [one.sent(rank) for rank in ranks],
        "least": one.least_bytes,
        "words": {"sent": [size(one.sent(rank)) for rank in ranks], "least": size(one.least_bytes)},
    }


def _picture(one: Play, dark: bool | None) -> bytes:
    """The grid at four moments, from the beginning to the end, side by side."""
    ranks, chunks = one.ranks, len(one.program.chunks)
    moments = sorted({c.time for c in one.changes})
    stops = [0.0, *(moments[max(0, -(-len(moments) * k // 3) - 1)] for k in (1, 2, 3))]
    cell, row, gap = min(44.0, 190 / chunks), max(14.0, min(26.0, 260 / ranks)), 18
    panel = chunks * cell
    sketch = Sketch(56 + 4 * panel + 3 * gap + 10, 34 + ranks * row + 6, dark)
    scale, unit = _scale(one.time)
    for rank in range(ranks):
        sketch.text(50, 34 + (rank + 0.5) * row, f"rank {rank}", size=11, anchor="rm")
    for k, stop in enumerate(stops):
        left, cells = 56 + k * (panel + gap), [list(line) for line in one.first]
        for change in one.changes:
            if change.time <= stop:
                cells[change.rank][change.chunk] = change.cell
        title = f"{stop / scale:.3g} {unit}" if k else "at first"
        sketch.text(left, 17, title, sketch.look.muted, 11)
        for rank in range(ranks):
            for c, held in enumerate(cells[rank]):
                x, y = left + c * cell, 34 + rank * row
                _draw_cell(sketch, x, y, cell - 2, row - 2, held, one.last[rank][c], ranks)
    return sketch.png()


def _draw_cell(
    s: Sketch, x: float, y: float, width: float, height: float, cell: Cell | None, goal: Cell | None, ranks: int
) -> None:
    if cell is None:
        s.rect(x, y, width, height, edge=s.look.rule)
        return
    parts = cell[1].bit_count()
    done = goal is not None and goal[1] == cell[1] and parts > 1
    face, edge, ink = ("#009E73", "#00664a", "#fefefe") if done else ("#0072B2", "#004a75", "#fefefe")
    if parts > 1 and not done:
        face, edge, ink = "#56B4E9", "#1f6d9c", "#201400"
    s.rect(x, y, width, height, face, edge)
    if width >= 7 * len(str(cell[0])) and height >= 12:
        s.text(x + width / 2, y + height / 2 - 1, str(cell[0]), ink, 11, "mm")
    each = (width - 4) / ranks
    for rank in range(ranks):
        if cell[1] >> rank & 1 and each >= 1:
            s.rect(x + 2 + rank * each, y + height - 4, max(1.0, each - 1), 2, ink)


class CollectivePlayer(Explorer):
    """Choose a collective, an algorithm, ranks and links; watch it, step through it, and see what it costs.

    algorithm   default: the collective's first one
    Errors: PlanError for what no control has.
    """

    def __init__(self, collective: str = "allreduce", algorithm: str = "", ranks: int = 4) -> None:
        names = collectives.names(one_of("collective", collective, collectives.COLLECTIVES))
        algorithm = one_of("algorithm", algorithm, names) if algorithm else names[0]
        whole("ranks", ranks, 2, MOST_RANKS)
        style = {"description_width": "7.5em"}
        layout = {"width": "20em"}
        both = {"style": style, "layout": layout}
        numbers = {**both, "continuous_update": False}
        self.collective = ui.Dropdown(
            options=collectives.COLLECTIVES, value=collective, description="collective", **both
        )
        self.algorithm = ui.Dropdown(options=names, value=algorithm, description="algorithm", **both)
        self.ranks = ui.IntSlider(ranks, 2, MOST_RANKS, description="ranks", **both)
        self.nodes = ui.Dropdown(options=_divisors(ranks), value=1, description="nodes", **both)
        self.root = ui.IntSlider(0, 0, ranks - 1, description="root", **both)
        self.mebibytes = ui.FloatLogSlider(
            4, min=-3, max=7, step=1, base=2, readout_format=".4g", description="size (MiB)", **numbers
        )
        self.alpha = ui.FloatSlider(20, min=0, max=500, description="latency (µs)", **numbers)
        self.rate = ui.FloatLogSlider(
            10, min=-1, max=2.5, step=0.1, readout_format=".3g", description="link (GB/s)", **numbers
        )
        self.adding = ui.FloatLogSlider(
            50, min=0, max=3, step=0.1, readout_format=".3g", description="adding (GB/s)", **numbers
        )
        self.far = ui.FloatSlider(1, min=1, max=20, description="nodes slower ×", **numbers)
        self.view = CollectiveView(collective, algorithm, ranks, 4 << 20, links=Links(20e-6, 1e-10, 2e-11))
        names = ("collective", "algorithm", "ranks", "nodes", "root", "mebibytes", "alpha", "rate", "adding", "far")
        self.controls = {name: getattr(self, name) for name in names}
        super().__init__([ui.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"}), self.view])
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self._changed()

    def _changed(self, change: Any = None) -> None:
        if getattr(self, "_busy", False):
            return
        self._busy = True  # (new options change the controls' values, and that calls this method again)
        try:
            self._fit_options()
        finally:
            self._busy = False
        far = (self.alpha.value * 1e-6 * self.far.value, 1e-9 / self.rate.value * self.far.value)
        several = self.nodes.value > 1
        links = Links(
            self.alpha.value * 1e-6, 1e-9 / self.rate.value, 1e-9 / self.adding.value, far if several else None
        )
        nbytes = round(self.mebibytes.value * 2**20)
        self.view.update(
            self.collective.value, self.algorithm.value, self.ranks.value, nbytes,
            root=self.root.value if self.rooted else 0, nodes=self.nodes.value, links=links,
        )  # fmt: skip
        self.problem = self.view.problem

    @property
    def rooted(self) -> bool:
        return self.collective.value in ("broadcast", "reduce")

    def _fit_options(self) -> None:
        """Offer only possible choices."""
        names = collectives.names(self.collective.value)
        if tuple(self.algorithm.options) != names:
            kept = self.algorithm.value
            self.algorithm.options = names
            self.algorithm.value = kept if kept in names else names[0]
        if list(self.nodes.options) != _divisors(self.ranks.value):
            kept = self.nodes.value
            self.nodes.options = _divisors(self.ranks.value)
            self.nodes.value = kept if kept in self.nodes.options else 1
        self.root.max = self.ranks.value - 1
        self.root.layout.display = "" if self.rooted else "none"
        self.far.layout.display = "" if self.nodes.value > 1 else "none"

    def settings(self) -> dict[str, str]:
        shown = {
            "collective": self.collective.value,
            "algorithm": self.algorithm.value,
            "ranks": str(self.ranks.value),
            "size": f"{self.mebibytes.value:g} MiB",
            "latency": f"{self.alpha.value:g} µs",
            "link": f"{self.rate.value:.3g} GB/s",
            "adding": f"{self.adding.value:.3g} GB/s",
        }
        if self.nodes.value > 1:
            slower = f"{self.far.value:g} times slower" if self.far.value > 1 else "as fast as inside"
            shown["nodes"] = f"{self.nodes.value}, links between them {slower}"
        return shown


def _divisors(ranks: int) -> list[int]:
    return [n for n in range(1, ranks + 1) if ranks % n == 0]
