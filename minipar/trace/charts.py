"""Charts of numbers. A notebook shows them by itself, with a description.

    lines({"ring": [(1e3, 0.6), (1e6, 6.6)], "tree": [...]}, x="bytes", y="ms", log="xy")    times over sizes, losses
    expert_load(models.mixture_load(model, x))                                               how busy experts are
    repartitions(sharding.matrix((1024, 1024), 4, Mesh(dp=2, tp=2)))                         from form to form

Lines differ in colour, dash and marker. Pictures of traces are in `drawing.py`. matplotlib loads on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minipar.errors import PlanError
from minipar.trace.figure import DARK, INK, RANK_COLOURS, RULE, picture, ruled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minipar.models.mixture_gpt import Load
    from minipar.sharding.repartition import Matrix

COLOURS = RANK_COLOURS
MARKERS = "osDv^PX*"
DASHES = ("-", "--", "-.", ":")
FEW_DECADES = 1000  # if last / first value of a logarithmic axis is smaller, its ticks are plain numbers
MANY = 40  # points; with more of them markers would hide the line

Points = Sequence[tuple[float, float]]


def lines(
    curves: Mapping[str, Points], *, x: str, y: str, title: str = "", log: str = "", width: float = 8.0
) -> Figure:
    """One chart of several curves, each a name and its points (x, y).

    x, y    labels of the axes, with the unit
    log     which axes are logarithmic: "", "x", "y" or "xy"
    width   inches

    The description of the picture (its `alt`, and what a notebook shows as text) names each curve with its first and
    last point. Errors: PlanError for no curve, or one without points.
    """
    if not curves or not all(curves.values()):
        empty = next((name for name, points in curves.items() if not points), None)
        raise PlanError("lines: no curves" if empty is None else f"lines: curve {empty!r} has no points")
    figure = picture()(figsize=(width, 0.45 * width), layout="constrained")
    axes = figure.subplots()
    for k, (name, points) in enumerate(curves.items()):
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            label=name,
            color=COLOURS[k % len(COLOURS)],
            linestyle=DASHES[k % len(DASHES)],
            marker=MARKERS[k % len(MARKERS)] if len(points) <= MANY else "",
            markersize=4,
        )
    axes.set(xlabel=x, ylabel=y)
    ruled(axes, title)
    across, up = zip(*(point for points in curves.values() for point in points), strict=True)
    if "x" in log:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis, across)
    if "y" in log:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, up)
    elif all(value >= 0 for value in up):
        axes.set_ylim(0.0, 1.08 * max(up) or 1.0)
    axes.grid(color=RULE, linewidth=0.6)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.alt = in_words(curves, x, y, title)  # type: ignore[attr-defined]
    return figure


def expert_load(load: Load, *, title: str = "", width: float = 8.0) -> Figure:
    """How many tokens chose each expert: for each layer a row of bars, the tokens that were dropped hatched on top.

    load    what `models.mixture_load` gives
    width   inches

    A dashed line is how many tokens an expert can take, if there is a capacity. The description is the text of `load`.
    """
    figure = picture()(figsize=(width, 0.5 + 1.3 * len(load.layers)), layout="constrained")
    every = figure.subplots(len(load.layers), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, layer, tokens, dropped in zip(every, load.layers, load.tokens, load.dropped, strict=True):
        kept = [n - lost for n, lost in zip(tokens, dropped, strict=True)]
        places = range(len(tokens))
        axes.bar(places, kept, color=COLOURS[0], label="taken")
        if any(map(sum, load.dropped)):
            look: Any = {"color": COLOURS[1], "hatch": "////", "edgecolor": "white", "linewidth": 0}
            axes.bar(places, dropped, bottom=kept, label="dropped", **look)
        if load.room is not None:
            axes.axhline(load.room, color=INK, linestyle="--", linewidth=0.8, label="room")
        axes.set_ylabel(f"layer {layer}")
        ruled(axes)
        axes.grid(axis="y", color=RULE, linewidth=0.6)
    every[-1].set(xlabel="expert", xticks=range(len(load.tokens[0])))
    ruled(every[0], title or "Tokens of each expert")
    every[0].legend(frameon=False, ncols=3, fontsize=8, labelcolor=INK, loc="upper right")
    every[0].set_ylim(0.0, 1.35 * max(load.room or 1, *(n for tokens in load.tokens for n in tokens)))
    figure.alt = str(load)  # type: ignore[attr-defined]
    return figure


def repartitions(matrix: Matrix, *, title: str = "", width: float = 8.0) -> Figure:
    """What it costs to go from the form of each row to that of each column, in ms: the darker, the longer.

    matrix  what `minipar.sharding.matrix` gives
    width   inches

    The description is the text of `matrix`.
    """
    from minipar.sharding.repartition import letters

    names, wanted = (list(map(letters, forms)) for forms in (matrix.rows, matrix.columns))
    cell = width / (len(wanted) + 2)
    figure = picture()(figsize=(width, 1.0 + max(0.28, 0.5 * cell) * len(names)), layout="constrained")
    axes = figure.subplots()
    most = max((seconds for row in matrix.seconds for seconds in row), default=0.0) or 1.0
    axes.imshow(matrix.seconds, cmap="cividis_r", vmin=0.0, vmax=most, aspect="auto")
    for y, row in enumerate(matrix.seconds):
        for x, seconds in enumerate(row):
            ink = "#fefefe" if seconds > 0.45 * most else DARK
            axes.text(x, y, f"{1e3 * seconds:.3g}", ha="center", va="center", color=ink, fontsize=min(9.0, 14 * cell))
    axes.set_xticks(range(len(wanted)), wanted)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="to", ylabel="from")
    ruled(axes, title or "Repartition, in ms")
    figure.alt = str(matrix)  # type: ignore[attr-defined]
    return figure


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Give a short logarithmic axis the ticks 1, 2, 5, 10, ... Without this it would have one power of ten, or none."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if min(values) > 0 and max(values) < FEW_DECADES * min(values):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def in_words(curves: Mapping[str, Points], x: str, y: str, title: str = "") -> str:
    """What a chart shows, as text: each curve with its first and last point."""
    ends = [f"{name} from {_point(points[0])} to {_point(points[-1])}" for name, points in curves.items()]
    return f"{title or 'Chart'}: {y} over {x}. " + "; ".join(ends) + "."


def _point(point: tuple[float, float]) -> str:
    return f"{point[1]:.3g} at {point[0]:.6g}"
