"""ShardingExplorer: fix the form of a tensor, and see which forms and collectives follow, and who holds what.

ShardingExplorer("MLP", "dp=2 tp=2")                           a layer of sharding_model.EXAMPLES
ShardingExplorer(captured, Mesh(tp=4), sharding.megatron())    a model that was captured, or one `sharding.Layer` of it
explorer.view.found                                            rows, collectives and the mistake, if there is one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from minipar.errors import MiniparError, PlanError
from minipar.program.mesh import Mesh
from minipar.sharding import Layer
from minipar.sharding.forms import axes_of
from minipar.sharding.repartition import Link
from minipar.trace.figure import LOOKS
from minipar_widgets.base import Explorer, View
from minipar_widgets.host import traitlets, ui
from minipar_widgets.sharding_model import (
    EXAMPLES,
    MOST_RANKS,
    STRATEGIES,
    Found,
    Move,
    Pick,
    Row,
    amount,
    annotated,
    column,
    duration,
    example,
    explore,
    outlook,
    picks_of,
    strategy,
    total,
    totals,
)
from minipar_widgets.sketch import Sketch, wrapped

Place = Callable[[str, str], float]  # of an axis and letters: where their column begins
_NOTHING = "nothing is fixed"
_OWN = "as it was given"
# Colours of forms, as in js/sharding.js: face, edge, ink on it, hatch in the blocks.
_FORMS = {
    "R": ("#c4c4c4", "#6a6a6a", "#201400", ""),
    "S": ("#0072B2", "#004a75", "#fefefe", ""),
    "P": ("#E69F00", "#7a5300", "#201400", "/"),
}


class Capture(Protocol):
    """What `sharding.capture_model` gives. (The widgets import no torch.)"""

    @property
    def layers(self) -> Sequence[Layer]: ...


class ShardingView(View):
    """The forms of one layer; `update(layer, mesh, picks, links)` shows another one.

    A click in the browser fixes a form, or frees it: `picks` has those that are fixed now, the newest one last.
    """

    name = "sharding"
    data = traitlets.Dict().tag(sync=True)  # see `_data`
    outlook = traitlets.Dict().tag(sync=True)  # what each form would give, see sharding_model.outlook
    asked = traitlets.Dict().tag(sync=True)  # what the browser asks for: {"id": n, "picks": [[tensor, axis, letters]]}
    editable = traitlets.Bool(True).tag(sync=True)

    def __init__(
        self, layer: Layer, mesh: Mesh, picks: Sequence[Pick] = (), links: Mapping[str, Link] | None = None
    ) -> None:
        super().__init__()
        self.found: Found | None = None
        self.picks: tuple[Pick, ...] = ()
        self._given: tuple[Layer, Mesh, Mapping[str, Link]] = (layer, mesh, dict(links or {}))
        self._id = 0
        self.observe(lambda change: self._asked(change["new"]), "asked")
        self.on_msg(self._wanted)
        self.update(layer, mesh, picks, links)

    def update(
        self, layer: Layer, mesh: Mesh, picks: Sequence[Pick] = (), links: Mapping[str, Link] | None = None
    ) -> None:
        """Show other forms. If that is impossible, the widget shows the reason instead."""
        self._given = (layer, mesh, dict(links or {}))
        self._id += 1
        self._show(tuple(picks))

    def _asked(self, asked: dict[str, Any]) -> None:
        if not asked or self.problem:
            return
        self._id = max(self._id, int(asked["id"]))
        self._show(tuple(Pick(*map(str, pick)) for pick in asked["picks"]))

    def _show(self, picks: tuple[Pick, ...]) -> None:
        layer, mesh, links = self._given
        self.picks = picks
        with self.hold_sync():
            self.outlook = {}  # it was of other forms
            try:
                self.found, self.problem = explore(layer, mesh, picks, links), ""
                self.data = self._data(self.found)
            except MiniparError as error:
                self.found, self.problem = None, str(error)
            self.refresh()

    def _wanted(self, _: Any, content: Any, __: Any) -> None:
        if content.get("want") == "outlook":
            self.find_outlook(str(content.get("tensor", "")))

    def find_outlook(self, tensor: str = "") -> None:
        """Find what each form would give, of a tensor or of all. The browser asks when the forms have been drawn."""
        if self.found is None or (tensor in self.outlook if tensor else len(self.outlook) == len(self.found.rows)):
            return
        words = outlook(self.found, self._given[2], tensor)
        plain = {t: {a: {w: list(p) for w, p in x.items()} for a, x in y.items()} for t, y in words.items()}
        self.outlook = {**self.outlook, **plain}

    def state(self) -> dict[str, Any]:
        """The traits for a page without a kernel: there forms can be read, and not fixed."""
        self.find_outlook()
        return super().state() | {"editable": False}

    def _data(self, found: Found) -> dict[str, Any]:
        mesh = found.mesh
        numbers = {row.name: k for k, row in enumerate(found.rows)}
        reads = [
            [numbers[name], numbers[out]]
            for op in found.layer.graph.operators for out in op.outputs for name in dict.fromkeys(op.inputs)
        ]  # fmt: skip
        return {
            "id": self._id,
            "axes": [[axis, length] for axis, length in mesh],
            "ranks": [list(mesh.coordinates(rank).values()) for rank in range(mesh.size)],
            "letters": _letters(found),
            "rows": [
                {
                    "name": row.name, "own": row.own, "made": row.made, "stored": not row.operator,
                    "shape": row.shape, "local": row.local, "whole": amount(row.bytes), "part": amount(row.local_bytes),
                    "forms": row.forms, "offered": row.offered, "blocks": row.blocks,
                }
                for row in found.rows
            ],
            "moves": [
                {
                    "at": m.at, "phase": m.phase, "op": m.op, "axis": m.axis, "value": m.value, "before": m.before,
                    "after": m.after, "bytes": amount(m.bytes), "time": duration(m.seconds), "why": m.why,
                    "once": m.once,
                }
                for m in found.moves
            ],
            "edges": reads,
            "picks": [list(pick) for pick in found.picks],
            "fixed": found.fixed,
            "problem": found.problem,
            "where": found.where,
            "bad": list(found.refused[-1]) if found.refused else None,
            "chosen": found.newest,
            "totals": _totals(found),
        }  # fmt: skip

    def summary(self) -> str:
        assert self.found is not None
        found = self.found
        said = annotated(found)
        mesh = " ".join(f"{axis}={length}" for axis, length in found.mesh)
        given = ", ".join(f"{name} {text}" for name, text in said.items()) if said else _NOTHING
        line = f"sharding of {len(found.rows)} tensors on {mesh}: {given}; {totals(found.moves)}"
        return f"{line}; cannot be: {found.problem.splitlines()[0]}" if found.problem else line

    def caption(self) -> str:
        assert self.found is not None
        text = (
            "A row is a tensor, and the coloured letter its form on an axis of the mesh: R whole, S0, S1, ... a block "
            "of that dimension, P a part of a sum. Forms with a thick edge are fixed, the others follow. Between the "
            "rows stand the collectives, from the form that is there to the one that is needed: ↓ forward, ↑ backward."
        )
        return f"{text}\nIt cannot be: {self.found.problem}" if self.found.problem else text

    def rows(self) -> list[list[str]]:
        assert self.found is not None
        found, axes = self.found, [axis for axis, _ in self.found.mesh]
        table = [["what", "how", "shape", *axes, "a rank has", "bytes on a rank", "time"]]
        for k in range(len(found.rows) + 1):
            for m in (move for move in found.moves if move.at == k):
                forms = [f"{m.before} to {m.after}" if axis == m.axis and m.before else "" for axis in axes]
                what = f"gradient of {m.value}" if m.phase == "backward" and m.before else m.value
                table.append(
                    [what, f"{m.phase} {m.op} over {m.axis}", "", *forms, "", amount(m.bytes), duration(m.seconds)]
                )
            if k < len(found.rows):
                row = found.rows[k]
                fixed = found.fixed.get(row.name, {})
                forms = [row.forms[axis] + (" (fixed)" if axis in fixed else "") for axis in axes]
                shapes = ["×".join(map(str, shape)) for shape in (row.shape, row.local)]
                table.append([row.own, row.made, shapes[0], *forms, shapes[1], amount(row.local_bytes), ""])
        return table

    def picture(self, dark: bool | None = False) -> bytes:
        assert self.found is not None
        return _picture(self.found, dark)


def _letters(found: Found) -> list[str]:
    """The columns: R, S0 to as many dimensions as there are, P."""
    return ["R", *(f"S{dim}" for dim in range(max(len(row.shape) for row in found.rows))), "P"]


def _totals(found: Found) -> list[str]:
    return [f"{total(found.moves, phase) or f'{phase} no collectives'}" for phase in ("forward", "backward")]


# The still picture ----------------------------------------------------------------------------------------------------

_LEFT, _LIST, _PANEL, _HEAD, _ROW, _MOVE, _GAP = 16, 610, 290, 40, 26, 22, 12


def _picture(found: Found, dark: bool | None) -> bytes:
    """The rows with the collectives between them, and the chosen tensor's blocks beside them."""
    columns, axes = _letters(found), [axis for axis, _ in found.mesh]
    cell = min(24.0, (0.56 * _LIST - (len(axes) - 1) * _GAP) // (len(axes) * len(columns)))
    wide = min(_LIST, 330 + len(axes) * (len(columns) * cell + _GAP))  # of the list; the panel is beside it
    grid = wide - len(axes) * len(columns) * cell - (len(axes) - 1) * _GAP
    lines = wrapped(f"✗ {found.problem}", 88) if found.problem else []
    problem = 10 + 15 * len(lines) if lines else 0
    tall = _HEAD + _ROW * len(found.rows) + _MOVE * len(found.moves) + problem + 8
    row = found.rows[found.newest]
    sketch = Sketch(wide + 20 + _PANEL, max(tall, 162 + _tiles(found, row)[3]), dark)
    look, y = sketch.look, float(_HEAD)

    def at(axis: str, letters: str) -> float:
        return grid + axes.index(axis) * (len(columns) * cell + _GAP) + columns.index(column(letters)) * cell

    for axis, length in found.mesh:
        x, room = at(axis, "R"), len(columns) * cell
        sketch.text(x + room / 2, 11, f"on {axis} ({length} ranks)", size=12, anchor="mm")
        for letters in columns:
            sketch.text(at(axis, letters) + cell / 2, 28, letters, look.muted, 10, "mm")
        sketch.rect(x, 36, room, 1, look.rule)
    if lines and found.where < 0:
        y = _draw_problem(sketch, lines, y)
    for k in range(len(found.rows) + 1):
        for move in (move for move in found.moves if move.at == k):
            _draw_move(sketch, move, y, grid, at, cell)
            y += _MOVE
        if k < len(found.rows):
            _draw_row(sketch, found, found.rows[k], y, grid, at, cell)
            y += _ROW
        if lines and found.where == k:
            y = _draw_problem(sketch, lines, y)
    _draw_panel(sketch, found, row, wide + 20)
    return sketch.png()


def _draw_problem(sketch: Sketch, lines: Sequence[str], y: float) -> float:
    sketch.rect(_LEFT - 6, y + 3, 3, 15 * len(lines) + 4, sketch.look.warn)
    for k, line in enumerate(lines):
        sketch.text(_LEFT + 4, y + 12 + 15 * k, line, sketch.look.warn, 11)
    return y + 10 + 15 * len(lines)


def _draw_row(sketch: Sketch, found: Found, row: Row, y: float, grid: float, at: Place, cell: float) -> None:
    look, middle = sketch.look, y + _ROW / 2
    if found.problem and found.rows[found.where] is row and found.where >= 0:
        sketch.rect(0, y + 1, 4, _ROW - 2, look.warn)
    shape = "×".join(map(str, row.shape))
    built = row.made if not row.operator else f"= {row.made}"
    sketch.text(grid - 12, middle, shape, look.muted, 10, "rm")
    name = row.own
    while sketch.measure(name, 12) > grid - 20 - sketch.measure(shape, 10) - _LEFT:
        name = f"{name.rstrip('…')[:-1]}…"
    sketch.text(_LEFT, middle, name, size=12)
    taken = _LEFT + sketch.measure(name, 12) + 8
    room = grid - 24 - sketch.measure(shape, 10) - taken
    if sketch.measure(built, 10) > room:
        built = built.partition("(")[0]
    if sketch.measure(built, 10) <= room:
        sketch.text(taken, middle, built, look.muted, 10)
    fixed = found.fixed.get(row.name, {})
    for axis, some in row.offered.items():
        for letters in some:
            x, now = at(axis, letters), row.forms[axis] == letters
            face, edge, ink, _ = _FORMS[letters[0]]
            if now:
                sketch.rect(x + 1, y + 2, cell - 2, _ROW - 4, face, edge)
            wrong = found.refused[-1:] == ((row.name, axis, letters),)
            if wrong or (now and fixed.get(axis) == letters):
                rim = look.warn if wrong else look.ink
                for thick in (0.0, 1.0):
                    sketch.rect(x + 1 + thick, y + 2 + thick, cell - 2 - 2 * thick, _ROW - 4 - 2 * thick, edge=rim)
            size = 10 if len(letters) < 3 else 8
            sketch.text(x + cell / 2, middle, letters, ink if now else look.warn if wrong else look.muted, size, "mm")


def _draw_move(sketch: Sketch, move: Move, y: float, grid: float, at: Place, cell: float) -> None:
    look, middle, back = sketch.look, y + _MOVE / 2, move.phase == "backward"
    sketch.rect(_LEFT, middle - 8, 20, 16, LOOKS["collective"].face, LOOKS["collective"].edge, "x")
    sketch.rect(_LEFT + 4, middle - 7, 12, 14, look.paper)
    sketch.text(_LEFT + 10, middle, "↑" if back else "↓", look.wire, 12, "mm")
    what = f"gradient of {move.value}" if back and move.before else move.value
    over = "" if move.before else f" over {move.axis}, inside"
    text = f"{move.op}{over} of {what}: {amount(move.bytes)}, {duration(move.seconds)}"
    if sketch.measure(text, 10) > grid - _LEFT - 36:
        text = f"{move.op}{over}: {amount(move.bytes)}, {duration(move.seconds)}"
    sketch.text(_LEFT + 26, middle, text, look.wire, 10)
    if move.before and move.after:
        x0, x1 = (at(move.axis, letters) + cell / 2 for letters in (move.before, move.after))
        side = 1 if x1 >= x0 else -1
        sketch.line([(x0, middle), (x1 - 4 * side, middle)], look.wire, 2, dashed=back)
        sketch.dot(x0, middle, 3, look.wire)
        for k in range(8):  # the head
            sketch.line([(x1 - k * side, middle - k / 2), (x1 - k * side, middle + k / 2)], look.wire, 1)


def _tiles(found: Found, row: Row) -> tuple[list[int], float, float, float, int]:
    """The dimensions that tiles show, a tile's width and height, the height of all, and how many stand side by side."""
    lengths = [length for _, length in found.mesh]
    cut = [d for d in range(len(row.shape)) if any(b[d] != ((0, row.shape[d]),) for b in row.blocks)]
    free = [d for d in range(len(row.shape)) if d not in cut]
    dims = sorted([*cut[:2], *reversed(free)][:2])
    across = min(lengths[0], 4) if len(lengths) == 1 else found.mesh.size // lengths[0]
    wide = min(112.0, (_PANEL - 6 - (42 if len(lengths) > 1 else 0)) / across - 8)
    down, over = (row.shape[dims[0]], row.shape[dims[1]]) if len(dims) > 1 else (1, 2.5)
    tall = wide * max(0.55, min(1.15, (down / max(1, over)) ** 0.5))
    return dims, wide, tall, -(-found.mesh.size // across) * (tall + 34), across


def _draw_panel(sketch: Sketch, found: Found, row: Row, left: float) -> None:
    dims, wide, tall, whole, across = _tiles(found, row)
    look, axes = sketch.look, found.mesh
    sketch.text(left, 13, f"Who holds what of {row.own}", size=12)
    shape, local = ("×".join(map(str, one)) for one in (row.shape, row.local))
    sketch.text(left, 31, f"{shape}, {amount(row.bytes)}; a rank has {local}", look.muted, 10)
    if len(dims) > 1:
        sketch.text(left, 46, f"a tile is dimensions {dims[0]} (down) and {dims[1]} (across)", look.muted, 10)
    label = 42 if len(axes) > 1 else 0
    kind = "P" if "P" in row.forms.values() else "S" if any(w[0] == "S" for w in row.forms.values()) else "R"
    face, edge, ink, mark = _FORMS[kind]
    for rank, block in enumerate(row.blocks):
        place = list(axes.coordinates(rank).items())
        x, y = left + label + (rank % across) * (wide + 8), 68 + (rank // across) * (tall + 34)
        if label and rank % across == 0:
            sketch.text(left, y + 14 + tall / 2, f"{place[0][0]} {place[0][1]}", look.muted, 10)
        there = ", ".join(f"{axis} {k}" for axis, k in (place[1:] or place))
        title = f"rank {rank} · {there}" if wide >= 84 else f"rank {rank}" if wide >= 40 else str(rank)
        sketch.text(x, y + 5, title, size=10)
        y += 14
        sketch.rect(x, y, wide, tall, look.rule)
        spans = [block[d] for d in dims] if len(dims) > 1 else [((0, 1),), block[0] if block else ((0, 1),)]
        sizes = [row.shape[d] for d in dims] if len(dims) > 1 else [1, row.shape[0] if row.shape else 1]
        for a, b in spans[0]:
            for c, d in spans[1]:
                width, height = (d - c) / sizes[1] * wide, (b - a) / sizes[0] * tall
                px, py = x + c / sizes[1] * wide, y + a / sizes[0] * tall
                sketch.rect(px, py, width, height, face, edge, mark)
                if kind == "P" and min(width, height) >= 18:
                    sketch.rect(px + width / 2 - 8, py + height / 2 - 8, 16, 16, face)
                    sketch.text(px + width / 2, py + height / 2, "Σ", ink, 12, "mm")
        sketch.rect(x, y, wide, tall, edge=look.muted)
    y = 76.0 + whole
    for letters, words in (("R", "whole"), ("S", "a block of dimension 0, 1, ..."), ("P", "part of a sum")):
        colour, rim, _, hatch = _FORMS[letters]
        sketch.rect(left, y - 6, 14, 12, colour, rim, hatch)
        sketch.text(left + 20, y, words, look.muted, 10)
        y += 17
    for text in _totals(found):
        sketch.text(left, y + 4, text, look.wire, 10)
        y += 15


# The explorer ---------------------------------------------------------------------------------------------------------


class ShardingExplorer(Explorer):
    """Choose a layer, a mesh and a strategy, or click the forms yourself; see what follows, and what it costs.

    layer         "matmul", "MLP", "attention"; a `sharding.Layer`; or what `sharding.capture_model` gives
    mesh          a Mesh, or text such as "dp=2 tp=2"; of 1 to 3 axes beside pp
    annotations   forms that are fixed from the beginning, as `sharding.propagate` takes them; also of inputs

    Impossible forms are shown where they are: at the operator that cannot have them, with the nearest choice.
    """

    view: ShardingView

    def __init__(
        self,
        layer: str | Layer | Capture = "MLP",
        mesh: str | Mesh = "dp=2 tp=2",
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        style, size = {"description_width": "6.5em"}, {"width": "20em"}
        both: dict[str, Any] = {"style": style, "layout": size}
        numbers = {**both, "continuous_update": False}
        sizes = mesh if isinstance(mesh, Mesh) else _mesh(str(mesh))
        self._own, chosen = _layers(layer)
        self._annotations = annotations
        names = [*self._own, *(name for name in EXAMPLES if name not in self._own)]
        self.layer = ui.Dropdown(options=names, value=chosen, description="layer", **both)
        self.axes = {
            axis: ui.SelectionSlider(
                options=sorted({1, 2, 4, 8, sizes.length(axis)}), value=sizes.length(axis),
                description=f"{axis} (ranks)", **both,
            )
            for axis in axes_of(sizes)
        }  # fmt: skip
        self.strategy = ui.Dropdown(description="strategy", **both)
        self.alpha = ui.FloatSlider(20, min=0, max=500, description="latency (µs)", **numbers)
        self.rate = ui.FloatLogSlider(
            10, min=-1, max=2.5, step=0.1, readout_format=".3g", description="link (GB/s)", **numbers
        )
        self._offer(_OWN if annotations or self._own else "")
        self.view = ShardingView(self._layer(), self.mesh, (), self.links)
        self.controls = {"layer": self.layer, **self.axes, "strategy": self.strategy}
        self.controls |= {"alpha": self.alpha, "rate": self.rate}
        super().__init__([ui.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"}), self.view])
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self._restart()

    @property
    def mesh(self) -> Mesh:
        return Mesh((axis, slider.value) for axis, slider in self.axes.items())

    @property
    def links(self) -> dict[str, Link]:
        return dict.fromkeys(self.axes, (self.alpha.value * 1e-6, 1e-9 / self.rate.value))

    def _layer(self) -> Layer:
        name = self.layer.value
        return self._own[name] if name in self._own else example(name)

    def _offer(self, chosen: str = "") -> None:
        """The strategies of the layer."""
        known = list(STRATEGIES.get(self.layer.value, {})) if self.layer.value not in self._own else []
        given = [_OWN] if self._annotations is not None or chosen == _OWN else []
        self.strategy.options = [*given, _NOTHING, *known]
        self.strategy.value = chosen or (known[1] if len(known) > 1 else _NOTHING)

    def _changed(self, change: Any) -> None:
        if getattr(self, "_busy", False):
            return
        if change["owner"] is self.layer:
            self._busy = True  # (other options change the strategy's value, and that calls this method again)
            try:
                self._offer(_OWN if self._annotations is not None and self.layer.value in self._own else "")
            finally:
                self._busy = False
        if change["owner"] in (self.alpha, self.rate):
            self.view.update(self._layer(), self.mesh, self.view.picks, self.links)
        else:
            self._restart()
        self.problem = self.view.problem

    def _restart(self) -> None:
        """Begin again with what the chosen strategy fixes."""
        layer = self._layer()
        self.view.update(layer, self.mesh, (), self.links)
        try:
            if self.strategy.value == _OWN and self._annotations:
                self.view.update(layer, self.mesh, picks_of(layer, self._annotations, self.mesh), self.links)
            elif self.strategy.value in STRATEGIES.get(self.layer.value, {}):
                picks = strategy(self.layer.value, self.strategy.value, self.mesh)
                self.view.update(layer, self.mesh, picks, self.links)
        except MiniparError as error:
            self.view.problem = str(error)
            self.view.refresh()
        self.problem = self.view.problem

    def address(self) -> dict[str, str]:
        return {**super().address(), "fixed": ";".join(",".join(pick) for pick in self.view.picks)}

    def follow(self, words: Mapping[str, str]) -> None:
        super().follow({name: text for name, text in words.items() if name != "fixed"})
        if "fixed" in words:
            picks = [part.split(",") for part in words["fixed"].split(";") if part]
            if not all(len(pick) == 3 for pick in picks):
                raise PlanError(f"fixed={words['fixed']!r}: must be tensor,axis,form, with ; between them")
            self.view.update(self._layer(), self.mesh, [Pick(*pick) for pick in picks], self.links)

    def settings(self) -> dict[str, str]:
        return {
            "layer": self.layer.value,
            "mesh": " ".join(f"{axis}={length}" for axis, length in self.mesh),
            "strategy": self.strategy.value,
            "latency": f"{self.alpha.value:g} µs",
            "link": f"{self.rate.value:.3g} GB/s",
        }


def _mesh(text: str) -> Mesh:
    """From "dp=2 tp=2". Errors: PlanError for other text."""
    words = text.replace(",", " ").split()
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(name and number.isdigit() and int(number) > 0 for name, _, number in pairs):
        raise PlanError(f"mesh {text!r}: must be axes and their sizes, such as dp=2 tp=2 (up to {MOST_RANKS} ranks)")
    return Mesh((name, int(number)) for name, _, number in pairs)


def _layers(given: str | Layer | Capture) -> tuple[dict[str, Layer], str]:
    """Layers that were handed over, by the names under which they are offered; and the one that is shown first."""
    if isinstance(given, str):
        example(given)
        return {}, given
    if isinstance(given, Layer):
        return {"the layer": given}, "the layer"
    if not hasattr(given, "layers"):
        raise PlanError(
            f"ShardingExplorer({given!r}): possible are {', '.join(EXAMPLES)}, a sharding.Layer, or what "
            "sharding.capture_model gives"
        )
    layers = {f"layer {k}": layer for k, layer in enumerate(given.layers)}
    return layers, next(iter(layers))
